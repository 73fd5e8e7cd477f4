"""What is read of outputs.logits is what stock's logits give: compared with one another, or after something changed."""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import OwnFunction, assert_same_training
from support import every_pair

V = 97


def targets(batch):
    return batch["labels"].clamp(min=0)[..., None]


# Each compares numbers of the same logits, and gives what stock gives to the last bit.
COMPARED = {
    "rank": lambda z, y: (z > z.gather(-1, y)).sum(-1),
    "rank, indexed": lambda z, y: (z[0] > z[0, torch.arange(11), y[0, :, 0]][:, None]).sum(-1),
    "highest": lambda z, y: z == z.amax(-1, keepdim=True),
    "top-k filter": lambda z, y: (z >= z.detach().topk(10).values[..., -1:]).sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compare", COMPARED)
def test_numbers_of_the_same_logits_compare_as_in_stock(compare, dtype, patched, batch):
    model, stock, _ = patched("llama", dtype, mlp=False, norm=False, rope=False)
    results = [COMPARED[compare](m(**batch).logits, targets(batch)) for m in (model, stock)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "scaled", [lambda z: z, lambda z: torch.tanh((z + torch.linspace(0, 1, V, dtype=z.dtype)[None]) / 30) * 30]
)
def test_statistics_are_of_logits_that_are_rounded_as_stock_rounds_them(scaled, patched, batch):
    """A bfloat16 model's highest logits tie, and what a row's logsumexp is taken from is not above 0."""
    model, stock, report = patched("gpt2", torch.bfloat16, mlp=False, norm=False, rope=False)
    ids = batch["input_ids"].repeat(6, 4)
    results = []
    for m in (model, stock):
        with torch.no_grad():
            m.lm_head.weight.mul_(20)
        z = scaled(m(input_ids=ids, labels=ids).logits).float()
        ranked, lse = z.argmax(-1), z.logsumexp(-1, keepdim=True)
        assert m is stock or report.calls_materialised == 0
        results.append((ranked, lse, (z - lse).max() <= 1e-6))
    assert (results[1][1].exp() > 1).any()
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-5)
    assert results[0][2]


def test_log_probabilities_given_before_keep_the_gradient(patched, batch):
    model, stock, _ = patched("llama", mlp=False)

    def loss(m):
        logprobs = m(**batch).logits.log_softmax(-1)
        return logprobs.gather(-1, targets(batch)).sum() + (logprobs.exp() * logprobs).sum()

    assert_same_training(model, stock, loss)


def optimizer(kind, **settings):
    def change(m, hidden):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        kind(m.parameters(), lr=0.1, **settings).step()

    return change


def in_place(m, hidden):
    with torch.no_grad():
        m.lm_head.weight[[3, 50]] = m.lm_head.weight[[50, 3]]


def another_dtype(m, hidden):
    m.to(torch.float64 if m.dtype == torch.float32 else torch.float32)


# Each changes what the logits are computed from.
CHANGES = {
    "AdamW": optimizer(torch.optim.AdamW),
    "SGD": optimizer(torch.optim.SGD),
    "unpatch": lambda m, hidden: lowtide.unpatch(m),
    "another dtype": another_dtype,
    "in place": in_place,
    "loaded": lambda m, hidden: m.load_state_dict(m.state_dict()),
    "detached": lambda m, hidden: m.lm_head.weight.detach().mul_(2),
    "hidden": lambda m, hidden: hidden.detach()[1, 4].add_(1e-6),
}
READS = {
    "argmax": lambda z, y: z.argmax(-1),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y),
    "loss": lambda z, y: F.cross_entropy(z.view(-1, V), y.flatten()),
    "logsumexp": lambda z, y: z.logsumexp(-1),
    "logits": lambda z, y: z + 1,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_read_after_a_change_is_an_error(change, patched, batch):
    model, _, _ = patched("llama", mlp=False, norm=False, rope=False)
    for read in READS.values():
        lowtide.patch(model, mlp=False, norm=False, rope=False)
        out = model(**batch, output_hidden_states=True)
        read(out.logits, targets(batch))  # before it is none
        later = model(**batch, output_hidden_states=True)
        CHANGES[change](model, later.hidden_states[-1])
        with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            read(later.logits, targets(batch))
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            read(later.logits, targets(batch))


@every_pair(
    kind=["weight", "bias"], frozen=["at the forward", "since"], read=["loss", "logsumexp", "logits", "own function"]
)
def test_what_is_trained_is_what_was_at_the_forward(kind, frozen, read, patched, batch):
    reads = {**READS, "own function": lambda z, y: OwnFunction.apply(z * 0.5)}
    model, stock, _ = patched("phi", mlp=False)

    def loss(m):
        parameter = getattr(m.lm_head, kind)
        others = [p for p in m.parameters() if p is not parameter]
        for p in others:
            p.requires_grad_(frozen == "at the forward" and p.dim() == 2)
        parameter.requires_grad_(frozen == "since")
        logits = m(**batch).logits
        for p in others:
            p.requires_grad_(True)
        parameter.requires_grad_(frozen != "since")
        value = reads[read](logits * 2, targets(batch)).sum()
        parameter.requires_grad_(True)  # at backward, AccumulateGrad looks
        return value

    assert_same_training(model, stock, loss, gradients=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_c_code_gets_no_null_pointer(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = model(**batch).logits.detach()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(logits)
    with pytest.raises(UnsupportedError, match=r"logits\.clone"):
        torch.jit.trace(lambda x: x * 2, (logits,))
    assert torch.equal(torch.from_dlpack(logits), logits.clone())


def test_logits_of_inference_mode_are_used_outside_of_it_as_stocks(patched, batch):
    """What is computed of them is an ordinary tensor, and PyTorch lets whoever detaches them write to them."""
    model, stock, _ = patched("llama")
    found = []
    for one in (model, stock):
        with torch.inference_mode():
            logits = one(**batch).logits
        scale = torch.tensor(1.5, requires_grad=True)
        (3 * torch.tanh(logits / 3) * scale).mean().backward()
        logits.detach().add_(1.0)
        found.append((logits.clone(), scale.grad))
    torch.testing.assert_close(*found)

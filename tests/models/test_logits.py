"""What reads a patched model's logits: without building them, or from real ones as stock's, or one clear error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import OwnFunction, Tiny, assert_same_training, called_without_loss, expect_calls
from promises import promise
from support import every_pair

pytestmark = promise("patched", "reported")
V = 97


def shifted(labels):
    return labels[:, 1:].reshape(-1)


# Each takes logits [2, 11, V] and labels [2, 11], and gives what can be summed. Without gradients: test_scoring's READ.
WITHOUT_LOGITS = {
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), shifted(y)),
    "flattened": lambda z, y: F.cross_entropy(z[:, :-1, :].flatten(0, 1), shifted(y), reduction="sum") / 7,
    "permuted": lambda z, y: F.cross_entropy(z.permute(1, 0, 2).reshape(-1, V), y.T.flatten()),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100], label_smoothing=0.2),
    "unflattened": lambda z, y: F.cross_entropy(z.unflatten(0, (1, 2))[0, 0], y[0]),
    "biased twice": lambda z, y: F.cross_entropy(
        ((z + torch.linspace(0, 1, V)[None] + torch.linspace(-1, 1, V)) * 0.5).view(-1, V), y.view(-1)
    ),
    "weights of classes": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), weight=torch.linspace(0.1, 2, V)),
    "log-softmax and nll": lambda z, y: F.nll_loss(F.log_softmax(z.view(-1, V), dim=-1), y.view(-1), reduction="sum"),
    "gathered": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1).square(),
    "several gathered": lambda z, y: torch.gather(
        torch.log_softmax(z / 0.7, 2), 2, torch.arange(11 * 6).remainder(V).view(1, 11, 6).expand(2, 11, 6)
    ),
    "summed": lambda z, y: (-F.log_softmax(z, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32),
    "logsumexp": lambda z, y: (z[:, 1:] * 0.5).logsumexp(-1, keepdim=True).square(),
    "classes second": lambda z, y: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:], label_smoothing=0.1),
    "argmax": lambda z, y: z[:, :-1].argmax(-1).float(),
}


@pytest.mark.parametrize("name", WITHOUT_LOGITS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # plain; with a soft cap
def test_without_logits(family, name, patched, batch):
    if family == "gemma2" and name.startswith("biased"):
        pytest.skip("a bias after the cap is none of the head's")
    model, stock, report = patched(family, mlp=False)
    values = {m: WITHOUT_LOGITS[name](m(**batch).logits, batch["labels"]) for m in (model, stock)}
    if values[stock].requires_grad:
        assert_same_training(model, stock, values.get, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*values.values())
    expect_calls(report, 1)


@promise("dtypes")
def test_under_autocast_results_have_the_dtypes_of_stock(patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)
    dtypes = []
    for m in (model, stock):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z, y = m(**batch).logits.view(-1, V), batch["labels"].view(-1)
            logprobs = z.log_softmax(-1)
            made = [F.cross_entropy(z, y), F.nll_loss(logprobs, y), logprobs, logprobs.sum(-1), z.logsumexp(-1)]
            made += [z.gather(-1, y[:, None].clamp(min=0)), z.detach().max(-1).values, z.detach().topk(3).values]
        made.append(F.cross_entropy(z, y))
        dtypes.append([x.dtype for x in made])
    assert dtypes[0] == dtypes[1]


MADE_WITHOUT = {
    "scaled": lambda z: z * 2,
    "slice": lambda z: z[:, 1:],
    "log-probabilities": lambda z: z.log_softmax(-1),
    "detached": lambda z: z.detach(),
}


USES = {
    "values": lambda z, scale: z + 1,
    "loss": lambda z, scale: F.cross_entropy(z.reshape(-1, V), torch.arange(z.numel() // V)),
    "with another that is trained": lambda z, scale: (z * scale).exp().mean(),
}


@pytest.mark.parametrize("made", MADE_WITHOUT)
@pytest.mark.parametrize("use", USES)
def test_what_was_made_without_gradients_has_none_later(use, made, patched, batch):
    model, stock, _ = patched("gemma2", mlp=False)
    seen = []
    for m in (model, stock):
        logits, scale = m(**batch).logits, torch.tensor(1.5, requires_grad=True)
        with torch.no_grad():
            z = MADE_WITHOUT[made](logits)
        requires_grad = z.requires_grad  # True of a view, whose gradient goes nowhere
        result = USES[use](z, scale)
        if result.requires_grad:
            result.sum().backward()
        assert all(p.grad is None for p in m.parameters())
        seen.append((requires_grad, result.requires_grad, result, scale.grad))
    torch.testing.assert_close(*seen)


def test_biases_and_masks_are_those_of_the_time_they_were_used(patched, batch):
    model, stock, report = patched("gpt2", mlp=False)
    losses = []
    for m in (model, stock):
        bias, mask = torch.linspace(0, 1, V), batch["labels"] != -100
        logits = ((m(**batch).logits + bias) * 0.5)[mask]
        labels = batch["labels"][mask]
        bias.fill_(9.0), mask.fill_(True)
        losses.append(F.cross_entropy(logits, labels))
    torch.testing.assert_close(*losses)
    expect_calls(report, 1)


@promise("checkpoint")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_of_yours_under_a_checkpoint(use_reentrant, patched, batch):
    """The logits are built once, so its recompute has fewer tensors to save than the first run would have saved."""
    model, stock, _ = patched("llama", mlp=False)
    for read in (torch.square, lambda z: z[:, 1:].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])):
        loss = lambda m: checkpoint(read, m(**batch).logits, use_reentrant=use_reentrant).mean()  # noqa: B023, E731
        assert_same_training(model, stock, loss)


# Each changes what the logits are computed from.
CHANGES = {
    "AdamW": lambda m, hidden: (
        [p.square().sum().backward() for p in m.parameters()],
        torch.optim.AdamW(m.parameters(), lr=0.1).step(),
    ),
    "unpatch": lambda m, hidden: lowtide.unpatch(m),
    "another dtype": lambda m, hidden: m.to(torch.float64),
    "in place": lambda m, hidden: m.lm_head.weight.detach().mul_(2),
    "hidden": lambda m, hidden: hidden.detach()[1, 4].add_(1e-6),
}
READS = {
    "argmax": lambda z, y: z.argmax(-1),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y),
    "loss": lambda z, y: F.cross_entropy(z.view(-1, V), y.flatten()),
    "logits": lambda z, y: z + 1,
}


@promise("errors")
@pytest.mark.parametrize("change", CHANGES)
def test_a_read_after_a_change_is_an_error(change, patched, batch):
    targets = batch["labels"].clamp(min=0)[..., None]
    for read in READS.values():
        model, _, _ = patched("llama", mlp=False, norm=False, rope=False)
        out = model(**batch, output_hidden_states=True)
        read(out.logits, targets)  # before it is none
        expected, kept = out.logits + 0, model(**batch).logits.clone()
        again = model(**batch, output_hidden_states=True)
        CHANGES[change](model, again.hidden_states[-1])
        with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            read(again.logits, targets)
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            read(again.logits, targets)
        assert torch.equal(kept, expected)  # a copy outlasts the weights


@every_pair(kind=["weight", "bias"], frozen=["at the forward", "since"], read=["loss", "logits", "own function"])
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
        value = reads[read](logits * 2, batch["labels"].clamp(min=0)[..., None]).sum()
        parameter.requires_grad_(True)  # at backward, AccumulateGrad looks
        return value

    assert_same_training(model, stock, loss, gradients=1e-4)


MADE_OF_THEM = {
    "a scale of a view": lambda z: (z[:, 1:] * 2).softmax(-1),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, torch.zeros(2, 11, 1, dtype=torch.long)),
    "a loss": lambda z: F.cross_entropy(z.flatten(0, 1), torch.ones(22, dtype=torch.long)),
}


@promise("errors")
@pytest.mark.parametrize("made", MADE_OF_THEM)
def test_gradients_by_logits_that_something_went_past_are_refused(made, patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    result = MADE_OF_THEM[made](logits).square().mean()
    for attempt in (
        lambda: logits.register_hook(print),
        logits.retain_grad,
        lambda: logits.grad_fn,
        lambda: torch.autograd.grad(result, [model.lm_head.weight, logits], allow_unused=True),
        lambda: torch.autograd.graph.get_gradient_edge(logits),
    ):
        with pytest.raises(UnsupportedError, match=r"call logits\.retain_grad\(\) first"):
            attempt()
    assert logits.detach().grad_fn is None


@promise("errors")
def test_what_goes_around_python_gets_no_wrong_numbers(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = model(**batch).logits.detach()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(logits)
    handle = model.lm_head.weight.register_hook(lambda grad: grad * 0.5)  # it would run twice
    with pytest.raises(UnsupportedError, match="gradient hook"):
        OwnFunction.apply(called_without_loss(model, batch)).sum().backward()
    handle.remove()
    OwnFunction.apply(called_without_loss(model, batch)).sum().backward()


class Past(Tiny):
    """Goes around its head."""

    def forward(self, input_ids, labels=None):
        return self.tail(F.linear(self.embedding(input_ids), self.lm_head.weight), labels)


class Unlabelled(Tiny):
    def forward(self, input_ids):
        return self.lm_head(self.embedding(input_ids))


def test_a_forward_past_the_head_is_counted_and_one_without_labels_left(batch):
    model = Past(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()))
    report = lowtide.patch(model)
    model(batch["input_ids"], batch["labels"])
    assert "was not called" in str(report)
    expect_calls(report, 0, 1)
    assert "takes none of labels" in lowtide.patch(Unlabelled(None)).parts["loss"].outcome

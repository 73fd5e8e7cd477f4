"""What reads a patched model's logits: without building them, or from real ones as stock's, or one clear error."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.models.lazy_logits import LazyLogits
from models.conftest import OwnFunction, assert_same_training, called_without_loss, expect_calls
from promises import promise
from support import every_pair

pytestmark = promise("patched", "reported")
V = 97


def shifted(labels):
    return labels[:, 1:].reshape(-1)


# Each takes logits [2, 11, V] and labels [2, 11], and gives what can be summed.
WITHOUT_LOGITS = {
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), shifted(y)),
    "reshaped": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, z.size(-1)), shifted(y), reduction="none"),
    "flattened": lambda z, y: F.cross_entropy(z[:, :-1, :].flatten(0, 1), shifted(y), reduction="sum") / 7,
    "permuted": lambda z, y: F.cross_entropy(z.permute(1, 0, 2).reshape(-1, V), y.T.flatten()),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100], label_smoothing=0.2),
    "masked slice": lambda z, y: F.cross_entropy(z[:, 1:][y[:, 1:] > 40].contiguous(), y[:, 1:][y[:, 1:] > 40]),
    "one sequence": lambda z, y: F.cross_entropy(z[1], y[1]),
    "unflattened": lambda z, y: F.cross_entropy(z.unflatten(0, (1, 2))[0, 0], y[0]),
    "biased twice": lambda z, y: F.cross_entropy(
        ((torch.linspace(0, 1, V)[None] + z + torch.linspace(-1, 1, V)) * 0.5).view(-1, V), y.view(-1)
    ),
    "weights of classes": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), weight=torch.linspace(0.1, 2, V)),
    "module": lambda z, y: nn.CrossEntropyLoss(ignore_index=5)(z.view(-1, V), y.view(-1).where(y.view(-1) > 0, 5)),
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, patched, batch):
    model, stock, report = patched("gpt2", dtype, mlp=False)
    narrow = dtype == torch.bfloat16
    for name in ("shifted", "gathered", "several gathered", "logsumexp", "log-softmax and nll"):
        values = [WITHOUT_LOGITS[name](m(**batch).logits, batch["labels"]) for m in (model, stock)]
        assert values[0].dtype == values[1].dtype, name
        torch.testing.assert_close(*values, rtol=0.05 if narrow else 1e-12, atol=0.2 if narrow else 1e-12)
    assert report.calls_materialised == 0, str(report)


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


# What the real logits are needed for, though some of it looks much the same. The programs of tests/programs draw more.
WITH_LOGITS = {
    "itself": lambda z, y: z,
    "index": lambda z, y: z[0],
    "clone": lambda z, y: z.clone(),
    "setitem": lambda z, y: (z.__setitem__((slice(None), 0), -5.0), z.float())[1],
    "own function": lambda z, y: OwnFunction.apply(z),
    "capped": lambda z, y: torch.tanh(z / 3.0) * 3.0,
    "capped twice": lambda z, y: torch.tanh(torch.tanh(z)),
    "logits gathered": lambda z, y: z[:, 1:].gather(-1, y[:, 1:, None].clamp(min=0)).square(),
    "gathered, and read": lambda z, y: (lambda p: p.gather(-1, y.clamp(min=0)[..., None]).sum() + (p.exp() * p).sum())(
        z.log_softmax(-1)
    ),
    "columns": lambda z, y: F.cross_entropy(z[..., :50].reshape(-1, 50), y.view(-1).clamp(0, 49)),
    "classes second, scaled": lambda z, y: F.cross_entropy(z.transpose(1, 2) * 2, y),
    "classes first": lambda z, y: F.cross_entropy(z[:, :2].transpose(0, 2), torch.zeros(97, 2, dtype=torch.long)),
    "probabilities": lambda z, y: F.cross_entropy(z.view(-1, V), torch.full((22, V), 1 / V)),
    "a softmax over tokens": lambda z, y: z.log_softmax(1).gather(-1, y.clamp(min=0)[..., None]),
    "scaled afterwards": lambda z, y: (F.log_softmax(z, dim=-1) * 0.5).gather(-1, y.clamp(min=0)[..., None]),
    "a bias for each token": lambda z, y: F.cross_entropy((z + torch.ones(2, 11, 1)).view(-1, V), y.view(-1)),
    "a bias of another dtype": lambda z, y: F.cross_entropy(
        (z + torch.linspace(0, 1, V, dtype=torch.float64)).view(-1, V), y.view(-1)
    ).float(),
    "scaled, then biased": lambda z, y: F.cross_entropy((z * 2 + torch.linspace(0, 1, V)).view(-1, V), y.view(-1)),
    "tokens first": lambda z, y: z.transpose(-1, 0).logsumexp(-1),
    "negative nll": lambda z, y: F.nll_loss(-z.log_softmax(-1).view(-1, V), y.view(-1)),
    "mask of logits": lambda z, y: z[torch.ones(2, 11, V, dtype=torch.bool)].square(),
}


@every_pair(name=WITH_LOGITS, family=["gpt2", "gemma2"])
def test_anything_else_gets_real_logits(family, name, patched, batch):
    model, stock, report = patched(family, mlp=False, norm=False, rope=False)
    bits = 1e-6 if "gathered, and" in name else 0
    loss = lambda m: WITH_LOGITS[name](m(**batch).logits, batch["labels"])  # noqa: E731
    assert_same_training(model, stock, loss, rtol=bits, atol=bits)
    expect_calls(report, 1, 1)


READ_IN_METRICS = {
    "highest class": lambda z, y: z.argmax(-1),
    "accuracy": lambda z, y: (z[:, :-1].argmax(dim=-1) == y[:, 1:]).float().mean(),
    "logsumexp": lambda z, y: z.float().logsumexp(-1),
    "perplexity": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()).exp(),
    "log-probability": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]),
}
WITHOUT = {
    "no_grad": (torch.no_grad, lambda z: z),
    "inference_mode": (torch.inference_mode, lambda z: z),
    "detach": (contextlib.nullcontext, torch.detach),
}


@every_pair(way=WITHOUT, metric=READ_IN_METRICS)
def test_a_metric_in_training_needs_no_logits(metric, way, patched, batch):
    model, stock, report = patched("gemma2", mlp=False)
    mode, without = WITHOUT[way]
    seen = []

    def loss(m):
        outputs = m(**batch)
        with mode():
            seen.append(READ_IN_METRICS[metric](without(outputs.logits), batch["labels"]))
        return outputs.loss

    assert_same_training(model, stock, loss)
    torch.testing.assert_close(*seen)
    assert not seen[0].requires_grad
    expect_calls(report, 1)


MADE_WITHOUT = {
    "scaled": lambda z: z * 2,
    "slice": lambda z: z[:, 1:],
    "cast": lambda z: z.double(),
    "log-probabilities": lambda z: z.log_softmax(-1),
    "detached": lambda z: z.detach(),
}


@pytest.mark.parametrize("made", MADE_WITHOUT)
@pytest.mark.parametrize("use", ["values", "loss", "with another that is trained"])
def test_what_was_made_without_gradients_has_none_later(use, made, patched, batch):
    model, stock, _ = patched("gemma2", mlp=False)
    results, grads, requires_grad = [], [], []
    for m in (model, stock):
        logits = m(**batch).logits
        with torch.no_grad():
            z = MADE_WITHOUT[made](logits)
        requires_grad.append(z.requires_grad)  # True of a view, whose gradient goes nowhere
        scale = torch.tensor(1.5, dtype=z.dtype, requires_grad=True)
        if use == "values":
            results.append(z + 1)
        elif use == "loss":
            rows = z.reshape(-1, V)
            results.append(F.cross_entropy(rows, torch.arange(len(rows))))
        else:
            results.append((z * scale).exp().mean())
            results[-1].backward()
            grads.append(scale.grad)
        requires_grad.append(results[-1].requires_grad)
        if requires_grad[-1] and use != "with another that is trained":
            results[-1].sum().backward()
        assert all(p.grad is None for p in m.parameters())
    assert requires_grad[:2] == requires_grad[2:]
    torch.testing.assert_close(*results)
    if grads:
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("without", [False, True])
def test_views_share_memory_with_the_logits(without, patched, batch):
    """Whichever is looked at first, changed in place, or read again; ``without`` a graph as well."""
    model, stock, _ = patched("gpt2", mlp=False, norm=False, rope=False)
    seen = []
    for m in (model, stock):
        with torch.set_grad_enabled(without):
            logits = m(**batch).logits
        base = logits.detach() if without else logits
        with torch.no_grad():
            flat, copied, cloned = base.view(-1, V), base[:, 1:].contiguous(), logits.clone()
            row = flat[3]
            row.fill_(-7.0)  # through two views, before anything else was looked at
            logits[1, 0, 0] = 5.0
            later = logits[:, :-1]
            later[0, 0] = 1.0
        seen.append((logits, base, flat, copied, cloned, row, later))
    for ours, expected in zip(*seen, strict=True):
        assert torch.equal(ours, expected)
        assert (ours.stride(), ours.storage_offset()) == (expected.stride(), expected.storage_offset())


@pytest.mark.parametrize("changed", ["logits", "view"])
def test_a_change_in_place_before_the_loss_counts(changed, patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)

    def loss(m):
        logits = m(**batch).logits
        flat = logits.view(-1, V)
        (flat if changed == "view" else logits).mul_(0.5)
        return F.cross_entropy(flat, batch["labels"].view(-1))

    assert_same_training(model, stock, loss)


def test_scales_and_biases_are_those_of_the_time_they_were_used(patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)
    losses = []
    for m in (model, stock):
        scale, bias, mask = torch.tensor(0.5), torch.linspace(0, 1, V), batch["labels"] != -100
        logits = ((m(**batch).logits + bias) * scale)[mask]
        scale.fill_(9.0), bias.fill_(9.0)
        labels = batch["labels"][mask]
        mask.fill_(True)
        losses.append(F.cross_entropy(logits, labels))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "scale", [0.0, float("inf"), -2.0, torch.tensor(0.3), nn.Parameter(torch.tensor(0.3))], ids=str
)
def test_scales_of_every_kind(scale, patched, batch):
    """One that is trained is no scalar of linear_cross_entropy's: real logits."""
    model, stock, report = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = copy.deepcopy(scale)
    if scale in (0.0, float("inf")):
        torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)), equal_nan=True)
    else:
        assert_same_training(model, stock, batch)
        expect_calls(report, int(not isinstance(scale, nn.Parameter)), int(isinstance(scale, nn.Parameter)))


def test_metadata_is_known_without_building(patched, batch):
    model, stock, report = patched("gemma2", mlp=False)
    lazy, real = model(**batch).logits, stock(**batch).logits
    for about in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda", "layout"):
        assert getattr(lazy, about) == getattr(real, about), about
    for about in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "__len__", "element_size"):
        assert getattr(lazy, about)() == getattr(real, about)(), about
    assert lazy[:, :, :] is lazy[..., :V] is lazy.float() is lazy.contiguous() is lazy
    assert isinstance(lazy.bfloat16(), LazyLogits)
    assert report.calls_materialised == 0
    with torch.no_grad():
        model.lm_head.weight[5] = 1.0  # what is built before is kept
        lazy = model(**batch).logits
        lazy[:, 0] = 7.0
        model.lm_head.weight.zero_()
    assert (lazy[:, 0] == 7.0).all()
    assert lazy.data_ptr() == lazy.data_ptr()
    assert report.why_materialised == {"read by TensorBase.__setitem__": 1}


def test_outputs_copy_and_pickle_as_real_logits(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    with torch.no_grad():
        expected = stock(**batch).logits
        for through in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            copied = through(model(**batch)["logits"])
            assert type(copied) is Tensor
            assert torch.equal(copied, expected)
        assert repr(model(**batch).logits) == repr(expected)


@promise("errors")
def test_wrong_shapes_classes_and_arguments_are_the_errors_of_stock(patched, batch):
    model, stock, _ = patched("gpt2")
    wrong = {
        "view": lambda z: z.view(-1, 13),
        "strides": lambda z: z.transpose(0, 1).view(-1, V),
        "axes": lambda z: z[:, :, :, 0],
        "class": lambda z: F.cross_entropy(z[0], torch.full((11,), 1000)),
        "negative": lambda z: F.cross_entropy(z[0], torch.full((11,), -3)),
        "gathered": lambda z: z.log_softmax(-1).gather(-1, torch.full((2, 11, 1), 1000)),
    }
    errors = []
    for m in (model, stock):
        logits, kinds = m(**batch).logits, []
        for name, use in wrong.items():
            with pytest.raises((RuntimeError, IndexError)) as error:
                use(logits)
            kinds.append(str(error.value) if name in ("view", "strides", "axes") else IndexError in error.type.__mro__)
        errors.append(kinds)
    assert errors[0][:-1] == errors[1][:-1]
    with torch.no_grad():  # arguments that recorded operations do not know
        for read in (
            lambda z: torch.div(z, 2, rounding_mode="floor"),
            lambda z: torch.mul(z, 2, out=torch.empty(0)),
            lambda z: z.view(dtype=torch.int32),
        ):
            assert torch.equal(read(model(**batch).logits), read(stock(**batch).logits))


@promise("dtypes")
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
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-5)
    assert results[0][2]


@promise("checkpoint")
@pytest.mark.parametrize(
    "read",
    [
        lambda z, _: z.square().mean(),
        lambda z, y: z[:, 1:].log_softmax(-1).gather(-1, y[:, 1:, None]).mean(),
    ],
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_of_yours_under_a_checkpoint(use_reentrant, read, patched, batch):
    """The logits are built once, so its recompute has fewer tensors to save than the first run would have saved."""
    model, stock, _ = patched("llama", mlp=False)

    def loss(m):
        return checkpoint(read, m(**batch).logits, batch["input_ids"], use_reentrant=use_reentrant)

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
    "loaded": lambda m, hidden: m.load_state_dict(m.state_dict()),
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
    "a cast, read before": lambda z: z.double().softmax(-1),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, torch.zeros(2, 11, 1, dtype=torch.long)),
    "a loss": lambda z: F.cross_entropy(z.flatten(0, 1), torch.ones(22, dtype=torch.long)),
}


@promise("errors")
@pytest.mark.parametrize("made", MADE_OF_THEM)
def test_gradients_by_logits_that_something_went_past_are_refused(made, patched, batch):
    model, _, report = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    result = MADE_OF_THEM[made](logits).square().mean()
    node = logits.grad_fn
    attempts = [
        lambda: logits.register_hook(print),
        logits.retain_grad,
        lambda: torch.autograd.grad(result, [model.lm_head.weight, logits], allow_unused=True),
        lambda: torch.autograd.graph.get_gradient_edge(logits),
    ]
    if report.calls_materialised == 0:  # else the node is that of the logits themselves
        attempts += [lambda: node.register_hook(print), lambda: node.next_functions]
    for attempt in attempts:
        with pytest.raises(UnsupportedError, match=r"call logits\.retain_grad\(\) first"):
            attempt()
    assert logits.detach().grad_fn is None


@pytest.mark.parametrize("made", MADE_OF_THEM)
def test_hooked_before_anything_is_made_of_them(made, patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    seen = []

    def loss(m):
        logits = called_without_loss(m, batch)
        logits.retain_grad()  # the way out that the error names
        handle = logits.register_hook(lambda grad: grad * 3)
        result = MADE_OF_THEM[made](logits).square().mean()
        seen.append((logits, torch.autograd.grad(result, logits, retain_graph=True)[0]))
        handle.remove()
        return result

    assert_same_training(model, stock, loss)
    (ours, grad), (theirs, expected) = seen
    torch.testing.assert_close((grad, ours.grad), (expected, theirs.grad))
    assert theirs.grad.any()


@promise("errors")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_what_goes_around_python_gets_no_wrong_numbers(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = model(**batch).logits.detach()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(logits)
    with pytest.raises(UnsupportedError, match=r"logits\.clone"):
        torch.jit.trace(lambda x: x * 2, (logits,))
    handle = model.lm_head.weight.register_hook(lambda grad: grad * 0.5)  # it would run twice
    with pytest.raises(UnsupportedError, match="gradient hook"):
        OwnFunction.apply(called_without_loss(model, batch)).sum().backward()
    handle.remove()
    OwnFunction.apply(called_without_loss(model, batch)).sum().backward()


class Bare(nn.Module):
    """A model without a loss function of its own; ``past`` goes around its head."""

    def __init__(self, past=False):
        super().__init__()
        self.embed, self.lm_head, self.past = nn.Embedding(V, 8), nn.Linear(8, V, bias=False), past

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        h = self.embed(ids)
        logits = F.linear(h, self.lm_head.weight) if self.past else self.lm_head(h).float()
        return F.cross_entropy(logits[..., :-1, :].reshape(-1, V), labels[..., 1:].reshape(-1))


class Unlabelled(Bare):
    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def test_models_with_a_loss_in_their_forward(batch):
    model = Bare()
    expected = model(batch["input_ids"], batch["labels"])
    report = lowtide.patch(model)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]), expected)
    expect_calls(report, 1)
    past = Bare(past=True)
    report = lowtide.patch(past)
    past(batch["input_ids"], batch["labels"])
    assert "was not called" in str(report)
    expect_calls(report, 0, 1)
    assert "takes none of labels" in lowtide.patch(Unlabelled()).parts["loss"].outcome


@promise("memory")
@pytest.mark.usefixtures("short_chunks")
def test_a_step_with_its_accuracy_takes_no_memory_of_the_logits_size(patched):
    model, _, _ = patched("llama", settings={"vocab_size": 4001})
    ids = torch.randint(3, 4001, (4, 60))
    with track_allocations() as seen:
        outputs = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            (outputs.logits[:, :-1].argmax(-1) == ids[:, 1:]).sum()
        outputs.loss.backward()
    assert max(event.bytes for event in seen.events) <= 4 * 60 * 4001 * 4 / 8

"""What is read of logits for a metric, beside a loss that is differentiated: without them, and without their graph."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.measure.allocations import track_allocations
from lowtide.models.lazy_logits import LazyLogits
from models.conftest import assert_same_training, expect_calls
from support import every_pair

WITHOUT = {
    "no_grad": (torch.no_grad, lambda z: z),
    "inference_mode": (torch.inference_mode, lambda z: z),
    "detach": (contextlib.nullcontext, lambda z: z.detach()),
    "torch.detach": (contextlib.nullcontext, torch.detach),
}
METRICS = {
    "highest class": lambda z, y: z.argmax(-1),
    "accuracy": lambda z, y: (z[:, :-1].argmax(dim=-1) == y[:, 1:]).float().mean(),
    "logsumexp": lambda z, y: z.float().logsumexp(-1),
    "perplexity": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()).exp(),
    "log-probability": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]),
}


@every_pair(way=WITHOUT, metric=METRICS, name=["llama", "gemma2"])
def test_a_metric_in_training_needs_no_logits(metric, way, name, patched, batch):
    model, stock, report = patched(name, mlp=False)
    mode, without = WITHOUT[way]
    seen = []

    def loss(m):
        outputs = m(**batch)
        with mode():
            seen.append(METRICS[metric](without(outputs.logits), batch["labels"]))
        return outputs.loss

    assert_same_training(model, stock, loss)
    torch.testing.assert_close(*seen)
    assert not seen[0].requires_grad
    expect_calls(report, 1)


LATER = {
    "scaled": lambda z: z * 2,
    "capped": torch.tanh,
    "all": lambda z: z[:, :, :],
    "slice": lambda z: z[:, 1:],
    "view": lambda z: z.view(-1, 97),
    "cast": lambda z: z.double(),
    "clone": lambda z: z.clone(),
    "log-probabilities": lambda z: z.log_softmax(-1),
    "detached": lambda z: z.detach(),
}


@pytest.mark.parametrize("made", LATER)
@pytest.mark.parametrize("use", ["values", "loss", "with another that is trained"])
def test_what_was_made_without_gradients_has_none_later(use, made, patched, batch):
    model, stock, _ = patched("gemma2", mlp=False)
    results, grads, requires_grad = [], [], []
    for m in (model, stock):
        logits = m(**batch).logits
        with torch.no_grad():
            z = LATER[made](logits)
        requires_grad.append(z.requires_grad)  # True of a view, whose gradient goes nowhere
        scale = torch.tensor(1.5, dtype=z.dtype, requires_grad=True)
        if use == "values":
            results.append(z + 1)
        elif use == "loss":
            rows = z.reshape(-1, 97)
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


def test_detached_logits_share_their_memory(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    results = []
    for m in (model, stock):
        logits = m(**batch).logits
        detached, copied = logits.detach(), logits.clone()
        with torch.no_grad():
            part = logits[:, 1:]
        detached[:, 0] = 7.0
        with torch.no_grad():
            part[:, 3] = -2.0
        results.append((logits, detached, part, copied))
    assert isinstance(results[0][1], LazyLogits)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_outlasts_the_weights(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    expected = stock(**batch).logits.detach()
    for keep in (lambda z: z.clone(), lambda z: z.detach().clone(), torch.no_grad()(lambda z: z.clone())):
        model.load_state_dict(stock.state_dict())
        outputs = model(**batch)
        detached, kept = outputs.logits[:, 1:].double().detach(), keep(outputs.logits)
        outputs.loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert torch.equal(kept, expected)
        with pytest.raises(lowtide.errors.UnsupportedError, match=r"read outputs\.logits before"):
            detached.argmax(-1)


@pytest.mark.usefixtures("short_chunks")
def test_accuracy_takes_no_memory_of_the_logits_size(patched):
    model, _, _ = patched("llama", settings={"vocab_size": 4001})
    ids = torch.randint(3, 4001, (4, 60), generator=torch.Generator().manual_seed(1))
    with track_allocations() as seen:
        outputs = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            (outputs.logits[:, :-1].argmax(-1) == ids[:, 1:]).sum()
        outputs.loss.backward()
    assert max(event.bytes for event in seen.events) <= 4 * 60 * 4001 * 4 / 8

"""What is put around the output embedding does what it does to a stock model and is reported, or is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import (
    Doubling,
    assert_same_training,
    called_without_loss,
    expect_calls,
)
from promises import promise
from support import every_pair

hooks = pytest.importorskip("accelerate.hooks")
pytestmark = [promise("patched", "reported")]


class Doubled(hooks.ModelHook):
    def post_forward(self, module, output):
        return output * 2


def another_class(model):
    base = type(model.lm_head)
    twice = {"forward": lambda self, *args: base.forward(self, *args) * 2}
    model.lm_head.__class__ = type("Twice", (base,), twice)


def replaced_forward(model):
    stock = model.lm_head.forward
    model.lm_head.forward = lambda *args: stock(*args) * 2


# each with the report's reason, where the change comes after patch
CHANGES = {
    "instance": (replaced_forward, "forward was replaced"),
    "hook": (lambda m: m.lm_head.register_forward_hook(lambda m, args, out: out * 2), "a hook from"),
    "full backward": (
        lambda model: model.lm_head.register_full_backward_hook(lambda m, grads, out: (grads[0] * 2,)),
        "a hook from",
    ),
    "accelerate": (lambda m: hooks.add_hook_to_module(m.lm_head, Doubled()), "forward was replaced"),
    "forward": (another_class, "another class, Twice"),
    "parametrization": (lambda model: parametrizations.spectral_norm(model.lm_head), "another class, Param"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_put_around_the_head_runs_once_and_is_reported(name, when, pair, batch):
    model, stock = pair("llama")
    change, reason = CHANGES[name]
    report = lowtide.patch(model, mlp=False) if when == "after" else None
    for m in (model, stock):
        torch.manual_seed(0)
        change(m)
    report = report or lowtide.patch(model, mlp=False)
    assert_same_training(model, stock, batch)
    expect_calls(report, 0, 1)
    assert (reason if when == "after" else "the output embedding") in str(report)


@pytest.mark.parametrize("around", ["a hook of all modules", "a function mode"])
def test_what_is_around_every_call_is_followed(around, patched, batch):
    model, stock, report = patched("llama", mlp=False)
    heads = model.lm_head, stock.lm_head
    if around == "a function mode":
        with Doubling(F.linear):
            losses = {m: m(**batch).loss for m in (model, stock)}
    else:
        handle = nn_module.register_module_forward_hook(lambda m, args, out: out * 2 if m in heads else None)
        losses = {m: m(**batch).loss for m in (model, stock)}
        handle.remove()
    assert_same_training(model, stock, lambda m: losses[m])
    expect_calls(report, 0, 1)


@promise("errors")
def test_a_hook_between_forward_and_loss_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    replaced_forward(model)
    with pytest.raises(UnsupportedError, match=r"got a change since.*forward was replaced"):
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


LABELS = torch.full((2, 6), -100)
IDS = torch.arange(12).view(2, 6)


def by_items(model):
    return model(input_ids=IDS, labels=LABELS, num_items_in_batch=torch.tensor(0)).loss


def by_hand(model):
    logits = model(input_ids=IDS, labels=LABELS).logits
    total = F.cross_entropy(logits.float().flatten(0, 1), LABELS.flatten(), reduction="sum")
    return total / (LABELS != -100).sum()


def by_mean(model):
    return model(input_ids=IDS, labels=LABELS).loss


def frozen_head(model):
    model.get_output_embeddings().requires_grad_(False)
    return model


@promise("ignored")
@every_pair(
    made=[lambda model: model, frozen_head],
    loss=[by_items, by_hand, by_mean],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_a_step_without_any_label_changes_no_weight(made, loss, dtype, pair):
    model, stock = map(made, pair("llama", dtype))
    report = lowtide.patch(model)
    losses = [loss(m) for m in (model, stock)]
    assert report.calls_materialised == 0
    assert all(value.isnan() for value in losses)
    for value in losses:
        value.backward()
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or not p.grad.any(), name


@promise("reversible")
def test_two_models_that_share_a_head(build, batch):
    one, two = build("llama", tie_word_embeddings=False), build("llama", tie_word_embeddings=False)
    two.lm_head = one.lm_head
    reports = [lowtide.patch(model) for model in (one, two)]
    losses = [model(**batch).loss for model in (one, two)]
    lowtide.unpatch(two)
    assert type(one.lm_head) is torch.nn.Linear
    torch.testing.assert_close(losses, [model(**batch).loss for model in (one, two)])
    for report, calls in zip(reports, (2, 1), strict=True):
        expect_calls(report, calls)


@promise("reversible")
def test_logits_of_a_head_that_was_replaced_since(patched, batch):
    model, stock, report = patched("llama", mlp=False)
    logits, expected = (m(**batch).logits for m in (model, stock))
    old = model.lm_head
    model.set_output_embeddings(torch.nn.Linear(16, 97))
    model(**batch)
    torch.testing.assert_close(logits + 0, expected)
    assert type(old(torch.ones(1, 16))) is torch.Tensor
    expect_calls(report, 2, 1)

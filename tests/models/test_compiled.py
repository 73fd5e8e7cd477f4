"""Patched models compiled as a whole: their forward runs in eager, what it calls is compiled, no logits are built."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import (
    COPIES,
    DYNAMO,
    MLP,
    PEFT,
    OwnFunction,
    Tiny,
    V,
    assert_same_training,
    called_without_loss,
    expect_calls,
    lora,
    wrap,
)
from promises import promise

pytestmark = [*DYNAMO, *PEFT, promise("compile", "patched")]


def with_lora(model):
    return wrap(model, lora(target_modules=["q_proj", *MLP]))


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize(
    ("name", "made", "fullgraph"),
    [
        ("llama", None, True),
        pytest.param("llama", checkpointed, False, marks=pytest.mark.slow),
        pytest.param("llama", with_lora, False, marks=pytest.mark.slow),
        *(pytest.param(name, None, True, marks=pytest.mark.slow) for name in ("llama-tied", "gemma2", "phi", "gpt2")),
    ],
)
def test_a_model(name, made, fullgraph, pair, batch):
    model, stock = pair(name, **({"num_hidden_layers": 1} if name != "gpt2" else {}))
    if made is not None:
        model, stock = made(model), made(stock)
    report = lowtide.patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    call = {**batch, "num_items_in_batch": torch.tensor(5), "use_cache": False}
    for _ in range(2):
        assert_same_training(model, stock, call, through=compiled)
    expect_calls(report, 2)
    torch.testing.assert_close(compiled(**call).logits.clone(), stock(**call).logits)
    expect_calls(report, 3, 1)


def test_calls_without_labels(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = lambda m: F.cross_entropy(called_without_loss(m, batch).flatten(0, 1), batch["labels"].flatten())  # noqa: E731
    assert_same_training(model, stock, loss, through=compiled)
    model.eval(), stock.eval()
    with torch.no_grad():
        logits = compiled(input_ids=batch["input_ids"]).logits
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, stock(input_ids=batch["input_ids"]).logits)
    expect_calls(report, 1)


def of_rows(z, y):
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def filled(z, y):
    z[..., 3] = -100.0
    return of_rows(z, y)


# Losses of logits z and labels y, and whether they need no logits.
LOSSES = {
    "shifted": (lambda z, y: of_rows(z[:, :-1].contiguous(), y[:, 1:]), True),
    "another loss too": (lambda z, y: of_rows(z, y) + z.square().mean(), False),
    "filled": (filled, False),
    "a custom function": (lambda z, y: OwnFunction.apply(z).square().mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name):
    tail, lazy = LOSSES[name]
    model = Tiny(tail)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    labels = ids.flip(1).clone()
    labels[0, 2] = -100

    def total(m):
        loss, logits = m(ids, labels=labels)
        return loss if lazy else loss.sum() + logits[:, 1:].square().mean()

    assert_same_training(model, stock, total, through=torch.compile(model, backend="aot_eager"))
    assert (report.calls_materialised == 0) is lazy, report.why_materialised


@promise("errors")
def test_one_graph_of_the_model_is_an_error_that_names_the_way_out():
    model, ids = Tiny(lambda z, y: z.sum()), torch.randint(V, (2, 7))
    lowtide.patch(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use layer\.compile\(\)"):  # of a function of the model
        torch.compile(lambda m: m(ids)[0] * 2, backend="eager", fullgraph=True)(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lowtide\.unpatch\(model\)"):
        torch.export.export(model, (ids,), strict=True)
    with pytest.raises(RuntimeError, match=r"not supported with torch\.export"):
        torch.export.export(model, (ids,), strict=False)
    lowtide.unpatch(model)
    torch.export.export(model, (ids,), strict=False)


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def another_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(8, V, bias=False)


@promise("reported", "reversible")
@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (hooked, (1, 1)),
        (another_head, (2, 0)),
        (lambda model: lowtide.unpatch(model), (1, 0)),
        (COPIES["deepcopy"], (2, 0)),
        (COPIES["pickle"], (2, 0)),
    ],
)
def test_changes_after_compile(change, calls):
    """And before it: the model is compiled before patch. A copy, as DPO's reference model, compiles by itself."""
    model = Tiny(of_rows)
    stock, ids = copy.deepcopy(model), torch.randint(V, (2, 7))
    compiled = torch.compile(model, backend="eager")
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
    report = lowtide.patch(model)
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
    copied = change(model)
    if copied is None:
        change(stock)
    else:
        model, compiled, report = copied, torch.compile(copied, backend="eager"), lowtide.patch(copied)
    model.zero_grad(), stock.zero_grad()
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
    expect_calls(report, *calls)

"""Patched models compiled as a whole: their forward runs in eager, what it calls is compiled, no logits are built."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from models.compiled_losses import LOSSES, Graphs, Tiny, V, of_rows
from models.conftest import (
    COPIES,
    DYNAMO,
    MLP,
    PEFT,
    assert_same_training,
    called_without_loss,
    expect_calls,
    lora,
    wrap,
)
from promises import promise

pytestmark = [*DYNAMO, *PEFT, promise("compile", "patched")]
SMALL = {"num_hidden_layers": 1}


def with_lora(model):
    return wrap(model, lora(target_modules=["q_proj", "lm_head", *MLP]))


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
    """And a function of it, in which PyTorch breaks at the model."""
    model, stock = pair(name, **(SMALL if name != "gpt2" else {}))
    if made is not None:
        model, stock = made(model), made(stock)
    report = lowtide.patch(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=fullgraph)
    for number in (None, torch.tensor(5)):
        call = {**batch, "num_items_in_batch": number, "use_cache": False}
        assert_same_training(model, stock, lambda m, call=call: m(**call).loss, through=compiled)
    assert graphs.count > 0
    assert not graphs.logits
    assert name == "gpt2" or graphs.operators >= {"lowtide.rotary"}
    assert name != "llama" or "lowtide.swiglu" in graphs.operators or made is with_lora
    expect_calls(report, 2)
    outputs, expected = compiled(**call), stock(**call)
    torch.testing.assert_close(outputs.logits.clone(), expected.logits)
    expect_calls(report, 3, 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use layer\.compile\(\)"):
        torch.compile(lambda m: m(**call).loss * 2, backend="eager", fullgraph=True)(model)


def test_a_function_of_the_model_and_a_loss_of_what_it_returned(patched, batch):
    model, stock, report = patched("llama", settings=SMALL)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def loss(m):
        return m(**batch).loss * 2

    def later(m):
        return of_rows(called_without_loss(m, batch), batch["labels"])

    assert_same_training(model, stock, lambda m: torch.compile(loss, backend="eager")(m) if m is model else loss(m))
    assert_same_training(model, stock, later, through=compiled)
    expect_calls(report, 2)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model.eval(), stock.eval()
    with torch.no_grad():
        logits = compiled(**inputs).logits
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, stock(**inputs).logits)
    tokens = [m.generate(**inputs, max_new_tokens=3, do_sample=False) for m in (model, stock)]
    assert torch.equal(*tokens)
    expect_calls(report, 2)


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


@promise("reversible")
@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_a_copy_compiles_by_itself(through):
    """As DPO's reference model: what a copy runs is not the original's."""
    model = Tiny(of_rows)
    stock, ids = copy.deepcopy(model), torch.randint(V, (2, 7))
    report = lowtide.patch(model)
    torch.compile(model, backend="eager")(ids, ids)
    other = COPIES[through](model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    assert_same_training(other, stock, lambda m: m(ids, ids)[0], through=compiled)
    expect_calls(report, 1)
    expect_calls(lowtide.patch(other), 2)


@promise("errors")
def test_export_is_an_error_that_names_unpatch():
    model, ids = Tiny(lambda z, y: z.sum()), torch.randint(V, (2, 7))
    lowtide.patch(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lowtide\.unpatch\(model\)"):
        torch.export.export(model, (ids,), strict=True)
    with pytest.raises(RuntimeError, match=r"not supported with torch\.export"):
        torch.export.export(model, (ids,), strict=False)
    lowtide.unpatch(model)
    torch.export.export(model, (ids,), strict=False)


@promise("reversible")
def test_patch_and_unpatch_after_compile():
    model = Tiny(of_rows)
    stock = copy.deepcopy(model)
    graphs, ids = Graphs(8, V), torch.randint(V, (2, 7))
    compiled = torch.compile(model, backend=graphs)

    def train():
        graphs.logits.clear()
        assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
        return bool(graphs.logits)

    assert train()
    report = lowtide.patch(model)
    assert not train()
    expect_calls(report, 1)
    lowtide.unpatch(model)
    train()
    assert type(compiled(ids, ids)[1]) is torch.Tensor
    expect_calls(report, 1)


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def another_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(8, V, bias=False)


@promise("reported")
@pytest.mark.parametrize(("change", "calls"), [(hooked, 1), (another_head, 2)])
def test_a_head_that_changes_after_compile(change, calls):
    model = Tiny(of_rows)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(V, (2, 7))
    for step in range(2):
        assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
        if step == 0:
            change(model), change(stock)
            model.zero_grad(), stock.zero_grad()
    expect_calls(report, calls, 2 - calls)

"""Patched models compiled as a whole: their forward runs in eager, what it calls is compiled, no logits are built."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide
from models.compiled_losses import LOSSES, Graphs, Tiny, V, of_rows
from models.conftest import DYNAMO, PEFT, assert_same_training, called_without_loss, expect_calls

pytestmark = [*DYNAMO, *PEFT, pytest.mark.usefixtures("fresh_compiler")]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [
        ("llama", True), ("gemma2", False),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in ("llama-tied", "gemma2", "phi", "gpt2")),
    ],
)  # fmt: skip
def test_a_model(name, fullgraph, patched, batch):
    model, stock, report = patched(name, settings={"num_hidden_layers": 1} if name != "gpt2" else {})
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=fullgraph)
    for _ in range(2):
        assert_same_training(model, stock, batch, through=compiled)
    assert_same_training(model, stock, lambda m: m(**batch, num_items_in_batch=torch.tensor(5)).loss, through=compiled)
    assert graphs.count > 0
    assert not graphs.logits
    assert name == "gpt2" or graphs.operators >= {"lowtide.swiglu", "lowtide.rotary"}
    expect_calls(report, 3)
    outputs, expected = compiled(**batch), stock(**batch)
    torch.testing.assert_close(outputs.logits.clone(), expected.logits)
    expect_calls(report, 4, 1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name):
    tail, lazy = LOSSES[name]
    torch.manual_seed(0)
    model = Tiny(tail)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    labels = ids.flip(1).clone()
    labels[0, 2] = -100
    compiled = torch.compile(model, backend="aot_eager")

    def total(m):
        loss, logits = m(ids, labels=labels)
        return loss if lazy else loss.sum() + logits[:, 1:].square().mean()

    assert_same_training(model, stock, total, through=compiled)
    assert (report.calls_materialised == 0) is lazy, report.why_materialised


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_compiles_by_itself(through, patched, batch):
    """As DPO's reference model: what a copy runs is not the original's."""
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    torch.compile(model, backend="eager")(**batch)
    other = through(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert_same_training(other, stock, batch, through=torch.compile(other, backend="eager", fullgraph=True))
    expect_calls(report, 1)
    expect_calls(lowtide.patch(other), 2)


def test_a_compiled_function_breaks_at_the_model(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    graphs = Graphs()

    def loss(m):
        return m(**batch).loss * 2

    def compiled_loss(m):
        return torch.compile(loss, backend=graphs)(m) if m is model else loss(m)

    assert_same_training(model, stock, compiled_loss)
    assert not graphs.logits
    expect_calls(report, 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use layer\.compile\(\)"):
        torch.compile(loss, backend="eager", fullgraph=True)(model)


def test_a_loss_of_the_logits_that_a_model_returned(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def loss(m):
        return of_rows(called_without_loss(m, batch), batch["labels"])

    assert_same_training(model, stock, loss, through=compiled)
    expect_calls(report, 1)


def test_export_is_an_error_that_names_unpatch(patched, batch):
    model, _, _ = patched("llama", settings={"num_hidden_layers": 1, "use_cache": False})
    inputs = {"input_ids": batch["input_ids"]}
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lowtide\.unpatch\(model\)"):
        torch.export.export(model, (), inputs, strict=True)
    with pytest.raises(RuntimeError, match=r"not supported with torch\.export"):
        torch.export.export(model, (), inputs, strict=False)
    lowtide.unpatch(model)
    torch.export.export(model, (), inputs, strict=False)


def test_calls_without_labels(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.eval(), stock.eval()
    with torch.no_grad():
        logits = compiled(**inputs).logits
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, stock(**inputs).logits)
    tokens = [m.generate(**inputs, max_new_tokens=3, do_sample=False) for m in (model, stock)]
    assert torch.equal(*tokens)
    expect_calls(report, 0)
    torch.testing.assert_close(compiled(**batch).loss, stock(**batch).loss)
    expect_calls(report, 1)


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


@pytest.mark.parametrize(("change", "fused"), [(hooked, 1), (another_head, 2)])
def test_a_head_that_changes_after_compile(change, fused):
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
    expect_calls(report, fused, 2 - fused)


def test_gradient_checkpointing(patched, batch):
    model, stock, report = patched("llama", settings={"use_cache": False, "num_hidden_layers": 1})
    for m in (model, stock):
        m.gradient_checkpointing_enable({"use_reentrant": False})
    graphs = Graphs()
    assert_same_training(model, stock, batch, through=torch.compile(model, backend=graphs))
    assert not graphs.logits
    expect_calls(report, 1)


def test_lora(build, batch):
    peft = pytest.importorskip("peft")
    stock = build("llama", num_hidden_layers=1)
    targets = ["q_proj", "up_proj", "lm_head"]
    torch.manual_seed(7)
    stock = peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model = copy.deepcopy(stock)
    report = lowtide.patch(model)
    graphs = Graphs()
    assert_same_training(model, stock, batch, through=torch.compile(model, backend=graphs))
    assert not graphs.logits
    expect_calls(report, 1)

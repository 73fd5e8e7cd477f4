"""Forms of models, each beside its stock copy: training, evaluation, copies and unpatch, and what runs fused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from models.conftest import (
    ADAPTED,
    COPIES,
    DYNAMO,
    PEFT,
    assert_same_gradients,
    assert_same_training,
    expect_calls,
    fused,
    state_of,
    types_of,
)
from promises import promise

pytestmark = [*DYNAMO, *PEFT, promise("patched", "reported")]

# How many modules of each part are patched, and, where adapters train alone, how many save something for backward.
FORMS: dict[str, tuple[dict[str, int], dict[str, int] | None]] = {
    "llama": ({"mlp": 2, "norm": 5, "rope": 2}, None),
    "llama-tied": ({"mlp": 2, "norm": 5, "rope": 2}, None),
    "gemma2": ({"mlp": 2, "norm": 9, "rope": 2}, None),
    "gemma3": ({"mlp": 2, "norm": 13, "rope": 2}, None),
    "cohere2": ({"mlp": 2, "rope": 2}, None),
    "granite": ({"mlp": 2, "norm": 5, "rope": 2}, None),
    "phi3": ({"mlp": 2, "norm": 5, "rope": 2}, None),
    "qwen3-moe": ({"mlp": 2, "norm": 9, "rope": 2}, None),
    "gpt-oss": ({"mlp": 2, "norm": 5, "rope": 2}, None),
    "phi": ({"rope": 2}, None),
    "gpt2": ({}, None),
    "bert": ({}, None),
    "lora": ({"mlp": 2, "norm": 5, "rope": 2}, {"mlp": 2, "norm": 4, "rope": 2}),
    "saved": ({"mlp": 2, "norm": 5, "rope": 2}, {"mlp": 2, "norm": 4, "rope": 2}),
    "4bit": ({"mlp": 2, "norm": 5, "rope": 2}, {"mlp": 2, "norm": 4, "rope": 2}),
}


def trains(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    parts, in_graph = FORMS[name]
    rows = {part: (report.parts[part], *report.parts[part].more) for part in ("mlp", "norm", "rope")}
    assert {part: n for part in rows if (n := sum(row.count for row in rows[part] if row.patched))} == parts
    for _ in range(2):
        loss = assert_same_training(model, stock, lambda m: 3.0 * m(**batch).loss, rtol=1e-6, atol=3e-6)
    assert fused(loss) == Counter(parts if in_graph is None else in_graph)
    expect_calls(report, 2)


def reads_logits_afterwards(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits.shape == expected.logits.shape
    assert outputs.logits.dtype == expected.logits.dtype
    expect_calls(report, 1)
    torch.testing.assert_close(outputs.logits[0], expected.logits[0])
    torch.testing.assert_close(outputs.logits + 0, expected.logits)
    expect_calls(report, 1, 1)
    found = {model: outputs, stock: expected}  # as an auxiliary loss would: both ways into the hidden states
    assert_same_training(model, stock, lambda m: found[m].loss + found[m].logits.square().mean())


def evaluates(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    model.eval(), stock.eval()
    with torch.no_grad():
        outputs, expected = model(**batch), stock(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert not outputs.loss.requires_grad
    expect_calls(report, 1)
    assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        logits = model(**prompt).logits
        assert type(logits) is Tensor
        assert torch.equal(logits, stock(**prompt).logits)  # on a CPU nothing is fused that saves nothing
    counts = report.calls_fused, report.calls_materialised
    tokens = [m.generate(**prompt, max_new_tokens=5, do_sample=False) for m in (stock, model)]
    assert torch.equal(*tokens)
    assert (report.calls_fused, report.calls_materialised) == counts


def is_unpatched(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    loss = stock(**batch).loss  # transformers puts what records its router logits in place at the first call
    model(**batch).loss.backward()
    assert state_of(model) != state_of(stock)
    lowtide.unpatch(model)
    assert state_of(model) == state_of(stock)
    assert torch.equal(model(**batch).loss, loss)
    assert type(model(**batch).logits) is Tensor
    expect_calls(report, 1)
    lowtide.unpatch(model)  # nothing to undo
    lowtide.patch(model)
    lowtide.unpatch(model)
    assert state_of(model) == state_of(stock)


def is_copied(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    for module in model.modules():
        if hasattr(module, "checkpoint_level"):
            module.checkpoint_level = 1
    for through in [COPIES["deepcopy"]] if name == "4bit" else COPIES.values():
        other = through(model)
        stock.zero_grad()
        assert any(getattr(module, "checkpoint_level", 0) for module in other.modules()) == ("mlp" in FORMS[name][0])
        assert_same_training(other, stock, batch)
        expect_calls(report, 0)
        assert lowtide.patch(other).calls_fused == 1
        assert all(p.grad is None for p in model.parameters())
        lowtide.unpatch(other)
        assert types_of(other) == types_of(stock)
    assert model(**batch).loss.isfinite()
    expect_calls(report, 1)


def divides_by_num_items(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    for number in (7, torch.tensor(7), torch.tensor(7.5)):
        assert_same_training(model, stock, {**batch, "num_items_in_batch": number})
    assert_same_training(model, stock, {**batch, "shift_labels": batch["labels"].roll(-2, 1)})
    expect_calls(report, 4)


def is_partly_frozen(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    for frozen in ("get_output_embeddings", "get_input_embeddings"):
        for m in (model, stock):
            m.requires_grad_(True).zero_grad()
            getattr(m, frozen)().requires_grad_(False)
        assert_same_training(model, stock, batch)
    for m in (model, stock):  # all but the head
        m.requires_grad_(False).zero_grad()
        m.get_output_embeddings().requires_grad_(True)
    assert_same_training(model, stock, batch)
    expect_calls(report, 3)


def is_checkpointed(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    for reentrant in (False, True):
        for m in (model, stock):
            m.gradient_checkpointing_enable({"use_reentrant": reentrant})
            m.enable_input_require_grads()
            m.zero_grad()
        for level in (0, 1):
            for module in model.modules():
                if hasattr(module, "checkpoint_level"):
                    module.checkpoint_level = level
            assert_same_training(model, stock, {**batch, "use_cache": False})
    expect_calls(report, 4)


def is_autocast(name: str, model: Any, stock: Any, report: Any, batch: dict[str, Tensor]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(outputs.logits + 0, expected.logits, rtol=3e-2, atol=5e-2)  # read outside of autocast
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-2, atol=1e-2)
    assert fused(outputs.loss) == Counter(FORMS[name][0])
    for out in (outputs, expected):
        out.loss.backward()
    largest = max(q.grad.norm() for q in stock.parameters())
    for (key, p), q in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert p.grad.dtype == torch.float32, key
        assert (p.grad - q[1].grad).norm() <= 0.03 * largest, key
    expect_calls(report, 1, 1)


CASES = {
    trains: (FORMS, "patched"),
    reads_logits_afterwards: (FORMS, "patched"),
    evaluates: ([name for name in FORMS if name != "4bit"], "patched"),  # of which bitsandbytes packs weights anew then
    is_unpatched: (FORMS, "reversible"),
    is_copied: (["llama-tied", "gemma3", "phi3", "qwen3-moe", "phi", "lora", "saved", "4bit"], "reversible"),
    divides_by_num_items: (FORMS, "patched"),
    is_partly_frozen: (["llama", "gemma2", "phi3", "qwen3-moe"], "adapters"),
    is_checkpointed: (["llama", "phi3", "gpt-oss", "lora", "4bit"], "checkpoint"),
    is_autocast: (["llama", "phi", "phi3"], "dtypes"),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=promise(held, *["adapters"] * (name in ADAPTED)), id=f"{case.__name__}-{name}")
        for case, (names, held) in CASES.items()
        for name in names
    ],
)
def test_a_form(case: Any, name: str, patched: Any, batch: dict[str, Tensor]) -> None:
    case(name, *patched(name), batch)


@promise("values")
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "phi", "phi3", "lora"])
def test_gradients_in_float64_are_equal_to_the_last_digits(name: str, pair: Any, batch: dict[str, Tensor]) -> None:
    """The stock loss itself rounds logits to float32, so the reference keeps its logits and takes its own loss."""
    model, stock = (m.double().eval() for m in pair(name))
    report = lowtide.patch(model)
    model(**batch).loss.backward()
    expect_calls(report, 1)
    labels = batch.pop("labels")
    logits = stock(**batch).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    assert_same_gradients(model, stock, rtol=1e-11)


@promise("reported")
def test_the_report_says_what_was_done(patched: Any, batch: dict[str, Tensor]) -> None:
    model, _, report = patched("llama", rope=False)
    assert [(row.part, row.patched, row.module, row.count) for row in report.parts.values()] == [
        ("loss", True, "lm_head", 1), ("mlp", True, "model.layers.*.mlp", 2),
        ("norm", True, "model.layers.*.input_layernorm", 2), ("rope", False, "-", 1),
    ]  # fmt: skip
    assert report.parts["mlp"].outcome == "runs as lowtide.swiglu_mlp (silu), which keeps gate and up"
    assert report.parts["rope"].outcome == "left as it is: rope=False"
    model(**batch).logits.sum()
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["part", "module"]
    assert any(line.split()[:3] == ["norm", "model.layers.*.input_layernorm", "(2)"] for line in lines)
    assert any(line.split()[:2] == ["norm", "model.norm"] for line in lines)
    assert lines[-2:] == ["calls with the loss fused: 1; with the logits built: 1", "  1 x read by TensorBase.sum"]

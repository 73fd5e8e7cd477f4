"""Patching is per instance, idempotent and reversible, survives what is done to models, and says what it did."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import COPIES, DYNAMO, assert_same_gradients, assert_same_training, state_of

# torch.compile warns of what it does itself, and lowtide of a whole model that is compiled
pytestmark = [
    *DYNAMO,
    pytest.mark.filterwarnings("ignore:lowtide.patch. the logits are built:UserWarning"),
]


def assert_fuses(model, report, batch):
    before = report.calls_fused
    model(**batch).loss.backward()
    assert report.calls_fused == before + 1, str(report)


def test_unpatch_restores_the_model(any_model, build, batch):
    model = build(any_model)
    loss = model(**batch).loss  # first: transformers puts what records its router logits in place then
    before = state_of(model)
    report = lowtide.patch(model)
    assert state_of(model) != before
    model(**batch).loss.backward()
    lowtide.unpatch(model)
    assert state_of(model) == before
    assert torch.equal(model(**batch).loss, loss)
    assert type(model(**batch).logits) is torch.Tensor
    counts = report.calls_fused, report.calls_materialised
    model(**batch)
    assert (report.calls_fused, report.calls_materialised) == counts
    lowtide.unpatch(model)  # nothing to undo
    lowtide.patch(model)
    lowtide.unpatch(model)
    assert state_of(model) == before


def test_the_report_says_what_was_done(patched, batch):
    model, _, report = patched("llama", rope=False)
    assert [(row.part, row.patched) for row in report.parts.values()] == [
        ("loss", True), ("mlp", True), ("norm", True), ("rope", False),
    ]  # fmt: skip
    assert report.parts["loss"].module == "lm_head"
    assert (report.parts["mlp"].module, report.parts["mlp"].count) == ("model.layers.*.mlp", 2)
    assert "lowtide.swiglu_mlp (silu)" in report.parts["mlp"].outcome
    assert "rope=False" in report.parts["rope"].outcome
    model(**batch).logits.sum()
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["part", "module"]
    assert lines[-2:] == ["calls with the loss fused: 1; with the logits built: 1", "  1 x read by TensorBase.sum"]


def test_loss_false_changes_nothing(build):
    model = build("llama")
    before = state_of(model)
    report = lowtide.patch(model, loss=False, mlp=False, norm=False, rope=False)
    assert state_of(model) == before
    assert "loss=False" in str(report)
    assert vars(model).keys() == vars(build("llama")).keys()


def test_options_reach_the_loss(patched, batch):
    model, _, _ = patched("llama", options=lowtide.HeadOptions(backend="exp"))
    with pytest.raises(UnsupportedError, match="backend"):
        model(**batch)
    lowtide.patch(model)
    assert model(**batch).loss.isfinite()


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_resized_embeddings(name, patched, batch):
    model, stock, report = patched(name)
    assert_fuses(model, report, batch)
    model.zero_grad()
    for m in (model, stock):
        torch.manual_seed(0)
        m.resize_token_embeddings(103, mean_resizing=False)
    batch["input_ids"][0, 0] = batch["labels"][0, 4] = 101
    assert_fuses(model, report, batch)
    stock(**batch).loss.backward()
    assert_same_gradients(model, stock)
    lowtide.unpatch(model)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
def test_copies_are_patched_on_their_own(through, patched, batch, ran):
    model, stock, report = patched("gemma3", settings={"tie_word_embeddings": True})
    model.model.layers[1].mlp.checkpoint_level = 1
    other = through(model)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.model.layers[1].mlp.checkpoint_level == 1
    ran.clear()
    assert_same_training(other, stock, batch)
    assert ran.keys() == {"swiglu_mlp", "rms_norm", "rotary"}
    assert report.calls_fused == 0
    assert lowtide.patch(other).calls_fused == 1
    assert all(p.grad is None for p in model.parameters())
    lowtide.unpatch(other)
    assert state_of(other) == state_of(stock)
    assert_fuses(model, report, batch)


def test_checkpoints_are_stock(patched, batch, tmp_path):
    model, stock, _ = patched("llama")
    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = type(stock).from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch).loss, stock(**batch).loss)


def test_moves_and_modes(patched, batch):
    model, _, report = patched("llama")
    model.eval().to(torch.float64)
    assert_fuses(model, report, batch)
    model.to(torch.float32).train()
    assert_fuses(model, report, batch)


def test_a_patched_model_goes_when_it_is_let_go(build, batch):
    """Without the garbage collector, which may be minutes away from freeing a GPU."""
    lowtide.patch(build("llama"))  # classes and probes that are made once
    model = build("llama")
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        lowtide.patch(model)
        outputs = model(**batch)
        outputs.loss.backward()
        outputs.logits.sum()
        del model, outputs
        assert gone() is None
    finally:
        gc.enable()


def test_a_forward_that_fails_leaves_no_trace(patched, batch):
    model, _, report = patched("llama")
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 1000, labels=batch["labels"])
    assert type(model.lm_head(torch.zeros(1, 16))) is torch.Tensor
    assert_fuses(model, report, batch)


def test_unpatch_refuses_a_model_changed_on_top(patched):
    model, _, _ = patched("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(UnsupportedError, match="Undo what came after"):
        lowtide.unpatch(model)
    nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    lowtide.unpatch(model)
    assert type(model.lm_head) is nn.Linear

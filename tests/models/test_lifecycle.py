"""Patching is per instance and reversible, survives what is done to models, and a refused call changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import ArgumentTypeError, UnsupportedError
from lowtide.models.instance import part_of
from models.conftest import (
    DYNAMO,
    PEFT,
    Tiny,
    expect_calls,
    fused,
    lora,
    state_of,
    types_of,
    wrap,
)
from promises import promise

# torch.compile warns of what it does itself
pytestmark = [*DYNAMO, *PEFT, promise("reversible")]


def assert_fuses(model, report, batch):
    before = report.calls_fused
    model(**batch).loss.backward()
    assert report.calls_fused == before + 1, str(report)


@pytest.mark.parametrize(
    ("changed", "call"),
    [
        ("lm_head", lowtide.unpatch),
        ("model.norm", lowtide.unpatch),
        ("lm_head", lambda m: lowtide.patch(m, loss=False, rope=False)),
        ("model.norm", lambda m: lowtide.patch(m, mlp=False, norm=False, options=lowtide.HeadOptions())),
    ],
)
def test_a_refused_call_changes_nothing(changed, call, patched, batch):
    """As where FSDP2 has changed the class of a module since."""
    model, stock, report = patched("llama")
    nn.utils.parametrize.register_parametrization(model.get_submodule(changed), "weight", nn.Identity())
    before, lines = state_of(model), str(report)
    with pytest.raises(UnsupportedError, match="Undo what came after"):
        call(model)
    assert state_of(model) == before
    assert str(report) == lines
    assert fused(model(**batch).loss)["mlp"] == 2
    nn.utils.parametrize.remove_parametrizations(model.get_submodule(changed), "weight")
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)


@promise("adapters")
@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize("way", ["get_base_model", "merge_and_unload", "unload"])
def test_a_head_that_peft_copied_into_modules_to_save(way, undo, patched, batch):
    """The copy has the class of the patched head, and is what trains."""
    model, stock, report = patched("llama")
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped, expected = wrap(model, config), wrap(stock, config)
    if way == "get_base_model" and undo:
        lowtide.unpatch(wrapped)
        assert types_of(wrapped) == types_of(expected)
        assert not any(map(part_of, wrapped.modules()))
    model, stock = (getattr(m, way)().requires_grad_(True) for m in (wrapped, expected))
    if undo:
        lowtide.unpatch(model)
        assert types_of(model) == types_of(stock)
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    expect_calls(report, int(not undo))


def test_patching_again_makes_the_model_as_asked_this_time(patched, batch):
    model, stock, report = patched("llama")
    state, mlp = state_of(model), model.model.layers[0].mlp
    parts = {"mlp": 2, "norm": 5, "rope": 2}
    mlp.checkpoint_level = 1
    assert lowtide.patch(model, options=lowtide.HeadOptions(backend="exp")) is report
    assert state_of(model) == state
    assert mlp.checkpoint_level == 1
    with pytest.raises(UnsupportedError, match="backend"):
        model(**batch)  # no GPU
    assert lowtide.patch(model, mlp=False) is report
    assert fused(model(**batch).loss) == {"norm": 5, "rope": 2}
    assert not hasattr(mlp, "checkpoint_level")
    assert not report.parts["mlp"].patched
    lowtide.patch(model, loss=False)
    assert fused(model(**batch).loss) == parts
    assert type(model(**batch).logits) is type(stock(**batch).logits) is torch.Tensor
    lowtide.patch(model, loss=False, mlp=False, norm=False, rope=False)
    assert state_of(model) == state_of(stock)
    assert str(report).count("=False") == 4


def test_checkpoints_moves_and_modes(patched, batch, tmp_path):
    model, stock, report = patched("llama")
    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(type(stock).from_pretrained(tmp_path)(**batch).loss, stock(**batch).loss)
    other = type(model)(model.config)  # an instance of the patched class is a stock model
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss)
    expect_calls(report, 1)
    model.eval().to(torch.float64)
    assert_fuses(model, report, batch)
    model.to(torch.float32).train()
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 1000, labels=batch["labels"])
    assert type(model.lm_head(torch.zeros(1, 16))) is torch.Tensor
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


@promise("errors")
def test_bad_arguments(build):
    model = build("llama")
    with pytest.raises(ArgumentTypeError, match="loss: expected True or False, got 'no'"):
        lowtide.patch(model, loss="no")
    for function in (lowtide.patch, lowtide.unpatch):
        for none in (3, nn.Linear(2, 2)):
            with pytest.raises(ArgumentTypeError, match="model: expected"):
                function(none)
        with pytest.raises(ArgumentTypeError, match="patch first, compile then"):
            function(torch.compile(model, backend="eager"))


def replica(model):
    other = model._replicate_for_data_parallel()
    other._parameters = model._parameters
    return other


def without_labels(model):
    return lambda ids, labels: model(ids)


def compiled(model):
    return without_labels(torch.compile(model, backend="eager"))


WAYS = {compiled: "without labels", replica: "torch.nn.DataParallel", without_labels: "without labels"}


@promise("reported")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_steps_that_build_logits_are_counted_and_warned_of_once(way):
    ids = torch.arange(12).reshape(2, 6)
    model = Tiny(lambda z, y: None if y is None else F.cross_entropy(z.flatten(0, 1), y.flatten()))
    before = lowtide.patch(model)
    model = copy.deepcopy(model)
    report = lowtide.patch(model)
    run = way(model)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            _, logits = run(ids, ids)
            logits.sum().backward()
        with torch.no_grad():
            run(ids, ids)
        model.eval()
        if way is not replica:  # of a model in evaluation another one would be made
            run(ids, ids)
    (text,) = [str(w.message) for w in record if str(w.message).startswith("lowtide.patch: ")]
    assert WAYS[way] in text
    assert [times for why, times in report.why_materialised.items() if WAYS[way] in why] == [3]
    assert (report.calls_materialised, before.calls_materialised) == (3, 0)


@promise("reported")
def test_what_is_no_training_run_is_not_counted(patched, batch):
    """As errors, which the warning would be."""
    model, _, report = patched("llama")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model.generate(**inputs, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        model(**inputs)
    model.lm_head(torch.randn(2, 16)).sum().backward()  # a loss in chunks of the user's own
    model.model(**inputs).last_hidden_state.sum().backward()
    model.eval()
    model(**inputs)
    expect_calls(report, 0)
    with pytest.warns(UserWarning, match=re.escape("Give it the labels too, or num_items_in_batch")):
        model.train()(input_ids=batch["input_ids"])

"""A training run whose logits are built at every step is counted, and warned of once."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.compiled_losses import Tiny
from models.conftest import expect_calls


def loss(logits, labels):
    return None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled(model):
    return without_labels(torch.compile(model, backend="eager"))


def replica(model):
    other = model._replicate_for_data_parallel()
    other._parameters = model._parameters
    return other


def without_labels(model):
    return lambda ids, labels: model(ids)


WAYS = {compiled: "without labels", replica: "torch.nn.DataParallel", without_labels: "without labels"}


@pytest.mark.parametrize("copied", [None, copy.deepcopy])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_steps_that_build_logits_are_counted_and_warned_of_once(way, copied):
    ids = torch.arange(12).reshape(2, 6)
    model, before = Tiny(loss), None
    if copied is not None:
        before, model = lowtide.patch(model), copied(model)
    report = lowtide.patch(model)
    torch._dynamo.reset()
    run = way(model)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            _, logits = run(ids, ids)
            logits.sum().backward()
        with torch.no_grad():
            run(ids, ids)
        (run if isinstance(run, nn.Module) else model).eval()
        if way is not replica:  # of a model in evaluation another one would be made
            run(ids, ids)
    (text,) = [str(w.message) for w in record if str(w.message).startswith("lowtide.patch: ")]
    assert WAYS[way] in text
    counts = [times for why, times in report.why_materialised.items() if WAYS[way] in why]
    assert counts == [3]
    assert report.calls_materialised == 3, str(report)
    assert before is None or before.calls_materialised == 0


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
    model.train().requires_grad_(False)
    model(**inputs)
    expect_calls(report, 0)


def test_the_warning_says_what_to_do(patched, batch):
    model, _, _ = patched("llama")
    with pytest.warns(UserWarning, match=re.escape("Give it the labels too, or num_items_in_batch")):
        model(input_ids=batch["input_ids"])

"""Code that asks for exact types takes a patched module for one of its own class."""

import copy
import pickle

import torch
from torch import nn

import lowtide
from models.conftest import expect_calls


def replaced_by_type(model):
    """As many libraries write it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) == nn.Linear:  # noqa: E721
                half = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                half.weight = nn.Parameter(child.weight.detach() / 2)
                setattr(module, name, half)
    return model


def test_what_looks_for_linear_layers_finds_the_head(patched, batch):
    model, stock, _ = patched("llama")
    model, stock = replaced_by_type(model), replaced_by_type(stock)
    report = lowtide.patch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    expect_calls(report, 1)


def test_a_patched_class_is_equal_to_its_own(build):
    model, stock = build("llama"), build("llama")
    lowtide.patch(model)
    for (name, ours), theirs in zip(model.named_modules(), stock.modules(), strict=True):
        kind = type(theirs)
        assert type(ours) == kind == type(ours), name  # noqa: E721
        assert {kind: 1}[type(ours)] == {type(ours): 1}[kind] == 1
        assert type(ours) in [kind]
        assert type(ours) != nn.Module  # noqa: E721
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.lm_head) in {nn.Linear}
    assert type(model.lm_head) is not nn.Linear

"""Code that asks for exact types takes a patched module for one of its own class."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.ao import quantization

import lowtide
from lowtide.swap import child_class
from models.conftest import expect_calls

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*"),  # of observers, about what they will be asked for later
]


def dynamic(model):
    return quantization.quantize_dynamic(model.eval(), {nn.Linear})


def prepared(model):
    model.lm_head.qconfig = quantization.default_qconfig
    return quantization.prepare(model)


def replaced_by_type(model):
    """As many libraries write it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) == nn.Linear:  # noqa: E721
                half = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                half.weight = nn.Parameter(child.weight.detach() / 2)
                setattr(module, name, half)
    return model


CHANGES = {dynamic: "is a Linear of torch.ao", prepared: "a hook from torch.ao", replaced_by_type: None}


@pytest.mark.parametrize("change", CHANGES)
def test_what_looks_for_linear_layers_finds_the_head(change, patched, batch):
    model, stock, _ = patched("llama")
    model, stock = change(model), change(stock)
    report = lowtide.patch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    if CHANGES[change] is None:
        expect_calls(report, 1)
    else:
        expect_calls(report, 0, 1)
        assert CHANGES[change] in str(report)


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


def overrides(base):
    return {}


def test_what_makes_a_class_of_a_class_tells_them_apart(patched):
    model, _, _ = patched("llama")
    head = type(model.lm_head)
    on_top, of_base = child_class(head, overrides, "_mark"), child_class(nn.Linear, overrides, "_mark")
    assert on_top is not of_base
    assert on_top == of_base == nn.Linear
    assert issubclass(on_top, head)
    assert not issubclass(of_base, head)
    kept = weakref.WeakKeyDictionary()
    kept[head], kept[nn.Linear] = "ours", "stock"
    assert (kept[head], kept[nn.Linear]) == ("ours", "stock")


def test_a_metaclass_is_left_as_it_is():
    class Meta(type):
        pass

    class Own(nn.Linear, metaclass=Meta):
        pass

    child = child_class(Own, overrides, "_mark")
    assert type(child) is Meta
    assert child != Own

"""Settings that change after `lowtide.patch`, a forward set on a class, and functions replaced before it."""

from __future__ import annotations

import copy
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import DYNAMO, PEFT, assert_same_training, expect_calls

pytestmark = DYNAMO + PEFT


def times(function, factor=1.5):
    """Return ``function`` with its first result multiplied."""

    @functools.wraps(function)
    def scaled(*args, **kwargs):
        result = function(*args, **kwargs)
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    return scaled


def assert_alike(model, stock, batch):
    model.zero_grad(), stock.zero_grad()
    assert_same_training(model, stock, batch, gradients=3e-5)


FORWARDS = {
    "llama": ("MLP", "RMSNorm", "Attention"),
    "qwen3-moe": ("Experts",),
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in FORWARDS.items() for part in parts])
def test_a_forward_set_on_a_class_runs(name, part, pair, batch, monkeypatch):
    model, stock = pair(name)
    report = lowtide.patch(model)
    before = model(**batch).loss
    kind = next(c for m in stock.modules() for c in type(m).__mro__ if c.__name__.endswith(part))
    monkeypatch.setattr(kind, "forward", times(kind.forward))
    assert_alike(model, stock, batch)
    lowtide.patch(model)
    assert_alike(model, stock, batch)
    monkeypatch.undo()
    assert lowtide.patch(model) is report
    assert torch.equal(model(**batch).loss, before)  # fused again


@pytest.mark.parametrize("function", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"])
def test_functions_that_are_replaced_count_when_patch_is_called_again(function, pair, batch, monkeypatch):
    model, stock = pair("llama")
    for m in (model, stock):
        m.set_attn_implementation("eager")
    lowtide.patch(model)
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(modeling, function, times(getattr(modeling, function)))
    lowtide.patch(model)
    assert_alike(model, stock, batch)


def z_loss(stock):
    return lambda z, *args, **kwargs: stock(z, *args, **kwargs) + 1e-2 * torch.logsumexp(z.float(), -1).square().mean()


def test_a_cross_entropy_that_was_replaced_before_patch_has_no_logits(pair, batch, monkeypatch):
    model, stock = pair("llama")
    monkeypatch.setattr(F, "cross_entropy", z_loss(F.cross_entropy))
    report = lowtide.patch(model)
    assert_alike(model, stock, batch)
    expect_calls(report, 1)


def set_on_layers(attribute, value):
    def change(model):
        for module in model.modules():
            if attribute in vars(module) and not list(module.children()):
                setattr(module, attribute, copy.deepcopy(value))

    return change


def new_activation(model):
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()


SETTINGS = {
    "epsilon": ("llama", set_on_layers("variance_epsilon", 0.5)),
    "an epsilon that is a tensor": ("llama", set_on_layers("variance_epsilon", torch.tensor(0.5))),
    "another activation": ("llama", new_activation),
    "attention's implementation": ("llama", lambda m: m.set_attn_implementation("eager")),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_change_later_count(what, patched, batch):
    name, change = SETTINGS[what]
    model, stock, _ = patched(name)
    model(**batch)
    for m in (model, stock):
        change(m)
    assert_alike(model, stock, batch)


class Multiplied(nn.Module):
    """Falcon-H1's MLP: factors that are 1 as a rule; and a dropout that drops nothing as a rule."""

    def __init__(self, D=16, F_=24):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F_), nn.Linear(D, F_)
        self.down_proj = nn.Linear(F_, D)
        self.act_fn, self.dropout = nn.SiLU(), nn.Dropout(0.0)
        self.gate_multiplier, self.down_multiplier = 1.0, 1.0

    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.dropout(self.scaled(y))

    def scaled(self, y):
        return self.down_proj(y) * self.down_multiplier


CHANGES = {
    "a factor": lambda mlp: setattr(mlp, "gate_multiplier", 0.5),
    "a factor that a method reads": lambda mlp: setattr(mlp, "down_multiplier", 3.0),
    "a child's forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.relu),
    "a child's setting": lambda mlp: setattr(mlp.dropout, "p", 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_mlps_own_settings(change, build, ran):
    torch.manual_seed(0)
    model = build("llama")
    stock = Multiplied()
    model.model.layers[0].mlp = copy.deepcopy(stock)
    lowtide.patch(model)
    mlp, copied = model.model.layers[0].mlp, copy.deepcopy(model).model.layers[0].mlp
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(mlp(x), stock(x))
    torch.testing.assert_close(copied(x), stock(x))  # a copy is what it was copied from
    assert ran["swiglu_mlp"] == 2
    for one in (mlp, copied, stock):
        CHANGES[change](one)
    for one in (mlp, copied):
        torch.testing.assert_close(one(x), stock(x))
    assert ran["swiglu_mlp"] == 2


def test_what_trains_in_another_way_than_it_evaluates_stays(build):
    class Trains(Multiplied):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.training else 2.0)

    model = build("llama")
    model.model.layers[0].mlp = Trains()
    assert "it is not down(act(gate(x)) * up(x))" in str(lowtide.patch(model))

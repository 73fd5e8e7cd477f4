"""Code and settings that are exchanged after `lowtide.patch`: fused modules do what stock ones do from then on."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.models import mlp_part
from models.conftest import DYNAMO, PEFT, assert_same_gradients, assert_same_training

pytestmark = DYNAMO + PEFT


def times(function, factor=1.5):
    """Return ``function`` with its first result multiplied."""

    @functools.wraps(function)
    def scaled(*args, **kwargs):
        result = function(*args, **kwargs)
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    return scaled


def modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def step(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def assert_alike(model, stock, batch):
    model.zero_grad(), stock.zero_grad()
    assert_same_training(model, stock, batch, gradients=3e-5)


# name -> (model, where, what); a text names a module of transformers, of its family
CODE = {
    "MLP.forward": ("llama", "llama", "LlamaMLP.forward"),
    "forward of a base class": ("gemma2", "gemma2", "Gemma2MLP.forward"),
    "Attention.forward": ("qwen3", "qwen3", "Qwen3Attention.forward"),
    "RMSNorm.forward": ("mistral", "mistral", "MistralRMSNorm.forward"),
    "a method of the norm": ("gemma2", "gemma2", "Gemma2RMSNorm._norm"),
    "apply_rotary_pos_emb": ("llama", "llama", "apply_rotary_pos_emb"),
    "rotate_half": ("qwen2", "qwen2", "rotate_half"),
    "eager_attention_forward": ("llama", "llama", "eager_attention_forward"),
    "F.linear": ("llama", F, "linear"),
    "F.silu": ("llama", F, "silu"),
    "torch.rsqrt": ("llama", torch, "rsqrt"),
    "torch.Tensor.pow": ("llama", torch.Tensor, "pow"),
    "SDPA": ("llama", F, "scaled_dot_product_attention"),
    "nn.Linear.__call__": ("llama", nn.Linear, "__call__"),
    "experts": ("qwen3-moe", F, "silu"),
}


@pytest.mark.parametrize("what", CODE)
def test_exchanged_code_runs(what, pair, batch, monkeypatch):
    name, place, path = CODE[what]
    model, stock = pair(name)
    if what == "eager_attention_forward":
        for m in (model, stock):
            m.set_attn_implementation("eager")
    report = lowtide.patch(model)
    before = step(model, batch)
    owner = modeling(place) if isinstance(place, str) else place
    *outer, attribute = path.split(".")
    owner = functools.reduce(getattr, outer, owner)
    with monkeypatch.context() as patches:
        patches.setattr(owner, attribute, times(getattr(owner, attribute)))
        assert_alike(model, stock, batch)
        assert not torch.equal(step(model, batch), before)
        reported = " ".join([*report.exchanged, *report.why_materialised])
        assert attribute in reported or what in ("SDPA", "experts"), reported  # stock code looks these two up itself
        assert str(report).count(f"{attribute}\n") <= 1
    assert torch.equal(step(model, batch), before)  # put back, it is fused again


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
    "a whole epsilon": ("llama", set_on_layers("variance_epsilon", 1)),
    "an epsilon that is a tensor": ("llama", set_on_layers("variance_epsilon", torch.tensor(0.5))),
    "Gemma's epsilon as a tensor": ("gemma2", set_on_layers("eps", torch.tensor(0.25))),
    "another activation": ("llama", new_activation),
    "the activation's function": ("gemma2", set_on_layers("act", F.silu)),
    "a method put on the instance": ("gemma2", lambda m: vars(m.model.norm).update(_norm=lambda x: x * 2)),
    "attention's implementation": ("llama", lambda m: m.set_attn_implementation("eager")),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_change_later_count(what, patched, batch):
    name, change = SETTINGS[what]
    model, stock, _ = patched(name)
    step(model, batch)
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
        self.config = type("Config", (), {})()
        self.config.factor = 1.0

    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.dropout(self.down_proj(y) * self.down_multiplier * self.config.factor)


def drop_all(mlp):
    mlp.dropout.p = 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: setattr(mlp, "down_multiplier", 3.0),
        lambda mlp: setattr(mlp, "gate_multiplier", 0.5),
        lambda mlp: setattr(mlp.config, "factor", 0.25),
        lambda mlp: setattr(mlp.act_fn, "forward", torch.relu),
        drop_all,
    ],
)
def test_an_mlps_own_settings(change, build, monkeypatch):
    torch.manual_seed(0)
    model = build("llama")
    stock = Multiplied()
    model.model.layers[0].mlp = copy.deepcopy(stock)
    report = lowtide.patch(model)
    mlp, copied = model.model.layers[0].mlp, copy.deepcopy(model).model.layers[0].mlp
    calls = []
    fused = mlp_part.plain_mlp
    monkeypatch.setattr(mlp_part, "plain_mlp", lambda *a, **k: (calls.append(1), fused(*a, **k))[1])
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(mlp(x), stock(x))
    torch.testing.assert_close(copied(x), stock(x))  # a copy is what it was copied from
    assert len(calls) == 2
    for one in (mlp, copied, stock):
        change(one)
    for one in (mlp, copied):
        torch.testing.assert_close(one(x), stock(x))
    assert len(calls) == 2
    reported = report.exchanged
    assert len(reported) <= 1
    assert type(stock.act_fn.forward).__name__ != "method" or "an attribute of" in reported[0]


def test_what_trains_in_another_way_than_it_evaluates_stays(build):
    class Trains(Multiplied):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.training else 2.0)

    model = build("llama")
    model.model.layers[0].mlp = Trains()
    assert "it is not down(act(gate(x)) * up(x))" in str(lowtide.patch(model))


def test_a_read_model_runs_what_its_process_has(patched, batch, monkeypatch):
    """Code of another process than the one that patched was not seen by a probe: it is, at the first call."""
    llama = modeling("llama")
    model, _, _ = patched("llama")
    file = io.BytesIO()
    torch.save(model, file)
    kinds = {type(module) for module in model.modules() if hasattr(type(module), "_lowtide_probed")}
    for kind in kinds:  # what reading finds in a new process
        monkeypatch.setattr(kind._lowtide_probed, "_code", None)
    expected = step(model, batch)
    assert all(kind._lowtide_probed._code is not None for kind in kinds)
    for kind in kinds:
        monkeypatch.setattr(kind._lowtide_probed, "_code", None)
    monkeypatch.setattr(llama.LlamaMLP, "forward", times(llama.LlamaMLP.forward))
    file.seek(0)
    read = torch.load(file, weights_only=False)
    loss = step(read, batch)
    lowtide.unpatch(model)
    torch.testing.assert_close(loss, step(model, batch))
    assert not math.isclose(loss.item(), expected.item(), rel_tol=1e-4)


def test_replaced_peft_code_runs(pair, batch, monkeypatch):
    peft = pytest.importorskip("peft")
    layer = peft.tuners.lora.layer.Linear
    wrapped = []
    for m in pair("llama"):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
        wrapped.append(peft.get_peft_model(m, config))
    lowtide.patch(wrapped[0])
    assert_alike(*wrapped, batch)
    monkeypatch.setattr(layer, "forward", times(layer.forward))
    assert_alike(*wrapped, batch)
    monkeypatch.undo()
    monkeypatch.setattr(layer, "_cast_input_dtype", lambda self, x, dtype: x.to(dtype) * 2)
    assert_alike(*wrapped, batch)


def test_a_compiled_part_notices_a_forward_set_on_the_class(build, monkeypatch):
    llama = modeling("llama")
    model = build("llama")
    stock = copy.deepcopy(model)
    lowtide.patch(model)
    x = torch.randn(2, 5, 16)
    compiled = torch.compile(model.model.norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), stock.model.norm(x))
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", times(llama.LlamaRMSNorm.forward))
    torch.testing.assert_close(compiled(x), stock.model.norm(x))


def test_a_replaced_call_of_every_module_sees_every_module(patched, batch, monkeypatch):
    model, stock, _ = patched("llama")
    called, own = [], nn.Module._call_impl

    def counted(self, *args, **kwargs):
        called.append(type(self).__name__)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_call_impl", counted)
    step(stock, batch)
    expected, called[:] = sorted(called), []
    step(model, batch)
    assert sorted(called) == expected
    assert_same_gradients(model, stock, 3e-5)

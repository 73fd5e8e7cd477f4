"""The parts mlp, norm and rope: what is not as it seems runs its own code, and so do calls with hooks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import (
    DYNAMO,
    MLP,
    PEFT,
    Doubling,
    assert_no_further_from_the_truth,
    assert_same_training,
    expect_calls,
    fused,
    lora,
    wrap,
)
from promises import promise

pytestmark = [
    *DYNAMO,
    *PEFT,
    promise("patched", "reported"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients:UserWarning"),
]


@promise("values")
@pytest.mark.parametrize(
    ("name", "loss"),
    [*((name, True) for name in ("llama", "gemma2", "gemma3", "phi3", "cohere2", "qwen3-moe")), ("llama", False)],
)
def test_in_bfloat16_no_further_from_the_truth_than_stock(name, loss, patched, batch):
    model, stock, _ = patched(name, torch.bfloat16, loss=loss)
    assert_no_further_from_the_truth(model, stock, lambda m: m(**batch).loss)


@pytest.mark.parametrize("part", ["mlp", "norm", "rope"])
@pytest.mark.parametrize("name", ["glm4", "gpt-oss"])
def test_each_part_alone_runs(name, part, patched, batch):
    parts = {"loss": False, "mlp": False, "norm": False, "rope": False}
    model, stock, report = patched(name, **{**parts, part: True})
    loss = assert_same_training(model, stock, batch, rtol=1e-6, atol=1e-6)
    lines = (report.parts[part], *report.parts[part].more)
    assert fused(loss) == {part: sum(line.count for line in lines if line.patched)}


def test_weights_on_no_device_and_other_surroundings(build):
    stock = build("llama")
    usual = str(lowtide.patch(build("llama")))
    with torch.device("meta"):
        assert str(lowtide.patch(type(stock)(stock.config))) == usual
    with torch.autocast("cpu", torch.bfloat16):
        assert str(lowtide.patch(build("llama"))) == usual
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert str(lowtide.patch(stock)) == usual
    finally:
        torch.set_default_dtype(before)


class Clamped(nn.Module):
    def forward(self, x):
        return F.silu(x).clamp(max=3000)


class BufferedSilu(nn.SiLU):
    """What a buffer holds may be loaded after patch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def with_own_forward(mlp):
    stock = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: stock(x) + 1


MLP_CHANGES = {
    "activation with a buffer": lambda mlp: setattr(mlp, "act_fn", BufferedSilu()),
    "high clamp": lambda mlp: setattr(mlp, "act_fn", Clamped()),
    "hook on the activation": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, args, out: out + 0.5),
    "forward": with_own_forward,
    "parametrization": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.gate_proj),
}
HOOKS = ("hook on the activation", "forward", "parametrization")  # which may come after patch


@pytest.mark.parametrize(
    ("name", "when"),
    [(name, when) for name in MLP_CHANGES for when in ("before", "after") if when == "before" or name in HOOKS],
)
def test_an_mlp_that_is_not_plain_runs_its_own_code(name, when, pair, batch):
    model, stock = pair("llama")
    if when == "after":
        lowtide.patch(model)
    for m in (model, stock):
        MLP_CHANGES[name](m.model.layers[0].mlp)
    if when == "before":
        report = lowtide.patch(model)
        assert [line.module for line in report.parts["mlp"].more] == ["model.layers.0.mlp"]
        assert report.parts["mlp"].more[0].outcome.startswith("left as it is: ")
    assert fused(assert_same_training(model, stock, batch, seed=5))["mlp"] == 1


def test_probes_leave_no_trace(build):
    model = wrap(build("llama"), lora(target_modules=MLP, lora_dropout=0.2)).eval()
    state, weights = torch.get_rng_state(), {n: p.clone() for n, p in model.named_parameters()}
    attributes = {n: {**vars(m)} for n, m in model.named_modules()}
    assert "LoRA on gate_proj, up_proj, down_proj with it" in str(lowtide.patch(model))
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    lowtide.unpatch(model)
    assert {n: {**vars(m)} for n, m in model.named_modules()} == attributes


def test_calls_that_are_not_ordinary_run_stock_code(patched):
    model, stock, _ = patched("llama")
    x = torch.randn(3, 16)
    for name in ("mlp", "input_layernorm"):
        ours, plain = (getattr(m.model.layers[0], name) for m in (model, stock))
        with Doubling(F.linear, torch.rsqrt):
            torch.testing.assert_close(ours(x), plain(x))
        with torch.device("cpu"):  # a mode that reads nothing
            assert fused(ours(x))
        torch.testing.assert_close(torch.func.vmap(ours)(x), torch.func.vmap(plain)(x))
        torch.testing.assert_close(torch.func.jacrev(ours)(x), torch.func.jacrev(plain)(x))
    norm, theirs = model.double().model.norm, stock.double().model.norm
    assert torch.equal(norm(x.double()), theirs(x.double()))
    assert not fused(norm(x.double()))


@promise("compile")
def test_compiled_layers(patched, batch):
    """They run the model's own code, except for an MLP that saves less than the compiler."""
    model, stock, report = patched("qwen3")
    codes = {0: "", 1: ""}

    def backend(level, graph, _):
        codes[level] += "".join(module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
        return graph

    for layer in model.model.layers:
        layer.mlp.checkpoint_level = level = int(layer is model.model.layers[0])
        layer.compile(backend=functools.partial(backend, level), fullgraph=True)
    for _ in range(2):
        assert_same_training(model, stock, batch)
    assert "lowtide" in codes[1]
    assert codes[0]
    assert "lowtide" not in codes[0]
    expect_calls(report, 2)

"""MLPs whose gate and up are one projection (gate_up_proj): forms, adapters, sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import (
    DYNAMO,
    PEFT,
    assert_same_training,
)
from models.joined import OTHER_FORM, Holder, assert_same_mlp, with_levels

peft = pytest.importorskip("peft")

pytestmark = [*DYNAMO, *PEFT]


# Forwards of modules with the same children; all but the first two run their own code.
def up_first(self, x):
    up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


def interleaved(self, x):
    both = self.gate_up_proj(x)
    return self.down_proj(both[..., 1::2] * self.activation_fn(both[..., ::2]))


def split(self, x):
    both = self.gate_up_proj(x)
    gate, up = both.split(both.shape[-1] // 2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


def of(function):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return function(self, x, gate, up)

    return forward


SERVED = {"gate first": split, "up first": up_first, "interleaved": interleaved}
OTHERS = {
    "clamped": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate.clamp(max=7)) * up)),
    "exact GELU": of(lambda mlp, x, gate, up: mlp.down_proj(F.gelu(gate) * up)),
    "no activation": of(lambda mlp, x, gate, up: mlp.down_proj(gate * up)),
    "input added": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate) * up) + x),
    "halves of the input": lambda self, x: self.down_proj(
        torch.cat([F.silu(h[..., ::2]) * h[..., 1::2] for h in self.gate_up_proj(x).chunk(2, -1)], -1).flip(-1)
    ),
    "dropout": of(lambda mlp, x, gate, up: mlp.down_proj(F.dropout(F.silu(gate) * up, 0.5, mlp.training))),
    "a tuple": of(lambda mlp, x, gate, up: (mlp.down_proj(F.silu(gate) * up), None)),
    "its own sizes": lambda self, x: self.down_proj(
        F.silu(self.gate_up_proj(x)[..., :24]) * self.gate_up_proj(x)[..., 24:]
    ),
}


def of_another_class(mlp, forward):
    mlp.__class__ = type("Own", (nn.Module,), {"forward": forward})
    return mlp


@pytest.mark.parametrize("joined", SERVED)
@pytest.mark.parametrize("level", [0, 1])
def test_the_probe_finds_where_gate_and_up_are(joined, level, build, ran):
    mlp = of_another_class(build("phi3").model.layers[0].mlp.double(), SERVED[joined])
    model, stock = Holder(copy.deepcopy(mlp)), mlp
    report = lowtide.patch(model)
    assert f"which keeps gate and up, one projection ({joined})" in report.parts["mlp"].outcome
    model.mlp.checkpoint_level = level
    assert_same_mlp(model.mlp, stock, rtol=1e-12)
    assert ran["adapted_mlp"] == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_alike_runs_its_own_code(name, build, ran):
    mlp = of_another_class(build("phi3").model.layers[0].mlp, OTHERS[name])
    model, stock = Holder(copy.deepcopy(mlp)), mlp
    report = lowtide.patch(model)
    assert not report.parts["mlp"].patched
    reason = "does not run on its projections alone" if name == "its own sizes" else OTHER_FORM
    assert reason in report.parts["mlp"].outcome
    outputs = []
    for m in (model.mlp, stock):
        torch.manual_seed(3)
        outputs.append(m(torch.ones(2, 16)))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert ran.total() == 0


TARGETS = {
    "gate_up": ["gate_up_proj"],
    "down": ["down_proj"],
    "both": ["gate_up_proj", "down_proj"],
}


def lora(names, **settings):
    return peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, target_modules=names, **settings)


def wrapped(model, *configs):
    torch.manual_seed(7)
    first, *more = configs
    found = peft.get_peft_model(model, first)
    for i, config in enumerate(more):
        found.add_adapter(f"more{i}", config)
    if more:
        found.base_model.set_adapter(["default", "more0"])
    return found.train()


@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("target", TARGETS)
def test_adapters(order, target, pair, batch, ran):
    model, stock = pair("phi3")
    if order == "patch first":
        lowtide.patch(model)
    model, stock = (wrapped(m, lora(TARGETS[target])) for m in (model, stock))
    report = lowtide.patch(model)
    assert f"LoRA on {', '.join(TARGETS[target])} with it" in report.parts["mlp"].outcome
    for level, tile in ((0, None), (1, None), (1, 4)):
        with_levels(model, level, tile)
        ran.clear()
        assert_same_training(model, stock, batch)
        assert ran["adapted_mlp"] == 2


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("when", ["before", "after"])
def test_sharded_for_tensor_parallelism_it_runs_its_own_code(when, one_process, pair, batch, ran):
    """transformers' plans gather what gate_up_proj computes, since a rank's rows are not halves of gate and of up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "model.layers.*.mlp.gate_up_proj": ColwiseParallel(output_layouts=Replicate()),
        "model.layers.*.mlp.down_proj": RowwiseParallel(input_layouts=Replicate()),
    }
    model, stock = pair("phi3")
    if when == "after":
        lowtide.patch(model)
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    if when == "before":
        report = lowtide.patch(model)
        assert "gate and up are one projection (gate_up_proj), and sharded" in report.parts["mlp"].outcome
    losses = [m(**batch).loss for m in (model, stock)]
    torch.testing.assert_close(*losses)
    losses[0].backward()
    assert ran["adapted_mlp"] == 0

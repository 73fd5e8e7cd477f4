"""MLPs whose gate and up are one projection (gate_up_proj): forms, changes, adapters, sharding."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.models import mlp_part
from mlp.test_swiglu_memory import after_forward
from models.conftest import (
    COPIES,
    DYNAMO,
    PEFT,
    assert_same_gradients,
    assert_same_training,
    types_of,
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
    "one more": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate) * (up + 1))),
    "exact GELU": of(lambda mlp, x, gate, up: mlp.down_proj(F.gelu(gate) * up)),
    "no activation": of(lambda mlp, x, gate, up: mlp.down_proj(gate * up)),
    "both activated": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate) * F.silu(up))),
    "input added": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate) * up) + x),
    "reversed": of(lambda mlp, x, gate, up: mlp.down_proj(F.silu(gate) * up.flip(-1))),
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


def test_a_forward_of_two_inputs(build):
    mlp = of_another_class(build("phi3").model.layers[0].mlp, lambda self, x, y=None: split(self, x))
    assert "takes more than one input" in lowtide.patch(Holder(mlp)).parts["mlp"].outcome


def test_a_child_that_is_none_is_no_projection(pair, batch, ran):
    model, stock = pair("llama")
    model.model.layers[0].mlp.register_module("gate_up_proj", None)
    lowtide.patch(model)
    assert_same_training(model, stock, batch)
    assert ran["swiglu_mlp"] == 2


CHANGES = {
    "hook": lambda mlp: mlp.gate_up_proj.register_forward_hook(lambda module, args, output: output * 0.5),
    "hook on the activation": lambda mlp: mlp.activation_fn.register_forward_hook(lambda module, args, out: out + 0.5),
    "forward": lambda mlp: setattr(mlp.down_proj, "forward", lambda x, stock=mlp.down_proj.forward: stock(x) + 1),
    "parametrization": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.gate_up_proj),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_mlp_that_is_not_plain_runs_its_own_code(name, when, pair, batch, ran):
    model, stock = pair("phi3")
    CHANGES[name](stock.model.layers[0].mlp)
    if when == "before":
        CHANGES[name](model.model.layers[0].mlp)
    report = lowtide.patch(model)
    if when == "after":
        CHANGES[name](model.model.layers[0].mlp)
    ran.clear()
    assert_same_training(model, stock, batch)
    assert ran["adapted_mlp"] == 1
    if when == "before":
        assert [line.module for line in report.parts["mlp"].more] == ["model.layers.0.mlp"]


@pytest.mark.parametrize("level", [0, 1])
def test_kept_bytes_are_those_of_two_projections(level, build):
    """Beyond the output: at level 0 input, gate and up, at level 1 the input."""
    kept = []
    for name in ("phi3", "llama"):
        model = build(name, torch.bfloat16)
        lowtide.patch(model)
        mlp = model.model.layers[0].mlp
        mlp.checkpoint_level = level
        x = torch.randn(64, 16).bfloat16().requires_grad_()
        kept.append(after_forward(lambda mlp=mlp, x=x: mlp(x.clone())))  # nobody else keeps the copy
    h, f = 16, 24
    assert kept == [64 * (2 * h + (1 - level) * 4 * f)] * 2


@pytest.mark.parametrize("name", ["phi3", "glm4"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_levels(name, reentrant, patched, batch, ran):
    for level in (0, 1):
        model, stock, _ = patched(name)
        with_levels(model, level)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        ran.clear()
        model(**batch, use_cache=False).loss.backward()
        assert ran["adapted_mlp"] == (2 if reentrant else 4)
        stock(**batch).loss.backward()
        assert_same_gradients(model, stock)


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both"])
def test_frozen_weights(frozen, patched, batch, ran):
    model, stock, _ = patched("phi3")
    for m in (model, stock):
        for layer in m.model.layers:
            for name in ("gate_up_proj", "down_proj") if frozen == "both" else (frozen,):
                getattr(layer.mlp, name).weight.requires_grad_(False)
    assert_same_training(model, stock, batch)
    assert ran["adapted_mlp"] == 2


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_layers(backend, patched, batch, ran):
    model, stock, _ = patched("phi3")
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same_training(model, stock, batch)
    assert ran["adapted_mlp"] > 0


def test_autocast(patched, batch, ran):
    model, stock, _ = patched("phi3", loss=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [m(**batch).loss for m in (model, stock)]
    torch.testing.assert_close(*losses, rtol=5e-3, atol=0)
    assert ran["adapted_mlp"] == 2


def test_weights_of_several_dtypes_are_the_error_of_stock(patched):
    model, stock, _ = patched("phi3")
    for m in (model, stock):
        m.model.layers[0].mlp.down_proj.double()
        with pytest.raises(RuntimeError, match="dtype"):
            m.model.layers[0].mlp(torch.randn(3, 16))


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
def test_copies_and_patching_again(through, patched, batch, ran):
    model, stock, report = patched("phi3")
    state = {name: p.clone() for name, p in stock.state_dict().items()}
    model.model.layers[0].mlp.checkpoint_level = 1
    assert lowtide.patch(model) is report
    assert [layer.mlp.checkpoint_level for layer in model.model.layers] == [1, 0]
    other = through(model)
    assert_same_training(other, stock, batch)
    assert ran["adapted_mlp"] == 2
    lowtide.unpatch(other)
    assert types_of(other) == types_of(stock)
    assert all(torch.equal(p, state[name]) for name, p in other.state_dict().items())


def test_a_policy_sets_the_level(patched, batch, ran):
    model, stock, _ = patched("phi3")
    lowtide.memory.apply_policy(model, lowtide.memory.ActivationPolicy(keep="attention", mlp_level=1))
    assert [layer.mlp.checkpoint_level for layer in model.model.layers] == [1, 1]
    assert_same_training(model, stock, batch)
    assert ran["adapted_mlp"] == 4


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
    for level in (0, 1):
        with_levels(model, level)
        ran.clear()
        assert_same_training(model, stock, batch)
        assert ran["adapted_mlp"] == 2


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.* was passed:UserWarning")
def test_adapters_in_float64_several_with_biases_and_base_weights_trained(pair):
    configs = [lora(TARGETS["both"], lora_bias=True), lora(TARGETS["gate_up"], lora_bias=True)]
    model, stock = (wrapped(m, *configs).double() for m in pair("phi3"))
    for m in (model, stock):
        m.requires_grad_(True)
    lowtide.patch(model)
    ours, theirs = (m.get_base_model().model.layers[0].mlp for m in (model, stock))
    x = torch.randn(5, 16, dtype=torch.float64)
    for level in (0, 1):
        ours.checkpoint_level = level
        for m in (ours, theirs):
            m(x).square().sum().backward()
        grads = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
        assert len(grads[0]) == 2 + 2 * 2 + 2 + 2 + 1
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * want.abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_with_dropout_drop_the_same_in_a_checkpoint(reentrant, pair, ran):
    model, stock = (wrapped(m, lora(TARGETS["both"], lora_dropout=0.5)) for m in pair("phi3"))
    lowtide.patch(model)
    mlp, theirs = (m.get_base_model().model.layers[0].mlp for m in (model, stock))
    x = torch.randn(400, 16, requires_grad=True)
    outputs, drawn = (torch.stack([m(x) for _ in range(6)]).detach() for m in (mlp, theirs))
    assert ran["adapted_mlp"] == 6
    assert outputs.var(0).mean().item() == pytest.approx(drawn.var(0).mean().item(), rel=0.1), "as noisy as stock's"
    grads = []
    for run in (mlp, functools.partial(checkpoint, mlp, use_reentrant=reentrant)):
        mlp.zero_grad()
        torch.manual_seed(4)
        run(x).square().sum().backward()
        grads.append([p.grad for p in mlp.parameters() if p.requires_grad])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lora(TARGETS["both"], use_dora=True), "gate_up_proj has an adapter of another form than LoRA's"),
        (peft.LoHaConfig(target_modules=TARGETS["gate_up"], r=2), "gate_up_proj is a Linear of peft.tuners.loha.layer"),
    ],
)
def test_other_adapters_run_their_own_code(config, why, pair, batch, ran):
    model, stock = (wrapped(m, config) for m in pair("phi3"))
    assert why in lowtide.patch(model).parts["mlp"].outcome
    assert_same_training(model, stock, batch)
    assert ran["adapted_mlp"] == 0


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


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
def test_fsdp(one_process, pair, batch, ran):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, stock = pair("phi3")
    lowtide.patch(model)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    for m in (model, stock):
        m(**batch).loss.backward()
    assert ran["adapted_mlp"] == 2
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), q.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_generating_on_a_cpu_looks_at_nothing(build, batch, monkeypatch):
    model = build("phi3")
    lowtide.patch(model, norm=False, rope=False)
    monkeypatch.setattr(mlp_part, "adapted_linear", lambda *_, **__: pytest.fail("looked"))
    with torch.no_grad():
        model(**batch)
    with pytest.raises(pytest.fail.Exception):
        model(**batch)

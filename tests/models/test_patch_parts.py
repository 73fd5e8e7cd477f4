"""The parts mlp, norm and rope: found by form, right, reversible, and left alone where something is not as it seems."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.models.instance import part_of
from models.conftest import (
    DYNAMO,
    PEFT,
    assert_no_further_from_the_truth,
    assert_same_gradients,
    assert_same_training,
    expect_calls,
    state_of,
)

pytestmark = [
    *DYNAMO,
    *PEFT,
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients:UserWarning"),
]
PARTS = ("mlp", "norm", "rope")
# What of each model of conftest's MODELS is fused.
FUSED = {
    "llama": PARTS, "llama-tied": PARTS, "qwen3": PARTS, "qwen3-moe": PARTS, "gemma2": PARTS,
    "gemma3": PARTS, "cohere2": ("mlp", "rope"), "granite": PARTS, "phi3": PARTS, "phi": ("rope",), "gpt2": (),
    "mistral": PARTS, "bert": (), "roberta": (), "olmo2": PARTS, "qwen2": PARTS, "gpt-neox": ("rope",),
    "glm4": PARTS,
}  # fmt: skip

JOINED = ("phi3", "glm4")  # gate and up in one projection


def fused_modules(model):
    return {name: part_of(module) for name, module in model.named_modules() if part_of(module) in PARTS}


def assert_near_in_bfloat16(model, stock, losses, rtol=4e-3):  # a last digit of bfloat16
    torch.testing.assert_close(*losses, rtol=rtol, atol=0)
    for loss in losses:
        loss.backward()
    grads = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    largest = max(g.norm() for g in grads.values())
    assert all((p.grad - grads[n]).norm() < 3e-2 * largest for n, p in model.named_parameters() if n in grads)


def test_what_is_fused(any_model, build):
    report = lowtide.patch(build(any_model))
    assert tuple(part for part in PARTS if report.parts[part].patched) == FUSED[any_model], str(report)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in FUSED.items() for part in parts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_alone_is_right_and_runs(name, part, dtype, patched, batch, ran):
    model, stock, report = patched(name, dtype, loss=False, **{other: other == part for other in PARTS})
    ran.clear()
    if dtype == torch.float32:
        assert_same_training(model, stock, batch, rtol=1e-6, atol=1e-6)
    else:
        assert_near_in_bfloat16(model, stock, [m(**batch).loss for m in (model, stock)])
    mlp = "experts_mlp" if name == "qwen3-moe" else "adapted_mlp" if name in JOINED else "swiglu_mlp"
    count = ran[{"mlp": mlp, "norm": "rms_norm", "rope": "rotary"}[part]]
    lines = (report.parts[part], *report.parts[part].more)
    assert count == sum(line.count for line in lines if line.patched)
    assert ran.total() == count


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "olmo2", "cohere2"])
def test_in_bfloat16_no_further_from_the_truth_than_stock(name, loss, patched, batch):
    model, stock, _ = patched(name, torch.bfloat16, loss=loss)
    assert_no_further_from_the_truth(model, stock, lambda m: m(**batch).loss, draws=6)


def test_patching_again_makes_the_model_as_asked_this_time(patched, batch):
    model, stock, report = patched("llama")
    everything, state = fused_modules(model), state_of(model)
    assert lowtide.patch(model, options=lowtide.HeadOptions()) is report
    assert state_of(model) == state
    assert type(stock(**batch).logits) is torch.Tensor, "this instance alone is patched"
    model.model.layers[0].mlp.checkpoint_level = 1
    assert lowtide.patch(model) is report
    assert fused_modules(model) == everything
    assert model.model.layers[0].mlp.checkpoint_level == 1
    assert lowtide.patch(model, mlp=False) is report
    assert set(fused_modules(model).values()) == {"norm", "rope"}
    assert not hasattr(model.model.layers[0].mlp, "checkpoint_level")
    assert not report.parts["mlp"].patched
    lowtide.patch(model, loss=False)
    assert fused_modules(model) == everything
    assert part_of(model) is None
    lowtide.unpatch(model)
    assert fused_modules(model) == {}


def test_the_report_is_a_table_with_alike_modules_in_one_line(build):
    report = lowtide.patch(build("phi3"))
    lines = str(report).splitlines()
    assert any(line.split()[:3] == ["norm", "model.layers.*.input_layernorm", "(2)"] for line in lines)
    assert any(line.split()[:2] == ["norm", "model.norm"] for line in lines)
    assert "keeps gate and up, one projection (gate first)" in report.parts["mlp"].outcome
    assert report.parts["mlp"].count == 2


def test_weights_on_no_device(build):
    stock = build("llama")
    with torch.device("meta"):
        model = type(stock)(stock.config)
    report = lowtide.patch(model)
    assert all(report.parts[part].patched for part in PARTS)


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


ACTIVATIONS = {
    "dropout": lambda: nn.Sequential(nn.SiLU(), nn.Dropout(0.5)), "exact GELU": nn.GELU,
    "activation with a buffer": BufferedSilu, "high clamp": Clamped,
}  # fmt: skip
MLP_CHANGES = {
    **{name: lambda mlp, make=make: setattr(mlp, "act_fn", make()) for name, make in ACTIVATIONS.items()},
    "hook on the activation": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, args, out: out + 0.5),
    "forward": with_own_forward,
    "parametrization": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.gate_proj),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", MLP_CHANGES)
def test_an_mlp_that_is_not_plain_runs_its_own_code(name, when, pair, batch, ran):
    model, stock = pair("llama")
    MLP_CHANGES[name](stock.model.layers[0].mlp)
    if when == "before":
        MLP_CHANGES[name](model.model.layers[0].mlp)
    report = lowtide.patch(model)
    if when == "after":
        MLP_CHANGES[name](model.model.layers[0].mlp)
    if when == "after" and name in ACTIVATIONS:  # only looked at when patching: patch again
        assert lowtide.patch(model) is report
    ran.clear()
    torch.manual_seed(5)
    loss = model(**batch).loss
    torch.manual_seed(5)
    torch.testing.assert_close(loss, stock(**batch).loss)
    assert ran["swiglu_mlp"] == 1
    if when == "before" or name in ACTIVATIONS:
        assert [line.module for line in report.parts["mlp"].more] == ["model.layers.0.mlp"]
        assert report.parts["mlp"].more[0].outcome.startswith("left as it is: ")


def test_hooks_of_a_fused_module_are_honoured(patched, batch):
    model, _, _ = patched("llama")
    seen = []
    layer = model.model.layers[0]
    for module in (layer.mlp, layer.input_layernorm, layer.self_attn):
        module.register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre"), with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: seen.append("post"))
        module.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    model(**batch).loss.backward()
    assert sorted(seen) == ["backward"] * 3 + ["post"] * 3 + ["pre"] * 3


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_gradient_checkpointing_and_levels(name, patched, batch, ran):
    for reentrant, level in ((False, 0), (True, 0), (False, 1)):
        model, stock, _ = patched(name)
        for layer in model.model.layers:
            layer.mlp.checkpoint_level = level
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        ran.clear()
        model(**batch, use_cache=False).loss.backward()
        # the first forward of a reentrant checkpoint is one without gradients, on a CPU stock code's
        assert ran["swiglu_mlp"] == (2 if reentrant else 4)
        stock(**batch).loss.backward()
        assert_same_gradients(model, stock)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_layers(backend, patched, batch):
    model, stock, report = patched("qwen3")
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same_training(model, stock, batch)
    expect_calls(report, 2)


def test_transforms_and_float64_run_stock_code(patched, batch, ran):
    model, stock, _ = patched("llama")
    norm = model.model.norm
    ran.clear()
    x = torch.randn(3, 16)
    jacobians = [torch.func.jacrev(m.model.norm)(x) for m in (model, stock)]
    torch.testing.assert_close(*jacobians)
    mlps = [torch.func.vmap(m.model.layers[0].mlp)(x) for m in (model, stock)]
    torch.testing.assert_close(*mlps)
    model.double()
    assert torch.equal(norm(x.double()), stock.double().model.norm(x.double()))
    assert ran.total() == 0


def test_autocast(patched, batch, ran):
    model, stock, _ = patched("qwen3", loss=False)
    ran.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [m(**batch).loss for m in (model, stock)]
    assert_near_in_bfloat16(model, stock, losses, rtol=5e-3)
    assert ran.keys() == {"swiglu_mlp", "rms_norm", "rotary"}


def test_kept_bytes_of_a_layer(pair):
    """What a patched layer keeps for backward: no float32 copy of anything, two of the MLP's three intermediates."""
    model, stock = pair("llama", torch.bfloat16)
    kept = []
    for m in (model, stock):
        if m is model:
            lowtide.patch(m)
        layer, hidden = m.model.layers[0], torch.randn(1, 64, 16).bfloat16().requires_grad_()
        positions = m.model.rotary_emb(hidden, torch.arange(64)[None])
        storages = {}
        weights = {p.untyped_storage().data_ptr() for p in m.parameters()}

        def keep(t, storages=storages):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage()  # alive, so that no address is used twice
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layer(hidden, position_embeddings=positions)
        kept.append(sum(s.nbytes() for at, s in storages.items() if at not in weights))
    h, f, heads = 16, 24, 3 * 8 + 8
    tables = 2 * 64 * 8 * 2
    # inputs of two norms and of what follows each, gate and up; q, k, v and attention's output (and its lse)
    assert kept[0] <= 64 * (4 * 2 * h + 2 * 2 * f + 2 * (heads + 16) + 4 * 2 + 4 * 2) + tables
    assert kept[0] < 0.65 * kept[1]

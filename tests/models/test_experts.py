"""Mixtures' experts in a patched model: what is around them, and what changes after patch."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import lowtide
from lowtide.models import experts_part
from lowtide.models.instance import part_of
from models.conftest import DYNAMO, VOCAB, assert_same_gradients, assert_same_training, state_of
from support import every_pair

transformers = pytest.importorskip("transformers")

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = ["Qwen3Moe", "GptOss"]
WAYS = ["eager", "grouped_mm", "batched_mm"]


@pytest.fixture
def pair():
    """Return a function that makes a patched tiny model, and a stock copy; the loss and the rest stay stock."""

    def pair(family="Qwen3Moe", way="grouped_mm", dtype=torch.float32, **settings):
        config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **settings, "experts_implementation": way})
        torch.manual_seed(0)
        stock = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model = copy.deepcopy(stock)
        lowtide.patch(model, loss=False, norm=False, rope=False)
        assert [part_of(module) for module in experts_of(model)] == ["mlp"] * 2
        return model, stock

    return pair


def experts_of(model):
    return [module for module in model.modules() if experts_part.is_candidate(module)]


def set_level(model, level):
    for module in experts_of(model):
        module.checkpoint_level = level


@every_pair(family=FAMILIES, way=WAYS, level=[0, 1])
def test_each_implementation(family, way, level, pair, batch, ran):
    model, stock = pair(family, way)
    set_level(model, level)
    assert_same_training(model, stock, batch)
    assert ran["experts_mlp"] == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
def test_autocast(way, hidden, pair, ran):
    """The GEMMs have the dtype that stock's have: PyTorch's grouped GEMM keeps the weights'."""
    model, stock = pair(way=way)
    results = []
    for m in (model, stock, stock):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(33, 16, generator=generator).to(hidden).requires_grad_()
        ids, routing = torch.rand(33, 4, generator=generator).topk(2).indices, torch.rand(33, 2, generator=generator)
        module = experts_of(m)[0]
        with torch.autocast("cpu", torch.bfloat16) if len(results) < 2 else contextlib.nullcontext():
            y = module(x if len(results) < 2 else x.float(), ids, routing.requires_grad_())
        grads = torch.autograd.grad(y.float().square().sum(), (x, routing, *module.parameters()))
        assert [g.dtype for g in grads] == [x.dtype, torch.float32, torch.float32, torch.float32]
        results.append([y, *grads])
    assert ran["experts_mlp"] == 1
    assert results[0][0].dtype == hidden
    for got, want, true in zip(*results, strict=True):
        error, theirs = ((t.double() - true.double()).norm() / true.double().norm() for t in (got, want))
        assert error <= 1.3 * theirs + 1e-6
        if way == "grouped_mm" and hidden == torch.float32:
            assert error < 1e-6


class Loud(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x) * 3


def each(change):
    return lambda model, _: [change(module) for module in experts_of(model)]


OF_A_MODEL = {
    "implementation": lambda model, _: model.set_experts_implementation("eager"),
    "activation": each(lambda module: setattr(module, "act_fn", Loud())),
    "expert parallel": each(lambda module: setattr(module, "_is_expert_parallel", True)),
    "hook on the activation": each(lambda module: module.act_fn.register_forward_hook(lambda _m, _a, y: y * 3)),
}


@pytest.mark.parametrize("change", OF_A_MODEL)
def test_changes_after_patch_are_followed(change, pair, batch, ran, monkeypatch):
    model, stock = pair()
    lowtide.patch(model, loss=False, norm=False, rope=False)
    plain = model(**batch).loss
    ran.clear()
    for m in (model, stock):
        OF_A_MODEL[change](m, monkeypatch)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, stock(**batch).loss)
    assert ran["experts_mlp"] == 0
    assert change in ("implementation", "expert parallel") or abs(loss - plain) > 1e-3


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CALLS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "function mode": Watching,
}


@pytest.mark.parametrize("around", CALLS)
def test_calls_that_run_the_stock_code(around, pair, batch, ran):
    model, stock = pair()
    with CALLS[around]():
        losses = [m(**batch).loss for m in (model, stock)]
    assert torch.equal(*losses)
    assert ran["experts_mlp"] == 0


def test_an_expert_that_no_router_has(pair, ran):
    """Eager experts skip an id that is their number."""
    model, stock = pair(way="eager")
    ids = torch.tensor([[0, 4], [4, 4], [3, 1]])
    x, routing = torch.randn(3, 16), torch.rand(3, 2)
    torch.testing.assert_close(*(experts_of(m)[0](x, ids, routing) for m in (model, stock)))
    assert ran["experts_mlp"] == 1


def cap(experts):
    """Give experts a capacity, as some mixtures have it: pairs behind it add nothing."""
    kind, E = type(experts), experts.num_experts

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = nn.functional.one_hot(top_k_index.reshape(-1), E)
        places = (chosen.cumsum(0) * chosen).sum(-1).view_as(top_k_index)
        inside = places <= top_k_index.numel() // E
        return kind.forward(self, hidden_states, top_k_index, top_k_weights * inside)

    experts.__class__ = type("Capped", (kind,), {"forward": forward})


FORMS = {
    "capacity": (cap, "its experts are not"),
    "norm inside": (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(3))), "weights or buffers beside"),
    "quantised": (lambda m: setattr(m, "down_proj", int8(m.down_proj)), "quantised"),
    "another activation": (lambda m: setattr(m, "act_fn", nn.ReLU()), "its experts are not"),
    "an exact GELU": (lambda m: setattr(m, "act_fn", nn.GELU()), "its experts are not"),
    "a forward of its own": (lambda m: setattr(m, "forward", m.forward), "replaced on the instance"),
    "an implementation for GPUs": (lambda m: setattr(m.config, "_experts_implementation", "sonicmoe"), "on a CPU"),
    "a level of its own": (lambda m: setattr(m, "checkpoint_level", 5), "checkpoint_level of its own"),
}


def int8(weight):
    return nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_stay_with_their_reason(form, pair):
    _, stock = pair()
    change, why = FORMS[form]
    for module in experts_of(stock):
        change(module)
    before = state_of(stock)
    report = lowtide.patch(stock, loss=False, norm=False, rope=False)
    assert not report.parts["mlp"].patched
    assert why in str(report)
    assert state_of(stock) == before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_on_the_weights_of_experts(first, pair, batch, ran):
    """Target parameters of peft, whose parametrisation adds the adapter to each expert's weight."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model, stock = pair()
    if first == "peft":
        lowtide.unpatch(model)
    wrapped = []
    for m in (model, stock):
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            wrapped.append(peft.get_peft_model(m, config))
        for name, p in wrapped[-1].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if first == "peft":
        lowtide.patch(model, loss=False, norm=False, rope=False)
    losses = [m(**batch).loss for m in wrapped]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(*wrapped)
    assert any("lora" in name and p.grad is not None for name, p in wrapped[0].named_parameters())
    assert ran["experts_mlp"] == 2


@DYNAMO[0]
@DYNAMO[1]
@DYNAMO[2]
def test_compiled(pair, batch, ran):
    model, stock = pair("GptOss")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_training(model, stock, batch, through=compiled)
    assert ran["experts_mlp"] == 2

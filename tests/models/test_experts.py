"""Mixtures' experts in a patched model: what is around them, what changes after patch, and what they save."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import lowtide
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.models import experts_part
from lowtide.models.instance import part_of
from models.conftest import COPIES, DYNAMO, VOCAB, assert_same_gradients, assert_same_training, state_of

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", [0, 1])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_no_further_from_float64_than_stock(family, pair):
    model, stock = pair(family, "eager", torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    x, upstream = torch.randn(2, 256, 16, generator=generator).bfloat16()
    ids, routing = torch.rand(256, 4, generator=generator).topk(2).indices, torch.rand(256, 2, generator=generator)
    results = []
    for m in (copy.deepcopy(stock).double(), stock, model):
        module = experts_of(m)[0]
        leaves = [t.bfloat16().to(module.down_proj.dtype).requires_grad_() for t in (x, routing)]
        y = module(leaves[0], ids, leaves[1])
        results.append([y, *torch.autograd.grad(y, (*leaves, *module.parameters()), upstream.to(y.dtype))])
    for true, theirs, ours in zip(*results, strict=True):
        errors = [(t.double() - true).norm() / true.norm() for t in (ours, theirs)]
        assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_gradient_checkpointing(level, reentrant, pair, batch, ran):
    model, stock = pair("GptOss")
    set_level(model, level)
    for m in (model, stock):
        with warnings.catch_warnings(action="ignore"):  # of another name for it
            m.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_training(model, stock, batch)
    assert ran["experts_mlp"] == (2 if reentrant else 4)  # a reentrant one runs forward without gradients


@pytest.mark.parametrize("keep", ["all", "attention", "input"])
@pytest.mark.parametrize("level", [0, 1])
def test_policies_set_the_level(keep, level, pair, batch):
    model, stock = pair()
    apply_policy(model, ActivationPolicy(keep=keep, mlp_level=level))
    assert {module.checkpoint_level for module in experts_of(model)} == {level}
    assert_same_training(model, stock, batch)


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
    "weights of another dtype": each(lambda module: module.double()),
}


@pytest.mark.parametrize("change", OF_A_MODEL)
def test_changes_after_patch_are_followed(change, pair, batch, ran, monkeypatch):
    model, stock = pair(way="eager" if change == "weights of another dtype" else "grouped_mm")
    lowtide.patch(model, loss=False, norm=False, rope=False)
    plain = model(**batch).loss
    ran.clear()
    for m in (model, stock):
        OF_A_MODEL[change](m, monkeypatch)
    if change == "weights of another dtype":
        for m in (model, stock):
            with pytest.raises(RuntimeError, match="dtype"):
                m(**batch)
        return
    loss = model(**batch).loss
    torch.testing.assert_close(loss, stock(**batch).loss)
    assert ran["experts_mlp"] == 0
    assert change in ("implementation", "expert parallel") or abs(loss - plain) > 1e-3


def test_a_limit_set_after_patch_is_followed(pair, batch, ran):
    model, stock = pair("GptOss")
    for m in (model, stock):
        for module in experts_of(m):
            module.limit = 0.01
    assert_same_training(model, stock, batch)
    assert ran["experts_mlp"] == 0
    report = lowtide.patch(model, loss=False, norm=False, rope=False)
    assert "limited to 0.01" in str(report)
    assert_same_training(model, stock, batch)
    assert ran["experts_mlp"] == 2


@pytest.mark.parametrize("how", COPIES)
def test_copies(how, pair, batch, ran):
    model, stock = pair("GptOss")
    set_level(model, 1)
    model = COPIES[how](model)
    assert {module.checkpoint_level for module in experts_of(model)} == {1}
    assert_same_training(model, stock, batch)
    assert ran["experts_mlp"] == 2


def test_unpatch_leaves_nothing(pair, batch):
    model, stock = pair()
    lowtide.unpatch(model)
    assert state_of(model) == state_of(stock)
    assert_same_training(model, stock, batch)


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


def test_arguments_by_name(pair, ran):
    model, stock = pair(way="eager")
    x, ids, routing = torch.randn(5, 16), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    got, want = (experts_of(m)[0](hidden_states=x, top_k_index=ids, top_k_weights=routing) for m in (model, stock))
    assert torch.equal(got, want)
    assert ran["experts_mlp"] == 0


def test_an_expert_that_no_router_has(pair, ran):
    """Eager experts skip an id that is their number."""
    model, stock = pair(way="eager")
    ids = torch.tensor([[0, 4], [4, 4], [3, 1]])
    x, routing = torch.randn(3, 16), torch.rand(3, 2)
    torch.testing.assert_close(*(experts_of(m)[0](x, ids, routing) for m in (model, stock)))
    assert ran["experts_mlp"] == 1


def test_no_tokens(pair):
    model, _ = pair()
    x = torch.randn(0, 16, requires_grad=True)
    y = experts_of(model)[0](x, torch.zeros(0, 2, dtype=torch.long), torch.rand(0, 2))
    y.sum().backward()
    assert x.grad.shape == y.shape == (0, 16)


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


@pytest.mark.parametrize("level", [0, 1])
@DYNAMO[0]
@DYNAMO[1]
@DYNAMO[2]
def test_compiled(level, pair, batch, ran):
    model, stock = pair("GptOss")
    set_level(model, level)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_training(model, stock, batch, through=compiled)
    assert ran["experts_mlp"] == 2


def saved_bytes(module, inputs):
    """Return the bytes that a call saves beyond its inputs and weights, by what is saved."""
    held = {t.untyped_storage().data_ptr() for t in (*inputs, *module.parameters())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*inputs)
    return sum(size for pointer, size in seen.items() if pointer not in held)


def test_saved_bytes_beside_stock(pair):
    """Of Qwen3-MoE's experts: gate and up, or nothing, where stock also has the activation, h, outputs and inputs."""
    T, K, D, F = 96, 2, 16, 8
    model, stock = pair(dtype=torch.bfloat16)
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    inputs = (x, torch.rand(T, 4).topk(K).indices, torch.rand(T, K, dtype=torch.bfloat16, requires_grad=True))
    row = 2 * T * K  # bytes of a bfloat16 number of each row
    order = 4 * (T * K + 4)
    ours = experts_of(model)[0]
    for level, activations in ((0, 2 * F * row), (1, 0)):
        ours.checkpoint_level = level
        assert order + activations <= saved_bytes(ours, inputs) <= order + activations + 64
    theirs = experts_of(stock)[0]
    for way in ("eager", "grouped_mm"):  # which save the inputs and outputs of each expert's GEMMs, and act(gate)
        theirs.config._experts_implementation = way
        assert saved_bytes(theirs, inputs) >= (2 * D + 4 * F) * row

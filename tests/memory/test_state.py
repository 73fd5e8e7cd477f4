"""Between forward and backward anything may be assigned: a recompute finds what its forward found, or raises."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from lowtide.memory.policy import word_of
from memory.models import ALL, ATTENTION, GROUPED, INPUT, Layer, Plain, stack_of
from memory.test_families import FAMILIES, build

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter first was active which is now deleted"),
    pytest.mark.filterwarnings("ignore:Already unmerged"),
]


def lora(model: Any, dropout: float = 0.3) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    names = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    first, second = (
        peft.LoraConfig(r=4, lora_alpha=a, target_modules=names, lora_dropout=dropout, init_lora_weights=False)
        for a in (8, 24)
    )
    wrapped = peft.get_peft_model(model, first, adapter_name="first")
    wrapped.add_adapter("second", second)
    return wrapped


def layers(model: Any) -> Any:
    return model.get_base_model().model.layers if hasattr(model, "get_base_model") else model.model.layers


def results(
    model: Any, ids: Tensor, change: Callable[[Any], object], around: Callable[[], Any] = contextlib.nullcontext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, with a change between forward and backward."""
    torch.manual_seed(5)
    random.seed(5)
    before = list(model.named_parameters())
    with around():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    change(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in before if p.grad is not None}


def assert_as_stock(stock: Any, ids: Tensor, change: Any, policy: Any, around: Any = contextlib.nullcontext) -> None:
    model = copy.deepcopy(stock)
    apply_policy(model.get_base_model() if hasattr(model, "get_base_model") else model, policy)
    want, got = (results(m, ids, change, around) for m in (stock, model))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-7)


def each_module(change: Callable[[Any], object], where: Callable[[Any], bool]) -> Callable[[Any], object]:
    return lambda model: [change(module) for module in model.modules() if where(module)]


def each_layer(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: [change(layer) for layer in layers(model)]


def after(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    """The change made before the policy is applied."""

    def changed(model: Any) -> Any:
        change(model)
        return model

    return changed


def replace_weights(layer: Any) -> None:
    for module in (layer.mlp.gate_proj, layer.input_layernorm):
        module.weight = nn.Parameter(module.weight.detach() * 2)


hook_mlps = each_layer(lambda layer: layer.mlp.register_forward_hook(lambda module, args, output: output * 3))
freeze = each_layer(lambda layer: layer.mlp.requires_grad_(not layer.mlp.gate_proj.weight.requires_grad))
as_built = after(lambda m: None)
ASSIGNED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "another adapter": (lora, lambda m: m.set_adapter("second")),
    "no adapter": (lora, lambda m: m.base_model.disable_adapter_layers()),
    "another scale": (lora, each_module(lambda m: m.scaling.update(first=9.0), lambda m: hasattr(m, "lora_A"))),
    "adapters taken off": (lora, lambda m: m.unload()),
    "an adapter deleted": (lora, lambda m: m.delete_adapter("first")),
    "evaluation": (lora, lambda m: m.eval()),
    "dropout": (lora, each_module(lambda m: setattr(m, "p", 0.9), lambda m: isinstance(m, nn.Dropout))),
    "hooks removed": (after(hook_mlps), each_layer(lambda layer: layer.mlp._forward_hooks.clear())),
    "hooks added": (as_built, hook_mlps),
    "parameters": (as_built, each_layer(replace_weights)),
    "frozen": (as_built, freeze),
    "thawed": (after(freeze), freeze),
    "modules": (as_built, each_layer(lambda layer: setattr(layer, "mlp", nn.Linear(24, 24)))),
    "a config": (as_built, lambda m: m.set_attn_implementation("eager")),
    "patched": (as_built, lowtide.patch),
    "unpatched": (after(lowtide.patch), lowtide.unpatch),
    "policy removed": (as_built, remove_policy),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("what", ASSIGNED)
def test_what_is_assigned_is_put_back_for_the_recompute(what: str, grouped: bool, llama: Any, ids: Tensor) -> None:
    prepare, change = ASSIGNED[what]
    assert_as_stock(prepare(llama()), ids, change, GROUPED if grouped else (INPUT, ATTENTION)[len(what) % 2])


@torch.no_grad()
def in_place(param: nn.Parameter) -> None:
    param.add_(1)


def write(change: Callable[[nn.Parameter], object]) -> Callable[[Any], object]:
    return lambda m: change(layers(m)[2].mlp.gate_proj.weight)


THROUGH_DATA = r"layers\.2: expected parameters .* or through \.data"
WRITTEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object], str]] = {
    "in place": (as_built, write(in_place), THROUGH_DATA),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_writes_to_weights_are_an_error(what: str, llama: Any, ids: Tensor) -> None:
    prepare, change, said = WRITTEN[what]
    model = prepare(llama())
    apply_policy(model, ATTENTION)
    with pytest.raises(UnsupportedError, match=said):
        results(model, ids, change)
    model.zero_grad()
    if what == "in place":
        results(model, ids, lambda m: None)


def test_functional_call_recomputes_with_its_parameters(llama: Any, ids: Tensor) -> None:
    model, stock = llama(), llama()
    apply_policy(model, INPUT)
    seen = []
    for m in (model, stock):
        torch.manual_seed(9)
        others = {name: (torch.randn_like(p) * 0.3).requires_grad_() for name, p in m.named_parameters()}
        kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
        loss = torch.func.functional_call(m, others, args=(), kwargs=kwargs).loss
        seen.append(torch.autograd.grad(loss, list(others.values())))
    for got, want in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


class Moving(nn.Module):
    """A layer whose forward depends on what its calls leave behind: a count, a list, a buffer, Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.past = 0, [1.0]
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor, log: list[int]) -> Tensor:
        self.calls += 1
        self.past.append(self.past[-1] + 1.0)
        log.append(self.calls)
        y: Tensor = torch.tanh(self.linear(x)) / self.mean.clone() * self.calls * self.past[-1] * random.random()
        with torch.no_grad():
            self.mean.mul_(0.5)
        return y * len(log)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Moving() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.log: list[int] = []
        for layer in self.layers:
            x = layer(x, self.log)
        return x.square().sum()


def test_what_forward_moves_is_moved_once() -> None:
    stock = Stack()
    model = copy.deepcopy(stock)
    apply_policy(model, INPUT)
    x = torch.randn(2, 8)
    for m in (stock, model):
        random.seed(3)
        losses = [m(x), m(x)]  # two graphs, each with the state of its own forward
        losses[1].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        m.after = random.random()
    assert model.after == stock.after
    assert model.log == stock.log
    for got, want in zip(model.layers, stock.layers, strict=True):
        assert (got.calls, got.past) == (want.calls, want.past)
        assert torch.equal(got.mean, want.mean)
        assert torch.equal(got.linear.weight.grad, want.linear.weight.grad)


def test_a_large_buffer_that_changes_is_an_error() -> None:
    model = Stack()
    for layer in model.layers:
        layer.register_buffer("mean", torch.ones(20_000))
        layer.linear = nn.Linear(20_000, 1)
        layer.linear.out_features = 1
    apply_policy(model, INPUT)
    x = torch.randn(1, 20_000, requires_grad=True)
    with pytest.raises(UnsupportedError, match="expected buffers that are in backward"):
        model(x).backward()


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MATH = torch.nn.attention.SDPBackend.MATH
AROUND: dict[str, Callable[[], Any]] = {
    "a function mode": Doubling,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "attention by matmuls": lambda: torch.nn.attention.sdpa_kernel(MATH),
}


@pytest.mark.parametrize("policy", [INPUT, GROUPED])
@pytest.mark.parametrize("what", AROUND)
def test_what_surrounds_forward_surrounds_its_recompute(what: str, policy: Any, llama: Any, ids: Tensor) -> None:
    assert_as_stock(llama(), ids, lambda m: None, policy, AROUND[what])


def test_the_default_dtype_is_that_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, x: forward(self, x) * torch.ones(()))
    model, ids = Plain(), torch.arange(8)[None]
    apply_policy(model, INPUT)
    loss = model(ids)
    torch.set_default_dtype(torch.float64)
    try:
        loss.backward()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_dispatch_mode_around_forward_alone_is_an_error(llama: Any, ids: Tensor) -> None:
    model = llama()
    apply_policy(model, INPUT)
    with pytest.raises(UnsupportedError, match="none of the Watching that was active"):
        results(model, ids, lambda m: None, Watching)


@pytest.mark.parametrize("name", ["silu", "scaled_dot_product_attention"])
@pytest.mark.parametrize("policy", [INPUT, ATTENTION], ids=["input", "attention"])
def test_code_that_is_replaced_between_is_an_error(
    llama: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch, policy: Any, name: str
) -> None:
    model = llama()
    apply_policy(model, policy)
    stock = getattr(F, name)
    with pytest.raises(UnsupportedError, match=rf"another torch\.nn\.functional\.{name}"):
        results(model, ids, lambda m: monkeypatch.setattr(F, name, lambda *args, **kw: stock(*args, **kw) * 2))
    model.zero_grad()
    results(model, ids, lambda m: None)  # forward and backward with the new one


def chunks(model: Any, ids: Tensor) -> Any:
    first = model(input_ids=ids[:, :6], use_cache=True)
    return model(input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=first.past_key_values)


@pytest.mark.parametrize("policy", [INPUT, ATTENTION], ids=["input", "attention"])
def test_a_cache_that_a_recomputing_layer_left_empty_is_not_read(policy: Any, llama: Any, ids: Tensor) -> None:
    model = llama()
    apply_policy(model, [ALL] * 2 + [policy] * 3)
    with pytest.raises(UnsupportedError, match=r"layers\.2: expected a cache that its own forwards have filled"):
        chunks(model, ids)
    first = model(input_ids=ids[:, :6])  # transformers' default makes a cache, which nobody reads
    first.logits.sum().backward()
    model.eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="use_cache=False"):
        model(input_ids=ids[:, 6:], past_key_values=first.past_key_values)
    with torch.no_grad():
        chunks(model, ids)


@pytest.mark.parametrize("reader", ["the model without its policy", "another model"])
def test_a_cache_left_empty_is_not_filled_by_layers_without_a_policy(reader: str, llama: Any, ids: Tensor) -> None:
    model, other = llama(), llama()
    apply_policy(model, [ALL] * 2 + [INPUT] * 3)
    cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
    assert type(cache).__name__ == "DynamicCache"
    if reader == "another model":
        model = other
    else:
        remove_policy(model)
    with pytest.raises(UnsupportedError, match=r"layers\.2: expected a cache that its own forwards have filled"):
        model(input_ids=ids[:, 6:], past_key_values=cache)


def test_chunks_train_with_a_cache_where_all_is_saved(llama: Any, ids: Tensor) -> None:
    model, stock = llama(), llama()
    apply_policy(model, ALL)
    assert torch.equal(chunks(model, ids).loss, chunks(stock, ids).loss)


def twice(model: Any, ids: Tensor) -> None:
    (model(input_ids=ids, labels=ids).loss + model(input_ids=ids[:, :9], labels=ids[:, :9]).loss).backward()


def evaluated_between(model: Any, ids: Tensor) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        model(input_ids=ids[:, :9])
    loss.backward()


def retained(model: Any, ids: Tensor) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize("run", [twice, evaluated_between, retained])
@pytest.mark.parametrize(
    "policy", [INPUT, ATTENTION, GROUPED, ActivationPolicy(keep="input", tile_tokens=5)], ids=word_of
)
def test_adapters_of_experts_set_each_weight_to_itself(policy: ActivationPolicy, run: Any, ids: Tensor) -> None:
    """In every forward, which looks like a write to it; stock, and PyTorch's checkpoint, take no harm."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(build("qwen3_moe", FAMILIES["qwen3_moe"][0]), settings)
    assert any("experts" in name and "lora" in name for name, _ in model.named_parameters())
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    for each in (model, stock):
        run(each, ids)
    largest = max(float(p.grad.norm()) for p in stock.parameters() if p.grad is not None)
    for (name, p), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None)
        if p.grad is not None:  # in tiles, large scores are rounded otherwise in backward than in forward
            near = 5e-5 if policy.tile_tokens else 2e-5
            assert (p.grad - other.grad).norm() <= near * other.grad.norm() + 1e-6 * largest, name
    (weight,) = (p for name, p in model.named_parameters() if "layers.1." in name and name.endswith("gate_up_proj"))
    loss = model(input_ids=ids, labels=ids).loss
    weight.detach()[0, 0, 0] += 1
    with pytest.raises(UnsupportedError, match=r"layers\.1: expected parameters that are in backward"):
        loss.backward()


class Halving(Layer):
    """Its forward changes a weight, as no other forward of it may before its backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.mul_(0.5)
        return super().forward(x)


def test_a_forward_that_changes_a_weight_changes_it_for_the_graphs_before() -> None:
    layer = Halving(24, 3, 0.0)
    apply_policy(stack_of(layer), INPUT)
    first = layer(torch.randn(2, 5, 24, requires_grad=True))
    layer(torch.randn(2, 5, 24, requires_grad=True))
    with pytest.raises(UnsupportedError, match="expected parameters that are in backward what they were in forward"):
        first.sum().backward()

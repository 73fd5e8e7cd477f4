"""Layers as users write them, with state of their own: the gradients and the state are those of stock, in float64."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import word_of
from memory.models import ATTENTION, GROUPED, INPUT, VOCAB, Layer, Plain, assert_same, step
from memory.test_families import FAMILIES, build

LAYERS = 5
every_policy = pytest.mark.parametrize("policy", [INPUT, ATTENTION, GROUPED], ids=word_of)


Run = Callable[[Any, Tensor], Tensor]


def in_order(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


class Model(Plain):
    """Layers of one kind, which ``run`` calls."""

    def __init__(self, kind: Any, run: Run = in_order, D: int = 24) -> None:
        super().__init__(LAYERS, D)
        self.blocks = nn.ModuleList(kind(D, D // 8, 0.0) for _ in range(LAYERS))
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.run(self, self.embed(ids))).flatten(0, 1), ids.flatten())


def assert_as_stock(
    kind: Any, policy: ActivationPolicy, ids: Tensor, run: Run = in_order, state: Callable[[Any], object] | None = None
) -> None:
    """Compare three steps to the bit, and the state that layers or the model have after each."""
    model, stock = Model(kind, run).double(), Model(kind, run).double()
    apply_policy(model, policy)
    for k in range(3):
        found = []
        for each in (model, stock):
            random.seed(k)
            found.append(step(each, ids, seed=k))
        assert_same(*found)
        if state is not None:
            assert state(model) == state(stock)


class Carries(Layer):
    """Reads and replaces what a dictionary or an object has from the layer before."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        own = given if isinstance(given, dict) else vars(given)
        y = super().forward(x + own["r"].tanh())
        own["r"], own["n"] = y / 2, own["n"] + 1
        return y


class Collects(Layer):
    """Reads the outputs of all layers before, and adds its own."""

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        y = super().forward(x + torch.stack(past).mean(0))
        past.append(y)
        return y


def carrying(make: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def run(model: Any, x: Tensor) -> Tensor:
        model.given = make(x)
        for block in model.blocks:
            x = block(x, model.given)
        return x

    return run


@every_policy
@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_arguments_that_layers_change(make: Any, policy: ActivationPolicy, ids: Tensor) -> None:
    def counted(model: Any) -> object:
        return model.given["n"] if isinstance(model.given, dict) else model.given.n

    assert_as_stock(Carries, policy, ids, carrying(lambda x: make(r=x, n=0)), counted)


@every_policy
def test_a_list_of_earlier_outputs(policy: ActivationPolicy, ids: Tensor) -> None:
    assert_as_stock(Collects, policy, ids, carrying(lambda x: [x]), lambda model: len(model.given))


class Scaled(Layer):
    """A layer whose scale is of a method that subclasses replace."""

    def scale(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale())


def jitter() -> float:
    return 0.5 + random.random()


class Overrides(Scaled):
    def scale(self) -> float:
        return 0.5 + random.random()


class Extends(Overrides):
    def scale(self) -> Any:
        return super().scale() * 1.5


class HasFunction(Scaled):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draw = jitter

    def scale(self) -> Any:
        return self.draw()


class HasHelper(Scaled):
    class Helper:
        def sample(self) -> float:
            return jitter()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.helper = self.Helper()

    def scale(self) -> Any:
        return self.helper.sample()


class InTrainingAlone(HasHelper):
    """Its first forward, in evaluation, draws nothing."""

    def scale(self) -> Any:
        return super().scale() if self.training else 1.0


@every_policy
@pytest.mark.parametrize("kind", [Overrides, Extends, HasFunction, HasHelper])
def test_random_numbers_of_python(kind: Any, policy: ActivationPolicy, ids: Tensor) -> None:
    assert_as_stock(kind, policy, ids)


def test_random_numbers_of_another_mode(ids: Tensor) -> None:
    model, stock = (Model(InTrainingAlone).double() for _ in range(2))
    apply_policy(model, INPUT)
    found = []
    for each in (model, stock):
        step(each.eval(), ids)
        random.seed(1)
        found.append(step(each.train(), ids))
    assert_same(*found)


@every_policy
@pytest.mark.parametrize("kind", [Overrides, Extends])
def test_an_overridden_method_that_is_replaced(
    kind: Any, policy: ActivationPolicy, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(kind)
    apply_policy(model, policy)
    loss = model(ids)
    monkeypatch.setattr(Overrides, "scale", lambda self: 1.0)
    with pytest.raises(UnsupportedError, match=r"got another .*scale"):
        loss.backward()


class Counts(Layer):
    """Counts its forwards, each of which depends on the count."""

    make: Any = staticmethod(lambda: {"n": 0})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = self.make()

    def counted(self) -> Any:
        self.count["n"] += 1
        return self.count["n"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.counted() / 5))


class Deep(Counts):
    make = staticmethod(lambda: {"a": {"b": {"n": [0]}}})

    def counted(self) -> Any:
        self.count["a"]["b"]["n"][0] += 1
        return self.count["a"]["b"]["n"][0]


class InTensor(Counts):
    make = staticmethod(lambda: torch.zeros(1))

    def counted(self) -> Any:
        return self.count.add_(1)


class BesideAnOutput(Counts):
    make = staticmethod(lambda: {"n": 0, "output": None})

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.count["output"] = y.square().mean()
        return y


class InADefaultdict(Counts):
    make = staticmethod(lambda: defaultdict(int))


class InACounter(Counts):
    make = staticmethod(Counter)


@every_policy
@pytest.mark.parametrize("kind", [Counts, InADefaultdict, InACounter, Deep, InTensor, BesideAnOutput])
def test_counters(kind: Any, policy: ActivationPolicy, ids: Tensor) -> None:
    def count(model: Any) -> list[object]:
        return [block.count.item() if kind is InTensor else {**block.count, "output": None} for block in model.blocks]

    assert_as_stock(kind, policy, ids, state=count)


class Looks(Layer):
    """Does something else where gradients are recorded, and watches some of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y = y + 0.3 * torch.randn_like(y) * torch.is_grad_enabled()
            y.register_hook(lambda gradient: gradient * 0.9)
        return y


@every_policy
def test_layers_that_look_at_gradients(policy: ActivationPolicy, ids: Tensor) -> None:
    assert_as_stock(Looks, policy, ids)


def with_hooks(*registers: Callable[[nn.Module], Any]) -> Run:
    """Run with hooks on each layer's MLP that are there in forward alone."""

    def run(model: Any, x: Tensor) -> Tensor:
        handles = [register(block.mlp) for block in model.blocks for register in registers]
        x = in_order(model, x)
        for handle in handles:
            handle.remove()
        return x

    return run


@every_policy
def test_inner_outputs_whose_gradients_are_kept(policy: ActivationPolicy, ids: Tensor) -> None:
    def keep(mlp: Any, args: Any, output: Tensor) -> None:
        output.retain_grad()
        mlp.outputs = [*getattr(mlp, "outputs", []), output]

    def run(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            block.mlp.outputs = []
        x = with_hooks(lambda mlp: mlp.register_forward_hook(keep))(model, x)
        model.outputs = [block.mlp.outputs[0] for block in model.blocks]
        return x

    def gradients(model: Any) -> list[object]:
        return [output.grad.tolist() for output in model.outputs]

    assert_as_stock(Layer, policy, ids, run, gradients)


@every_policy
def test_hooks_with_keyword_arguments_that_are_gone_in_backward(policy: ActivationPolicy, ids: Tensor) -> None:
    def doubled(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs

    def halved(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output / (2 + len(kwargs))

    run = with_hooks(
        lambda mlp: mlp.register_forward_pre_hook(doubled, with_kwargs=True),
        lambda mlp: mlp.register_forward_hook(halved, with_kwargs=True),
    )
    assert_as_stock(Layer, policy, ids, run)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@every_policy
def test_adapters_that_are_activated_by_tokens(policy: ActivationPolicy) -> None:
    """peft's hooks for them are there in forward alone."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[5, 6], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(build("llama", FAMILIES["llama"][0]), settings).double()
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    ids = torch.randint(7, VOCAB, (2, 11))
    ids[:, 4], ids[:, 5] = 5, 6
    assert_same(*(step(each, ids, use_cache=False) for each in (model, stock)))


class Stores(Layer):
    """Keeps an output with its graph, which no backward reaches."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.entropy = -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean()
        return y


class Conditioned(Layer):
    """Reads an attribute that the model computes for each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.condition)


@every_policy
def test_a_computed_attribute_gets_its_gradient(policy: ActivationPolicy, ids: Tensor) -> None:
    """Also where it is another one, or none, in backward."""

    def run(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            block.condition = 1 + x.mean(1, keepdim=True).tanh()
        x = in_order(model, x)
        for block in model.blocks[1:]:
            block.condition = None
        return x

    assert_as_stock(Conditioned, policy, ids, run)


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@every_policy
@pytest.mark.parametrize("backward", [True, False])
def test_a_stored_output_holds_no_earlier_step(policy: ActivationPolicy, backward: bool, ids: Tensor) -> None:
    model = Model(Stores)
    apply_policy(model, policy)
    counts = []
    for _ in range(6):
        if backward:
            step(model, ids)
        else:
            model(ids)
        counts.append(alive())
    assert counts[2:] == counts[2:3] * 4, counts


def pairs(model: Any, x: Tensor) -> Tensor:
    """Run two layers at a time under PyTorch's checkpoint."""
    for first in range(0, LAYERS, 2):
        x = checkpoint(lambda x, part: [x := block(x) for block in part][-1], x, model.blocks[first : first + 2],
                       use_reentrant=False)  # fmt: skip
    return x


@every_policy
def test_inside_a_checkpoint_of_several_layers(policy: ActivationPolicy, ids: Tensor) -> None:
    assert_as_stock(Layer, policy, ids, pairs)


class Capacity(Layer):
    """Top-1 experts, each of which takes so many tokens of all and drops the rest."""

    def __init__(self, D: int, *args: Any) -> None:
        super().__init__(D, *args)
        self.router = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        flat = self.norm(x).flatten(0, 1)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        hot = F.one_hot(chosen, 4)
        taken = (hot.cumsum(0) * hot).sum(-1) <= len(flat) // 2
        parts = [(hot[:, i] * taken * share)[:, None] * expert(flat) for i, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0).view_as(x)


class OfAllTokens(Layer):
    """Divides by the size of all tokens, which gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y * y.detach().float().square().mean().rsqrt().to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Capacity, OfAllTokens])
def test_tiles_refuse_layers_whose_tokens_depend_on_each_other(kind: Any, dtype: torch.dtype) -> None:
    model = Model(kind, D=64).to(dtype)
    apply_policy(model, ActivationPolicy(keep="input", tile_tokens=32))
    with pytest.raises(UnsupportedError, match="computes each token from that token alone"):
        model(torch.randint(3, VOCAB, (1, 128)))

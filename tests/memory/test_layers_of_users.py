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
from memory.models import ATTENTION, GROUPED, INPUT, VOCAB, Layer
from memory.test_families import FAMILIES, build

LAYERS = 5
every_policy = pytest.mark.parametrize("policy", [INPUT, ATTENTION, GROUPED], ids=word_of)


class Model(nn.Module):
    """Layers of one kind, run one after the other, or as ``run`` does."""

    def __init__(self, kind: Any, run: Callable[[Any, Tensor], Tensor] | None = None, D: int = 24) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(kind(D, D // 8, 0.0) for _ in range(LAYERS))
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.run is not None:
            x = self.run(self, x)
        else:
            for block in self.blocks:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def step(model: nn.Module, k: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a step on its own tokens."""
    torch.manual_seed(k)
    random.seed(k)
    model.zero_grad()
    loss = model(torch.randint(3, VOCAB, (2, 13)))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_stock(
    kind: Any, policy: ActivationPolicy, run: Any = None, state: Callable[[Any], object] = lambda _: None
) -> None:
    """Compare three steps, after each of which the state that the layers keep has to be the same."""
    model, stock = Model(kind, run).double(), Model(kind, run).double()
    apply_policy(model, policy)
    for k in range(3):
        (got, of_got), (want, of_want) = step(model, k), step(stock, k)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(of_got, of_want, rtol=1e-10, atol=1e-12)
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
def test_arguments_that_layers_change(make: Any, policy: ActivationPolicy) -> None:
    def counted(model: Any) -> object:
        return model.given["n"] if isinstance(model.given, dict) else model.given.n

    assert_as_stock(Carries, policy, carrying(lambda x: make(r=x, n=0)), counted)


@every_policy
def test_a_list_of_earlier_outputs(policy: ActivationPolicy) -> None:
    assert_as_stock(Collects, policy, carrying(lambda x: [x]), lambda model: len(model.given))


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


class InEvaluationToo(HasHelper):
    """Draws in training alone: its first forward, in evaluation, does not."""

    def scale(self) -> Any:
        return super().scale() if self.training else 1.0


@every_policy
@pytest.mark.parametrize("kind", [Overrides, Extends, HasFunction, HasHelper])
def test_random_numbers_of_python(kind: Any, policy: ActivationPolicy) -> None:
    assert_as_stock(kind, policy)


def test_random_numbers_of_another_mode() -> None:
    model, stock = (Model(InEvaluationToo).double() for _ in range(2))
    apply_policy(model, INPUT)
    for each in (model, stock):
        each.eval()
        step(each, 0)
        each.train()
    torch.testing.assert_close(step(model, 1), step(stock, 1), rtol=1e-10, atol=1e-12)


@every_policy
@pytest.mark.parametrize("kind", [Overrides, Extends])
def test_an_overridden_method_that_is_replaced(
    kind: Any, policy: ActivationPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(kind)
    apply_policy(model, policy)
    loss = model(torch.randint(3, VOCAB, (2, 13)))
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
def test_counters(kind: Any, policy: ActivationPolicy) -> None:
    def count(model: Any) -> list[object]:
        return [block.count.item() if kind is InTensor else {**block.count, "output": None} for block in model.blocks]

    assert_as_stock(kind, policy, state=count)


class Looks(Layer):
    """Does something else where gradients are recorded, and watches some of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y = y + 0.3 * torch.randn_like(y) * torch.is_grad_enabled()
            y.register_hook(lambda gradient: gradient * 0.9)
        return y


@every_policy
def test_layers_that_look_at_gradients(policy: ActivationPolicy) -> None:
    assert_as_stock(Looks, policy)


@every_policy
def test_inner_outputs_whose_gradients_are_kept(policy: ActivationPolicy) -> None:
    """By a hook that is there in forward alone."""
    found = []
    for with_policy in (True, False):
        model, kept = Model(Layer).double(), list[Tensor]()
        if with_policy:
            apply_policy(model, policy)

        def keep(module: Any, args: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
            output.retain_grad()
            kept.append(output)

        hooks = [block.mlp.register_forward_hook(keep) for block in model.blocks]
        loss = model(torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1)))
        for hook in hooks:
            hook.remove()
        first = kept[:LAYERS]
        loss.backward()
        found.append([output.grad for output in first])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@every_policy
def test_hooks_with_keyword_arguments_that_are_gone_in_backward(policy: ActivationPolicy) -> None:
    found = []
    for with_policy in (True, False):
        model = Model(Layer).double()
        if with_policy:
            apply_policy(model, policy)

        def doubled(module: Any, args: Any, kwargs: Any) -> Any:
            return (args[0] * 2,), kwargs

        def halved(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return output / (2 + len(kwargs))

        hooks = [block.mlp.register_forward_pre_hook(doubled, with_kwargs=True) for block in model.blocks]
        hooks += [block.mlp.register_forward_hook(halved, with_kwargs=True) for block in model.blocks]
        loss = model(torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1)))
        for hook in hooks:
            hook.remove()
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


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
    gradients = []
    for each in (model, stock):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert gradients[0]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


class Stores(Layer):
    """Keeps an output with its graph, which no backward reaches."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.entropy = -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean()
        return y


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@every_policy
@pytest.mark.parametrize("backward", [True, False])
def test_a_stored_output_holds_no_earlier_step(policy: ActivationPolicy, backward: bool) -> None:
    model = Model(Stores)
    apply_policy(model, policy)
    counts = []
    for k in range(6):
        if backward:
            step(model, k)
        else:
            model(torch.randint(3, VOCAB, (2, 13)))
        counts.append(alive())
    assert counts[2:] == counts[2:3] * 4, counts


def pairs(model: Any, x: Tensor) -> Tensor:
    """Run two layers at a time under PyTorch's checkpoint."""
    for first in range(0, LAYERS, 2):
        x = checkpoint(lambda x, part: [x := block(x) for block in part][-1], x, model.blocks[first : first + 2],
                       use_reentrant=False)  # fmt: skip
    return x


@every_policy
def test_inside_a_checkpoint_of_several_layers(policy: ActivationPolicy) -> None:
    assert_as_stock(Layer, policy, pairs)


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

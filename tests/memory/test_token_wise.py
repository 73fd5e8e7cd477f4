"""What layers in tiles refuse, or take from stock, beside attention: random numbers, buffers, hooks, arguments."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.tile_attention import WholeSequence
from lowtide.memory.tiles import LayerInTiles
from memory.models import Layer, Plain, loss_of, stack_of, step
from memory.test_families import FAMILIES, build

KEEPS = ["input", "attention"]


def policy(tokens: int = 5, keep: Any = "input") -> ActivationPolicy:
    return ActivationPolicy(keep=keep, tile_tokens=tokens)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], msg=name)


class Bidirectional(Layer):
    """Transformers takes `is_causal=False` for a single token, also where a layer is causal."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Depth(Layer):
    """Stochastic depth: one draw for all tokens of a sequence, which is seldom zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (super().forward(x) - x) * (torch.rand(len(x), 1, 1) > 1e-3)


class Average(Layer):
    """A running mean that its output does not read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class Assigned(Average):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)
        return Layer.forward(self, x)


class Attribute(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.load = x.detach().mean()
        return super().forward(x)


class Spectral(Layer):
    """Each forward moves its singular vectors."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.out = parametrizations.spectral_norm(self.out)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.clone())
        x.mul_(2)
        return y


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Quantised(Layer):
    """One scale for all tokens, without a gradient; the largest is now in this half of them, now in the other."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        scale = y.detach().abs().max() / 7
        return y + ((y / scale).round() * scale - y).detach()


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class Penalised(Layer):
    """A loss of its weights that comes in backward: once for each tile it would be."""

    def forward(self, x: Tensor) -> Tensor:
        return _Added.apply(super().forward(x), self.out.weight.square().sum())


class WithoutGraph(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.is_grad_enabled())


class Hooked(Layer):
    """A hook of what has no gradient in the forward of tiles."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: None)
        return y


REFUSED = {
    Bidirectional: "got attention to later tokens",
    Depth: "draws random numbers",
    Average: "writes to its buffers or attributes",
    Assigned: "writes to its buffers or attributes",
    Attribute: "writes to its buffers or attributes",
    Spectral: "writes to its buffers or attributes",
    InPlace: "fails for a part of its tokens",
    Checkpointed: "fails for a part of its tokens",
    Penalised: "backward adds gradients to those of its output",
    WithoutGraph: "forward without a graph, as that of tiles is, computes something else",
    Hooked: "fails for a part of its tokens: cannot register a hook",
    Quantised: "depend on how many others there are",
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_layers_that_are_refused(kind: type[Layer], tokens: int) -> None:
    """And they stay what they were."""
    holder = stack_of(kind(24, 3, 0.0))
    before = copy.deepcopy(holder.state_dict())
    apply_policy(holder, policy(tokens))
    with pytest.raises(UnsupportedError, match=REFUSED[kind]) as raised:
        holder.blocks[0](torch.randn(2, 13, 24, requires_grad=True) * 1)
    assert "blocks.0" in str(raised.value)
    assert "tile_tokens=None" in str(raised.value)
    assert_equal(holder.state_dict(), before)
    assert "load" not in vars(holder.blocks[0])


@pytest.mark.parametrize("kind", [dict, list])
def test_arguments_that_are_written_to_are_refused(kind: Any) -> None:
    class Sharing(Layer):
        def forward(self, x: Tensor, shared: Any) -> Tensor:
            y = super().forward(x)
            _ = shared.append(1) if kind is list else shared.update(found=1)
            return y

    holder = stack_of(Sharing(24, 3, 0.0))
    apply_policy(holder, policy())
    with pytest.raises(UnsupportedError, match="writes to a list or a dictionary among its arguments"):
        holder.blocks[0](torch.randn(2, 13, 24), kind())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention under vmap
def test_transforms_are_refused_and_leave_forwards_without_gradients() -> None:
    model = Plain(layers=1)
    x = torch.randn(3, 2, 13, 24)
    want = torch.func.vmap(model.blocks[0])(x)
    apply_policy(model, policy())
    for transform in (torch.func.vmap(model.blocks[0]), torch.func.grad(lambda x: model.blocks[0](x[0]).sum())):
        with pytest.raises(UnsupportedError, match=r"got a transform of torch\.func"):
            transform(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model.blocks[0])(x), want)


def test_weights_cached_by_parametrize_are_refused() -> None:
    layer = Layer(24, 3, 0.0)
    layer.out = parametrizations.weight_norm(layer.out)
    holder = stack_of(layer)
    apply_policy(holder, policy())
    holder.blocks[0](torch.randn(2, 13, 24)).sum().backward()
    with parametrize.cached(), pytest.raises(UnsupportedError, match=r"weights cached by parametrize\.cached"):
        holder.blocks[0](torch.randn(2, 13, 24))


@pytest.mark.parametrize("tokens", [1, 5])
def test_another_way_to_cut_arguments_is_checked_too(tokens: int) -> None:
    """A number per sequence, of as many sequences as tokens, would be cut with the tokens."""

    class Scaled(Layer):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    holder = stack_of(Scaled(24, 3, 0.0))
    apply_policy(holder, policy(tokens))
    holder.blocks[0](torch.randn(2, 13, 24), torch.rand(2, 1, 1))
    with pytest.raises(UnsupportedError, match="fails for a part of its tokens"):
        holder.blocks[0](torch.randn(13, 13, 24), torch.rand(13, 1, 1))


def test_weights_that_a_hook_assigns(ids: Tensor) -> None:
    """They are the same for all tiles."""
    model = Plain(layers=2)
    prune.random_unstructured(model.blocks[0].out, "weight", 0.3)
    stock = Plain(layers=2)
    with torch.no_grad():
        stock.blocks[0].out.weight.copy_(model.blocks[0].out.weight)
    apply_policy(model, policy())
    (loss, got), (want_loss, want) = step(model, ids), step(stock, ids)
    torch.testing.assert_close(loss, want_loss)
    masked = want.pop("blocks.0.out.weight") * model.blocks[0].out.weight_mask
    torch.testing.assert_close(got.pop("blocks.0.out.weight_orig"), masked)
    assert_equal(got, want)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def _keep(block: Any) -> None:
    block.seen = []
    block.mlp.register_forward_hook(lambda module, args, output: block.seen.append(output))


def _normalise(block: Any) -> None:
    block.mlp.register_full_backward_hook(lambda module, found, given: (found[0] / (1 + found[0].norm()),))


CHANGES: dict[str, Callable[[Any], object]] = {
    "values are kept beside its output": _keep,
    "depend on how many others there are": _normalise,
    "other operations read other tokens": lambda block: block.mlp.append(Summed()),
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_layer_that_changed_is_checked_again(says: str, ids: Tensor) -> None:
    model = Plain(layers=2)
    apply_policy(model, policy())
    step(model, ids)
    CHANGES[says](model.blocks[1])
    with pytest.raises(UnsupportedError, match=f"blocks.1: .*{says}"):
        step(model, ids)


def test_hooks_of_forwards_without_gradients_see_whole_sequences(ids: Tensor) -> None:
    """Those of transformers, and of users: nothing of the check either."""
    pytest.importorskip("transformers")
    model = build("qwen3_moe", {**FAMILIES["qwen3_moe"][0], "attention_dropout": 0.0})
    found = []
    for tiles in (False, True):
        if tiles:
            apply_policy(model, policy())
        seen: list[Tensor] = []
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
            handle = model.model.layers[1].mlp.register_forward_hook(lambda *values, seen=seen: seen.append(values[2]))
            model(input_ids=ids, use_cache=False)
        handle.remove()
        found.append([*logits, *seen])
    assert len(found[0]) == 4
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want)


def test_tensors_from_outside_that_train_later_are_refused() -> None:
    scale = torch.ones(24)

    class Outside(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * scale)

    holder = stack_of(Outside(24, 3, 0.0))
    apply_policy(holder, policy())
    holder.blocks[0](torch.randn(2, 13, 24)).sum().backward()
    scale.requires_grad_()
    with pytest.raises(UnsupportedError, match="trained tensors which are no parameters of its own"):
        holder.blocks[0](torch.randn(2, 13, 24)).sum().backward()


@pytest.mark.parametrize("keep", KEEPS)
def test_hooks_of_parameters_get_the_whole_gradient_once(keep: str, ids: Tensor) -> None:
    model = Plain(layers=2)
    stock = copy.deepcopy(model)
    apply_policy(model, policy(keep=keep))
    found = []
    for each in (model, stock):
        calls: list[str] = []
        parameters = dict(each.named_parameters())
        for name, p in parameters.items():
            p.register_hook(lambda g, calls=calls, name=name: (calls.append(name), 2 * g.clamp(-1e-3, 1e-3))[1])
            p.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append("after"))
        register_multi_grad_hook([*parameters.values()], lambda _, calls=calls: calls.append("all"))
        for _ in range(2):
            _, gradients = step(each, ids)
        found.append((gradients, sorted(calls)))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("keep", KEEPS)
def test_a_layer_whose_output_needs_no_gradient(keep: str) -> None:
    """A trained parameter that its output does not use, and hidden states that need none."""
    holder = stack_of(Layer(24, 3, 0.0)).requires_grad_(False)
    holder.blocks[0].unused = nn.Linear(2, 2)
    apply_policy(holder, policy(keep=keep))
    scale = torch.ones((), requires_grad=True)
    (holder.blocks[0](torch.randn(2, 13, 24)).sum() * scale).backward()
    assert scale.grad is not None
    assert holder.blocks[0].unused.weight.grad is None


@pytest.mark.parametrize("keep", KEEPS)
def test_inside_a_checkpoint_and_hooks_of_saved_tensors(keep: str, ids: Tensor) -> None:
    """They save as many tensors in the first forward, which checks layers, as in another."""
    model = Plain(layers=3)
    _, want = step(copy.deepcopy(model), ids)

    def blocks(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    def loss() -> Tensor:
        return F.cross_entropy(model.head(checkpoint(blocks, model.embed(ids), use_reentrant=False)).mT, ids)

    for _ in range(2):
        apply_policy(model, policy(keep=keep))
        model.zero_grad()
        loss().backward()
        assert_equal({name: p.grad for name, p in model.named_parameters()}, want)
    apply_policy(model, policy(keep=keep))
    with save_on_cpu():
        _, got = step(model, ids)
    assert_equal(got, want)


@pytest.mark.parametrize("keep", KEEPS)
def test_nothing_outlives_a_step(keep: str, ids: Tensor) -> None:
    """Without a garbage collection: neither what tiles hold, nor the weights of a model that is deleted."""
    model = Plain(layers=2)
    apply_policy(model, policy(keep=keep))
    step(model, ids)
    gc.collect()
    gc.disable()
    try:
        step(model, ids)
        loss_of(model, ids)  # without a backward
        assert not [x for x in gc.get_objects() if isinstance(x, LayerInTiles | WholeSequence)]
        weight = weakref.ref(model.blocks[0].out.weight)
        del model
        assert weight() is None
    finally:
        gc.enable()

"""The checkpoint around a layer beside PyTorch's, without reentrance: values, gradients, what lives, and errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lowtide.errors import UnsupportedError
from lowtide.memory import recompute
from lowtide.memory.recompute import recomputed

Layer = Callable[[Tensor], Any]


@pytest.fixture(autouse=True, params=["torch 2.13", "earlier"])
def how_the_input_is_saved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "earlier":
        monkeypatch.setattr(recompute, "_make_saved_tensor", None)
    elif recompute._make_saved_tensor is None:
        pytest.skip("with torch 2.13")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.down(F.silu(self.up(x)).pow(2)))


def ours(layer: Layer, x: Tensor) -> Any:
    return recomputed("layer", layer, x)


def stock(layer: Layer, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


def stack(
    run: Callable[[Layer, Tensor], Any], *, trains: bool = True
) -> tuple[list[Block], Tensor, Callable[[], Tensor]]:
    torch.manual_seed(0)
    blocks, x = [Block() for _ in range(3)], torch.randn(5, 8, requires_grad=trains)

    def forward() -> Tensor:
        torch.manual_seed(1)
        y = x
        for block in blocks:
            y = run(block, y)
        return y.sin().sum()

    return blocks, x, forward


def leaves(blocks: list[Block], x: Tensor) -> list[Tensor]:
    return [*([x] if x.requires_grad else []), *(p for block in blocks for p in block.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trains", [True, False])
def test_gradients_are_those_of_pytorchs_checkpoint(trains: bool, autocast: bool) -> None:
    """With dropout; and the random state behind backward is what it was before."""
    found = []
    for run in (ours, stock, lambda layer, x: layer(x)):
        blocks, x, forward = stack(run, trains=trains)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = forward()
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        found.append([loss.detach(), *(p.grad for p in leaves(blocks, x))])
    for one in found[:2]:
        assert all(map(torch.equal, one, found[2]))


def test_a_graph_that_is_kept_runs_backward_again_and_in_parts() -> None:
    blocks, x, forward = stack(ours)
    loss, inputs = forward(), leaves(blocks, x)
    whole = torch.autograd.grad(loss, inputs, retain_graph=True)
    for _ in range(2):
        assert all(map(torch.equal, whole, torch.autograd.grad(loss, inputs, retain_graph=True)))
    parts = [torch.autograd.grad(loss, one, retain_graph=True)[0] for one in reversed(inputs)]
    assert all(map(torch.equal, whole, reversed(parts)))
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(inputs, whole, strict=True))


def test_second_derivatives() -> None:
    found = []
    for run in (ours, stock):
        blocks, x, forward = stack(run)
        (first,) = torch.autograd.grad(forward(), x, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), leaves(blocks, x), allow_unused=True))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_nothing_but_the_input_lives_between_forward_and_backward() -> None:
    blocks, _, forward = stack(ours)
    made: list[weakref.ref[Tensor]] = []
    for block in blocks:
        block.up.register_forward_hook(lambda *call: made.append(weakref.ref(call[-1])))
    loss = forward()
    assert [one() for one in made] == [None] * 3
    loss.backward()
    assert [one() for one in made] == [None] * 6
    del loss


def test_a_graph_that_never_runs_backward_is_freed_at_once() -> None:
    blocks, _, forward = stack(ours)
    held = weakref.ref(blocks[0])
    loss = forward()
    del blocks, forward
    assert held() is not None
    del loss, _
    assert held() is None, "without the garbage collector"


def test_a_recompute_ends_with_the_last_tensor_that_is_needed() -> None:
    done: list[str] = []

    def layer(x: Tensor) -> Tensor:
        y = x.exp()
        done.append("saved")
        z = y + 1
        done.append("not saved")
        return z

    x = torch.randn(3, requires_grad=True)
    ours(layer, x).sum().backward()
    assert done == ["saved", "not saved"], "a second run of exp saves its result, and ends there"
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_the_input_goes_through_the_hooks_around() -> None:
    """And nothing else does: the layer's own tensors are dropped."""
    seen: list[Tensor] = []
    x, block = torch.randn(4, 8, requires_grad=True), Block()

    def put(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(put, lambda tensor: tensor):
        y = ours(block, x)
    assert len(seen) == 1
    assert seen[0] is x
    y.sum().backward()
    assert block.calls == 2


@pytest.mark.parametrize("inner", [ours, stock])
@pytest.mark.parametrize("outer", [ours, stock])
def test_one_inside_another(outer: Any, inner: Any) -> None:
    found = []
    for nested in (True, False):
        torch.manual_seed(0)
        block, x = Block(), torch.randn(5, 8, requires_grad=True)
        torch.manual_seed(1)
        y = outer(partial(inner, block), x) if nested else block(x)
        y.sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(map(torch.equal, *found))


def test_backward_inside_forward() -> None:
    """A layer that takes a gradient of its own, whose graph the checkpoint's hooks are around."""

    def layer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (own,) = torch.autograd.grad(y.pow(3).sum(), y)
        return x.exp() * own

    grads = []
    for run in (ours, stock, lambda layer, x: layer(x)):
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        run(layer, x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[2])


@pytest.mark.parametrize("second", [lambda x: x.exp().sum(0), lambda x: x * 2, lambda x: x[:1].exp()])
def test_a_recompute_that_takes_another_path(second: Layer) -> None:
    calls: list[int] = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp().sin() if len(calls) == 1 else second(x)

    y = ours(layer, torch.randn(4, 3, requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"layer: expected a recompute that saves .* another path"):
        y.sum().backward()


def test_an_error_in_a_recompute_leaves_the_state_as_it_was() -> None:
    calls: list[int] = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            torch.rand(3)
            raise KeyError("mine")
        return x.exp()

    y = ours(layer, torch.randn(3, requires_grad=True))
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.is_autocast_enabled("cpu")


def test_what_one_backward_leaves_is_not_read_by_another() -> None:
    """A layer's second output is left out of the first backward, and its weight is written to before the second."""

    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.probe = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.main(x).exp()
            return y, self.probe(self.probe(y.detach())).pow(2).sum()

    found = []
    for run in (ours, stock):
        torch.manual_seed(0)
        layer = Probed()
        y, beside = run(layer, torch.randn(3, 4, requires_grad=True))
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            layer.probe.weight.mul_(3)
        beside.backward()
        found.append(layer.probe.weight.grad)
    assert torch.equal(*found)


def test_early_ends_can_be_switched_off() -> None:
    """For a layer that takes any exception for its own."""

    def layer(x: Tensor) -> Tensor:
        try:
            return x.exp()
        except Exception as error:
            raise RuntimeError("layer failed") from error

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="layer failed"):
        ours(layer, x).sum().backward()
    with set_checkpoint_early_stop(False):
        y = ours(layer, x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_an_input_that_the_layer_writes_to_under_hooks_that_copy() -> None:
    def layer(x: Tensor) -> Tensor:
        x += 1
        return x.exp()

    grads = []
    for run in (ours, stock):
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = run(layer, x * 1)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_several_threads_on_one_graph() -> None:
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    y = ours(layer, x).sum()
    (true,) = torch.autograd.grad(y, x, retain_graph=True)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: torch.autograd.grad(y, x, retain_graph=True)[0], range(40)))
    assert all(torch.equal(one, true) for one in found)


@pytest.mark.parametrize("how_the_input_is_saved", ["torch 2.13"], indirect=True)  # as in PyTorch's own
@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # which torch calls
def test_vmap_and_forward_mode() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, tangent = torch.randn(2, 3, 4), torch.randn(3, 4)
    assert torch.allclose(torch.func.vmap(partial(ours, layer))(x), layer(x))
    with forward_ad.dual_level():
        found = [forward_ad.unpack_dual(run(layer, forward_ad.make_dual(x[0], tangent))) for run in (ours, stock)]
    assert torch.equal(found[0].tangent, found[1].tangent)

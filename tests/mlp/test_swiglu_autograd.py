"""swiglu_mlp in autograd's graph: frozen subsets, retained graphs, checkpoints, autocast, hooks, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide import swiglu_mlp
from lowtide.errors import LowtideError, UnsupportedError
from mlp.calls import call, grads, in_float64
from support import mlp, mlp_oracle, relative_error

MODES = [{"checkpoint_level": level, "tile_tokens": tile} for level, tile in itertools.product((0, 1), (None, 4))]


@pytest.fixture(params=MODES, ids=lambda mode: f"level{mode['checkpoint_level']}-tile{mode['tile_tokens']}")
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_every_subset_of_tensors_frozen(mode: dict[str, Any]) -> None:
    leaves = mlp((2, 3), 4, 5, dtype=torch.float64)
    upstream = torch.randn(2, 3, 4, dtype=torch.float64)
    for trained in itertools.product((False, True), repeat=len(leaves)):
        for tensor, flag in zip(leaves, trained, strict=True):
            tensor.requires_grad_(flag)
        if not any(trained):
            assert not call(leaves, **mode).requires_grad
            continue
        expected = grads(mlp_oracle(leaves), leaves, upstream)
        y = call(leaves, **mode)
        first, second = grads(y, leaves, upstream, retain_graph=True), grads(y, leaves, upstream)
        for g, again, e in zip(first, second, expected, strict=True):
            torch.testing.assert_close(g, e)
            torch.testing.assert_close(again, e)


def test_a_subset_of_the_gradients_is_asked_for(mode: dict[str, Any]) -> None:
    leaves = mlp(5, 4, 6, dtype=torch.float64)
    everything = grads(mlp_oracle(leaves).sum(), leaves)
    for i, expected in enumerate(everything):
        torch.testing.assert_close(grads(call(leaves, **mode).sum(), [leaves[i]])[0], expected)


def test_a_second_backward_through_a_freed_graph_is_an_error(mode: dict[str, Any]) -> None:
    leaves = mlp(5, 4, 6)
    y = call(leaves, **mode).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()


@pytest.mark.parametrize(("level", "products"), [(0, 9), (1, 11)])
def test_pytorchs_counter_of_operations_sees_the_products(level: int, products: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton where there is one

    N, D, F_ = 5, 4, 6
    leaves = mlp(N, D, F_)
    with FlopCounterMode(display=False) as counter:
        gradients = grads(call(leaves, checkpoint_level=level).sum(), leaves)
    assert counter.get_total_flops() == products * 2 * N * D * F_
    torch.testing.assert_close(gradients, grads(call(leaves, checkpoint_level=level).sum(), leaves))


def test_hooks_fire_once_and_gradients_accumulate(mode: dict[str, Any]) -> None:
    leaves = mlp((2, 5), 7, 11)
    fired = [0] * len(leaves)

    def count(i: int, _: Tensor) -> None:
        fired[i] += 1

    for i, leaf in enumerate(leaves):
        leaf.register_hook(partial(count, i))
        leaf.grad = torch.full_like(leaf, 0.5)
    call(leaves, **mode).sum().backward()
    assert fired == [1] * 7
    expected = torch.autograd.grad(mlp_oracle(leaves).sum(), leaves)
    for leaf, e in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, 0.5 + e)


def test_the_same_weights_twice_and_one_weight_in_both_places(mode: dict[str, Any]) -> None:
    leaves = mlp(5, 4, 6, dtype=torch.float64)
    x, gate, _, down, *biases = leaves
    other = [x, gate, gate, down, *biases]

    def both(f: Callable[..., Tensor]) -> list[Tensor]:
        first = f(leaves)
        y = first + f([first, *leaves[1:]]) + f(other)
        return list(torch.autograd.grad(y.square().sum(), leaves))

    torch.testing.assert_close(both(partial(call, **mode)), both(mlp_oracle))


@pytest.mark.parametrize("how", [True, False, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, "hooks"])
def test_checkpointed_or_saved_elsewhere_it_is_the_same(
    mode: dict[str, Any], how: bool | CheckpointPolicy | str
) -> None:
    """Reentrant or not, selective, or with saved tensors that hooks move away."""
    leaves = mlp((2, 5), 7, 11)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        ours = (torch.ops.lowtide.swiglu.default, torch.ops.lowtide.swiglu_projections.default)
        return how if op in ours else CheckpointPolicy.PREFER_RECOMPUTE

    kwargs: dict[str, Any] = {"use_reentrant": how is True}
    if isinstance(how, CheckpointPolicy):
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if how == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            y = call(leaves, **mode)
    else:
        y = checkpoint(lambda *t: call(list(t), **mode), *leaves, **kwargs)
    expected = grads(call(leaves, **mode).sum(), leaves, create_graph=True)  # a graph that nobody differentiates
    y.sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(leaves, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("weights", "inputs"), list(itertools.product([torch.float32, torch.bfloat16], repeat=2)))
def test_autocast(mode: dict[str, Any], dtype: torch.dtype, weights: torch.dtype, inputs: torch.dtype) -> None:
    x, *rest = mlp((4, 25), 32, 48)
    leaves = [x.detach().to(inputs).requires_grad_(), *(torch.nn.Parameter(t.detach().to(weights)) for t in rest)]
    true = in_float64(leaves)
    upstream = torch.randn(4, 25, 32)
    with torch.autocast("cpu", dtype):
        y, plain = call(leaves, **mode), mlp_oracle(leaves)
    assert y.dtype == plain.dtype == dtype
    exact = mlp_oracle(true)
    wanted = [exact, *grads(exact, true, upstream.double())]
    theirs = [plain, *grads(plain, leaves, upstream.to(dtype))]
    ours = [y, *grads(y, leaves, upstream.to(dtype))]
    for tensor, g, p, e in zip((y, *leaves), ours, theirs, wanted, strict=True):
        assert g.dtype == tensor.dtype
        assert relative_error(g, e) <= 1.5 * relative_error(p, e) + torch.finfo(dtype).eps / 2


def test_autocast_leaves_float64_alone() -> None:
    leaves = mlp(5, 4, 6, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(leaves)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, mlp_oracle(leaves))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("by", [0, 1, 2, 3, 4])
def test_a_second_derivative_is_an_error_that_names_the_way_out(mode: dict[str, Any], frozen: bool, by: int) -> None:
    """By each tensor alone: a derivative that does not pass here would be 0 in silence."""
    leaves = mlp(5, 4, 6)
    if frozen and by:
        return
    for leaf in leaves[1:]:
        leaf.requires_grad_(not frozen)
    upstream = torch.ones(5, 4, requires_grad=True)

    def twice() -> None:
        (dx,) = torch.autograd.grad(call(leaves, **mode), leaves[0], upstream, create_graph=True)
        torch.autograd.grad(dx.square().sum(), leaves[by])

    with pytest.raises(UnsupportedError, match=r"second derivative.*functional\.silu") as error:
        twice()
    assert isinstance(error.value, RuntimeError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out() -> None:
    leaves = mlp(5, 4, 6, bias=False)[:4]
    x, *weights = leaves
    calls: list[Callable[[], object]] = [
        lambda: torch.func.grad(lambda x: swiglu_mlp(x, *weights).sum())(x),
        lambda: torch.func.vmap(lambda x: swiglu_mlp(x, *weights))(x),
        lambda: torch.func.jvp(lambda x: swiglu_mlp(x, *weights), (x,), (x,)),
    ]
    for forbidden in calls:
        with pytest.raises(LowtideError, match=r"swiglu_mlp: expected reverse-mode.*write it out.*linear"):
            forbidden()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            swiglu_mlp(dual, *weights)


def test_a_weight_changed_before_backward_is_noticed() -> None:
    leaves = mlp(5, 4, 6)
    y = call(leaves)
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_grad_and_inference_mode(mode: dict[str, Any]) -> None:
    leaves = mlp(5, 4, 6)
    expected = call(leaves, **mode).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = call(leaves, **mode)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_the_input_is_not_changed(mode: dict[str, Any]) -> None:
    leaves = mlp((2, 5), 7, 11)
    before = [t.detach().clone() for t in leaves]
    upstream = torch.randn(2, 5, 7)
    kept = upstream.clone()
    call(leaves, **mode).backward(upstream)
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


@pytest.mark.parametrize("level", [0, 1])
def test_weights_of_the_other_16_bits_than_autocasts(level: int) -> None:
    torch.manual_seed(0)
    x, *weights = (torch.randn(*shape).bfloat16() for shape in ((5, 8), (12, 8), (12, 8), (8, 12)))
    weights = [torch.nn.Parameter(w) for w in weights]
    found = []
    for run in (lambda: swiglu_mlp(x, *weights, checkpoint_level=level), None):
        with torch.autocast("cpu", torch.float16, enabled=run is not None):
            y = run() if run else (F.silu(x @ weights[0].T) * (x @ weights[1].T)) @ weights[2].T
        found.append([y.float(), *torch.autograd.grad(y.float().sum(), weights)])
    for got, plain in zip(*found, strict=True):
        torch.testing.assert_close(got.float(), plain.float(), rtol=0, atol=2e-2 * plain.abs().max().item())

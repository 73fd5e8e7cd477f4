"""The gated MLP with gate and up in one projection: values, the weight's one gradient, what is kept and allocated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise
from lowtide.mlp.call import JOINED, Adapter, Projection
from lowtide.mlp.swiglu import adapted_mlp
from mlp.calls import grads, in_float64, plain_mlp
from support import every_pair, mlp, mlp_slack, relative_error

# dynamo's
pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")

PLACES = [joined for joined in JOINED if joined]
SCALES = (0.5, 1.7)  # as test_low_rank scales gate and up differently, one of the joined and one of down


def joined_leaves(
    N: int | tuple[int, ...], D: int, FF: int, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> list[Any]:
    """Return x, the joined weight [2F, D], down's, and the joined bias [2F] and down's, as leaves."""
    x, gate, up, down, *biases = mlp(N, D, FF, dtype=dtype)
    both = torch.cat([gate, up]).detach().requires_grad_()
    if not bias:
        return [x, both, down, None, None]
    return [x, both, down, torch.cat(biases[:2]).detach().requires_grad_(), biases[2]]


def joined_adapters(D: int, FF: int, dtype: torch.dtype = torch.float32, rank: int = 3) -> list[Any]:
    """Return A and B of the joined projection and of down, as leaves."""
    g = torch.Generator().manual_seed(7)
    shapes = ((rank, D), (2 * FF, rank), (rank + 1, FF), (D, rank + 1))
    return [(torch.randn(*s, generator=g) / s[1] ** 0.5).to(dtype).requires_grad_() for s in shapes]


def run(
    leaves: list[Any], joined: str = "gate first", level: int = 0, tile: int | None = None, *,
    ab: tuple[Any, ...] | list[Any] = (None,) * 4, dropout: float = 0.0, activation: str = "silu",
) -> Tensor:  # fmt: skip
    x, both, down, both_bias, down_bias = leaves
    pairs = [None if ab[i] is None else Adapter(ab[i], ab[i + 1], SCALES[i // 2], dropout) for i in (0, 2)]
    gate_up, down = Projection(both, both_bias, pairs[0]), Projection(down, down_bias, pairs[1])
    settings: Any = {"activation": activation, "checkpoint_level": level, "tile_tokens": tile, "joined": joined}
    return adapted_mlp(x, gate_up, None, down, **settings)


def apart(leaves: list[Any], joined: str) -> list[Any]:
    """Return the seven tensors of two projections, as functions of the joined ones: without `JOINED`."""
    x, both, down, both_bias, down_bias = leaves

    def halves(t: Tensor | None) -> tuple[Any, Any]:
        if t is None:
            return None, None
        first, second = t.chunk(2) if joined != "interleaved" else (t.unflatten(0, (-1, 2))[:, i] for i in range(2))
        return (second, first) if joined == "up first" else (first, second)

    return [x, *halves(both), down, *halves(both_bias), down_bias]


def plain(leaves: list[Any], joined: str, *, ab: Any = (None,) * 4, activation: str = "silu") -> Tensor:
    if ab[0] is None:
        return plain_mlp(apart(leaves, joined), activation)
    x, both, down, both_bias, down_bias = leaves
    both = both + SCALES[0] * ab[1] @ ab[0]
    return plain_mlp(apart([x, both, down + SCALES[1] * ab[3] @ ab[2], both_bias, down_bias], joined), activation)


@every_pair(joined=PLACES, level=[0, 1], tile=[None, 4], adapted=[False, True], activation=["silu", "gelu_tanh"])
def test_float64(joined: str, level: int, tile: int | None, adapted: bool, activation: str) -> None:
    ab = joined_adapters(7, 11, torch.float64) if adapted else [None] * 4
    for shape in ((2, 5), (1,), (0,)):
        leaves = joined_leaves(shape, 7, 11, torch.float64)
        y = run(leaves, joined, level, tile, ab=ab, activation=activation)
        expected = plain(leaves, joined, ab=ab, activation=activation)
        torch.testing.assert_close(y, expected)
        upstream = torch.randn(*shape, 7, dtype=torch.float64)
        for got, want in zip(
            grads(y, [*leaves, *ab], upstream), grads(expected, [*leaves, *ab], upstream), strict=True
        ):
            torch.testing.assert_close(got, want)
            assert got.is_contiguous()


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("joined", PLACES)
def test_every_subset_of_what_is_trained(joined: str, level: int) -> None:
    leaves, ab = joined_leaves(5, 4, 6, torch.float64), joined_adapters(4, 6, torch.float64)
    everything, upstream = [*leaves, *ab], torch.randn(5, 4, dtype=torch.float64)
    for flags in itertools.product((True, False), repeat=len(everything)):
        for tensor, flag in zip(everything, flags, strict=True):
            tensor.requires_grad_(flag)
        y = run(leaves, joined, level, ab=ab)
        assert y.requires_grad == any(flags)
        if any(flags):
            first, second = grads(y, everything, upstream, retain_graph=True), grads(y, everything, upstream)
            for g, again, e in zip(
                first, second, grads(plain(leaves, joined, ab=ab), everything, upstream), strict=True
            ):
                torch.testing.assert_close(g, e)
                assert torch.equal(g, again)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_further_from_the_truth_than_two_projections(level: int, dtype: torch.dtype) -> None:
    leaves = joined_leaves(67, 64, 96, dtype)
    true, upstream = in_float64(leaves), torch.randn(67, 64).to(dtype)
    found = []
    for y, of in (
        (run(leaves, "gate first", level, 20), leaves),
        (plain(leaves, "gate first"), leaves),
        (plain(true, "gate first"), true),
    ):
        found.append([y, *grads(y, of, upstream.to(y.dtype))])
    slack = mlp_slack(dtype, leaves)
    for ours, theirs, e in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, e) <= 1.3 * relative_error(theirs, e) + slack


N, D, FF = 512, 48, 160
SLACK = 2**16


@pytest.mark.parametrize("joined", PLACES)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tile", [None, 128])
def test_the_gradient_of_the_weight_is_one_tensor_written_once(
    joined: str, level: int, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other tensor of its size or of a half's is allocated in backward."""
    monkeypatch.setattr(elementwise, "PIECE", 2**11)
    x, both, down, *_ = leaves = joined_leaves(N, D, FF, bias=False)
    y, upstream = run(leaves, joined, level, tile), torch.ones(N, D)
    with track_allocations() as seen:
        y.backward(upstream)
    sizes = [event.bytes for event in seen.events if event.bytes > 0]
    assert sizes.count(both.nbytes) == 1
    assert sizes.count(both.nbytes // 2) == 1, "down's own"
    assert both.grad.is_contiguous()
    assert both.grad.untyped_storage().nbytes() == both.nbytes
    assert both.grad.data_ptr() != both.data_ptr()
    rows, weights = tile or N, both.nbytes + down.nbytes
    assert seen.peak_bytes <= 4 * (rows * FF * (1 if level == 0 else 3) + D * N) + weights + SLACK
    assert x.grad is not None


@pytest.mark.parametrize(("level", "dynamic"), [(0, None), (1, None), (1, True)])
def test_compiled(level: int, dynamic: bool | None) -> None:
    leaves, ab = joined_leaves((2, 5), 7, 11), joined_adapters(7, 11)
    torch._dynamo.reset()
    how: Any = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    compiled = torch.compile(lambda *t: run(list(t[:5]), "gate first", level, ab=t[5:]), **how)
    y, expected = compiled(*leaves, *ab), run(leaves, "gate first", level, ab=ab)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(y.sum(), [*leaves, *ab]), grads(expected.sum(), [*leaves, *ab]))


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("joined", PLACES)
def test_gate_and_up_of_one_adapter_drop_the_same(joined: str, level: int) -> None:
    """As peft's layer does, which drops values of its input once."""
    x, one = torch.ones(200, 1, requires_grad=True), torch.ones(2, 1)
    leaves = [x, torch.zeros(2, 1), torch.ones(1, 1), None, None]
    y = run(leaves, joined, level, ab=[torch.ones(1, 1), one, None, None], dropout=0.25)
    product = torch.nn.functional.silu(torch.tensor(SCALES[0] / 0.75)) * SCALES[0] / 0.75
    kept = y != 0
    torch.testing.assert_close(y, product * kept)
    assert 0.6 < kept.float().mean() < 0.9
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx != 0, kept), "backward drops others"

"""swiglu_mlp on a CUDA device: values and gradients, what is kept, peaks, no host waits, compiled, sharded."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits
from lowtide import swiglu_mlp
from lowtide.measure.timing import peak_above
from support import assert_near, doubled, every_pair, mlp, mlp_oracle, mlp_slack, relative_error

pytestmark = [
    *ON_GPU,
    # autograd's thread has no context yet where its first operation is a GEMM, as it is after y.backward(upstream)
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [((3, 43), 37, 101), ((1,), 64, 8), ((2, 300), 128, 344), ((0, 5), 16, 40)]


def on_gpu(*args: Any, **kwargs: Any) -> list[Any]:
    return [t if t is None else t.detach().cuda().requires_grad_() for t in mlp(*args, **kwargs)]


def call(leaves: list[Any], **options: Any) -> Tensor:
    names = ("gate_bias", "up_bias", "down_bias")
    return swiglu_mlp(*leaves[:4], **dict(zip(names, leaves[4:], strict=True)), **options)


def gradients(y: Tensor, leaves: list[Any], upstream: Tensor, **kwargs: Any) -> list[Tensor]:
    trained = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, trained, upstream.to(y.dtype), **kwargs)]


@every_pair(dtype=DTYPES, shape=SHAPES, activation=["silu", "gelu_tanh"])
def test_values_and_gradients_err_no_more_than_plain_pytorch(dtype: torch.dtype, shape: Any, activation: str) -> None:
    leaves = on_gpu(*shape, dtype=dtype)
    true = doubled(*leaves)
    upstream = torch.randn(leaves[0].shape, device="cuda")
    expected = gradients(mlp_oracle(true, activation), true, upstream)
    plain = gradients(mlp_oracle(leaves, activation), leaves, upstream)
    for level, tile in itertools.product((0, 1), (None, 100)):
        y = call(leaves, activation=activation, checkpoint_level=level, tile_tokens=tile)
        twice = gradients(y, leaves, upstream, retain_graph=True)
        got = gradients(y, leaves, upstream)  # in place now
        for g, again, p, e in zip(got, twice, plain, expected, strict=True):
            assert g.dtype == dtype
            assert torch.equal(g, again)
            assert relative_error(g, e) <= 1.3 * relative_error(p, e) + mlp_slack(dtype, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [None, 50])
def test_autocast_returns_gradients_in_the_weights_dtype(dtype: torch.dtype, tile: int | None) -> None:
    leaves = on_gpu((2, 77), 64, 168)
    true = doubled(*leaves)
    upstream = torch.randn(2, 77, 64, device="cuda")
    expected = gradients(mlp_oracle(true), true, upstream)
    with torch.autocast("cuda", dtype):
        y, z = call(leaves, tile_tokens=tile), mlp_oracle(leaves)
    assert y.dtype == z.dtype == dtype
    got, plain = gradients(y, leaves, upstream), gradients(z, leaves, upstream)
    for g, p, e in zip(got[1:], plain[1:], expected[1:], strict=True):
        assert g.dtype == torch.float32
        assert relative_error(g, e) <= 1.3 * relative_error(p, e)


@pytest.mark.parametrize("level", [0, 1])
def test_kept_bytes_and_peaks(level: int) -> None:
    N, D, F = 4096, 512, 1536  # whole MiB: the allocator does not split off less than one
    leaves = on_gpu(N, D, F, dtype=torch.bfloat16, bias=False)
    token = 2 * N  # bytes of a bfloat16 number a token
    upstream = torch.randn(N, D, device="cuda", dtype=torch.bfloat16)

    def step(x: Tensor) -> Any:
        return call([x, *leaves[1:]], checkpoint_level=level)

    step(leaves[0]).backward(upstream)
    for leaf in leaves[:4]:
        leaf.grad = None
    x = (leaves[0] * 1).detach().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a block that earlier tests left may be up to a MiB larger than what it is taken for
    before = torch.cuda.memory_allocated()
    y = step(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert kept == (2 * F * token if level == 0 else 0)
    weights = 3 * D * F * 2
    peak = peak_above(lambda: y.backward(upstream), "cuda")
    # above what is kept: the product's gradient (and at level 1 gate and up), dX, and the weights' gradients
    most = (F if level == 0 else 3 * F) * token + D * token + weights
    assert peak <= most + 2**20
    for leaf in (x, *leaves[1:4]):
        leaf.grad = None
    peak = peak_above(lambda: step(x), "cuda")
    assert peak <= (3 * F if level == 0 else 2 * F) * token + D * token + 2**20


@pytest.mark.parametrize("level", [0, 1])
def test_a_tile_bounds_what_a_step_holds(level: int) -> None:
    N, D, F, C = 8192, 256, 2048, 1024
    leaves = on_gpu(N, D, F, dtype=torch.bfloat16, bias=False)

    def step(tile: int | None) -> None:
        for leaf in leaves[:4]:
            leaf.grad = None
        call(leaves, checkpoint_level=level, tile_tokens=tile).sum().backward()

    peaks = []
    for tile in (None, C):
        step(tile)
        for leaf in leaves[:4]:
            leaf.grad = None
        peaks.append(peak_above(lambda tile=tile: step(tile), "cuda"))
    saved = (1 if level == 0 else 3) * F * (N - C) * 2 - 3 * D * F * 6  # the sums are in float32
    assert peaks[0] - peaks[1] > 0.9 * saved


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tile", [None, 512])
def test_bitwise_the_same_and_no_synchronisation(level: int, tile: int | None) -> None:
    leaves = on_gpu((2, 700), 256, 688, dtype=torch.bfloat16)
    upstream = torch.randn(2, 700, 256, device="cuda")
    found = []
    for waits in (nullcontext, no_waits):  # the first time compiles
        with waits():
            found.append(gradients(call(leaves, checkpoint_level=level, tile_tokens=tile), leaves, upstream))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_outside_the_tensors_is_written() -> None:
    """Odd sizes, whose last block of a kernel goes beyond the end."""
    from lowtide.mlp.kernels import gated as kernels

    for n in (1, 37, kernels.BLOCK - 1, kernels.BLOCK + 5):
        room = torch.full((3, n + 16), torch.nan, device="cuda", dtype=torch.bfloat16)
        room[:, :n] = torch.randn(3, n, device="cuda")
        gate, up, grad = room[:, :n].clone().unbind(0)
        kernels.gated_backward(*(room[i, :n] for i in range(3)), "silu", *(room[i, :n] for i in range(3)))
        true = [t.double().requires_grad_() for t in (gate, up)]
        p = true[0] * torch.sigmoid(true[0]) * true[1]
        wanted = [*torch.autograd.grad(p, true, grad.double()), p]
        for got, e in zip(room, wanted, strict=True):
            torch.testing.assert_close(got[:n].double(), e, rtol=2**-8, atol=1e-7)
        assert room[:, n:].isnan().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("level", [0, 1])
def test_compiled_whole(level: int) -> None:
    torch._dynamo.reset()
    leaves = on_gpu((2, 60), 64, 168, dtype=torch.bfloat16)
    upstream = torch.randn(2, 60, 64, device="cuda")
    compiled = torch.compile(lambda *t: call(list(t), checkpoint_level=level) * 2, fullgraph=True)
    got = gradients(compiled(*leaves), leaves, upstream)
    expected = gradients(call(leaves, checkpoint_level=level) * 2, leaves, upstream)
    assert_near(got, expected, 4e-3)

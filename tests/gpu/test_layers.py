"""Norms and rotations on a CUDA device: values at real sizes, no host synchronisation, bitwise the same, far heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contract import references
from gpu.conftest import ON_GPU, no_waits
from lowtide.layers import add_rms_norm, rms_norm, rotary
from lowtide.layers.norm import why_no_kernel
from promises import promise
from support import assert_near, doubled, every_pair

pytestmark = [*ON_GPU, promise("values", "kernels")]
EPS = 1e-5
# Roundings of float32 sums, and one rounding at random of a result
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.2e-3, torch.float16: 2.8e-4}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=g, device="cuda", dtype=torch.float64).to(dtype)
    return x.requires_grad_(grad)


@every_pair(
    dtype=TOLERANCE,
    shape=[(7, 37), (2, 300, 8, 128), (33, 5003), (9, 32768), (3, 40000)],
    offset=[0.0, 1.0],
    rounding=["before_weight", "after_weight"],
)
def test_norm(dtype: torch.dtype, shape: tuple[int, ...], offset: float, rounding: Any) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(x, weight, EPS, offset=offset, rounding=rounding)
    true = doubled(x, weight)
    loose = TOLERANCE[dtype] * (1.5 if rounding == "before_weight" else 1)
    (expected,) = references.rms_norm(*true, EPS, offset)
    upstream = random(*shape, dtype=dtype, seed=2, grad=False)
    got = torch.autograd.grad(out, (x, weight), upstream)
    want = torch.autograd.grad(expected, true, upstream.double())
    assert [g.dtype for g in (out, *got)] == [dtype] * 3
    assert_near((out, *got), (expected, *want), loose)
    assert (why_no_kernel(x, weight) is None) == (dtype != torch.float64 and shape[-1] <= 32768)


def layer(x: Tensor, residual: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed, total = add_rms_norm(x, residual, weight, EPS, rounding="before_weight")
    heads = rms_norm(total, weight, EPS).view(1, -1, 8, 64).transpose(1, 2)
    q, k = rotary(heads[:, :6], heads[:, 6:], cos, sin)
    return (normed.float().square().sum() + torch.cat((q, k), 1).float().square().sum()) / x.numel()


def layer_inputs() -> tuple[Tensor, ...]:
    N = 300
    x, residual = (random(N, 512, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    weight = random(512, dtype=torch.bfloat16, seed=2)
    cos, sin = (random(1, N, 64, seed=s, grad=False) for s in (3, 4))
    return x, residual, weight, cos, sin


@promise("bitwise", "host")
def test_bitwise_the_same_and_no_synchronisation() -> None:
    inputs = layer_inputs()
    first = torch.autograd.grad(layer(*inputs), inputs[:3])
    with no_waits():
        again = torch.autograd.grad(layer(*inputs), inputs[:3])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rotary_of_heads_that_lie_far_apart() -> None:
    """A long sequence with its heads first: one head begins more than 2**31 values behind the first."""
    apart, T, d = 2**30, 5, 64
    far = torch.empty(2 * apart + T * d, device="cuda", dtype=torch.bfloat16)
    q = far.as_strided((1, 3, T, d), (0, apart, d, 1))
    near = random(1, 3, T, d, dtype=torch.bfloat16, grad=False)
    q.copy_(near)
    k = random(1, 1, T, d, dtype=torch.bfloat16, seed=1, grad=False)
    angles = random(1, T, d // 2, seed=2, grad=False)
    cos, sin = (table.repeat(1, 1, 2).bfloat16() for table in (angles.cos(), angles.sin()))
    for got, want in zip(rotary(q, k, cos, sin), rotary(near, k, cos, sin), strict=True):
        assert torch.equal(got, want)

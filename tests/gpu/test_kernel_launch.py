"""Kernels launched again by what they were compiled to: the same as by Triton's own launch, whatever changes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from gpu.conftest import ON_GPU
from lowtide.kernel_launch import Launcher
from promises import promise

pytestmark = [*ON_GPU, promise("kernels")]
BLOCK = 64
STEPS = [(1, 1), (16, 2), (37, 1), (130, 16), (128, 3)]  # n and step: a 1 and multiples of 16 are specialised on


class Line(NamedTuple):
    out: Tensor
    shift: Tensor | None
    numbers: tuple[int, float]  # step, slope


@Launcher
@triton.jit(do_not_specialize=["free"])
def _affine(x_ptr, line, n, free, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out_i = slope x_(i step) + free, doubled and shifted where asked for."""
    step, slope = line.numbers
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + i * step, mask=i < n, other=0.0).to(tl.float32) * slope + free
    if line.shift is not None:
        value += tl.load(line.shift)
    if DOUBLE:
        value *= 2
    tl.store(line.out + i, value, mask=i < n)


def affine(
    x: Tensor, n: int, step: int = 1, free: int = 1, slope: float = 1.0, double: bool = False, shift: float = 0.0
) -> None:
    """Launch it twice, compiled and then remembered, and compare; outside of its n numbers the result stays NaN."""
    for _ in range(2):
        out = torch.full((n + 8,), torch.nan, device="cuda")
        line = Line(out[:n], torch.full((), shift, device="cuda") if shift else None, (step, slope))
        _affine[(triton.cdiv(n, BLOCK),)](x, line, n, free, DOUBLE=double, BLOCK=BLOCK)
        want = x[::step][:n].float() * slope + free + shift
        torch.testing.assert_close(out[:n], want * (1 + double), rtol=1e-6, atol=1e-6)
        assert out[n:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1, 8])  # 0 and 8 lie at multiples of 16 bytes
def test_every_change_between_launches(dtype: torch.dtype, offset: int) -> None:
    x = torch.randn(4096, device="cuda").to(dtype)[offset:]
    for n, step in STEPS:
        affine(x, n, step)
        affine(x, n, step, free=16, slope=-2.5, double=True)
        affine(x, n, step, free=2**20 + 1, slope=0.5, shift=0.25)

"""Kernels launched again by what they were compiled to: the same as by Triton's own launch, whatever changes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from lowtide.kernel_launch import MOST_VARIANTS, Launcher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64


@Launcher
@triton.jit(do_not_specialize=["free"])
def _affine(x_ptr, shift_ptr, out_ptr, n, step, free, slope, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out_i = slope x_(i step) + free, doubled and shifted where asked for."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + i * step, mask=i < n, other=0.0).to(tl.float32) * slope + free
    if shift_ptr is not None:
        value += tl.load(shift_ptr)
    if DOUBLE:
        value *= 2
    tl.store(out_ptr + i, value, mask=i < n)


def affine(x: Tensor, n: int, step: int, free: int, slope: float, double: bool, shift: Tensor | None) -> Tensor:
    """Launch it; outside of its n numbers the result stays NaN."""
    out = torch.full((n + 8,), torch.nan, device=DEVICE)
    grid = (triton.cdiv(n, BLOCK),)
    _affine[grid](x, shift, out[:n], n, step, free, slope, DOUBLE=double, BLOCK=BLOCK)
    return out


def test_every_change_between_launches() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16):
        whole = torch.randn(4096, generator=g).to(DEVICE, dtype)
        for offset in (0, 1, 8):  # 0 and 8 lie at multiples of 16 bytes
            for n, step in ((1, 1), (16, 2), (37, 1), (130, 16), (128, 3)):
                for free, slope, double, shifted in (
                    (1, 1.0, False, False),
                    (16, -2.5, True, False),
                    (2**20 + 1, 0.5, False, True),
                ):
                    shift = torch.full((), 0.25, device=DEVICE) if shifted else None
                    for _ in range(2):  # compiled, and then remembered
                        out = affine(whole[offset:], n, step, free, slope, double, shift)
                        want = whole[offset::step][:n].float() * slope + free + 0.25 * shifted
                        torch.testing.assert_close(out[:n], want * (1 + double), rtol=1e-6, atol=1e-6)
                        assert out[n:].isnan().all()


class Line(NamedTuple):
    out: Tensor
    shift: Tensor | None
    numbers: tuple[int, int, float]  # n, step, slope


@Launcher
@triton.jit
def _affine_of_record(x_ptr, line, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n, step, slope = line.numbers
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + i * step, mask=i < n, other=0.0).to(tl.float32) * slope
    if line.shift is not None:
        value += tl.load(line.shift)
    tl.store(line.out + i, value, mask=i < n)


def test_every_change_within_a_record() -> None:
    """All of its numbers are specialised on, a 1 and multiples of 16 too; a part that is None is compiled out."""
    whole = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for offset in (0, 1):
        for n, step, slope in ((1, 1, 1.0), (16, 2, 0.5), (37, 1, 1.0), (130, 16, -2.5), (128, 3, 1.0)):
            for shift in (None, torch.full((), 0.25, device=DEVICE)):
                for _ in range(2):  # compiled, and then remembered
                    out = torch.full((n + 8,), torch.nan, device=DEVICE)
                    record = Line(out[:n], shift, (n, step, slope))
                    _affine_of_record[(triton.cdiv(n, BLOCK),)](whole[offset:], record, BLOCK=BLOCK)
                    want = whole[offset::step][:n] * slope + (0.0 if shift is None else 0.25)
                    torch.testing.assert_close(out[:n], want, rtol=1e-6, atol=1e-6)
                    assert out[n:].isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_kernels_are_remembered_and_not_without_end() -> None:
    x = torch.randn(64, device=DEVICE)
    before = len(_affine._compiled)
    for free in range(3, 50):  # not specialised on
        affine(x, 64, 1, free, float(free), False, None)
    assert len(_affine._compiled) <= before + 1
    for n in range(1, MOST_VARIANTS + 10):
        _affine._compiled.setdefault((n,), None)
    affine(x, 63, 1, 1, 1.0, False, None)
    assert len(_affine._compiled) <= MOST_VARIANTS

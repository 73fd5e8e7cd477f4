"""Elementary functions for kernels, with full relative precision where the obvious formula cancels, and single passes
over tokens or gradients: select the valid tokens, put them first; scale a gradient.

N tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, multiprocessors

SELECT_BLOCK, SCALE_BLOCK = 1024, 4096
SCALE_PROGRAMS = 16  # a multiprocessor


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x): its series near 0, where 1 - exp(-2|x|) would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    xx = x * x
    near = x * (1.0 + xx * (-1.0 / 3.0 + xx * (2.0 / 15.0 - xx * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def log1p_near(r):  # type: ignore[no-untyped-def]
    """log(1 + r) of r from -1/2 to 1 as 2 atanh(r / (2 + r)), to the last bits also where r is 1e-7."""
    s = r / (2.0 + r)
    ss = s * s
    high = 1.0 / 9.0 + ss * (1.0 / 11.0 + ss * (1.0 / 13.0 + ss * (1.0 / 15.0 + ss * (1.0 / 17.0))))
    return 2.0 * s * (1.0 + ss * (1.0 / 3.0 + ss * (1.0 / 5.0 + ss * (1.0 / 7.0 + ss * high))))


@triton.jit
def log1p(r):  # type: ignore[no-untyped-def]
    """log(1 + r) of r >= -1/2."""
    return tl.where(r <= 1.0, log1p_near(r), tl.log(1.0 + r))


@triton.jit
def expm1(x):  # type: ignore[no-untyped-def]
    """exp(x) - 1 of x <= 0 (Kahan)."""
    u = tl.exp(x)
    far = x < -20.0  # further on u is subnormal, and its logarithm is not x
    near = (u == 1.0) | far
    return tl.where(near, tl.where(far, -1.0, x), (u - 1.0) * (x / tl.where(near, 1.0, tl.log(u))))


@Launcher
@triton.jit(do_not_specialize=["N", "ignore_index"])  # type: ignore[untyped-decorator]
def _select(target_ptr, weight_ptr, out, N, V, ignore_index, shard, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    y_ptr, unit_ptr, number_ptr = out
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    target = tl.load(target_ptr + i, mask=inside, other=0)
    kept = inside & (target != ignore_index)
    is_class = (target >= 0) & (target < V)
    y = tl.where(is_class, target, 0)
    unit = tl.full((BLOCK,), 1.0, tl.float32)
    if weight_ptr is not None:
        unit = tl.load(weight_ptr + i, mask=inside, other=0.0)
    unit = tl.where(is_class, unit, float("nan"))
    if shard is not None:
        first, width, elsewhere = shard
        y -= first
        y = tl.where((y >= 0) & (y < width), y, elsewhere)
    tl.store(y_ptr + i, tl.where(kept, y, -1).to(tl.int32), mask=inside)
    tl.store(unit_ptr + i, tl.where(kept, unit, 0.0), mask=inside)
    tl.store(number_ptr + tl.program_id(0), tl.sum(kept.to(tl.int32), 0))


@Launcher
@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _put_valid_first(y_ptr, unit_ptr, number_ptr, out, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a block's tokens to their places: the valid ones in order, then the others."""
    y_out, unit_out, index_ptr, count_ptr = out
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    total = 0
    earlier = 0
    for b in range(0, blocks, BLOCK):
        at = b + tl.arange(0, BLOCK)
        number = tl.load(number_ptr + at, mask=at < blocks, other=0)
        total += tl.sum(number, 0)
        earlier += tl.sum(tl.where(at < block, number, 0), 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    y = tl.load(y_ptr + i, mask=inside, other=-1)
    valid = (y >= 0).to(tl.int32)
    until = earlier + tl.cumsum(valid, 0)
    place = tl.where(y >= 0, until - 1, total + i - until)
    tl.store(index_ptr + place, i.to(tl.int64), mask=inside)
    tl.store(y_out + place, y, mask=inside)
    tl.store(unit_out + place, tl.load(unit_ptr + i, mask=inside, other=0.0), mask=inside)
    if block == 0:
        tl.store(count_ptr, total)


def select(
    target_N: Tensor, V: int, ignore_index: int, token_weight_N: Tensor | None,
    shard: tuple[int, int, int] | None = None,
) -> "Selection":  # fmt: skip
    """Return what is known of tokens with these contiguous int64 targets.

    Classes are int32 [N], -1 for ignored tokens, 0 for those whose target is no class; what a token counts is float32
    [N], 0 if ignored, NaN if its target is no class. ``shard`` is, where the vocabulary is sharded, this rank's first
    class, how many it has, and what stands in the place of the others; classes are then counted from its first one.
    """
    N = target_N.numel()
    blocks = max(1, triton.cdiv(N, SELECT_BLOCK))
    y_N = torch.empty(N, dtype=torch.int32, device=target_N.device)
    found = Selection(y_N, torch.empty_like(y_N, dtype=torch.float32), y_N.new_empty(blocks))
    _select[(blocks,)](target_N, token_weight_N, tuple(found), N, V, ignore_index, shard, BLOCK=SELECT_BLOCK)
    return found


class Selection(NamedTuple):
    """What `select` finds."""

    y_N: Tensor
    unit_N: Tensor
    numbers: Tensor  # int32: how many tokens of each block are valid

    def valid_first(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (classes, what each token counts) of valid tokens in order, then of the others; and how they lie.

        That is each row's place among the tokens (int64 [N]), and how many tokens are valid (int32 [1]).
        """
        y_N, new = self.y_N, torch.empty_like
        found = new(y_N), new(self.unit_N), new(y_N, dtype=torch.int64), y_N.new_empty(1)
        _put_valid_first[(len(self.numbers),)](*self, found, len(y_N), BLOCK=SELECT_BLOCK)
        return found


def valid_first(kept_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of tokens, those that are ``kept_N`` (bool) first, and how many they are (int32 [1])."""
    return select(torch.where(kept_N, 0, -1), 1, -1, None).valid_first()[2:]


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _scale(x_ptr, factor_ptr, rows, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row times its factor: the product in the factor's dtype, the result rounded to x's. What is 0 stays 0."""
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (block // blocks).to(tl.int64)
        factor = tl.load(factor_ptr + row)
        if factor != 1.0:
            column = (block % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            at, inside = row * columns + column, column < columns
            x = tl.load(x_ptr + at, mask=inside).to(factor.dtype)
            tl.store(x_ptr + at, tl.where(x == 0.0, x, x * factor).to(x_ptr.dtype.element_ty), mask=inside)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply ``x`` (contiguous) with ``factor`` (float32 or float64) in place.

    The factor is 0-d, or has one value [N] for each row of ``x`` [N, D], contiguous.
    """
    if x.numel():
        rows = factor.numel()
        columns = x.numel() // rows
        # where the factor is 1, launching a program a block would take longest
        programs = min(rows * triton.cdiv(columns, SCALE_BLOCK), SCALE_PROGRAMS * multiprocessors(x.device))
        _scale[(programs,)](x, factor, rows, columns, BLOCK=SCALE_BLOCK)

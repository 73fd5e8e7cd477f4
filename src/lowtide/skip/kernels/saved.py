"""What forward saves of each row's tiles, for gradients that are computed in backward from some of them.

C rows of a chunk, N tokens, P tiles across the vocabulary. Of token i and each tile, in bfloat16, over its classes but
the target, p the probabilities (with a soft cap times ``1 - (z / softcap)**2``, as E is):

    saved [N, 2, P]:    sum of p,    sum of p^2 - (sum of p)^2 / 256

(256, or the number of classes in the last tile). In backward E is p times a factor of each row, from 1 to 2: see
`exp_rows.prepare_rows`. The tiles that are kept then follow from these numbers: see `choice`.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1
from lowtide.head.kernels.exp_logits import Stored
from lowtide.head.kernels.exp_terms import block_of
from lowtide.head.kernels.gemm import ALL, Used, counted_rows
from lowtide.kernel_launch import Launcher
from lowtide.skip.kernels.choice import classes_in


@Launcher
@triton.jit(do_not_specialize=["C", "V", "P"])  # type: ignore[untyped-decorator]
def _save_tiles(  # type: ignore[no-untyped-def]
    sums_ptr, masses_ptr, squares_ptr, stride, miss_ptr, y_ptr, to_ptr, saved_ptr, used, C, V, P, BLOCK: tl.constexpr
):  # fmt: skip
    """A program per row. Sums are over those of all tiles, whatever they are relative to."""
    i = tl.program_id(0)
    y = tl.where(i < counted_rows(used, C), tl.load(y_ptr + i), -1)
    end = tl.where(y >= 0, P, 0)
    to = tl.load(to_ptr + i).to(tl.int64)
    sums_ptr += i.to(tl.int64) * stride
    if masses_ptr is None:
        masses_ptr = sums_ptr
    else:
        masses_ptr += i.to(tl.int64) * stride
    squares_ptr += i.to(tl.int64) * stride
    total = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P, BLOCK):
        at = p + tl.arange(0, BLOCK)
        total += tl.load(sums_ptr + at, mask=at < end, other=0.0)
    whole = tl.sum(total, 0)
    factor = -expm1(-tl.load(miss_ptr + i)) / tl.where(whole == 0.0, 1.0, whole)
    for p in range(0, P, BLOCK):
        at = p + tl.arange(0, BLOCK)
        mass = tl.load(masses_ptr + at, mask=at < end, other=0.0)
        varied = tl.load(squares_ptr + at, mask=at < end, other=0.0) - mass * (mass / classes_in(at, V))
        root = tl.sqrt(tl.where(varied < 0.0, 0.0, varied)) * factor  # NaN stays
        out = saved_ptr + to * (2 * P) + at
        tl.store(out, (mass * factor).to(saved_ptr.dtype.element_ty), mask=at < P)
        tl.store(out + P, (root * root).to(saved_ptr.dtype.element_ty), mask=at < P)


@Launcher
@triton.jit(do_not_specialize=["C", "V", "P"])  # type: ignore[untyped-decorator]
def _take_tiles(  # type: ignore[no-untyped-def]
    saved_ptr, from_ptr, lse_ptr, reference_ptr, sums_ptr, squares_ptr, stride, used, C, V, P, BLOCK: tl.constexpr
):  # fmt: skip
    """A program per row."""
    i = tl.program_id(0)
    if i < counted_rows(used, C):
        saved_ptr += tl.load(from_ptr + i).to(tl.int64) * (2 * P)
        factor = tl.exp(tl.load(lse_ptr + i) - tl.load(reference_ptr + i))
        for p in range(0, P, BLOCK):
            at = p + tl.arange(0, BLOCK)
            mass = tl.load(saved_ptr + at, mask=at < P, other=0.0).to(tl.float32) * factor
            varied = tl.load(saved_ptr + P + at, mask=at < P, other=0.0).to(tl.float32) * factor * factor
            out = i.to(tl.int64) * stride + at
            tl.store(sums_ptr + out, mass, mask=at < P)
            tl.store(squares_ptr + out, varied + mass * (mass / classes_in(at, V)), mask=at < P)


def save_tiles(
    sums_CP: Tensor, stored: Stored, miss_C: Tensor, y_C: Tensor, to_C: Tensor, saved: Tensor, V: int,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Write the rows' part of ``saved`` [N, 2, P] at their places ``to_C``; of rows that do not count it is 0.

    From the sums of the exponentials in each tile, and of E as it is stored.
    """
    C, P = sums_CP.shape
    _save_tiles[(C,)](
        sums_CP, stored.masses, stored.squares, sums_CP.stride(0), miss_C, y_C, to_C, saved, used, C, V, P,
        BLOCK=block_of(P), num_warps=4,
    )  # fmt: skip


def take_tiles(
    saved: Tensor, from_C: Tensor, lse_C: Tensor, reference_C: Tensor, sums_CP: Tensor, squares_CP: Tensor, V: int,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Write what rows of E sum to in each tile, and of its squares, of the rows from places ``from_C``."""
    C, P = sums_CP.shape
    _take_tiles[(C,)](
        saved, from_C, lse_C, reference_C, sums_CP, squares_CP, sums_CP.stride(0), used, C, V, P,
        BLOCK=block_of(P), num_warps=4,
    )  # fmt: skip

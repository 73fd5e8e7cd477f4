"""Checksums of samples of all weights of a layer by one launch: their addresses are arguments of the kernel.

A table of addresses on the device would have to be written again whenever a weight moves, as FSDP2's do in each step,
and would need care on streams and in CUDA graphs.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher

BLOCK = 2048
MOST = 32  # weights of a launch


@Launcher
@triton.jit(debug=True, do_not_specialize=["first"])  # type: ignore[untyped-decorator]  # else no assertions
def _sum_samples(  # type: ignore[no-untyped-def]
    pointers, sums_ptr, first,
    COUNTS: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: sum_k x_i[k STEPS_i] (2 (first + sum_(j < i) COUNTS_j + k) + 1) over COUNTS_i samples, mod 2^64."""
    here = tl.program_id(0)
    pointer, count, step = pointers[0], COUNTS[0], STEPS[0]
    start = first.to(tl.int64)
    begin = start
    for i in tl.static_range(1, len(COUNTS)):
        start += COUNTS[i - 1]
        pointer = tl.where(here == i, pointers[i], pointer)
        count = tl.where(here == i, COUNTS[i], count)
        step = tl.where(here == i, STEPS[i], step)
        begin = tl.where(here == i, start, begin)
    x_ptr = pointer.to(tl.pointer_type(tl.dtype(f"int{BITS}")))
    total = tl.zeros((BLOCK,), tl.int64)
    for offset in range(0, count, BLOCK):
        k = offset + tl.arange(0, BLOCK).to(tl.int64)
        bits = tl.load(x_ptr + k * step, mask=k < count, other=0).to(tl.int64)
        total += bits * (2 * (begin + k) + 1)
    found = tl.sum(total)
    if CHANGED is None:
        tl.store(sums_ptr + here, found)
    else:
        tl.device_assert(found == tl.load(sums_ptr + here), CHANGED)


def sum_samples(
    weights: Sequence[Tensor],
    counts: tuple[int, ...],
    steps: tuple[int, ...],
    sums_n: Tensor,
    *,
    changed: str | None = None,
) -> None:
    """Write the checksum of each of n weights to ``sums_n`` (int64), or with ``changed`` compare it with what is there.

    Samples of weight i are every ``steps[i]``-th of its values, ``counts[i]`` in all; their factors are the odd numbers
    in order, so that the sum of all checksums is that of all samples in a row. All weights have one size of values, and
    are contiguous. ``changed`` is the message of a device-side assertion.
    """
    bits, first = 8 * weights[0].element_size(), 0
    for i in range(0, len(weights), MOST):
        pointers = tuple([x.data_ptr() for x in weights[i : i + MOST]])
        here = counts[i : i + MOST]
        _sum_samples[(len(here),)](
            pointers, sums_n[i:] if i else sums_n, first,
            COUNTS=here, STEPS=steps[i : i + MOST], BITS=bits, CHANGED=changed, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        first += sum(here)

"""Checksums of samples of all weights of a layer by one launch: their addresses are arguments of the kernel.

A table of addresses on the device would have to be written again whenever a weight moves, as FSDP2's do in each step,
and would need care on streams and in CUDA graphs.
"""

from collections.abc import Sequence
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher

BLOCK = 2048
MOST = 32  # weights of a launch
# Two numbers in one argument, as each takes the host 0.3 microseconds: a step, and below it a count.
SHIFT = tl.constexpr(32)
COUNT = tl.constexpr(2**32 - 1)


@Launcher
@triton.jit(debug=True, do_not_specialize=["first"])  # type: ignore[untyped-decorator]  # else no assertions
def _sum_samples(  # type: ignore[no-untyped-def]
    pointers, places, sums_ptr, first, BITS: tl.constexpr, CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: sum_k x_i[k step_i] (2 (first + sum_(j < i) count_j + k) + 1) over count_i samples, modulo 2^64.

    ``places`` are step_i 2^SHIFT + count_i.
    """
    here = tl.program_id(0)
    pointer, place = pointers[0], places[0]
    start = first.to(tl.int64)
    begin = start
    for i in tl.static_range(1, len(pointers)):
        start += places[i - 1] & COUNT
        pointer = tl.where(here == i, pointers[i], pointer)
        place = tl.where(here == i, places[i], place)
        begin = tl.where(here == i, start, begin)
    count, step = place & COUNT, place >> SHIFT
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
    bits, first, places = 8 * weights[0].element_size(), 0, _packed(counts, steps)
    for i in range(0, len(weights), MOST):
        pointers = tuple([x.data_ptr() for x in weights[i : i + MOST]])
        _sum_samples[(len(pointers),)](
            pointers, places[i : i + MOST], sums_n[i:] if i else sums_n, first,
            BITS=bits, CHANGED=changed, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        first += sum(counts[i : i + MOST])


@lru_cache(256)
def _packed(counts: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([step << SHIFT.value | count for count, step in zip(counts, steps, strict=True)])

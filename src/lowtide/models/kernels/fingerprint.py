"""A fingerprint of all bits of a tensor in one pass: integer sums, which come out the same in any order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of

BLOCK = 1024
EACH = 32  # blocks of a program
FACTOR = tl.constexpr(6364136223846793005)  # odd, so that no power of it loses a bit; Knuth's, of MMIX
MIX = tl.constexpr(0x5851F42D4C957F2D)


@Launcher
@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _sum_bits(x_ptr, out_ptr, n, EACH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out_p = sum over a program's lanes l of m_pl sum_t x_tl FACTOR^(EACH - t), modulo 2^64, with odd m_pl."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * (EACH * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for _ in range(EACH):
        total = total * FACTOR + tl.load(x_ptr + at, mask=at < n, other=0).to(tl.int64)
        at += BLOCK
    mixed = (lane + 1) * MIX
    mixed = (mixed ^ (mixed >> 29)) * FACTOR
    tl.store(out_ptr + tl.program_id(0), tl.sum(total * (mixed ^ (mixed >> 32) | 1)))


def sum_bits(bits_n: Tensor) -> Tensor:
    """Return a 0-d int64 that any change of a value, or of values' places, changes.

    ``bits_n`` [n] is of an integer dtype, contiguous.
    """
    programs = blocks_of(bits_n.numel(), EACH * BLOCK)
    sums = torch.empty(programs, dtype=torch.int64, device=bits_n.device)
    if programs:
        _sum_bits[(programs,)](bits_n, sums, bits_n.numel(), EACH=EACH, BLOCK=BLOCK)
    return sums.sum()

"""Whether tensors still have the same values: a fingerprint of all of their bits.

A version counter counts the writes that autograd sees. It misses writes to ``.data`` (averaged weights swapped in for
an evaluation) and, in some releases, fused optimizers. The fingerprint is a sum, modulo 2^64, of the bits times odd
factors that depend on the position: it detects every change of one value, and any other change but for a chance of
2^-64. It takes one pass over the memory, little beside the GEMMs of some hundred tokens, and no synchronisation.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.kernel_launch import why_no_triton

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # values that are summed at a time, whose factors stay in the cache
_LEVELS = 8  # of sums of sums: more than memory has
_SHARE = 2**20  # values that are worth a thread, or an operation on another device


def fingerprint(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """Return int64 [k], a number per tensor of any dtype and strides; for a DTensor that of this rank's shard.

    None among ``tensors`` is left out. On the meta device, where tensors have no values, the result is None.
    """
    held: list[Any] = [x for x in tensors if x is not None]
    with torch.no_grad():  # for to_local(); to detach a DTensor is an error in inference mode
        here: list[Tensor] = [x.to_local() if is_dtensor(x) else x.detach() for x in held]
        if any(x.is_meta for x in here):
            return None
        return torch.stack([_of(x).to(here[0].device) for x in here])


def _of(x: Tensor) -> Tensor:
    strides = x.stride()
    x = x.permute(sorted(range(x.dim()), key=lambda axis: -strides[axis]))  # a transposed weight is not copied
    x = x.contiguous().view(-1)
    octets = x.view(torch.uint8)
    whole, aligned = octets.numel() // 8 * 8, octets.storage_offset() % 8 == 0
    if why_no_triton(x.device) is None:
        from lowtide.models.kernels.fingerprint import sum_bits

        by_eight = aligned and whole == octets.numel()
        with torch.cuda.device(x.device):
            return sum_bits(octets.view(torch.int64) if by_eight else x.view(INTEGERS[x.dtype.itemsize]))
    if not aligned:  # within another tensor, of which a view has to begin at eight bytes
        octets = octets.clone()
    values = torch.cat([octets[whole:], octets.new_zeros(whole + 8 - octets.numel())]).view(torch.int64)
    return _sum(octets[:whole].view(torch.int64)) + values[0]


def _sum(values: Tensor) -> Tensor:
    """Return the sum of int64 values [n] times factors of their places."""
    factors = _factors(values.device)
    for level in range(_LEVELS - 1):
        rows = values.numel() // _ROW
        if values.numel() <= _ROW:
            break
        whole = values[: rows * _ROW].view(rows, _ROW)
        values = torch.cat([_row_sums(whole, factors[level]), values[rows * _ROW :]])
    return (values * factors[-1, : values.numel()]).sum()


def _row_sums(values: Tensor, factors: Tensor) -> Tensor:
    if values.device.type != "cpu":  # which multiplies no matrices of integers
        return torch.cat([(block * factors).sum(1) for block in torch.split(values, _SHARE // _ROW)])
    # On the CPU that product runs on one thread, so each takes a share of the rows. No parallel region is opened.
    threads = min(torch.get_num_threads(), values.numel() // _SHARE)
    if threads < 2:
        return values.mv(factors)
    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(lambda share: share.mv(factors), values.chunk(threads))))


@cache
def _factors(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**62), 2**62, (_LEVELS, _ROW), generator=generator, device="cpu")
        return (bits | 1).to(device)

"""Rows grouped by expert, and the GEMMs of each group with its expert's weight.

T tokens, K experts per token, S = T K rows, E experts.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 16  # bytes, of each stride of an operand of PyTorch's grouped GEMM
_NARROW = 8  # columns: a sum over the rows of a group is a GEMM with so many columns


class Form(NamedTuple):
    """What an expert computes between its GEMMs: ``h = act(g) (u + shift)``.

    g is gate, at most ``limit``, and u is up, from ``-limit`` to ``limit``. act is ``g sigmoid(alpha g)`` for
    ``"silu"``, and ``"gelu_tanh"`` has no alpha.
    """

    activation: str
    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0
    joined: str = "gate first"  # where gate and up are among the 2F columns: a key of `lowtide.mlp.call.JOINED`


class Inner(NamedTuple):
    """Gate and up of all rows, without their bias."""

    gate_up: Tensor  # [S, 2F]
    bias: Tensor | None  # [E, 2F]
    expert: Tensor  # [S], int32: the expert of each row, E for rows of none
    experts: int  # E
    form: Form


class Pairs(NamedTuple):
    """The pairs of each token and one of its experts."""

    inverse: Tensor  # [T, K], int32: the row of each
    ids: Tensor  # [T, K], int64: its expert, E for those that add nothing
    experts: int  # E


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of the pairs ``ids`` [T, K] by expert, and where each expert's rows end, int32 [S] and [E].

    Pairs of one expert stay in their order. Nothing waits for the device.
    """
    # Few bits make the sort short. An id above the last expert stays above it.
    keys = ids.reshape(-1).clamp(max=experts).to(torch.int16 if experts < 2**15 else torch.int64)
    keys, order = torch.sort(keys, stable=True)
    every = torch.arange(experts, device=ids.device, dtype=keys.dtype)
    return order.to(torch.int32), torch.searchsorted(keys, every, right=True, out_int32=True)


def inverse_of(order: Tensor) -> Tensor:
    """Return the place of each pair among the sorted rows, int32 [S]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device, dtype=order.dtype)
    return inverse


class Groups:
    """Rows [S, .] sorted by expert, of which those of expert e end at ``ends[e]``.

    A GEMM of all groups is PyTorch's grouped GEMM on CUDA, in bfloat16 with sizes of whole 16 bytes. In other cases it
    is one GEMM for each expert that has rows, and the host has to read ``ends``.
    """

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends
        self._read: list[int] | None = None

    def times(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the rows [S, in] of each group times its expert's matrix of ``weight`` [E, in, out]."""
        if _has_grouped(rows, weight):
            return torch._grouped_mm(rows, weight, offs=self._ends)
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for e, group in self._groups():
            torch.mm(rows[group], weight[e], out=out[group])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left^T right`` [E, M, N] of each group, from rows [S, M] and [S, N]; 0 for a group without rows."""
        if _has_grouped(left, right):
            return torch._grouped_mm(left.T, right, offs=self._ends)
        out = left.new_zeros(self._ends.shape[0], left.shape[1], right.shape[1])
        for e, group in self._groups():
            torch.mm(left[group].T, right[group], out=out[e])
        return out

    def sums(self, rows: Tensor, factors: Tensor | None = None) -> Tensor:
        """Return the sum of each group's rows [E, N], each times its factor of ``factors`` [S]."""
        columns = rows.new_ones(1, 1) if factors is None else factors.to(rows.dtype)[:, None]
        return self.outer(rows, columns.expand(rows.shape[0], _NARROW).contiguous())[..., 0].contiguous()

    def _groups(self) -> list[tuple[int, slice]]:
        """Return each expert that has rows, and where they are."""
        if self._read is None:
            self._read = self._ends.tolist()
        starts = (0, *self._read[:-1])
        spans = zip(starts, self._read, strict=True)
        return [(e, slice(start, end)) for e, (start, end) in enumerate(spans) if end > start]


def _has_grouped(*operands: Tensor) -> bool:
    """Return whether PyTorch's grouped GEMM takes these operands without a loop of its own."""
    if not operands[0].is_cuda or operands[0].dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(operands[0].device) < (9, 0):
        return False
    return all(_is_aligned(operand) for operand in operands)


def _is_aligned(operand: Tensor) -> bool:
    """Return whether all sizes of an operand but its first, its strides and its start are whole 16 bytes."""
    wide = [stride for stride in operand.stride()[-2:] if stride != 1]
    numbers = (*operand.shape[1:], *operand.stride()[:-2], *wide, operand.storage_offset())
    return len(wide) == 1 and operand.numel() > 0 and all(n * operand.element_size() % _ALIGNED == 0 for n in numbers)

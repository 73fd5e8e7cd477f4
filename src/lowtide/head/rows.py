"""The rows that are computed: of hidden states [..., D], or of any tensor with tokens on its leading axes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which of N tokens a pass computes, in the order of its chunks: n rows.

    On the CPU tokens that count for nothing are dropped; elsewhere that would stop the host. There the exponential
    path's kernels take them last, and end before them: only the device has the number of the others. Other paths
    compute them as zeros, as across ranks, where all must make as many exchanges. Where tokens are spread over ranks, a
    chunk has rows of each rank's, and shorter parts are filled up.
    """

    tokens: int  # N
    index: Tensor | None = None  # [n] places among the N tokens; None: all, in order
    filled: bool = False  # whether ``index`` may be N: a row of no token
    kept: Tensor | None = None  # [n] bool: rows that count; None: all
    count: Tensor | None = None  # [1] int32: how many of ``index`` count, the first ones; None: all, or those ``kept``

    @property
    def n(self) -> int:
        """Return how many they are."""
        return self.tokens if self.index is None else self.index.numel()

    def in_order(self, order: Tensor | None) -> "Rows":
        """Return the rows in the order of a plan's chunks, if tokens are spread; None: unchanged."""
        return self if order is None else replace(self, index=order, filled=True)

    def of_each(self, known: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `of` of each."""
        return {name: self.of(x) for name, x in known.items()}

    def of(self, x_N: Tensor, fill: float = 0) -> Tensor:
        """Return values [N, ...] of the tokens as [n, ...], ``fill`` in a row of no token."""
        if self.index is None:
            return x_N
        return (torch.cat((x_N, x_N.new_full((1, *x_N.shape[1:]), fill))) if self.filled else x_N).index_select(
            0, self.index
        )

    def among_all(self, x_n: Tensor) -> Tensor:
        """Undo `of`: return [N, ...], 0 at tokens that are not computed."""
        if self.index is None:
            return x_n
        out = x_n.new_zeros(self.tokens + self.filled, *x_n.shape[1:]).index_copy_(0, self.index, x_n)
        return out[: self.tokens].clone() if self.filled else out  # autograd refuses to have a node's view written to


def slices(N: int, size: int) -> Iterator[slice]:
    """Yield the slices of ``size`` that make up N, the last one perhaps shorter."""
    for start in range(0, N, max(1, size)):
        yield slice(start, min(start + max(1, size), N))


def take_rows(x: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor:
    """Return rows ``part`` [C, D] of the tokens ``index`` (None: all, in order) of hidden states [..., D] in ``dtype``.

    A view where they lie in memory that way.
    """
    return take_leading(x, x.dim() - 1, index, part).to(dtype)


def take_leading(x: Tensor, axes: int, index: Tensor | None, part: slice) -> Tensor:
    """Return the same of a tensor [..., *rest] whose first ``axes`` axes are one axis of tokens."""
    leading = x.shape[:axes]
    if rows_are_viewable(x, axes):
        return x.view(leading.numel(), *x.shape[axes:])[part if index is None else index[part]]
    return x[places_in(leading, torch.arange(part.start, part.stop, device=x.device) if index is None else index[part])]


def places_in(leading: torch.Size, chosen: Tensor) -> tuple[Tensor, ...]:
    """Return the indices along axes ``leading`` of the tokens ``chosen``; torch.unravel_index stops the host."""
    found = []
    for size in leading[:0:-1]:
        found.append(chosen % size)
        chosen = chosen // size
    return chosen, *found[::-1]


def rows_are_viewable(x: Tensor, axes: int = -1) -> bool:
    """Return whether ``x.view(-1, D)`` exists: each of the leading axes spans exactly those after it."""
    long = [(size, stride) for size, stride in zip(x.shape[:axes], x.stride()[:axes], strict=True) if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(long))


def rows_are_aligned(x: Tensor) -> bool:
    """Return whether rows [..., D] lie at addresses that are multiples of 16 bytes, for TMA."""
    return (
        x.stride(-1) == 1
        and all(stride and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % 16 == 0
    )


def input_is_copied(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether hidden states [..., D] lie in memory in another way than the GEMMs' operands of ``dtype`` do."""
    return x.dtype != dtype or not (x.dim() == 2 or rows_are_viewable(x)) or not rows_are_aligned(x)


def looks_at_numbers(device: torch.device) -> bool:
    """Return whether what is given is checked number by number: where that does not stop the host."""
    return device.type == "cpu"


def positions(chosen_N: Tensor) -> Tensor | None:
    """Return where ``chosen_N`` is True, or None where it is everywhere; the host waits for it."""
    index = chosen_N.nonzero()[:, 0]
    return None if index.numel() == chosen_N.numel() else index


def sent(x: Tensor) -> Callable[[], Any]:
    """Begin to copy numbers to the host; return what waits until they are there, and returns them as a list."""
    there = x.to("cpu", non_blocking=True, copy=True)  # pinned
    if not x.is_cuda:
        return there.tolist
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(x.device))

    def wait() -> Any:
        arrived.synchronize()
        return there.tolist()

    return wait

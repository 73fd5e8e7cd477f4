"""Whether ignored tokens are skipped, where nothing is asked: by how many there were in the calls before.

The kernels that end before ignored tokens take a few percent longer than cuBLAS where none is ignored. The host does
not wait to learn a call's number: it counts one call in three, once the call is launched, and heeds that number AFTER
calls later, when it has arrived long ago. Only the first call of a kind, of a head and a function, waits for its own.
What is chosen follows from the calls made, never from when a number arrives: a program that runs again computes the
same bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import watched
from lowtide.head.backends import skips_ignored
from lowtide.head.call import CrossEntropyArgs, TokenStatsArgs
from lowtide.head.host_numbers import host_memory, sent

LEAST = 0.05  # the share of ignored tokens from which skipping them is faster
AFTER, AT_ONCE = 4, 8  # calls; numbers under way
NUMBERS = 16  # of so many numbers one above that is enough: batches differ, and a batch that is computed gains little
RATE = 0.309  # of calls that are counted, in no step with kinds of batches that take turns
MOST_KINDS = 64
COUNTED = (CrossEntropyArgs, TokenStatsArgs)  # records of arguments with targets
Share = Callable[[], float]


class Calls:
    """The calls of one kind: whether the next skips ignored tokens."""

    def __init__(self) -> None:
        self.numbers = host_memory(AT_ONCE, dtype=torch.int64)  # as they arrive
        self._number = 0
        self._counted: deque[tuple[int, Share]] = deque()
        self._shares: deque[float] = deque(maxlen=NUMBERS)

    @property
    def skips(self) -> bool:
        """Whether the counts that have arrived say that skipping pays."""
        return max(self._shares) > LEAST

    def launched(self, count: Callable[[Tensor], Share]) -> None:
        """Count a call's tokens, if it is one that is counted, and heed the counts that the next call is to know.

        ``count`` begins to count them into a number on the host, and returns what waits for the result.
        """
        n = self._number
        self._number += 1
        if n == 0 or int((n + 1) * RATE) > int(n * RATE):
            self._counted.append((n, count(self.numbers[n % AT_ONCE])))
        while self._counted and (n == 0 or self._counted[0][0] <= n + 1 - AFTER):
            self._shares.append(self._counted.popleft()[1]())


_calls: dict[tuple[Any, ...], Calls | None] = {}  # None: of a kind that skips nothing


def decided(
    kind: tuple[Any, ...], tensors: Sequence[Tensor], counted: Callable[[], Tensor], *, alone: bool
) -> tuple[str, Callable[[], None] | None]:
    """Return what a pass does with ignored tokens, where nothing is asked, and what is to run once it is launched.

    ``kind`` is the pass's, its record of arguments and a reduction. ``tensors`` are the hidden states, the weight and
    what the record begins with; ``counted`` gives the tokens that are computed: `kept_tokens`. ``alone``: no ranks,
    which would wait for each other if they chose unlike ways.

    Tokens are skipped where results may not depend on earlier calls: in a compiled graph, and where deterministic
    algorithms are requested. A captured graph does what the last call did.
    """
    if not alone:
        return "auto", None
    if torch.compiler.is_compiling():
        return "skip", None
    x, w, target = tensors
    device = x.device
    if device.type != "cuda":
        return "auto", None
    kind = *kind, device, *w.shape
    known = _calls.get(kind, False)
    if known is False and len(_calls) >= MOST_KINDS:
        _calls.clear()
    if known is None or (known is False and not (kind[1] in COUNTED and skips_ignored(device))):
        _calls[kind] = None
        return "auto", None
    if torch.are_deterministic_algorithms_enabled() or watched((x, target)):
        return "skip", None

    def count(number: Tensor) -> Share:
        return _share(counted(), number)

    if isinstance(known, Calls):
        return "skip" if known.skips else "compute", partial(_launched, known, count)
    if torch.cuda.is_current_stream_capturing():
        return "skip", None
    _calls[kind] = calls = Calls()
    calls.launched(count)  # the first one's count is waited for
    return "skip" if calls.skips else "compute", None


def _launched(calls: Calls, count: Callable[[Tensor], Share]) -> None:
    if not torch.cuda.is_current_stream_capturing():
        calls.launched(count)


def kept_tokens(args: Any, upstream: Sequence[Tensor | None], tokens: int) -> Tensor:
    """Return which tokens have a target, and in backward an upstream gradient that is not 0: bool [N, *]."""
    kept_NK: Tensor = args.target != args.ignore_index
    flows = [g.reshape(tokens, -1) != 0 for g in upstream if g is not None and g.dim()]
    if not flows:
        return kept_NK.any(1) if kept_NK.numel() > tokens else kept_NK
    if upstream[0] is not None:  # the targets'
        flows[0] = flows[0] & kept_NK.reshape(tokens, -1)
    return torch.cat(flows, 1).any(1)


def _share(kept_N: Tensor, number: Tensor) -> Share:
    """Begin to count the tokens that are left out, on the host in ``number``; return what waits for their share."""
    arrived = sent(kept_N.sum(), number)

    def wait() -> float:
        arrived()
        return 1 - int(number) / max(1, kept_N.numel())

    return wait

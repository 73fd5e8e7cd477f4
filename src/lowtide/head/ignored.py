"""Whether ignored tokens are skipped, where nothing is asked: by how many there were in the calls before.

The kernels that end before ignored tokens take a few percent longer than cuBLAS where none is ignored. The host does
not wait to learn a call's number: it counts one call in three, and heeds that number AFTER calls later, when it has
arrived long ago. Only the first call of a kind, of a head and a function, waits for its own. What is chosen follows
from the calls made, never from when a number arrives: a program that runs again computes the same bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import watched
from lowtide.head.backends import skips_ignored
from lowtide.head.call import CrossEntropyArgs, Head, TokenStatsArgs

LEAST = 0.05  # the share of ignored tokens from which skipping them is faster
AFTER, AT_ONCE = 4, 8  # calls; numbers under way
NUMBERS = 16  # of so many numbers one above that is enough: batches differ, and a batch that is computed gains little
RATE = 0.309  # of calls that are counted, in no step with kinds of batches that take turns
MOST_KINDS = 64
Share = Callable[[], float]


class Calls:
    """The calls of one kind: whether the next skips ignored tokens."""

    def __init__(self) -> None:
        self._number = 0
        self._counted: deque[tuple[int, Share]] = deque()
        self._shares: deque[float] = deque(maxlen=NUMBERS)

    @property
    def skipping(self) -> bool:
        """Whether the counts that have arrived say that skipping pays."""
        return max(self._shares) > LEAST

    def skips(self, count: Callable[[int], Share]) -> tuple[bool, Callable[[], None] | None]:
        """Return whether the next call skips, and what is to run once it has been launched, if anything.

        ``count`` begins to count the tokens of the n-th call, and returns what waits for the result.
        """
        n = self._number
        self._number += 1

        def begin() -> None:
            self._counted.append((n, count(n)))

        if n == 0:
            begin()
        while self._counted and (n == 0 or self._counted[0][0] <= n - AFTER):
            self._shares.append(self._counted.popleft()[1]())
        counts = n > 0 and int((n + 1) * RATE) > int(n * RATE)
        return self.skipping, begin if counts else None


_calls: dict[tuple[Any, ...], tuple[Calls, Tensor]] = {}  # and where the counts arrive


def decided(
    name: str, head: Head, args: Any, upstream: Sequence[Tensor | None] = ()
) -> tuple[str, Callable[[], None] | None]:
    """Return what a pass does with ignored tokens, where nothing is asked, and what counts them once it is launched.

    ``name`` is the pass's. They are skipped where results may not depend on earlier calls: in a compiled graph, and
    where deterministic algorithms are requested. A captured graph does what the last call did. In backward a token to
    which nothing flows back is as good as ignored.
    """
    device = head.input.device
    if not head.ranks.alone:  # ranks that chose unlike ways would wait for each other
        return "auto", None
    if torch.compiler.is_compiling():
        return "skip", None
    if device.type != "cuda":
        return "auto", None
    kind = name, getattr(args, "reduction", None), device, *head.weight_VD.shape
    known = _calls.get(kind)
    if known is None and not (isinstance(args, CrossEntropyArgs | TokenStatsArgs) and skips_ignored(device)):
        return "auto", None
    if torch.are_deterministic_algorithms_enabled() or watched((head.input, args.target)):
        return "skip", None
    if torch.cuda.is_current_stream_capturing():
        return "skip" if known is None or known[0].skipping else "compute", None
    if known is None:
        if len(_calls) >= MOST_KINDS:
            _calls.clear()
        known = _calls[kind] = Calls(), torch.empty(AT_ONCE, dtype=torch.int64, pin_memory=True)
    calls, numbers = known
    skips, after = calls.skips(lambda n: _share(kept_tokens(args, upstream, head.tokens), numbers[n % AT_ONCE]))
    return "skip" if skips else "compute", after


def kept_tokens(args: Any, upstream: Sequence[Tensor | None], tokens: int) -> Tensor:
    """Return which tokens have a target, and in backward something that flows back: bool [N, *]."""
    kept_NK: Tensor = args.target != args.ignore_index
    flows = [g.reshape(tokens, -1) != 0 for g in upstream if g is not None and g.dim()]
    if not flows:
        return kept_NK.any(1) if kept_NK.numel() > tokens else kept_NK
    if upstream[0] is not None:  # the targets'
        flows[0] = flows[0] & kept_NK.reshape(tokens, -1)
    return torch.cat(flows, 1).any(1)


def _share(kept_N: Tensor, number: Tensor) -> Share:
    """Begin to count the tokens that are left out, on the host in ``number``; return what waits for their share."""
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    number.copy_(kept_N.sum(), non_blocking=True)
    arrived.record(torch.cuda.current_stream(kept_N.device))

    def wait() -> float:
        arrived.synchronize()
        return 1 - int(number) / max(1, kept_N.numel())

    return wait

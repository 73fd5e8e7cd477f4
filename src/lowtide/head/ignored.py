"""Whether ignored tokens are skipped, where nothing is asked: by how many there were in the calls before.

The kernels that end before ignored tokens take a few percent longer than cuBLAS where none is ignored. The host does
not wait to learn a call's number: it is read AFTER calls later, when it has arrived long ago. Only the first call of a
kind, of a head and a function, waits for its own. What is chosen follows from the calls made, never from when a number
arrives: a program that runs again computes the same bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import watched
from lowtide.head.backends import skips_ignored
from lowtide.head.call import CrossEntropyArgs, TokenStatsArgs

LEAST = 0.05  # the share of ignored tokens from which skipping them is faster
AFTER = 4  # calls
NUMBERS = 16  # of so many shares one above that is enough: batches differ, and a batch that is computed gains little
MOST_KINDS = 64
COUNTED = (CrossEntropyArgs, TokenStatsArgs)  # records of arguments with targets


def share_of(kept_N: Tensor) -> Callable[[], float]:
    """Begin to count the tokens that are left out; return what waits for their share, once."""
    number, N = host_memory(dtype=torch.int64), max(1, kept_N.numel())
    arrived = sent(kept_N.sum(), number)

    @cache
    def wait() -> float:
        arrived()
        return 1 - int(number) / N

    return wait


def pays(shares: Sequence[Callable[[], float]]) -> bool:
    """Return whether skipping pays in the next call: by all shares but the last ones, at first by the first."""
    return max(share() for share in list(shares)[: 1 - AFTER] or [shares[0]]) > LEAST


def host_memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory on the host that a device writes to, whatever mode the first call runs in."""
    with torch.inference_mode(mode=False):  # training cannot write to an inference tensor
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


def sent(x: Tensor, to: Tensor) -> Callable[[], None]:
    """Begin to copy numbers to the host; return what waits until they are there."""
    to.copy_(x, non_blocking=True)
    if not x.is_cuda:
        return lambda: None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(x.device))
    return arrived.synchronize


_known: dict[tuple[Any, ...], deque[Callable[[], float]]] = {}  # the shares of each kind's last calls
_skips = cache(skips_ignored)


def decided(
    kind: tuple[Any, ...], tensors: Sequence[Tensor], counted: Callable[[], Tensor], *, alone: bool
) -> tuple[str, Callable[[], object] | None]:
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
    if x.device.type != "cuda" or kind[1] not in COUNTED or not len(x) or not _skips(x.device):
        return "auto", None
    if torch.are_deterministic_algorithms_enabled() or watched((x, target)):
        return "skip", None
    kind, captures = (*kind, x.device, *w.shape), torch.cuda.is_current_stream_capturing()
    shares = _known.get(kind)
    if shares is not None:
        return "skip" if pays(shares) else "compute", None if captures else partial(_count, shares, counted)
    if captures:
        return "skip", None
    if len(_known) >= MOST_KINDS:
        _known.clear()
    _known[kind] = shares = deque(maxlen=NUMBERS + AFTER - 1)
    return "skip" if _count(shares, counted) else "compute", None


def _count(shares: deque[Callable[[], float]], counted: Callable[[], Tensor]) -> bool:
    """Begin to count a call's tokens, and wait for what the next call reads: a graph may capture that one."""
    shares.append(share_of(counted()))
    return pays(shares)


def kept_tokens(args: Any, upstream: Sequence[Tensor | None], tokens: int) -> Tensor:
    """Return which tokens have a target, and in backward an upstream gradient that is not 0: bool [N, *]."""
    kept_NK: Tensor = args.target != args.ignore_index
    flows = [g.reshape(tokens, -1) != 0 for g in upstream if g is not None and g.dim()]
    if not flows:
        return kept_NK.any(1) if kept_NK.numel() > tokens else kept_NK
    if upstream[0] is not None:  # the targets'
        flows[0] = flows[0] & kept_NK.reshape(tokens, -1)
    return torch.cat(flows, 1).any(1)

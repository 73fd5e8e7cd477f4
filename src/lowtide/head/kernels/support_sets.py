"""Each token's set of classes: its pairs in the order of their classes, statistics of its logits, and their gradient.

N tokens, P pairs of a token and a class, those of a token one after another, T targets a token, V vocabulary. One sort
of all pairs by class, stable, serves twice: equal neighbours of one token are a class that it lists again, and the
weight's gradient sums each class's pairs in that order. Where tokens' pairs begin is ``starts`` [N + 1] int64, None:
each has K. `terms/support` has the same in plain PyTorch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import log1p, tanh
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.kernel_launch import Launcher, blocks_of, power_of_2

FLOOR = tl.constexpr(-1e4)  # a log-probability whose probability is 0: stands for -inf, which times 0 would be NaN
BLOCK = 1024  # pairs or classes that a program has
LONGEST = 512  # pairs of a token that a program has at a time
TARGETS = 8  # and targets beside them
TOGETHER = 8  # slices of a row that are read at once


class Sets(NamedTuple):
    """The pairs, int32 [P]. A class is -1 where a pair is none (padding, a repetition), -2 where it is no class."""

    ids: Tensor  # in the tokens' order
    sorted_ids: Tensor  # in ascending order, repetitions with their class
    token: Tensor  # in this order: the token,
    place: Tensor  # and the pair among all P


class SetStats(NamedTuple):
    """What is computed of each token [N] or target [N, T], float32 where nothing else is said; None: not wanted."""

    lse: Tensor
    argmax: Tensor  # int64
    entropy: Tensor | None
    sum_sq_prob: Tensor | None
    logprob: Tensor
    is_top1: Tensor  # bool
    outside: Tensor  # int32 [N]
    place: Tensor  # int64 [N, T]: each target's pair, -1: none
    z: Tensor  # [P]: logits


@triton.jit
def _above(value, starts_ptr, n, steps):  # type: ignore[no-untyped-def]
    """How many of n ascending numbers are at most ``value``."""
    low = tl.zeros_like(value)
    high = low + n
    for _ in range(steps):
        middle = (low + high) // 2
        less = (low < high) & (tl.load(starts_ptr + middle, mask=low < high, other=0) <= value)
        low, high = tl.where(less, middle + 1, low), tl.where(less, high, middle)
    return low


@triton.jit
def _token_of(p, starts_ptr, N, K, steps):  # type: ignore[no-untyped-def]
    """The token of pairs; -1 or N of those that are no token's."""
    if starts_ptr is None:
        token = p // K
    else:
        token = _above(p, starts_ptr, N + 1, steps) - 1
    return token


@Launcher
@triton.jit(do_not_specialize=["P", "N", "V", "steps"])  # type: ignore[untyped-decorator]
def _keys(  # type: ignore[no-untyped-def]
    ids_ptr, counts_ptr, starts_ptr, key_ptr, P, N, K, V, steps, BLOCK: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids_ptr + p, mask=p < P, other=-1)
    key = tl.where((v < -1) | (v >= V), -2, v)
    if counts_ptr is not None or starts_ptr is not None:
        token = _token_of(p, starts_ptr, N, K, steps)
        is_token = (token >= 0) & (token < N) & (p < P)
        if counts_ptr is not None:
            is_token = is_token & (tl.load(counts_ptr + token, mask=is_token, other=0) != 0)
        key = tl.where(is_token, key, -1)
    tl.store(key_ptr + p, key.to(tl.int32), mask=p < P)


@Launcher
@triton.jit(do_not_specialize=["P", "N", "steps"])  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    key_ptr, order_ptr, starts_ptr, sets, P, N, K, steps, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the pairs in both orders: of those of one token and class the first is the pair."""
    s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, follows = s < P, (s < P) & (s > 0)
    v = tl.load(key_ptr + s, mask=inside, other=-1)
    p = tl.load(order_ptr + s, mask=inside, other=0)
    same = tl.load(key_ptr + s - 1, mask=follows, other=-3) == v
    token = _token_of(p, starts_ptr, N, K, steps)
    before = _token_of(tl.load(order_ptr + s - 1, mask=follows, other=0), starts_ptr, N, K, steps)
    tl.store(sets.ids + p, tl.where(same & (token == before) & (v >= 0), -1, v), mask=inside)
    tl.store(sets.token + s, token.to(tl.int32), mask=inside)
    tl.store(sets.place + s, p.to(tl.int32), mask=inside)


def sets_of(ids_P: Tensor, starts: Tensor | None, N: int, K: int, V: int, counts_N: Tensor | None) -> Sets:
    """Return the pairs of listed ids (int64), -1 and what is no class among them.

    Of tokens where ``counts_N`` (bool) is False nothing is left.
    """
    P = len(ids_P)  # an operator returns no views of one memory
    ids, key, token, place = (ids_P.new_empty(P, dtype=torch.int32) for _ in range(4))
    grid, steps = (max(1, blocks_of(P, BLOCK)),), (N + 1).bit_length()
    if not P:
        return Sets(ids, key, token, place)
    _keys[grid](ids_P.contiguous(), counts_N, starts, key, P, N, K, V, steps, BLOCK=BLOCK, num_warps=4)
    sorted_ids, order = torch.sort(key, stable=True)
    sets = Sets(ids, sorted_ids, token, place)
    _mark[grid](sorted_ids, order, starts, sets, P, N, K, steps, BLOCK=BLOCK, num_warps=4)
    return sets


@Launcher
@triton.jit(do_not_specialize=["P", "first", "V", "steps"])  # type: ignore[untyped-decorator]
def _class_starts(key_ptr, out_ptr, P, first, V, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + v, _above(v + first - 1, key_ptr, P, steps).to(tl.int64), mask=v <= V)


def class_starts(sorted_ids: Tensor, first: int, V: int) -> Tensor:
    """Return where the pairs of V classes from ``first`` on begin in their order, and where they end [V + 1] int64."""
    out, P = sorted_ids.new_empty(V + 1, dtype=torch.int64), len(sorted_ids)
    _class_starts[(blocks_of(V + 1, BLOCK),)](
        sorted_ids, out, P, first, V, P.bit_length(), BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
    return out


@triton.jit
def _pairs_of(i, starts_ptr, K):  # type: ignore[no-untyped-def]
    """Where a token's pairs begin and end."""
    if starts_ptr is None:
        first = i * K
        last = first + K
    else:
        first = tl.load(starts_ptr + i)
        last = tl.load(starts_ptr + i + 1)
    return first, last


@triton.jit
def _highest(z, v, top, top_id, has_nan, V):  # type: ignore[no-untyped-def]
    """The highest of these and earlier logits, the lowest of its classes, and how many are NaN."""
    has_nan += tl.sum(tl.where(z == z, 0, 1), 0)
    z = tl.where(z == z, z, float("-inf"))
    here = tl.max(z, 0)
    here_id = tl.min(tl.where((z == here) & (v >= 0), v, V), 0)
    top_id = tl.where(here > top, here_id, tl.where(here == top, tl.minimum(here_id, top_id), top_id))
    return tl.maximum(top, here), top_id, has_nan


@triton.jit
def _exponentials(z, v, top, top_id):  # type: ignore[no-untyped-def]
    """z - top, at least FLOOR, and exp(z - top) of all pairs but the highest class's."""
    above = z - tl.where(top == float("-inf"), 0.0, top)
    e = tl.where((v == top_id) | (v == -1), 0.0, tl.exp(above))
    return tl.where(above < FLOOR, FLOOR, above), e


@Launcher
@triton.jit(do_not_specialize=["P", "V", "slices", "ignored"])  # type: ignore[untyped-decorator]
def _set_stats(  # type: ignore[no-untyped-def]
    parts_ptr, ids_ptr, starts_ptr, transform, y_ptr, out, P, K, V, T, slices, ignored, TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """See `set_stats`."""
    i = tl.program_id(0).to(tl.int64)
    first, last = _pairs_of(i, starts_ptr, K)
    top = tl.full((), float("-inf"), tl.float32)
    top_id = V + tl.zeros((), tl.int32)
    has_nan = tl.zeros((), tl.int32)
    for p in range(first, last, BLOCK):
        at = p + tl.arange(0, BLOCK)
        inside = at < last
        v = tl.load(ids_ptr + at, mask=inside, other=-1)
        z = tl.zeros((BLOCK,), tl.float32)
        for s in range(0, slices, TOGETHER):
            part = s + tl.arange(0, TOGETHER)[:, None]
            parts = parts_ptr + part.to(tl.int64) * P + at[None, :]
            z += tl.sum(tl.load(parts, mask=(part < slices) & inside[None, :], other=0.0), 0)
        if transform.bias_V is not None:
            z += tl.load(transform.bias_V + v, mask=v >= 0, other=0.0)
        if transform.scale is not None:
            z *= tl.load(transform.scale)
        if transform.softcap is not None:
            softcap = tl.cast(transform.softcap, tl.float32)  # under inductor a float argument comes as float64
            z = softcap * tanh(z / softcap)
        z = tl.where(v == -1, float("-inf"), tl.where(v == -2, float("nan"), z))
        tl.store(out.z + at, z, mask=inside)
        top, top_id, has_nan = _highest(z, v, top, top_id, has_nan, V)
    tl.debug_barrier()  # other threads read what was written
    top_id = tl.where(has_nan > 0, V, top_id)
    top = tl.where(has_nan > 0, float("nan"), top)
    empty = (top == float("-inf")) & (top_id == V)
    rest, heat, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for p in range(first, last, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(ids_ptr + at, mask=at < last, other=-1)
        z = tl.load(out.z + at, mask=at < last, other=float("-inf"))
        above, e = _exponentials(z, v, top, top_id)
        rest += e
        heat += tl.where(e > 0.0, e * above, e)
        squares += e * e
    total = tl.sum(rest, 0) + tl.where(
        empty | (tl.abs(top) < float("inf")), 0.0, float("nan")
    )  # NaN where top is not finite
    spread = log1p(total)
    lse = tl.where(tl.abs(top) == float("inf"), top, top + spread)
    tl.store(out.lse + i, lse)
    tl.store(out.argmax + i, tl.where(top_id == V, -1, top_id).to(tl.int64))
    if out.entropy is not None:
        tl.store(out.entropy + i, spread - tl.sum(heat, 0) / (1.0 + total))
    if out.sum_sq_prob is not None:
        both = (1.0 + tl.sum(squares, 0)) / ((1.0 + total) * (1.0 + total))
        tl.store(out.sum_sq_prob + i, tl.where(empty, 0.0, both))
    outside = tl.zeros((TARGETS,), tl.int32)
    for t in range(0, T, TARGETS):
        k = t + tl.arange(0, TARGETS)
        y = tl.load(y_ptr + i * T + k, mask=k < T, other=ignored)
        kept, is_class = y != ignored, (y >= 0) & (y < V)
        usable = kept & is_class
        place = tl.full((TARGETS,), -1, tl.int64)
        for p in range(first, last, BLOCK):
            at = p + tl.arange(0, BLOCK)
            v = tl.load(ids_ptr + at, mask=at < last, other=-1)
            same = (y[:, None] == v[None, :]) & usable[:, None]
            place = tl.maximum(place, tl.max(tl.where(same, at[None, :], -1), 1))
        found = place >= 0
        above = tl.load(out.z + place, mask=found, other=0.0) - tl.where(top == float("-inf"), 0.0, top)
        is_top = found & (y == top_id)
        logprob = tl.where(found, tl.where(is_top, 0.0, above) - spread, float("-inf"))
        logprob = tl.where(lse == lse, logprob, float("nan"))
        logprob = tl.where(is_class, logprob, float("nan"))
        tl.store(out.logprob + i * T + k, tl.where(kept, logprob, 0.0), mask=k < T)
        tl.store(out.is_top1 + i * T + k, is_top, mask=k < T)
        tl.store(out.place + i * T + k, place, mask=k < T)
        outside += tl.where(usable & (place < 0), 1, 0)
    tl.store(out.outside + i, tl.sum(outside, 0))


def set_stats(
    parts_SP: Tensor, ids_P: Tensor, starts: Tensor | None, K: int, V: int, y_NT: Tensor, ignored: int,
    want: frozenset[str], transform: LogitTransform, block: int | None = None,
) -> SetStats:  # fmt: skip
    """Return statistics of the sets from slices of the pairs' dot products, float32.

    ``y_NT`` are int64, contiguous; the transform's bias is of the whole vocabulary, its scale on the device.
    """
    (N, T), (slices, P), new = y_NT.shape, parts_SP.shape, parts_SP.new_empty
    entropy, squares = (new(N) if name in want else None for name in ("entropy", "sum_sq_prob"))
    long = y_NT.new_empty
    out = SetStats(
        new(N), long(N), entropy, squares, new(N, T), long(N, T, dtype=torch.bool), long(N, dtype=torch.int32),
        long(N, T), new(P),
    )  # fmt: skip
    if N:
        block = block_of(K, starts) if block is None else block
        _set_stats[(N,)](
            parts_SP, ids_P, starts, transform, y_NT, out, P, K, V, T, slices, ignored,
            TOGETHER=min(TOGETHER, power_of_2(slices)), BLOCK=block,
            TARGETS=min(TARGETS, max(1, power_of_2(T))), num_warps=warps_of(block),
        )  # fmt: skip
    return out


def block_of(K: int, starts: Tensor | None) -> int:
    """Return how many of a token's pairs a program has at a time."""
    return 128 if starts is not None else min(LONGEST, max(16, power_of_2(K)))


def warps_of(block: int) -> int:
    """Return how many warps it has."""
    return max(1, min(4, block // 128))


class SetUpstream(NamedTuple):
    """The gradients of the numbers, and what they are multiplied with on their way to the dot products."""

    logprob: Tensor | None  # [N, T]; the others [N]
    entropy: Tensor | None
    lse: Tensor | None


@Launcher
@triton.jit(do_not_specialize=["V", "ignored"])  # type: ignore[untyped-decorator]
def _set_gradient(  # type: ignore[no-untyped-def]
    z_ptr, ids_ptr, starts_ptr, transform, y_ptr, place_ptr, upstream, out_ptr, K, V, T, ignored,
    BLOCK: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """See `set_gradient`."""
    i = tl.program_id(0).to(tl.int64)
    first, last = _pairs_of(i, starts_ptr, K)
    of_token, h, r = tl.zeros((), tl.float32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    sums, flows = tl.zeros((TARGETS,), tl.float32), tl.zeros((TARGETS,), tl.int32)
    if upstream.logprob is not None:
        for t in range(0, T, TARGETS):
            k = t + tl.arange(0, TARGETS)
            y = tl.load(y_ptr + i * T + k, mask=k < T, other=ignored)
            wrong = (y != ignored) & ((y < 0) | (y >= V))
            found = tl.load(place_ptr + i * T + k, mask=k < T, other=-1) >= 0
            g = tl.load(upstream.logprob + i * T + k, mask=found, other=0.0)
            sums += tl.where(wrong, float("nan"), g)
            flows += tl.where(wrong | (g != 0.0), 1, 0)
        of_token = tl.sum(sums, 0)
    active = tl.sum(flows, 0) > 0
    if upstream.entropy is not None:
        h = tl.load(upstream.entropy + i)
        active = active | (h != 0.0)
    if upstream.lse is not None:
        r = tl.load(upstream.lse + i)
        active = active | (r != 0.0)
    top = tl.full((), float("-inf"), tl.float32)
    top_id = V + tl.zeros((), tl.int32)
    has_nan = tl.zeros((), tl.int32)
    until = tl.where(active, last, first)
    for p in range(first, until, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(ids_ptr + at, mask=at < last, other=-1)
        z = tl.load(z_ptr + at, mask=at < last, other=float("-inf"))
        top, top_id, has_nan = _highest(z, v, top, top_id, has_nan, V)
    top_id = tl.where(has_nan > 0, V, top_id)
    top = tl.where(has_nan > 0, float("nan"), top)
    empty = (top == float("-inf")) & (top_id == V)
    rest, heat = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for p in range(first, until, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(ids_ptr + at, mask=at < last, other=-1)
        z = tl.load(z_ptr + at, mask=at < last, other=float("-inf"))
        above, e = _exponentials(z, v, top, top_id)
        rest += e
        heat += tl.where(e > 0.0, e * above, e)
    others = tl.sum(rest, 0) + tl.where(empty | (tl.abs(top) < float("inf")), 0.0, float("nan"))
    total = 1.0 + others
    spread = log1p(others)
    entropy = spread - tl.sum(heat, 0) / total
    for p in range(first, last, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(ids_ptr + at, mask=at < last, other=-1)
        z = tl.load(z_ptr + at, mask=at < last, other=float("-inf"))
        above, e = _exponentials(z, v, top, top_id)
        is_top = v == top_id
        prob = tl.where(is_top, 1.0, e) / total
        c = tl.zeros((BLOCK,), tl.float32)
        if upstream.logprob is not None:
            own = tl.zeros((BLOCK,), tl.float32)
            for t in range(0, tl.where(active, T, 0), TARGETS):
                k = t + tl.arange(0, TARGETS)
                place = tl.load(place_ptr + i * T + k, mask=k < T, other=-1)
                g = tl.load(upstream.logprob + i * T + k, mask=place >= 0, other=0.0)
                same = place[:, None] == at[None, :]
                own += tl.sum(tl.where(same, g[:, None], 0.0), 0)
            # where a token has one target, the second difference is exactly 0 there
            c = own * tl.where(is_top, others / total, 1.0 - prob) - (of_token - own) * prob
        if upstream.entropy is not None:
            log_p = tl.where(is_top, 0.0, above) - spread
            c -= tl.where(prob > 0.0, h * prob * (log_p + entropy), prob)
        if upstream.lse is not None:
            c += r * prob
        if transform.softcap is not None:
            share = tl.where(v >= 0, z, 0.0) / tl.cast(transform.softcap, tl.float32)
            c *= 1.0 - share * share
        if transform.scale is not None:
            c *= tl.load(transform.scale)
        tl.store(out_ptr + at, tl.where(active & (v != -1), c, 0.0), mask=at < last)


def set_gradient(
    z: Tensor, place: Tensor, ids_P: Tensor, starts: Tensor | None, K: int, V: int, y_NT: Tensor,
    ignored: int, upstream: SetUpstream, transform: LogitTransform, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the pairs' dot products [P], 0 of pairs that are none and where nothing flows back.

    ``z`` are the logits [P], ``place`` the targets' pairs [N, T]; all tensors are contiguous.
    """
    N, T = y_NT.shape
    out = torch.zeros_like(z) if starts is not None else torch.empty_like(z)  # pairs may be no token's
    if N and len(z):
        block = block_of(K, starts) if block is None else block
        _set_gradient[(N,)](
            z, ids_P, starts, transform, y_NT, place, upstream, out, K, V, T, ignored, BLOCK=block,
            TARGETS=min(TARGETS, max(1, power_of_2(T))), num_warps=warps_of(block),
        )  # fmt: skip
    return out

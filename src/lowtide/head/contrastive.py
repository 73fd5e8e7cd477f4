"""Contrastive losses of queries and keys, without their similarities in memory.

Q queries and K keys on this rank, W ranks that gather them (1 without a group), P positives a query, D hidden size.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.arguments import (
    check_device,
    check_flag,
    check_tensor,
    is_dtensor,
    positive_scalar,
    refuse_transforms,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, TargetIndexError, message
from lowtide.graph import node
from lowtide.head.call import CrossEntropyArgs, Head, TokenStatsArgs, check_head, checked_call
from lowtide.head.options import HeadOptions
from lowtide.head.plan import choose_gradient
from lowtide.head.ranks import (
    begin_gather,
    begin_scattered_sum,
    exchanges_between_ranks_run_in_eager,
    group_of,
    swapped,
)
from lowtide.head.rows import looks_at_numbers
from lowtide.head.terms.cross_entropy import CROSS_ENTROPY
from lowtide.head.token_stats import TOKEN_STATS

NAMES = ("queries", "keys", "")
NAIVE = "torch.nn.functional.cross_entropy(queries @ keys.T / temperature, positives)"
NONE = -1  # a positive that is none


def linear_contrastive(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    symmetric: bool = False,
    group: Any = None,
    options: HeadOptions | None = None,
) -> Tensor:
    """Return the contrastive loss (InfoNCE) of queries among keys, without the similarities [Q, K] in memory.

    With logits ``z = queries @ keys.T / temperature`` and the positives y of query i, the loss is the mean over i of

        mean_y (log(sum_k exp(z_ik)) - z_iy)    over keys k that are not masked for i, and all positives of i

    The similarities are computed in chunks of queries, as the logits of `linear_cross_entropy` are: with one positive a
    query, gradients are computed in forward (6QKD FLOP); with several, backward recomputes the similarities (8QKD). No
    tensor of floating-point numbers of size [Q, K] exists. With normalised queries and keys the loss is that of
    https://arxiv.org/abs/1807.03748, symmetric that of CLIP (https://arxiv.org/abs/2103.00020).

    Args:
        queries: [Q, D], any floating dtype and strides.
        keys: [K, D], outside autocast of the same dtype. More keys than queries: the others are negatives alone.
        positives: Ids of keys [Q], or [Q, P] padded with -1, an integer dtype; one that is listed twice counts twice.
            None: key i is the positive of query i. Queries without a positive are left out, of the mean too.
        temperature: Number above 0, or 0-d tensor (not inspected), by which the similarities are divided. A tensor that
            requires a gradient gets it, in float16 at the cost of a float32 copy of ``queries``.
        mask: bool [Q, K], any strides, True where a key is left out of a query's denominator, such as a false negative;
            positives never are. On a GPU masked calls run the ``"row"`` or ``"torch"`` backend.
        symmetric: Return the mean of this loss and of that of the keys among the queries, whose positives are the
            queries that have the key as theirs, and whose mask is ``mask.T``. Keys without a query are left out. It
            costs as much again; with ``positives`` it computes one row for each positive of a query, and with a mask
            besides it has a bool tensor [Q, Q * P].
        group: A `torch.distributed` process group whose ranks have Q queries and K keys each, with gradients recorded
            on all or on none; ranks that differ hang or fail in the exchange. The keys are those of all ranks, in their
            order: ``positives`` are ids among W * K, ``mask`` is [Q, W * K], and with None query i has its rank's key
            i. The second direction of ``symmetric`` is of the keys of this rank's queries, among the queries of all
            ranks. Gradients flow back to the ranks that keys and queries come from.
        options: Memory and implementation: see `HeadOptions`.

    Returns:
        Tensor: Scalar, float32, for float64 inputs float64: the mean over this rank's queries. The average over ranks
        with as many valid queries each, which data parallelism takes of the gradients, is the mean over all queries.
        NaN where no query has a positive.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit, or a DTensor; also a `TypeError`.
        TargetIndexError: On the CPU, a positive that is neither a key nor -1; also an `IndexError`. On other devices
            the loss and its gradients are NaN.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, or an explicitly requested
            implementation that cannot run; also a `RuntimeError`.

    Example:
        >>> queries, keys = torch.randn(8, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
        >>> log_temperature = torch.tensor(-3.0, requires_grad=True)
        >>> normed = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(keys)
        >>> linear_contrastive(*normed, temperature=log_temperature.exp()).backward()
    """
    if group is not None and torch.compiler.is_compiling():
        run = partial(linear_contrastive, queries, keys, positives, temperature=temperature, mask=mask,
                      symmetric=symmetric, group=group, options=options)  # fmt: skip
        return exchanges_between_ranks_run_in_eager(run)
    refuse_transforms("linear_contrastive", queries, keys, temperature, instead=NAIVE)
    check_flag("symmetric", symmetric)
    _check_operands(queries, keys)
    group = None if group is None else group_of(group)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    (Q, K), device = (len(queries), len(keys)), queries.device
    _check_positives(queries, positives, K, ranks * K)
    _check_mask(queries, mask, ranks * K)
    scale = _scale_of(temperature, queries)
    head_of = partial(checked_call, "linear_contrastive", linear_bias=None, logit_scale=scale, softcap=None,
                      options=options, vocab_shard=None)  # fmt: skip
    all_keys, own = _of_all_ranks(keys, group), torch.arange(Q, device=device)
    y = rank * K + own if positives is None else positives.long()
    y = y[:, None] if y.dim() == 1 else y
    loss = _mean_over_positives(head_of(queries, all_keys), y, mask)
    if not symmetric or not Q:
        return loss
    all_queries, own, n = _of_all_ranks(queries, group), own + rank * Q, ranks * K
    if positives is None:
        every_N = (torch.arange(0, n, K, device=device)[:, None] + own - rank * Q).flatten()
        head, args = head_of(keys[:Q], all_queries), CrossEntropyArgs(own, ignore_index=NONE)
    else:  # a row for each pair of a query and its positive; padding, and what is no key, becomes key n
        every_N = _of_all_ranks(y.flatten(), group)
        every_N = every_N.where((every_N >= 0) & (every_N < n), n)
        ids = every_N[rank * y.numel() :][: y.numel()]
        # not index_select, whose gradient is summed in no fixed order on a GPU
        head = head_of(F.embedding(ids.clamp(max=n - 1), all_keys), all_queries)
        counts = torch.zeros(n + 1, dtype=torch.long, device=device).index_add_(0, every_N, torch.ones_like(every_N))
        share = (1 / counts[ids].to(head.wide)).where(ids < n, 0)
        target = own.repeat_interleave(y.shape[1]).where(ids < n, NONE)
        args = CrossEntropyArgs(target, token_weight=share, num_items=share.sum(), ignore_index=NONE)
    if mask is not None:
        args = args._replace(mask=_mask_of_keys(mask, y, every_N, group))
    return (loss + _cross_entropy(head, args)) / 2


def _of_all_ranks(x: Tensor, group: Any) -> Tensor:
    """Return all ranks' rows [W * R, ...] of ``x`` [R, ...], whose gradient is the sum of all ranks', rounded once."""
    return x if group is None else _GATHERED.apply(x, group)  # type: ignore[no-untyped-call]


def _gather(ctx: Any, x: Tensor, group: Any) -> Tensor:
    ctx.group, ctx.dtype = group, x.dtype
    return begin_gather(x, group).get().flatten(0, 1)


def _sum_to_each(ctx: Any, upstream: Tensor) -> Any:
    wide = upstream.to(torch.promote_types(ctx.dtype, torch.float32)).contiguous()
    return [begin_scattered_sum(wide, ctx.group).get().to(ctx.dtype)], ()


_GATHERED = node("GatheredRows", "the gathered keys", _gather, _sum_to_each)


def _cross_entropy(head: Head, args: CrossEntropyArgs) -> Tensor:
    recompute = choose_gradient(head.gradient, "mean", head.frozen) == "recompute"
    return CROSS_ENTROPY(head, args, recompute=recompute)["loss"]


def _mean_over_positives(head: Head, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over queries of the mean over their positives y [Q, P] of minus the log-probability."""
    if y.shape[1] == 1:
        return _cross_entropy(head, CrossEntropyArgs(y.reshape(-1), ignore_index=NONE, mask=mask))
    choose_gradient(head.gradient, "none")  # each has an upstream gradient of its own
    # in the places of padding the query's first positive, with weight 0: a class that is masked for it may not count
    some = y != NONE
    first = y.gather(1, some.int().argmax(1, keepdim=True))
    args = TokenStatsArgs(y.where(some, first), "logprob", topk=0, ignore_index=NONE, mask=mask)
    logprob = TOKEN_STATS(head, args, recompute=True)["logprob"]
    counts = some.sum(1, keepdim=True)
    weights = some.to(logprob.dtype) / counts.clamp(min=1)
    return -(logprob * weights).sum() / (counts > 0).sum()


def _mask_of_keys(mask: Tensor, y_QP: Tensor, every_N: Tensor, group: Any) -> Tensor:
    """Return the mask of the second direction, whose rows are keys and whose columns are all ranks' queries.

    Queries that have a key as their positive are not left out of its denominator.
    """
    columns = mask[:, every_N.clamp(max=mask.shape[1] - 1)]
    for y_Q in y_QP.unbind(1):
        columns &= y_Q[:, None] != every_N
    if group is None:
        return columns.T
    Q, ranks = len(mask), group.size()
    of_ranks = columns.view(torch.uint8).view(Q, ranks, -1).transpose(0, 1).flatten()
    sizes = [len(of_ranks) // ranks] * ranks
    return swapped(of_ranks, sizes, sizes, group).view(ranks * Q, -1).view(torch.bool).T


def _check_operands(queries: Tensor, keys: Tensor) -> None:
    for name, tensor in (("queries", queries), ("keys", keys)):
        if is_dtensor(check_tensor(name, tensor)):
            hint = "Pass .to_local(), and the ranks that have the other keys as group."
            raise ArgumentTypeError(message(name, "a plain tensor", "a DTensor", hint))
        if tensor.dim() != 2:
            raise ArgumentValueError(message(name, f"shape [{name[0].upper()}, D]", str(list(tensor.shape))))
    check_head(queries, keys, None, NAMES)
    if not len(keys):
        raise ArgumentValueError(message("keys", "at least one", str(list(keys.shape))))


def _check_positives(queries: Tensor, positives: Tensor | None, own_keys: int, keys: int) -> None:
    """Check ids of keys; on the CPU also that they are ids."""
    Q = len(queries)
    if positives is None:
        if own_keys < Q:
            expected, hint = f"at least {Q}, a key for each query", "Or pass positives, the ids of each query's keys."
            raise ArgumentValueError(message("keys", expected, str(own_keys), hint))
        return
    check_tensor("positives", positives)
    if positives.is_floating_point() or positives.is_complex() or positives.dtype == torch.bool:
        hint = "Where similar pairs are a matrix, pass .nonzero() of its rows, padded with -1."
        raise ArgumentTypeError(message("positives", "ids of keys, an integer dtype", str(positives.dtype), hint))
    if positives.dim() not in (1, 2) or len(positives) != Q or 0 in positives.shape[1:]:
        expected = f"shape [{Q}] or [{Q}, P] with P above 0, as queries is {list(queries.shape)}"
        raise ArgumentValueError(message("positives", expected, str(list(positives.shape))))
    check_device("positives", positives, queries, NAMES[0])
    if looks_at_numbers(queries.device) and not torch.compiler.is_compiling() and type(positives) is Tensor:
        ids = positives.long()  # in an unsigned dtype -1 is a large number
        for place in ((ids < NONE) | (ids >= keys)).nonzero().tolist():
            got = f"{ids[tuple(place)]} at {place}"
            raise TargetIndexError(message("positives", f"ids from 0 to {keys - 1}, or -1 for padding", got))


def _check_mask(queries: Tensor, mask: Tensor | None, keys: int) -> None:
    if mask is not None:
        if check_tensor("mask", mask).dtype != torch.bool:
            raise ArgumentTypeError(message("mask", "a bool tensor, True where a key is left out", str(mask.dtype)))
        if mask.shape != (len(queries), keys):
            expected = f"shape [{len(queries)}, {keys}], queries and keys"
            raise ArgumentValueError(message("mask", expected, str(list(mask.shape))))
        check_device("mask", mask, queries, NAMES[0])


def _scale_of(temperature: float | Tensor, queries: Tensor) -> float | Tensor:
    """Return what the similarities are multiplied with: of a tensor in float32, or wider."""
    scalar = positive_scalar("temperature", temperature, torch.float64)
    if not isinstance(temperature, Tensor):
        return 1 / temperature
    wide = torch.promote_types(torch.promote_types(scalar.dtype, queries.dtype), torch.float32)
    return 1 / scalar.to(wide)

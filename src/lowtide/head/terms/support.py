"""Log-probabilities and statistics over a set of classes for each token, from the set's rows of the weight alone.

N tokens, P listed ids, those of a token one after another, T targets a token, D hidden size, V vocabulary. With z the
logits of a token's set S, p their softmax over S, H their entropy and g, h, l the upstream gradients of the targets'
log-probabilities, entropy and logsumexp, the gradient of z_v is

    sum_t g_t ([v = y_t] - p_v) - h p_v (log p_v + H) + l p_v    over targets y_t in S
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, TargetIndexError, message
from lowtide.head.call import Head, SupportArgs, Wanted
from lowtide.head.choice import support_backend
from lowtide.head.gradients import Gradients
from lowtide.head.nodes import Function
from lowtide.head.plan import support_chunk
from lowtide.head.rows import looks_at_numbers, take_rows
from lowtide.head.stored import NOTHING as NO_SHAPE
from lowtide.head.stored import Shape, gradient_shapes
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.pairs import NO_CLASS, NOTHING, Pairs, Products, add_rows_
from lowtide.head.terms.statistics import FLOOR, Upstream

DIFFERENTIABLE = ("logprob", "entropy", "lse")
SORTED = ("sorted_id", "pair_token", "pair_place")  # the pairs in the order of their classes, for kernels
OF_TARGETS = frozenset({"logprob", "is_top1", "outside"})


class Numbers(NamedTuple):
    """A token's numbers [n], measured from the highest logit of its set, and each pair's."""

    top: Tensor  # the highest logit, -inf of an empty set
    top_id: Tensor  # its class, the lowest of several; V where there is none
    rest: Tensor  # sum of exp(z - top) over the other classes
    spread: Tensor  # log(1 + rest)
    above: Tensor  # [pairs] z - top
    e: Tensor  # [pairs] exp(z - top), 0 at the highest class and where a pair is none
    is_top: Tensor  # [pairs] bool

    def entropy(self, pairs: Pairs) -> Tensor:
        """Return the entropy [n]."""
        heat = pairs.sum(torch.where(self.e > 0, self.e * self.above.clamp(min=FLOOR), self.e))
        return self.spread - heat / (1 + self.rest)


def forward(head: Head, args: SupportArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:  # noqa: ARG001
    """Return the statistics of all N tokens; with ``keep`` the pairs' classes and logits, and the targets' pairs."""
    kept, values_of = args.target != args.ignore_index, _chunk_values
    if looks_at_numbers(head.input.device):
        V = head.ranks.vocab
        wrong = kept & ((args.target < 0) | (args.target >= V))
        check_classes(args.target.reshape(-1), wrong.reshape(-1), V, args.ignore_index)
        check_ids(args.ids, V)
        _check_offsets(args)
    counts = None
    if args.wanted.issubset(OF_TARGETS):
        counts = kept.reshape(-1) if kept.shape[1] == 1 else kept.any(1)
    if by_kernels(head):
        from lowtide.head.terms.support_kernels import values as values_of
    found = [values_of(head, args, tokens, ids, counts, keep) for tokens, ids in _chunks(head, args)]
    joined = found[0] if len(found) == 1 else {name: torch.cat([x[name] for x in found]) for name in found[0]}
    return joined | {"outside": joined["outside"].sum()}


def _chunk_values(
    head: Head, args: SupportArgs, tokens: slice, ids: Tensor, counts: Tensor | None, keep: bool
) -> dict[str, Tensor]:
    """Return the statistics of a chunk's tokens in plain PyTorch; "outside" is a number of each of them."""
    y, V = args.target[tokens], head.ranks.vocab
    kept, is_class = y != args.ignore_index, (y >= 0) & (y < V)
    some = None if counts is None else counts[tokens]
    pairs = Pairs.of(ids, args.offsets, len(y), args.K, V, some)
    z = _logits(head, pairs, _products(head, pairs, pairs.ids, tokens))
    numbers = _numbers(pairs, z)
    at, inside = pairs.find(y)
    values = _values(args, pairs, z, numbers, at)
    usable = kept & is_class
    values["is_top1"] &= usable & inside
    undefined = ~is_class | values["lse"].isnan()[:, None]
    of_class = values["logprob"].masked_fill(~inside, -torch.inf).masked_fill(undefined, torch.nan)
    values["logprob"] = of_class.masked_fill(~kept, 0)
    values["outside"] = (usable & ~inside).sum(1)
    if keep:
        places = at.masked_fill(~(inside & usable), -1)  # -1: in no pair
        values |= {"pair_z": z.view(-1), "pair_id": pairs.ids.view(-1).int(), "target_at": places}
    return values


def by_kernels(head: Head) -> bool:
    """Return whether kernels run, or plain PyTorch."""
    return support_backend(head)[0] == "row"


def backward(
    head: Head, args: SupportArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the upstream ones [N] (of logprob [N, T]), and what forward returned."""
    into, slot_V = _buffers(head, args, wanted, known["pair_id"])
    for tokens, _ in _chunks(head, args):
        of_pairs = slice(tokens.start * args.K, tokens.stop * args.K) if args.offsets is None else slice(0, None)
        of_chunk = {name: x[tokens if name == "target_at" else of_pairs] for name, x in known.items()}
        given = {name: g[tokens] for name, g in upstream.items() if g is not None and name in args.wanted}
        if by_kernels(head):
            from lowtide.head.terms.support_kernels import add_gradients, upstream_of

            add_gradients(head, args, tokens, upstream_of(given), of_chunk, wanted, into, slot_V)
        else:
            _add_gradients(head, args, tokens, Upstream(**given), of_chunk, wanted, into, slot_V)
    return into


def _add_gradients(
    head: Head, args: SupportArgs, tokens: slice, upstream: Upstream, known: dict[str, Tensor], wanted: Wanted,
    into: Gradients, slot_V: Tensor | None,
) -> None:  # fmt: skip
    """Add a chunk's gradients in plain PyTorch."""
    V, ids, y = head.ranks.vocab, known["pair_id"].long(), args.target[tokens]
    wrong = (y != args.ignore_index) & ((y < 0) | (y >= V))
    pairs = Pairs(tokens=len(y), ids=ids, keys=ids, starts=args.offsets, K=args.K, vocab=V)
    pairs, z = replace(pairs, ids=pairs.shaped(ids)), pairs.shaped(known["pair_z"])
    c, active = _logits_gradient(pairs, z, known["target_at"], upstream, wrong.any(1))
    c = _inputs_gradient(head, pairs, z, c, active).view(-1)
    products = _products(head, pairs, pairs.ids.masked_fill(~pairs.spread(active), NOTHING), tokens)
    if wanted.input:
        _put_input_grad(head, products, c, tokens, into)
    if into.weight_VD is not None or into.bias_V is not None:
        weight, slot_V = (
            (into.weight_VD, slot_V)
            if into.weight_VD is not None
            else (y.new_empty(len(head.weight_VD), 0, dtype=head.dtype), None)
        )
        products.weight_grad(c, weight, into.bias_V, slot_V, add=tokens.start > 0)


def check_ids(ids: Tensor, V: int) -> None:
    """Raise where an id is neither a class nor -1; on a device this would stop the host."""
    wrong = (ids < NOTHING) | (ids >= V)
    if wrong.any():
        position = int(wrong.nonzero()[0, 0])
        raise TargetIndexError(
            f"support: expected ids from 0 to {V - 1}, or -1 for padding, got {int(ids[position])} at position"
            f" {position} of the flattened ids. Check that tokenizer and head have the same vocabulary."
        )


def _check_offsets(args: SupportArgs) -> None:
    offsets, P = args.offsets, len(args.ids)
    if offsets is not None and (offsets[0] != 0 or offsets[-1] != P or (offsets.diff() < 0).any()):
        expected = f"offsets that ascend from 0 to {P}, the number of ids"
        raise ArgumentValueError(message("support[1]", expected, "others", "Each token's ids begin at its offset."))


def _chunks(head: Head, args: SupportArgs) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens with their ids. In CSR form only the device knows where these begin: one chunk."""
    N = len(args.target)
    step = N if args.offsets is not None else support_chunk(head, N, args.K)[0]
    for start in range(0, max(N, 1), max(step, 1)):
        tokens = slice(start, min(start + step, N))
        yield tokens, args.ids if args.offsets is not None else args.ids[tokens.start * args.K : tokens.stop * args.K]


def _products(head: Head, pairs: Pairs, ids: Tensor, tokens: slice) -> Products:
    """Return the products with the rows that this rank holds of ``ids`` [pairs]."""
    if not head.ranks.alone:
        row, here = head.ranks.here(ids)
        ids = row.where(here, NOTHING)  # type: ignore[arg-type]
    x = take_rows(head.input, None, tokens, head.dtype)
    return Products(
        pairs=pairs, ids=ids.view(-1).int(), x_nD=x if x.stride(-1) == 1 else x.contiguous(), weight_VD=head.weight_VD,
        wide=head.wide, gathered=support_chunk(head, 1, 1)[1],
    )  # fmt: skip


def _logits(head: Head, pairs: Pairs, products: Products) -> Tensor:
    """Return the logits of all pairs, of every rank's classes; -inf where a pair is none."""
    z, ids = products.scores(), pairs.ids
    z = pairs.shaped(z)
    if head.bias_V is not None and len(head.bias_V):
        rows = pairs.shaped(products.ids)
        z = z + head.bias_V.take(rows.clamp(min=0).long()).masked_fill(rows < 0, 0)
    z = head.ranks.sum_of(z)
    if head.scale is not None:
        z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z.masked_fill(ids == NOTHING, -torch.inf).masked_fill(ids == NO_CLASS, torch.nan)


def _numbers(pairs: Pairs, z: Tensor) -> Numbers:
    top = pairs.highest(z)
    highest = (pairs.ids >= 0) & (z == pairs.spread(top))
    top_id = pairs.lowest_id(highest)
    is_top = highest & (pairs.ids == pairs.spread(top_id))
    nothing = top == -torch.inf
    above = z - pairs.spread(top.masked_fill(nothing, 0))
    e = above.exp().masked_fill_(is_top, 0)
    rest = pairs.sum(e) + (top - top).masked_fill_(nothing & (top_id == pairs.vocab), 0)  # NaN where top is not finite
    return Numbers(top, top_id, rest, torch.log1p(rest), above, e, is_top)


def _values(args: SupportArgs, pairs: Pairs, z: Tensor, numbers: Numbers, at: Tensor) -> dict[str, Tensor]:
    """Return what is computed of each token, and of its targets at the pairs ``at``."""
    top, spread, V = numbers.top, numbers.spread, pairs.vocab
    infinite, empty = top.abs() == torch.inf, (top == -torch.inf) & (numbers.top_id == V)
    values = {"lse": top.where(infinite, top + spread), "argmax": numbers.top_id.masked_fill(numbers.top_id == V, -1)}
    if "entropy" in args.wanted:
        values["entropy"] = numbers.entropy(pairs)
    if "sum_sq_prob" in args.wanted:
        squares = pairs.sum(numbers.e.square())
        values["sum_sq_prob"] = ((1 + squares) / (1 + numbers.rest).square()).masked_fill(empty, 0)
    above, ids = (x.take(at) if z.numel() else at - 2 for x in (numbers.above, pairs.ids))
    values["is_top1"] = values["argmax"][:, None] == ids
    values["logprob"] = above.masked_fill(values["is_top1"], 0) - spread[:, None]
    return values


def _logits_gradient(
    pairs: Pairs, z: Tensor, places_nT: Tensor, upstream: Upstream, wrong_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the pairs' logits [pairs], and which tokens any gradient flows back to [n].

    ``places_nT`` are the targets' pairs, negative where a target has none; ``wrong_n`` tokens have a wrong target.
    """
    numbers, g, h, r = _numbers(pairs, z), upstream.logprob, upstream.entropy, upstream.lse
    total = pairs.spread(1 + numbers.rest)
    p = numbers.e.masked_fill(numbers.is_top, 1) / total
    c, active = torch.zeros_like(z), torch.zeros(pairs.tokens, dtype=torch.bool, device=z.device)
    if isinstance(g, Tensor):
        g = g.masked_fill(places_nT < 0, 0)
        of_pair = _at_places(torch.zeros_like(z).view(-1), places_nT, g).view(z.shape)
        active, of_token = wrong_n | (g != 0).any(1), g.sum(1).masked_fill_(wrong_n, torch.nan)
        other = torch.where(numbers.is_top, pairs.spread(numbers.rest) / total, 1 - p)
        # where a token has one target, the second difference is exactly 0 there
        c = of_pair * other - (pairs.spread(of_token) - of_pair) * p
    if h is not None:
        log_p = numbers.above.masked_fill(numbers.is_top, 0).clamp_(min=FLOOR) - pairs.spread(numbers.spread)
        c = c - torch.where(p > 0, pairs.spread(h) * p * (log_p + pairs.spread(numbers.entropy(pairs))), p)
        active = active | (h != 0)
    if r is not None:
        c = c + pairs.spread(r) * p
        active = active | (r != 0)
    return c, active


def _at_places(total_P: Tensor, places_nT: Tensor, g_nT: Tensor) -> Tensor:
    """Add ``g_nT`` to ``total_P`` where the places are: in one order, and 0 where they are negative."""
    if not len(total_P):
        return total_P
    # equal places are summed one by one: what has none adds its 0 to one of its own
    spare = torch.arange(places_nT.numel(), device=total_P.device).view(places_nT.shape) % len(total_P)
    places, g = places_nT.where(places_nT >= 0, spare).reshape(-1), g_nT.reshape(-1)
    if g_nT.shape[1] == 1:  # a sum of one number and zeros, in any order
        total_P.index_add_(0, places, g)
    else:
        add_rows_(total_P, places, g)
    return total_P


def _inputs_gradient(head: Head, pairs: Pairs, z: Tensor, c: Tensor, active: Tensor) -> Tensor:
    """Return the gradient of the pairs' dot products, 0 of pairs that are none and where nothing flows back."""
    if head.softcap is not None:
        c = c * (1 - (z / head.softcap).square())
    if head.scale is not None:
        c = c * head.scale
    return c.masked_fill((pairs.ids == NOTHING) | ~pairs.spread(active), 0)


def _buffers(head: Head, args: SupportArgs, wanted: Wanted, ids: Tensor) -> tuple[Gradients, Tensor | None]:
    """Return memory for the gradients, and with ``sparse`` the row of each class among those of its values."""
    x, (V, D), into, slot = head.input, head.weight_VD.shape, Gradients(), None
    N = len(args.target)
    several = args.offsets is None and support_chunk(head, N, args.K)[0] < N
    summed = several and (head.accumulate != "input" or head.weight_VD.dtype == torch.float16)
    dtype = head.wide if summed else head.weight_VD.dtype
    if wanted.input:
        into.input_ND = x.new_empty(N, D)
    if wanted.weight:
        if args.sparse:
            into.weight_ids, slot = _listed_classes(head, ids)
            new = x.new_empty if by_kernels(head) and len(args.target) else x.new_zeros
            into.weight_VD = new(into.weight_ids.shape[1], D, dtype=dtype)
        else:
            into.weight_VD = x.new_empty(V, D, dtype=dtype)
    if wanted.bias:
        into.bias_V = x.new_zeros(V, dtype=head.wide)
    return into, slot


def _listed_classes(head: Head, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's classes that any pair lists [1, R], and of each class which of these it is [V_r].

    Their number is known on the device only: there are as many as there can be, class 0 in the place of those that
    are not there, whose rows are other classes', without values. On the CPU there are as many as there are.
    """
    rows, V = ids.long(), len(head.weight_VD)
    if not head.ranks.alone:
        row, here = head.ranks.here(rows)
        rows = row.where(here, NOTHING)  # type: ignore[arg-type]
    listed = torch.zeros(V + 1, dtype=torch.bool, device=ids.device)
    listed = listed.index_fill_(0, rows.where(rows >= 0, V), True)[:V]
    before, most = listed.cumsum(0), min(V, len(ids))
    classes = torch.arange(V, device=ids.device)
    slot = torch.where(listed, before - 1, classes - before + before[-1:])
    if looks_at_numbers(ids.device):
        return classes[listed][None], slot
    found = torch.zeros(most + 1, dtype=torch.int64, device=ids.device)
    return found.scatter_(0, slot.where(listed, most), classes)[None, :most], slot


def _put_input_grad(head: Head, products: Products, c: Tensor, tokens: slice, into: Gradients) -> None:
    assert into.input_ND is not None
    if head.ranks.alone:
        products.input_grad(c, into.input_ND[tokens])
        return
    part = torch.empty_like(products.x_nD, dtype=head.wide)
    products.input_grad(c, part)
    head.ranks.begin_sum(part, tokens)(into)


def _shapes(head: Head, args: SupportArgs, keep: bool) -> dict[str, Shape]:
    N, T = args.target.shape
    P = (len(args.ids) if keep else 0,)
    return {
        "logprob": ((N, T), head.wide),
        "entropy": ((N if "entropy" in args.wanted else 0,), head.wide),
        "lse": ((N,), head.wide),
        "argmax": ((N,), torch.int64),
        "sum_sq_prob": ((N if "sum_sq_prob" in args.wanted else 0,), head.wide),
        "is_top1": ((N, T), torch.bool),
        "outside": ((), torch.int64),
        "pair_z": (P, head.wide),
        "pair_id": (P, torch.int32),
        "target_at": ((N if keep else 0, T), torch.int64),
        **dict.fromkeys(SORTED, (P if by_kernels(head) else (0,), torch.int32)),
    }


def _gradient_shapes(head: Head, args: SupportArgs, wanted: Wanted) -> dict[str, Shape]:
    shapes, rows = gradient_shapes(head, wanted), min(len(head.weight_VD), len(args.ids))
    sparse = args.sparse and wanted.weight
    if sparse:
        shapes["weight_grad"] = ((rows, head.weight_VD.shape[1]), head.weight_VD.dtype)
    return shapes | {"weight_ids": ((1, rows) if sparse else NO_SHAPE, torch.int64)}


def _flop(head: Head, args: SupportArgs, wanted: Wanted) -> int:
    return 2 * (1 + sum(wanted[:2])) * len(args.ids) * head.weight_VD.shape[1]


SUPPORT = Function(
    "support_stats", "linear_token_stats", SupportArgs, forward, backward, shapes=_shapes,
    returned=(*DIFFERENTIABLE, "argmax", "sum_sq_prob", "is_top1", "outside"), upstream=DIFFERENTIABLE,
    known=("pair_z", "pair_id", "target_at", *SORTED), gradients=_gradient_shapes, returns=4, flop=_flop,
)  # fmt: skip

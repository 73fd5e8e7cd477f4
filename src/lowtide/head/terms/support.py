"""Log-probabilities and statistics over a set of classes for each token, from the set's rows of the weight alone.

N tokens, P listed ids, those of a token one after another, T targets a token, D hidden size, V vocabulary. With z the
logits of a token's set S, p their softmax over S, H their entropy and g, h, l the upstream gradients of the targets'
log-probabilities, entropy and logsumexp, the gradient of z_v is

    sum_t g_t ([v = y_t] - p_v) - h p_v (log p_v + H) + l p_v    over targets y_t in S
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, TargetIndexError, message
from lowtide.head.call import Head, SupportArgs, Wanted
from lowtide.head.gradients import Gradients
from lowtide.head.nodes import Function
from lowtide.head.plan import support_backend, support_chunk
from lowtide.head.rows import drops_rows, take_rows
from lowtide.head.stored import NOTHING as NO_SHAPE
from lowtide.head.stored import Shape, gradient_shapes
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.pairs import NO_CLASS, NOTHING, Pairs, Products, add_rows_
from lowtide.head.terms.statistics import FLOOR, Upstream

DIFFERENTIABLE = ("logprob", "entropy", "lse")
OF_TARGETS = frozenset({"logprob", "is_top1", "outside"})


class Numbers(NamedTuple):
    """A token's numbers [n], measured from the highest logit of its set, and each pair's [P]."""

    top: Tensor  # the highest logit, -inf of an empty set
    top_id: Tensor  # its class, the lowest of several; V where there is none
    rest: Tensor  # sum of exp(z - top) over the other classes
    spread: Tensor  # log(1 + rest)
    above: Tensor  # [P] z - top
    e: Tensor  # [P] exp(z - top), 0 at the highest class and where a pair is none
    is_top: Tensor  # [P] bool

    def entropy(self, pairs: Pairs) -> Tensor:
        """Return the entropy [n]."""
        heat = pairs.sum(torch.where(self.e > 0, self.e * self.above.clamp(min=FLOOR), self.e))
        return self.spread - heat / (1 + self.rest)


def forward(head: Head, args: SupportArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:  # noqa: ARG001
    """Return the statistics of all N tokens; with ``keep`` the pairs' classes and logits, and the targets' pairs."""
    V, (N, _) = head.ranks.vocab, args.target.shape
    kept, is_class = args.target != args.ignore_index, (args.target >= 0) & (args.target < V)
    if drops_rows(head.input.device):
        check_classes(args.target.reshape(-1), (kept & ~is_class).reshape(-1), V, args.ignore_index)
        check_ids(args.ids, V)
        _check_offsets(args)
    counts = kept.any(1) if args.wanted.issubset(OF_TARGETS) else None
    found: list[dict[str, Tensor]] = []
    for tokens, ids in _chunks(head, args):
        pairs = _pairs(head, args, tokens, ids, counts)
        z = _logits(head, pairs, _products(head, pairs, pairs.ids, tokens))
        numbers = _numbers(pairs, z)
        at, inside = pairs.find(args.target[tokens])
        values = _values(args, pairs, z, numbers, at)
        usable = kept[tokens] & is_class[tokens]
        values["is_top1"] &= usable & inside
        of_outside = torch.where(values["lse"].isnan(), torch.nan, -torch.inf)[:, None]
        of_class = values["logprob"].where(inside, of_outside).where(is_class[tokens], torch.nan)
        values["logprob"] = of_class.where(kept[tokens], 0)
        values["outside"] = (usable & ~inside).sum()
        if keep:
            # where in all of the pairs; -1: in none
            first = 0 if args.offsets is not None else tokens.start * pairs.K
            values |= {"pair_z": z, "pair_id": pairs.ids.int(), "target_at": (at + first).where(inside & usable, -1)}
        found.append(values)
    joined = {name: torch.cat([x[name] for x in found]) for name in found[0] if name != "outside"}
    assert len(joined["lse"]) == N
    return joined | {"outside": torch.stack([x["outside"] for x in found]).sum()}


def backward(
    head: Head, args: SupportArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the upstream ones [N] (of logprob [N, T]), and what forward returned."""
    kept, is_class = args.target != args.ignore_index, (args.target >= 0) & (args.target < head.ranks.vocab)
    into, slot_V = _buffers(head, args, wanted, known["pair_id"])
    weight = into.weight_VD
    for tokens, _ in _chunks(head, args):
        of_pairs = slice(tokens.start * args.K, tokens.stop * args.K) if args.offsets is None else slice(None)
        ids = known["pair_id"][of_pairs].long()
        pairs = Pairs(
            tokens=tokens.stop - tokens.start, ids=ids, keys=ids, starts=args.offsets, K=args.K, vocab=head.ranks.vocab
        )
        at = known["target_at"][tokens]
        usable = kept[tokens] & is_class[tokens] & (at >= 0)
        g, h, r = (_given(upstream[name], name, args, tokens) for name in DIFFERENTIABLE)
        if g is not None:
            wrong = kept[tokens] & ~is_class[tokens]
            g = g.where(usable, 0).masked_fill(wrong, torch.nan)
        z = known["pair_z"][of_pairs]
        c, active = _logits_gradient(pairs, z, at - (of_pairs.start or 0), Upstream(g, h, r))
        c = _inputs_gradient(head, pairs, z, c, active)
        held = torch.where(pairs.spread(active), ids, NOTHING)
        products = _products(head, pairs, held, tokens)
        if wanted.input:
            _put_input_grad(head, products, c, tokens, into)
        if weight is not None or into.bias_V is not None:
            rows = head.input.new_empty(len(head.weight_VD), 0) if weight is None else weight
            products.weight_grad(c, rows, into.bias_V, slot_V if weight is not None else None, add=tokens.start > 0)
    return into


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


def _pairs(head: Head, args: SupportArgs, tokens: slice, ids: Tensor, counts: Tensor | None) -> Pairs:
    some = None if counts is None else counts[tokens]
    return Pairs.of(ids, args.offsets, tokens.stop - tokens.start, args.K, head.ranks.vocab, some)


def _products(head: Head, pairs: Pairs, ids: Tensor, tokens: slice) -> Products:
    """Return the products with the rows that this rank holds of ``ids`` [P]."""
    if not head.ranks.alone:
        row, here = head.ranks.here(ids)
        ids = row.where(here, NOTHING)  # type: ignore[arg-type]
    x = take_rows(head.input, None, tokens, head.dtype)
    return Products(
        pairs=pairs, ids=ids.int(), x_nD=x if x.stride(-1) == 1 else x.contiguous(), weight_VD=head.weight_VD,
        wide=head.wide, gathered=support_chunk(head, 1, 1)[1], kernels=support_backend(head)[0] == "row",
    )  # fmt: skip


def _logits(head: Head, pairs: Pairs, products: Products) -> Tensor:
    """Return the logits of all pairs [P], of every rank's classes; -inf where a pair is none."""
    z, ids = products.scores(), pairs.ids
    if head.bias_V is not None and len(head.bias_V):
        z = z + head.bias_V[products.ids.clamp(min=0).long()].where(products.ids >= 0, 0)
    z = head.ranks.sum_of(z)
    if head.scale is not None:
        z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z.masked_fill(ids == NOTHING, -torch.inf).masked_fill(ids == NO_CLASS, torch.nan)


def _numbers(pairs: Pairs, z: Tensor) -> Numbers:
    V, top, is_pair = pairs.vocab, pairs.highest(z), pairs.ids >= 0
    highest = is_pair & (z == pairs.spread(top))
    # the lowest class of several: wide floats, which hold each class exactly
    top_id = -pairs.highest(torch.where(highest, -pairs.ids.double(), -float(V)))
    top_id = top_id.clamp(max=V).long()
    is_top = highest & (pairs.ids == pairs.spread(top_id))
    above = z - pairs.spread(top.masked_fill(top == -torch.inf, 0))
    e = above.exp().masked_fill(is_top, 0)
    not_finite = torch.where((top == -torch.inf) & (top_id == V), 0, top - top)  # NaN, but for an empty set
    rest = pairs.sum(e) + not_finite
    return Numbers(top, top_id, rest, torch.log1p(rest), above, e, is_top)


def _values(args: SupportArgs, pairs: Pairs, z: Tensor, numbers: Numbers, at: Tensor) -> dict[str, Tensor]:
    """Return what is computed of each token, and of its targets at the pairs ``at``."""
    top, spread, V = numbers.top, numbers.spread, pairs.vocab
    infinite, empty = top.abs() == torch.inf, (top == -torch.inf) & (numbers.top_id == V)
    values = {"lse": top.where(infinite, top + spread), "argmax": numbers.top_id.where(numbers.top_id < V, -1)}
    if "entropy" in args.wanted:
        values["entropy"] = numbers.entropy(pairs)
    if "sum_sq_prob" in args.wanted:
        squares = pairs.sum(numbers.e.square())
        values["sum_sq_prob"] = ((1 + squares) / (1 + numbers.rest).square()).masked_fill(empty, 0)
    of_pair = numbers.above[at] if len(z) else at.to(z.dtype)
    values["is_top1"] = args_top = values["argmax"][:, None] == (pairs.ids[at] if len(z) else at - 2)
    values["logprob"] = torch.where(args_top, 0, of_pair) - spread[:, None]
    return values


def _given(g: Tensor | None, name: str, args: SupportArgs, tokens: slice) -> Tensor | None:
    return g[tokens] if g is not None and name in args.wanted else None


def _logits_gradient(pairs: Pairs, z: Tensor, at: Tensor, upstream: Upstream) -> tuple[Tensor, Tensor]:
    """Return the gradient of the pairs' logits [P], and which tokens any gradient flows back to [n]."""
    numbers, g, h, r = _numbers(pairs, z), upstream.logprob, upstream.entropy, upstream.lse
    total = 1 + numbers.rest
    over = pairs.spread(total)
    p = torch.where(numbers.is_top, 1, numbers.e) / over
    c, active = torch.zeros_like(z), torch.zeros(pairs.tokens, dtype=torch.bool, device=z.device)
    if isinstance(g, Tensor):
        g_pair = torch.zeros_like(z)
        if len(z):
            # equal places are summed one by one: what is of no pair adds its 0 to one of its own
            spare = torch.arange(at.numel(), device=at.device).view(at.shape) % len(z)
            where, what = at.where(at >= 0, spare).reshape(-1), g.where(at >= 0, 0).reshape(-1)
            if g.shape[1] == 1:  # a sum of one number and zeros, in any order
                g_pair.index_add_(0, where, what)
            else:
                add_rows_(g_pair, where, what)
        of_token, active = g.sum(1), active | (g != 0).any(1)
        other = torch.where(numbers.is_top, pairs.spread(numbers.rest) / over, 1 - p)
        # where a token has one target, the second difference is exactly 0 there
        c += g_pair * other - (pairs.spread(of_token) - g_pair) * p
    if h is not None:
        log_p = torch.where(numbers.is_top, 0, numbers.above).clamp(min=FLOOR) - pairs.spread(numbers.spread)
        c -= torch.where(p > 0, pairs.spread(h) * p * (log_p + pairs.spread(numbers.entropy(pairs))), p)
        active |= h != 0
    if r is not None:
        c += pairs.spread(r) * p
        active |= r != 0
    return c, active


def _inputs_gradient(head: Head, pairs: Pairs, z: Tensor, c: Tensor, active: Tensor) -> Tensor:
    """Return the gradient of the pairs' dot products, 0 of pairs that are none and where nothing flows back."""
    if head.softcap is not None:
        c = c * (1 - (z / head.softcap).square())
    if head.scale is not None:
        c = c * head.scale
    return torch.where((pairs.ids != NOTHING) & pairs.spread(active), c, 0)


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
            into.weight_VD = x.new_zeros(into.weight_ids.shape[1], D, dtype=dtype)
        else:
            into.weight_VD = x.new_empty(V, D, dtype=dtype)
    if wanted.bias:
        into.bias_V = x.new_zeros(V, dtype=head.wide)
    return into, slot


def _listed_classes(head: Head, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's classes that any pair lists [1, R], and of each class which of these it is [V_r].

    Their number is known on the device only: there are as many as there can be, class 0 in the place of those that
    are not there. On the CPU there are as many as there are.
    """
    rows, V = ids.long(), len(head.weight_VD)
    if not head.ranks.alone:
        row, here = head.ranks.here(rows)
        rows = row.where(here, NOTHING)  # type: ignore[arg-type]
    listed = torch.zeros(V + 1, dtype=torch.bool, device=ids.device)
    listed[rows.where(rows >= 0, V)] = True
    listed = listed[:V]
    slot, most = (listed.cumsum(0) - 1).clamp_(min=0), min(V, len(ids))
    classes = torch.arange(V, device=ids.device)
    if drops_rows(ids.device):
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
    known=("pair_z", "pair_id", "target_at"), gradients=_gradient_shapes, returns=4, flop=_flop,
)  # fmt: skip

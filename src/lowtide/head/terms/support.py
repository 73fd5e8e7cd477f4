"""Log-probabilities and statistics over a set of classes for each token, from the set's rows of the weight alone.

N tokens, n of a chunk, K ids of a set, T targets a token, D hidden size, V vocabulary. A set's logits [n, K] are those
of a small vocabulary, and `terms/statistics` has their numbers and their gradient; a target is a place among the K.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import TargetIndexError
from lowtide.head.call import Head, SupportArgs, Wanted
from lowtide.head.gradients import Gradients
from lowtide.head.matmul import slices
from lowtide.head.nodes import Function, Shape
from lowtide.head.plan import CPU_WORKSPACE, MIB, SUPPORT_WORKSPACE, support_backend
from lowtide.head.ranks.parallel import Alone
from lowtide.head.rows import looks_at_numbers, take_rows
from lowtide.head.terms import listed_rows
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.statistics import Statistics, Upstream

DIFFERENTIABLE = ("logprob", "entropy", "lse")
OF_TARGETS = frozenset({"logprob", "is_top1", "outside"})
NOTHING, NO_CLASS = -1, -2  # in the place of a class: a pad or a repetition; an id that is no class


def forward(head: Head, args: SupportArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:  # noqa: ARG001
    """Return the statistics of all N tokens; with ``keep`` the sets' classes and logits, and the targets' places."""
    valid = args.target != args.ignore_index
    if looks_at_numbers(head.input.device):
        V = head.ranks.vocab
        wrong = valid & ((args.target < 0) | (args.target >= V))
        check_classes(args.target.reshape(-1), wrong.reshape(-1), V, args.ignore_index)
        check_ids(args.ids, V)
    chunks = [_statistics(head, args, tokens, keep) for tokens in _chunks(head, args)]
    stats = chunks[0] if len(chunks) == 1 else {name: torch.cat([x[name] for x in chunks]) for name in chunks[0]}
    return stats | {"outside": stats["outside"].sum()}


def _statistics(head: Head, args: SupportArgs, tokens: slice, keep: bool) -> dict[str, Tensor]:
    """Return the statistics of a chunk's tokens; "outside" is a number of each of them."""
    y, V = args.target[tokens], head.ranks.vocab
    valid, is_class = y != args.ignore_index, (y >= 0) & (y < V)
    ids, at = _sets(args.ids[tokens], y, V)
    if args.wanted <= OF_TARGETS:  # ignored tokens' rows are not read
        ids = ids.masked_fill(~valid.any(1, keepdim=True), NOTHING)
    inside = at >= 0
    z, empty = _logits(head, ids, tokens)
    numbers = _terms(head, args, at).numbers(z.clone(), slice(0, len(z)))
    undefined = ~is_class | numbers["lse"].isnan()[:, None]
    of_class = numbers["logprob"].masked_fill(~inside, -torch.inf).masked_fill(undefined, torch.nan)
    stats = {
        "logprob": of_class.masked_fill(~valid, 0),
        "lse": numbers["lse"].masked_fill(empty, -torch.inf),
        "outside": (valid & is_class & ~inside).sum(1),
    }
    if args.wanted & {"argmax", "is_top1"}:
        argmax = ids.gather(1, numbers["argmax"][:, None]).clamp(min=-1)
        stats |= {"argmax": argmax[:, 0], "is_top1": (argmax == y) & inside & valid}
    if "entropy" in numbers:
        stats["entropy"] = numbers["entropy"]
    if "sum_sq_prob" in numbers:
        stats["sum_sq_prob"] = numbers["sum_sq_prob"].masked_fill(empty, 0)
    return stats | ({"set_z": z, "set_id": ids.int(), "target_at": at.where(valid, -1)} if keep else {})


def backward(
    head: Head, args: SupportArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the upstream ones [N] (of logprob [N, T]), and what forward returned."""
    x, (V, D), into = head.input, head.weight_VD.shape, Gradients()
    _, input_grad, weight_grad = _products(head)
    rows = torch.empty_like(known["set_id"])
    c = torch.empty_like(known["set_z"])  # the gradient of the dot products
    if wanted.input:
        into.input_ND = x.new_empty(len(c), D)
    for tokens in _chunks(head, args):
        of_chunk = {name: g[tokens] for name, g in upstream.items() if g is not None and name in args.wanted}
        ids = known["set_id"][tokens]
        c[tokens] = _gradient(head, args, tokens, Upstream(**of_chunk), {name: x[tokens] for name, x in known.items()})
        rows[tokens] = _rows_here(head, ids)
        if into.input_ND is not None:
            alone = head.ranks.alone
            out = into.input_ND[tokens] if alone else c.new_empty(len(ids), D)
            input_grad(c[tokens], head.weight_VD, rows[tokens], out, head.dtype)
            if not alone:
                head.ranks.begin_sum(out, tokens, None, into)()
    if wanted.weight:
        into.weight_VD = x.new_empty(V, D, dtype=head.weight_VD.dtype)
        weight_grad(c, _hidden(head, slice(0, len(c))), rows, into.weight_VD)
    if wanted.bias:
        into.bias_V = x.new_zeros(V, dtype=head.wide)
        if V:
            row, c = rows.view(-1).long(), c.where(rows >= 0, 0).view(-1)
            # equal rows are summed one by one: a pad adds its 0 to a row of its own
            spare = torch.arange(len(row), device=row.device) % V
            listed_rows.add_rows_(into.bias_V, row.where(row >= 0, spare), c)
    return into


def _gradient(head: Head, args: SupportArgs, tokens: slice, g: Upstream, known: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the dot products of a chunk's tokens [n, K], 0 at pads and where nothing flows back."""
    y, z, at = args.target[tokens], known["set_z"], known["target_at"]
    wrong = (y != args.ignore_index) & ((y < 0) | (y >= head.ranks.vocab))
    if isinstance(g.logprob, Tensor):
        g = g._replace(logprob=g.logprob.where(at >= 0, 0).masked_fill(wrong, torch.nan))
    terms, every = _terms(head, args, at), slice(0, len(z))
    numbers, z = terms.numbers(z.clone(), every), z.clone()
    terms.gradient_(z, every, numbers, g)
    nothing = g.largest(head.ranks.vocab) == 0
    return z.masked_fill_((known["set_id"] == NOTHING) | nothing[:, None], 0)


def check_ids(ids: Tensor, V: int) -> None:
    """Raise where an id is neither a class nor -1; on a device this would stop the host."""
    ids = ids.reshape(-1)
    wrong = (ids < NOTHING) | (ids >= V)
    if wrong.any():
        position = int(wrong.nonzero()[0, 0])
        raise TargetIndexError(
            f"support: expected ids from 0 to {V - 1}, or -1 for padding, got {int(ids[position])} at position"
            f" {position} of the flattened ids. Check that tokenizer and head have the same vocabulary."
        )


def _products(head: Head) -> list[Callable[..., Any]]:
    """Return what computes the dot products, the hidden states' gradient and the weight's."""
    if support_backend(head)[0] == "row":
        from lowtide.head.kernels import support_rows

        return [support_rows.score, support_rows.input_grad, support_rows.weight_grad]
    block = min(2**20, _workspace(head) // 32)
    plain: tuple[Callable[..., Any], ...] = listed_rows.score, listed_rows.input_grad, listed_rows.weight_grad
    return [partial(product, block=block) for product in plain]


def _workspace(head: Head) -> int:
    if head.workspace_mib is not None:
        return int(head.workspace_mib * MIB)
    return CPU_WORKSPACE if head.input.device.type == "cpu" else SUPPORT_WORKSPACE


def _chunks(head: Head, args: SupportArgs) -> list[slice]:
    """Return the tokens of each chunk, the same on every rank: sorting ids and their logits take memory."""
    (N, K), D = args.ids.shape, head.input.shape[-1]
    of_id = 100 + 4 * (D // 128 + 1) + 4 * head.ranks.size
    of_token = K * of_id + D * (head.input.element_size() + 2 * head.wide.itemsize)
    return list(slices(N, _workspace(head) // 2 // of_token)) or [slice(0, 0)]


def _sets(ids: Tensor, y_nT: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """Return each token's ids in ascending order, each once, else `NOTHING`; and its targets' places, -1 outside."""
    ids = ids.masked_fill((ids < NOTHING) | (ids >= V), NO_CLASS).sort(1).values
    at = torch.searchsorted(ids, y_nT).clamp_(max=ids.shape[1] - 1)  # the first of several
    at = at.masked_fill((ids.gather(1, at) != y_nT) | (y_nT < 0), -1)
    repeated = ids[:, 1:] == ids[:, :-1]
    ids[:, 1:].masked_fill_(repeated, NOTHING)
    return ids, at


def _rows_here(head: Head, ids: Tensor) -> Tensor:
    """Return the ids' rows of this rank's weight, int32, negative where it has none."""
    row, here = head.ranks.here(ids)
    return (row if here is None else row.where(here, NOTHING)).int()


def _hidden(head: Head, tokens: slice) -> Tensor:
    x = take_rows(head.input, None, tokens, head.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _logits(head: Head, ids: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Return the sets' logits [n, K], -inf at pads, and which sets are empty, where the first one is 0."""
    rows = _rows_here(head, ids)
    z = _products(head)[0](_hidden(head, tokens), head.weight_VD, rows)
    if head.bias_V is not None and len(head.bias_V):
        z += head.bias_V.take(rows.clamp(min=0).long()).where(rows >= 0, 0)
    z = head.ranks.sum_of(z)
    if head.scale is not None:
        z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z.masked_fill(ids == NOTHING, -torch.inf).masked_fill_(ids == NO_CLASS, torch.nan)
    empty = (ids == NOTHING).all(1)
    z[:, 0].masked_fill_(empty, 0)
    return z, empty


def _terms(head: Head, args: SupportArgs, at_nT: Tensor) -> Statistics:
    """Return the statistics of sets as of a vocabulary of K classes; a target outside stands for the first place."""
    names = args.wanted & {"entropy", "sum_sq_prob"}
    return Statistics(head._replace(ranks=Alone(args.ids.shape[1])), None, at_nT.clamp(min=0), names | {"argmax"})


def _shapes(head: Head, args: SupportArgs, keep: bool) -> dict[str, Shape]:
    (N, T), K = args.target.shape, args.ids.shape[1]
    of_set: tuple[int, ...] = (N, K) if keep else (0,)
    return {
        "logprob": ((N, T), head.wide),
        "entropy": ((N if "entropy" in args.wanted else 0,), head.wide),
        "lse": ((N,), head.wide),
        "argmax": ((N,), torch.int64),
        "sum_sq_prob": ((N if "sum_sq_prob" in args.wanted else 0,), head.wide),
        "is_top1": ((N, T), torch.bool),
        "outside": ((), torch.int64),
        "set_z": (of_set, head.wide),
        "set_id": (of_set, torch.int32),
        "target_at": ((N if keep else 0, T), torch.int64),
    }


def _flop(head: Head, args: SupportArgs, wanted: Wanted) -> int:
    return 2 * (1 + sum(wanted[:2])) * args.ids.numel() * head.weight_VD.shape[1]


SUPPORT = Function(
    "support_stats", "linear_token_stats", SupportArgs, forward, backward, shapes=_shapes,
    returned=(*DIFFERENTIABLE, "argmax", "sum_sq_prob", "is_top1", "outside"), upstream=DIFFERENTIABLE,
    known=("set_z", "set_id", "target_at"), flop=_flop,
)  # fmt: skip

"""Log-probabilities and statistics over a set of classes for each token, from the set's rows of the weight alone.

N tokens, n of a chunk, K ids of a set, T targets a token, D hidden size, V vocabulary. A set's logits [n, K] are those
of a small vocabulary, and `terms/statistics` has their numbers and their gradient; a target is a place among the K. The
dot products and their gradients are kernels' (`kernels/support_rows`), or the same in plain PyTorch, below.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, TargetIndexError, message
from lowtide.head.call import Gradients, Head, SupportArgs, Wanted, axes_and
from lowtide.head.engine import joined
from lowtide.head.nodes import Function, Shape
from lowtide.head.plan import CPU_WORKSPACE, GPU_WORKSPACE, MIB, support_backend
from lowtide.head.ranks import Alone
from lowtide.head.rows import looks_at_numbers, slices, take_rows
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.statistics import Statistics, Upstream

WITHOUT_SUPPORT = ("mean_logit", "topk")  # statistics of the whole vocabulary
DIFFERENTIABLE = ("logprob", "entropy", "lse")
OF_TARGETS = frozenset({"logprob", "is_top1"})
NOTHING, NO_CLASS = -1, -2  # in the place of a class: a pad or a repetition; an id that is no class
BLOCK = 2**16  # numbers of the weight's rows that plain PyTorch gathers at a time, unless one token's are more


def check_support(support: object, input: Tensor, names: frozenset[str]) -> Tensor:
    """Check sets of classes, ids [..., K] or [K], and that ``names`` are statistics of a set; return them as int64."""
    for name in WITHOUT_SUPPORT:
        if name in names:
            hint = "Of a set take its log-probabilities: target=ids."
            raise ArgumentValueError(message("want", "statistics of a set with support", repr(name), hint))
    if not isinstance(support, Tensor):
        hint = "Pad sets of different lengths with -1."
        raise ArgumentTypeError(message("support", "a tensor of ids", type(support).__name__, hint))
    ids = check_tensor("support", support)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        hint = "For a mask of the vocabulary pass the ids where it is True." if ids.dtype == torch.bool else ""
        raise ArgumentTypeError(message("support", "an integer dtype", str(ids.dtype), hint))
    check_device("support", ids, input)
    if ids.dim() != 1 and (ids.dim() != input.dim() or ids.shape[:-1] != input.shape[:-1]):
        expected = f"shape {axes_and(input, 'K')}, padded with -1, or [K], one set for all tokens"
        got = f"{list(ids.shape)}"
        raise ArgumentValueError(message("support", f"{expected}, as input is {list(input.shape)}", got))
    return ids.long()


def forward(head: Head, args: SupportArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:  # noqa: ARG001
    """Return the statistics of all N tokens, "outside" as a number of each; with ``keep`` the sets' logits."""
    check_classes(head, args.target, args.ignore_index)
    if looks_at_numbers(head.input.device):
        ids, V = args.ids.reshape(-1), head.ranks.vocab
        wrong = ((ids < NOTHING) | (ids >= V)).nonzero()
        if len(wrong):
            raise TargetIndexError(
                f"support: expected ids from 0 to {V - 1}, or -1 for padding, got {int(ids[wrong[0, 0]])} at position"
                f" {int(wrong[0, 0])} of the flattened ids. Check that tokenizer and head have the same vocabulary."
            )
    return joined([(_statistics(head, args, tokens, keep), None) for tokens in _chunks(head, args)])[0]


def _statistics(head: Head, args: SupportArgs, tokens: slice, keep: bool) -> dict[str, Tensor]:
    y, V = args.target[tokens], head.ranks.vocab
    valid, is_class = y != args.ignore_index, (y >= 0) & (y < V)
    ids, at = _sets(args, tokens, V)
    inside, z = at >= 0, _logits(head, ids, tokens)
    numbers = _terms(head, args, at).numbers(z.clone(), slice(0, len(z)))
    empty = (ids == NOTHING).all(1)
    undefined = ~is_class | numbers["lse"].isnan()[:, None]
    of_class = numbers["logprob"].masked_fill(~inside, -torch.inf).masked_fill(undefined, torch.nan)
    argmax = ids.gather(1, numbers["argmax"][:, None]).clamp(min=-1)
    stats = {
        "logprob": of_class.masked_fill(~valid, 0),
        "lse": numbers["lse"].masked_fill(empty, -torch.inf),
        "argmax": argmax[:, 0],
        "is_top1": (argmax == y) & inside & valid,
        "outside": (valid & is_class & ~inside).sum(1),
    }
    if "entropy" in numbers:
        stats["entropy"] = numbers["entropy"]
    if "sum_sq_prob" in numbers:
        stats["sum_sq_prob"] = numbers["sum_sq_prob"].masked_fill(empty, 0)
    return stats | ({"set_z": z} if keep else {})


def backward(
    head: Head, args: SupportArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the upstream ones [N] (of logprob [N, T]), and the sets' logits."""
    x, (V, D), into = head.input, head.weight_VD.shape, Gradients()
    _, input_grad, weight_grad = _products(head)
    rows, c = torch.empty_like(args.ids, dtype=torch.int32), torch.empty_like(known["set_z"])  # c: of dot products
    if wanted.input:
        into.input_ND = x.new_empty(len(c), D)
    for tokens in _chunks(head, args):
        y, z, (ids, at) = args.target[tokens], known["set_z"][tokens], _sets(args, tokens, head.ranks.vocab)
        g = Upstream(**{name: g[tokens] for name, g in upstream.items() if g is not None and name in args.wanted})
        if isinstance(g.logprob, Tensor):
            wrong = (y != args.ignore_index) & ((y < 0) | (y >= head.ranks.vocab))
            g = g._replace(logprob=g.logprob.where(at >= 0, 0).masked_fill(wrong, torch.nan))
        terms, every = _terms(head, args, at), slice(0, len(z))
        numbers, z = terms.numbers(z.clone(), every), z.clone()
        terms.gradient_(z, every, numbers, g)
        nothing = (ids == NOTHING) | (g.largest(head.ranks.vocab) == 0)[:, None]
        c[tokens], rows[tokens] = z.masked_fill_(nothing, 0), _rows_here(head, ids)
        if into.input_ND is not None:
            out = into.input_ND[tokens] if head.ranks.alone else c.new_empty(len(ids), D)
            input_grad(c[tokens], head.weight_VD, rows[tokens], out, head.dtype)
            if not head.ranks.alone:
                head.ranks.begin_sum(out, tokens, None, into.put_input)()
    if wanted.weight:
        into.weight_VD = x.new_empty(V, D, dtype=head.weight_VD.dtype)
        weight_grad(c, _hidden(head, slice(0, len(c))), rows, into.weight_VD)
    if wanted.bias:
        into.bias_V = c.new_empty(V)
        weight_grad(c, c.new_ones(len(c), 1), rows, into.bias_V[:, None])
    return into


def _products(head: Head) -> tuple[Callable[..., Any], ...]:
    """Return what computes the dot products, the hidden states' gradient and the weight's."""
    if support_backend(head)[0] != "row":
        return score, input_grad, weight_grad
    from lowtide.head.kernels import support_rows

    return support_rows.score, support_rows.input_grad, support_rows.weight_grad


def _chunks(head: Head, args: SupportArgs) -> list[slice]:
    """Return the tokens of each chunk, the same on every rank: sorting ids and their logits take memory."""
    (N, K), D = args.ids.shape, head.input.shape[-1]
    workspace: float = CPU_WORKSPACE if head.input.device.type == "cpu" else GPU_WORKSPACE
    if head.workspace_mib is not None:
        workspace = head.workspace_mib * MIB
    of_id = 104 + D // 32 + 4 * head.ranks.size
    of_token = K * of_id + D * (head.input.element_size() + 2 * head.wide.itemsize)
    return list(slices(N, int(workspace) // 2 // of_token)) or [slice(0, 0)]


def _sets(args: SupportArgs, tokens: slice, V: int) -> tuple[Tensor, Tensor]:
    """Return each token's ids in ascending order, each once, else `NOTHING`; and its targets' places, -1 outside.

    If nothing but what is of targets is wanted, sets of tokens without any are empty: no row is read for them.
    """
    ids, y = args.ids[tokens], args.target[tokens]
    ids = ids.masked_fill((ids < NOTHING) | (ids >= V), NO_CLASS).sort(1).values
    at = torch.searchsorted(ids, y.contiguous()).clamp_(max=ids.shape[1] - 1)  # the first of several
    at = at.masked_fill((ids.gather(1, at) != y) | (y < 0) | (y == args.ignore_index), -1)
    repeated = ids[:, 1:] == ids[:, :-1]
    ids[:, 1:].masked_fill_(repeated, NOTHING)
    if args.wanted <= OF_TARGETS:
        ids.masked_fill_((y == args.ignore_index).all(1, keepdim=True), NOTHING)
    return ids, at


def _rows_here(head: Head, ids: Tensor) -> Tensor:
    """Return the ids' rows of this rank's weight, int32, negative where it has none."""
    row, here = head.ranks.here(ids)
    return (row if here is None else row.where(here, NOTHING)).int()


def _hidden(head: Head, tokens: slice) -> Tensor:
    x = take_rows(head.input, None, tokens, head.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _logits(head: Head, ids: Tensor, tokens: slice) -> Tensor:
    """Return the sets' logits [n, K], -inf at pads; of an empty set the first one is 0."""
    rows = _rows_here(head, ids)
    z: Tensor = _products(head)[0](_hidden(head, tokens), head.weight_VD, rows)
    if head.bias_V is not None and len(head.bias_V):
        z += head.bias_V.take(rows.clamp(min=0).long()).where(rows >= 0, 0)
    z = head.ranks.sum_of(z)
    if head.scale is not None:
        z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z.masked_fill(ids == NOTHING, -torch.inf).masked_fill_(ids == NO_CLASS, torch.nan)
    z[:, 0].masked_fill_((ids == NOTHING).all(1), 0)
    return z


def _terms(head: Head, args: SupportArgs, at_nT: Tensor) -> Statistics:
    """Return the statistics of sets as of a vocabulary of K classes; a target outside stands for the first place."""
    names = args.wanted & {"entropy", "sum_sq_prob"}
    return Statistics(head._replace(ranks=Alone(args.ids.shape[1])), None, at_nT.clamp(min=0), names | {"argmax"})


def score(x_nD: Tensor, w_VD: Tensor, rows_nK: Tensor) -> Tensor:
    """Return each listed row's dot product with its token's hidden state, wide; 0 where a row is negative."""
    z = x_nD.new_zeros(rows_nK.shape, dtype=torch.promote_types(x_nD.dtype, torch.float32))
    for part, w in _gathered(w_VD, rows_nK, x_nD.dtype, z.dtype):
        z[part] = (w @ x_nD[part, :, None].to(z.dtype))[..., 0].where(rows_nK[part] >= 0, 0)
    return z


def input_grad(c_nK: Tensor, w_VD: Tensor, rows_nK: Tensor, out_nD: Tensor, dtype: torch.dtype) -> None:
    """Write the sum of each token's rows, rounded to ``dtype``, times ``c_nK`` (wide) into ``out_nD``."""
    out_nD.zero_()
    c_nK = c_nK.where(rows_nK >= 0, 0)
    for part, w in _gathered(w_VD, rows_nK, dtype, c_nK.dtype):
        w.masked_fill_((c_nK[part] == 0)[..., None], 0)
        out_nD[part] = (c_nK[part, None] @ w)[:, 0].to(out_nD.dtype)


def weight_grad(c_NK: Tensor, x_ND: Tensor, rows_NK: Tensor, out_VD: Tensor) -> None:
    """Write the sum of each row's hidden states times ``c_NK`` into ``out_VD``, in one order."""
    total, c_NK = out_VD.zero_().to(c_NK.dtype), c_NK.where(rows_NK >= 0, 0)
    for part in slices(len(x_ND) if len(out_VD) else 0, BLOCK // max(1, rows_NK.shape[1] * x_ND.shape[1])):
        row, c = rows_NK[part].clamp(min=0).view(-1).long(), c_NK[part, :, None]
        products = (c * x_ND[part, None]).masked_fill_(c == 0, 0).flatten(0, 1)
        if total.is_cuda:  # where index_add_ has no order
            total.index_put_((row,), products, accumulate=True)
        else:
            total.index_add_(0, row, products)
    if total is not out_VD:
        out_VD.copy_(total)


def _gathered(w_VD: Tensor, rows_nK: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield some tokens, and their rows of the weight [m, K, D] rounded to ``dtype``; anything where they are none."""
    (n, K), (V, D) = rows_nK.shape, w_VD.shape
    for part in slices(n if V else 0, BLOCK // max(1, K * D)):
        yield part, w_VD[rows_nK[part].clamp(min=0)].to(dtype).to(wide)


def _shapes(head: Head, args: SupportArgs, keep: bool) -> dict[str, Shape]:
    (N, T), wide = args.target.shape, head.wide
    return {
        "logprob": ((N, T), wide),
        "entropy": ((N if "entropy" in args.wanted else 0,), wide),
        "lse": ((N,), wide),
        "argmax": ((N,), torch.int64),
        "sum_sq_prob": ((N if "sum_sq_prob" in args.wanted else 0,), wide),
        "is_top1": ((N, T), torch.bool),
        "outside": ((N,), torch.int64),
        "set_z": (args.ids.shape if keep else (0,), wide),
    }


def _flop(head: Head, args: SupportArgs, wanted: Wanted) -> int:
    return 2 * (1 + sum(wanted[:2])) * args.ids.numel() * head.weight_VD.shape[1]


SUPPORT = Function(
    "support_stats", "linear_token_stats", SupportArgs, forward, backward, shapes=_shapes,
    returned=(*DIFFERENTIABLE, "argmax", "sum_sq_prob", "is_top1", "outside"), upstream=DIFFERENTIABLE,
    known=("set_z",), flop=_flop,
)  # fmt: skip

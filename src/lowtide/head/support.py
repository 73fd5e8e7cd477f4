"""Sets of classes over which a head's log-probabilities are taken: their checks, and the two ways to compute them.

N tokens, T targets a token, K ids of a set, D hidden size, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import Operator, node
from lowtide.head.call import Head, SupportArgs, TokenStatsArgs, axes_and
from lowtide.head.ranks.parallel import Alone, Ranks, exchanges_between_ranks_run_in_eager
from lowtide.head.rows import looks_at_numbers
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.support import SUPPORT, check_ids
from lowtide.head.terms.token_stats import TOKEN_STATS

WITHOUT_SUPPORT = ("mean_logit", "topk")  # statistics of the whole vocabulary
_IGNORED = -100


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


def support_stats(
    head: Head, input: Tensor, target: Tensor | None, names: frozenset[str], ignore_index: int, support: Tensor
) -> dict[str, Tensor]:
    """Return fields ``names`` over the sets, and "outside" if there are targets; ``input`` is the caller's."""
    if head.gradient == "forward":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with support", "'forward'", hint))
    if isinstance(head.ranks, Ranks) and torch.compiler.is_compiling():
        return exchanges_between_ranks_run_in_eager(_stats, head, input, target, names, ignore_index, support)
    return _stats(head, input, target, names, ignore_index, support)


def _stats(
    head: Head, input: Tensor, target: Tensor | None, names: frozenset[str], ignore_index: int, support: Tensor
) -> dict[str, Tensor]:
    ranks = head.ranks
    leading, N = input.shape[:-1], math.prod(input.shape[:-1])
    target, support = ranks.whole(target), ranks.whole(support)
    if isinstance(ranks, Ranks) and ranks.spread:
        whole, ranks = ranks.gathered(_as_dtensor(head.input, input))
        head = head._replace(input=whole, ranks=ranks)
    y = head.input.new_zeros((N, 0), dtype=torch.long)
    if target is not None:
        y = target.long().reshape(N, target.shape[-1] if target.dim() > len(leading) else 1).contiguous()
    if not support.shape[-1]:
        support = support.new_full((*support.shape[:-1], 1), -1)
    if support.dim() == 1:
        stats = _one_set(head, y, names, ignore_index, support)
    else:
        ids = support.reshape(N, support.shape[-1])
        args = SupportArgs(target=y, ids=ids, want=",".join(sorted(names)), ignore_index=ignore_index)
        stats = SUPPORT(head, args, recompute=True)
    shapes = {} if target is None else dict.fromkeys(("logprob", "is_top1"), target.shape)
    wanted = names | {"outside"} if target is not None else names
    return {
        name: ranks.result(x if name == "outside" else x.view(shapes.get(name, leading)))
        for name, x in stats.items()
        if name in wanted
    }


def _as_dtensor(local: Tensor, input: Any) -> Tensor:
    """Return this rank's hidden states, which may carry a trained scale, as a DTensor placed as ``input`` is."""
    from torch.distributed.tensor import DTensor

    placed: Tensor = DTensor.from_local(
        local, input.device_mesh, input.placements, run_check=False, shape=input.shape, stride=input.stride()
    )
    return placed


def _one_set(head: Head, y: Tensor, names: frozenset[str], ignore_index: int, support: Tensor) -> dict[str, Tensor]:
    """One set is a smaller vocabulary: the rows of the weight are gathered, and scored by the usual functions."""
    V, on_cpu = head.ranks.vocab, looks_at_numbers(head.input.device)
    valid, is_class = y != ignore_index, (y >= 0) & (y < V)
    if on_cpu and not torch.compiler.is_compiling():
        check_classes(y.reshape(-1), (valid & ~is_class).reshape(-1), V, ignore_index)
    ids, alive = _SET(support, V)
    if on_cpu and not torch.compiler.is_compiling() and alive.any():
        ids, alive = ids[alive], None
    weight, bias = _gathered(head, ids, alive)
    mask, empty = None, None
    if alive is not None:
        empty = ~alive.any()
        dead = ~alive & ~empty  # of an empty set any logits: a softmax of -inf alone would be NaN
        if head.softcap is None and _is_positive(head.scale):
            # float32, whatever the operands' dtype, and exactly -inf: kernels measure a lower number, rounded twice, in
            # one operation from itself rounded once, and of -1e30 the difference is 6e21
            bias = (weight.new_zeros(len(ids)) if bias is None else bias).to(head.wide).masked_fill(dead, -torch.inf)
        else:
            mask = dead.expand(len(y), -1)
    at = torch.searchsorted(ids, y).clamp(max=len(ids) - 1)
    inside = (ids.take(at) == y) & is_class
    y_slot = at.where(inside, _IGNORED).where(is_class | ~valid, len(ids)).where(valid, _IGNORED)
    args = TokenStatsArgs(target=y_slot, want=",".join(sorted(names)), topk=0, ignore_index=_IGNORED, mask=mask)
    small = head._replace(weight_VD=weight, bias_V=bias, ranks=Alone(len(ids)))
    stats = TOKEN_STATS(small, args, recompute=True)
    outside = valid & is_class & ~inside
    of_outside = torch.where(stats["lse"].detach().isnan(), torch.nan, -torch.inf)[:, None]
    stats |= {"logprob": torch.where(outside, of_outside, stats["logprob"]), "argmax": ids.take(stats["argmax"])}
    if empty is not None:
        of_empty = {"lse": -torch.inf, "entropy": 0.0, "sum_sq_prob": 0.0, "argmax": -1}
        stats |= {name: stats[name].masked_fill(empty, value) for name, value in of_empty.items() if name in names}
    return stats | {"outside": outside.sum()}


def _is_positive(scale: Tensor | None) -> bool:
    """Return whether a logit scale is a number above 0: on a device it is not looked at."""
    if scale is None or torch.compiler.is_compiling():
        return scale is None
    return scale.device.type == "cpu" and not scale.requires_grad and scale.item() > 0


def _gathered(head: Head, ids: Tensor, alive: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the rows of weight and bias of ``ids`` [K], of any rank: 0 where nothing is ``alive``, NaN of no class."""
    ranks, (V, D) = head.ranks, head.weight_VD.shape
    row, here = ranks.here(ids.clamp(min=0))
    row = row.clamp(max=max(0, V - 1))
    if V:
        weight = head.weight_VD.index_select(0, row)
        bias = None if head.bias_V is None else head.bias_V.index_select(0, row)
    else:  # a rank without classes
        weight = head.weight_VD.sum() + head.weight_VD.new_zeros(len(ids), D)
        bias = None if head.bias_V is None else head.bias_V.sum() + head.bias_V.new_zeros(len(ids))
    if here is not None:
        weight = _TOGETHER.apply(weight.where(here[:, None], 0), ranks)  # type: ignore[no-untyped-call]
        bias = None if bias is None else _TOGETHER.apply(bias.where(here, 0), ranks)  # type: ignore[no-untyped-call]
    if alive is None:
        return weight, bias
    # what was read in the place of a pad may be NaN
    of_others = weight.new_zeros(len(ids), 1).masked_fill_((ids < -1)[:, None], torch.nan)
    is_class = alive & (ids >= 0)
    return weight.where(is_class[:, None], of_others), None if bias is None else bias.where(is_class, 0)


def _put_together(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:  # noqa: ARG001
    """Return all ranks' rows: each has its own, and 0 in the place of the others'."""
    return ranks.put_together_(x.contiguous().clone())


_TOGETHER = node("RowsOfAllRanks", "linear_token_stats", _put_together, lambda ctx, g: ([g], ()))  # noqa: ARG005


def _set_of(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the ids in ascending order, padding as V at the end, and which of them are not padding, each once.

    What is no class is -2, one of the set whose logit is NaN, and an error on the CPU.
    """
    if looks_at_numbers(ids.device):
        check_ids(ids, vocab)
    ids = ids.masked_fill((ids < -1) | (ids >= vocab), -2).masked_fill(ids == -1, vocab).sort().values
    alive = ids != vocab
    alive[1:] &= ids[1:] != ids[:-1]
    return ids, alive


def _fake_set(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


_SET = Operator("set_of_classes", "(Tensor ids, SymInt vocab) -> (Tensor, Tensor)", _set_of, _fake_set)

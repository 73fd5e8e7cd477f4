"""Sets of classes over which a head's log-probabilities are taken: their checks, and what runs for each form of them.

N tokens, P listed ids, T targets a token, K ids of one set, D hidden size, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.arguments import check_device, check_tensor, is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import Operator, node
from lowtide.head.call import Call, Head, SupportArgs, TokenStatsArgs, axes_and
from lowtide.head.ranks.parallel import Alone, Ranks, exchanges_between_ranks_run_in_eager
from lowtide.head.rows import looks_at_numbers
from lowtide.head.terms.cross_entropy import check_classes
from lowtide.head.terms.support import SUPPORT, check_ids
from lowtide.head.terms.token_stats import TOKEN_STATS

WITHOUT_SUPPORT = ("mean_logit", "topk")  # statistics of the whole vocabulary
_IGNORED = -100

SupportLike = Tensor | tuple[Tensor, Tensor]


class Support(NamedTuple):
    """Sets of classes, checked."""

    ids: Tensor  # int64 [P], or [K] where one set is all tokens'
    offsets: Tensor | None  # int64 [N + 1], where each token's begin; None: each has K
    K: int
    shared: bool
    sparse: bool = False  # the weight's gradient


def check_support(support: object, input: Tensor, names: frozenset[str], *, sparse: bool) -> Support:
    """Check the sets of the tokens of hidden states [..., D], and that ``names`` are statistics of a set."""
    for name in WITHOUT_SUPPORT:
        if name in names:
            hint = "Of a set take its log-probabilities: target=ids."
            raise ArgumentValueError(message("want", "statistics of a set with support", repr(name), hint))
    if sparse and torch.compiler.is_compiling():
        hint = "Call the function outside of torch.compile, or leave sparse out."
        raise UnsupportedError(message("sparse", "False under torch.compile", "True", hint))
    if not isinstance(support, tuple):
        return _padded(_check_ids("support", support, input), input)._replace(sparse=sparse)
    if len(support) != 2:
        expected = "ids [..., K] or [K], or a tuple (ids, offsets)"
        raise ArgumentTypeError(message("support", expected, f"a tuple of {len(support)}"))
    ids, offsets = (_check_ids(f"support[{i}]", x, input) for i, x in enumerate(support))
    if ids.dim() != 1:
        raise ArgumentValueError(message("support[0]", "ids of one axis beside offsets", f"shape {list(ids.shape)}"))
    if offsets.dtype != torch.int64:
        raise ArgumentTypeError(message("support[1]", "offsets of dtype torch.int64", str(offsets.dtype)))
    N = math.prod(input.shape[:-1])
    if offsets.shape != (N + 1,):
        expected = f"offsets of shape [{N + 1}], one more than there are tokens"
        raise ArgumentValueError(message("support[1]", expected, f"shape {list(offsets.shape)}"))
    return Support(ids.long(), offsets, 0, False, sparse)


def _check_ids(name: str, value: object, input: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        expected = "a tensor of ids, or a tuple (ids, offsets)" if name == "support" else "a tensor"
        raise ArgumentTypeError(message(name, expected, type(value).__name__))
    ids = check_tensor(name, value)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        hint = "For a mask of the vocabulary pass the ids where it is True." if ids.dtype == torch.bool else ""
        raise ArgumentTypeError(message(name, "an integer dtype", str(ids.dtype), hint))
    check_device(name, ids, input)
    return ids


def _padded(ids: Tensor, input: Tensor) -> Support:
    if ids.dim() == 1:
        return Support(ids.long(), None, ids.shape[0], True)
    if ids.dim() != input.dim() or ids.shape[:-1] != input.shape[:-1]:
        expected = f"shape {axes_and(input, 'K')}, padded with -1, or [K], one set for all tokens"
        got = f"{list(ids.shape)}"
        raise ArgumentValueError(message("support", f"{expected}, as input is {list(input.shape)}", got))
    return Support(ids.long(), None, ids.shape[-1], False)


def support_stats(
    call: Call, input: Tensor, target: Tensor | None, names: frozenset[str], ignore_index: int, support: Support
) -> dict[str, Tensor]:  # fmt: skip
    """Return fields ``names`` over the sets, and "outside" if there are targets; ``input`` is the caller's."""
    head, ranks, options = call
    if options.gradient == "forward":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with support", "'forward'", hint))
    if support.sparse and is_dtensor(input):
        hint = "Pass the local tensors with vocab_shard, or leave sparse out."
        raise ArgumentValueError(message("sparse", "False where the weight is a DTensor", "True", hint))
    if isinstance(ranks, Ranks) and torch.compiler.is_compiling():
        return exchanges_between_ranks_run_in_eager(_stats, head, input, target, names, ignore_index, support)
    return _stats(head, input, target, names, ignore_index, support)


def _stats(
    head: Head, input: Tensor, target: Tensor | None, names: frozenset[str], ignore_index: int, support: Support
) -> dict[str, Tensor]:
    ranks = head.ranks
    leading, N = input.shape[:-1], math.prod(input.shape[:-1])
    target = ranks.whole(target)
    support = support._replace(ids=ranks.whole(support.ids), offsets=ranks.whole(support.offsets))
    if isinstance(ranks, Ranks) and ranks.spread:
        whole, ranks = ranks.gathered(_as_given(head.input, input))
        head = head._replace(input=whole, ranks=ranks)
    y = head.input.new_zeros((N, 0), dtype=torch.long)
    if target is not None:
        y = target.long().reshape(N, target.shape[-1] if target.dim() > len(leading) else 1).contiguous()
    by = _one_set if support.shared else _set_per_token
    found = by(head, y, names, ignore_index, support)
    shapes = {} if target is None else dict.fromkeys(("logprob", "is_top1"), target.shape)
    wanted = names | {"outside"} if target is not None else names
    return {
        name: ranks.result(x if name == "outside" else x.view(shapes.get(name, leading)))
        for name, x in found.items()
        if name in wanted
    }


def _as_given(local: Tensor, input: Any) -> Tensor:
    """Return this rank's hidden states, which may carry a trained scale, as the DTensor that they came as."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        local, input.device_mesh, input.placements, run_check=False, shape=input.shape, stride=input.stride()
    )
    return made


def _set_per_token(
    head: Head, y: Tensor, names: frozenset[str], ignore_index: int, support: Support
) -> dict[str, Tensor]:
    ids, offsets = support.ids.reshape(-1), support.offsets
    if offsets is not None and not looks_at_numbers(ids.device):  # what is wrong there must not be read
        offsets = offsets.clamp(0, len(ids)).cummax(0).values
    offsets = None if offsets is None else offsets.contiguous()
    args = SupportArgs(
        target=y, ids=ids, offsets=offsets, K=support.K, want=",".join(sorted(names)), ignore_index=ignore_index,
        sparse=support.sparse,
    )  # fmt: skip
    return dict(zip(SUPPORT.returned, SUPPORT(head, args, recompute=True), strict=True))


def _one_set(head: Head, y: Tensor, names: frozenset[str], ignore_index: int, support: Support) -> dict[str, Tensor]:
    """One set is a smaller vocabulary: the rows of the weight are gathered, and scored by the usual functions."""
    V, on_cpu = head.ranks.vocab, looks_at_numbers(head.input.device)
    kept, is_class = y != ignore_index, (y >= 0) & (y < V)
    if on_cpu and not torch.compiler.is_compiling():
        check_classes(y.reshape(-1), (kept & ~is_class).reshape(-1), V, ignore_index)
    ids, alive = _SET(support.ids, V)
    if on_cpu and not torch.compiler.is_compiling() and alive.any():
        ids, alive = ids[alive], None
    weight, bias = _gathered(head, ids, alive, sparse=support.sparse)
    dead, empty = None, None
    if alive is not None:
        empty = ~alive.any()
        dead = ~alive & ~empty  # of an empty set any logits: a softmax of -inf alone would be NaN
        if head.softcap is None and _is_positive(head.scale):
            # float32, whatever the operands' dtype, and exactly -inf: kernels measure a lower number, rounded twice, in
            # one operation from itself rounded once, and of -1e30 the difference is 6e21
            bias = (weight.new_zeros(len(ids)) if bias is None else bias).to(head.wide).masked_fill(dead, -torch.inf)
            dead = None
    at = torch.searchsorted(ids, y).clamp(max=len(ids) - 1)
    inside = (ids.take(at) == y) & is_class
    y_slot = at.where(inside, _IGNORED).where(is_class | ~kept, len(ids)).where(kept, _IGNORED)
    args = TokenStatsArgs(target=y_slot, want=",".join(sorted(names)), topk=0, ignore_index=_IGNORED, dead=dead)
    small = head._replace(weight_VD=weight, bias_V=bias, ranks=Alone(len(ids)))
    found = dict(zip(TOKEN_STATS.returned, TOKEN_STATS(small, args, recompute=True), strict=True))
    outside = kept & is_class & ~inside
    of_outside = torch.where(found["lse"].detach().isnan(), torch.nan, -torch.inf)[:, None]
    found |= {"logprob": torch.where(outside, of_outside, found["logprob"]), "argmax": ids.take(found["argmax"])}
    if empty is not None:
        of_none = {"lse": -torch.inf, "entropy": 0.0, "sum_sq_prob": 0.0, "argmax": -1}
        found |= {name: found[name].masked_fill(empty, value) for name, value in of_none.items() if name in names}
    return found | {"outside": outside.sum()}


def _is_positive(scale: Tensor | None) -> bool:
    """Return whether a logit scale is a number above 0: on a device it is not looked at."""
    if scale is None or torch.compiler.is_compiling():
        return scale is None
    return scale.device.type == "cpu" and not scale.requires_grad and scale.item() > 0


def _gathered(head: Head, ids: Tensor, alive: Tensor | None, *, sparse: bool) -> tuple[Tensor, Tensor | None]:
    """Return the rows of weight and bias of ``ids`` [K], of any rank: 0 where nothing is ``alive``, NaN of no class."""
    ranks, (V, D) = head.ranks, head.weight_VD.shape
    row, here = ranks.here(ids.clamp(min=0))
    row = row.clamp(max=max(0, V - 1))
    if V:
        weight = F.embedding(row, head.weight_VD, sparse=True) if sparse else head.weight_VD.index_select(0, row)
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
    """Return the ids in ascending order, at least one, and which of them are not padding, each once.

    -1 pads; what is no class is -2, one of the set whose logit is NaN, and an error on the CPU.
    """
    if looks_at_numbers(ids.device):
        check_ids(ids, vocab)
    ids = torch.where((ids < -1) | (ids >= vocab), -2, ids)
    ids = (ids if len(ids) else ids.new_full((1,), -1)).sort().values
    alive = ids != -1
    alive[1:] &= ids[1:] != ids[:-1]
    return ids, alive


def _fake_set(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    K = max(1, ids.shape[0])
    return ids.new_empty(K), ids.new_empty(K, dtype=torch.bool)


_SET = Operator("set_of_classes", "(Tensor ids, SymInt vocab) -> (Tensor, Tensor)", _set_of, _fake_set)

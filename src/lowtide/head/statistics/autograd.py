"""`linear_token_stats` as registered operators and in autograd's graph: what forward finds, and backward from it.

`torch.ops.lowtide.token_stats` computes what is wanted of each token; `torch.ops.lowtide.token_stats_backward` builds
the logits once more for the gradients. Both begin with the fields of `StatsCall`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.head.call import Head, HeadCall, TokenStatsArgs, Wanted
from lowtide.head.graph import in_places, refuse_batched, save_for_recompute, saved_for_recompute
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.registration import (
    fake_gradients,
    flop_formula,
    found_gradients,
    head_flop,
    schema_of,
    tensor_fields,
    undisturbed,
    wanted_gradients,
    watched,
)
from lowtide.head.terms import token_stats as token_stats_terms


class StatsCall(NamedTuple):
    """What `lowtide.linear_token_stats` was asked, as plain tensors and scalars."""

    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    linear_bias: Tensor | None  # [V]
    target: Tensor  # [N, K] int64; K is 0 where there are none
    logit_scale: Tensor | None  # scalar
    dtype: torch.dtype  # of the GEMMs' operands
    softcap: float | None
    want: str  # the fields' names, separated by commas
    topk: int
    ignore_index: int
    workspace_mib: float | None
    accumulate: str
    backend: str

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and of what comes of them."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def wanted(self) -> frozenset[str]:
        """Return the wanted fields' names."""
        return frozenset(self.want.split(","))


class Found(NamedTuple):
    """What `token_stats` returns for N tokens; empty where not wanted."""

    logprob: Tensor  # [N, K]
    entropy: Tensor  # [N]
    lse: Tensor  # [N]
    mean_logit: Tensor  # [N]
    argmax: Tensor  # [N]
    sum_sq_prob: Tensor  # [N]
    topk_values: Tensor  # [N, k]
    topk_ids: Tensor  # [N, k]
    is_top1: Tensor  # [N, K]
    top_logprob: Tensor  # [N] the highest class's, for backward


DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
_INTEGER = {"argmax": torch.int64, "topk_ids": torch.int64, "is_top1": torch.bool}
_TRAINED = tuple(map(StatsCall._fields.index, ("input", "linear_weight", "linear_bias")))
_TENSORS = tensor_fields(StatsCall)
_CALL = schema_of(StatsCall)
_UPSTREAM = ", ".join(f"Tensor? {name}_grad" for name in DIFFERENTIABLE)


@torch.library.custom_op(
    "lowtide::token_stats", mutates_args=(), schema=f"({_CALL}) -> ({', '.join(['Tensor'] * len(Found._fields))})"
)
def token_stats(*args: Any) -> Found:
    """Compute what is wanted of each token."""
    return _found(StatsCall(*args))


@token_stats.register_fake
def _(*args: Any) -> Found:
    call = StatsCall(*args)
    N, K = call.target.shape
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(Found._fields, (0,))
    shapes |= {"logprob": (N, K), "is_top1": (N, K), "lse": (N,), "argmax": (N,), "top_logprob": (N,)}
    shapes |= dict.fromkeys(call.wanted & {"entropy", "mean_logit", "sum_sq_prob"}, (N,))
    if "topk" in call.wanted:
        shapes |= {"topk_values": (N, call.topk), "topk_ids": (N, call.topk)}
    return Found(
        **{name: call.input.new_empty(shape, dtype=_INTEGER.get(name, call.wide)) for name, shape in shapes.items()}
    )


@torch.library.custom_op(
    "lowtide::token_stats_backward",
    mutates_args=(),
    schema=f"({_CALL}, bool input_grad, bool weight_grad, bool bias_grad, {_UPSTREAM}, "
    "Tensor logprob, Tensor entropy, Tensor lse, Tensor argmax, Tensor top_logprob) -> (Tensor, Tensor, Tensor)",
)
def token_stats_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias from the upstream ones [N] (of logprob [N, K])."""
    return _gradients(*_split(args))


@token_stats_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, wanted, *_ = _split(args)
    return fake_gradients(wanted, call.input, call.linear_weight, call.wide)


@flop_formula("token_stats")
def _(*args: Any) -> int:
    call = StatsCall(*args)
    return head_flop(call.input, call.linear_weight)


@flop_formula("token_stats_backward")
def _(*args: Any) -> int:
    call, wanted, *_ = _split(args)
    return head_flop(call.input, call.linear_weight, wanted)


def _split(args: Sequence[Any]) -> tuple[StatsCall, tuple[bool, bool, bool], list[Any], list[Any]]:
    start = len(StatsCall._fields)
    flags, rest = args[start : start + 3], list(args[start + 3 :])
    return StatsCall(*args[:start]), (flags[0], flags[1], flags[2]), rest[:4], rest[4:]


def _parts(call: StatsCall, ranks: Ranks | None) -> tuple[Head, TokenStatsArgs]:
    head = HeadCall(
        input=call.input, linear_weight=call.linear_weight, linear_bias=call.linear_bias, logit_scale=call.logit_scale,
        softcap=call.softcap, dtype=call.dtype, workspace_mib=call.workspace_mib, accumulate=call.accumulate,
        backend=call.backend,
    )  # fmt: skip
    args = TokenStatsArgs(**{name: getattr(call, name) for name in TokenStatsArgs._fields})
    return head.head(ranks, "recompute"), args


def _found(call: StatsCall, engine: Ranks | None = None, *, keep: bool = False) -> Found:
    with torch.no_grad(), undisturbed(call.input.device):
        found, _ = token_stats_terms.forward(*_parts(call, engine), Wanted(False, False, False), keep)
    unwanted = [name for name in Found._fields if name not in found]
    empty = {name: call.input.new_empty(0, dtype=_INTEGER.get(name, call.wide)) for name in unwanted}
    return Found(**{name: found[name] for name in Found._fields if name in found}, **empty)


def _gradients(
    call: StatsCall,
    wanted: tuple[bool, bool, bool],
    upstream: Sequence[Tensor | None],
    known: Sequence[Tensor],
    engine: Ranks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    names = ("logprob", "entropy", "lse", "argmax", "top_logprob")
    with torch.no_grad(), undisturbed(call.input.device):
        into = token_stats_terms.backward(
            *_parts(call, engine),
            Wanted(*wanted),
            dict(zip(DIFFERENTIABLE, upstream, strict=True)),
            dict(zip(names, known, strict=True)),
        )
    return found_gradients(into, call.input, call.linear_weight, call.wide)


def run(call: StatsCall, engine: Ranks | None = None) -> Found:
    """Return what is wanted of each token, connected to whichever tensors of ``call`` need a gradient.

    Args:
        call: What was asked, validated.
        engine: What computes; None: the operators.
    """
    trained = any(t is not None and t.requires_grad for t in (call.input, call.linear_weight, call.linear_bias))
    if torch.is_grad_enabled() and trained and not call.wanted.isdisjoint(DIFFERENTIABLE):
        return Found(*_TokenStats.apply(engine, *call))  # type: ignore[no-untyped-call]
    return _run(call, engine)


def _run(call: StatsCall, engine: Ranks | None, *, keep: bool = False) -> Found:
    if engine is not None:
        return _found(call, engine, keep=keep)
    return Found(*token_stats(*call)) if watched(call) else _found(call)


class _TokenStats(torch.autograd.Function):
    """Forward stores the inputs and a few numbers a token; backward builds the logits once more."""

    @staticmethod
    def forward(ctx: Any, engine: Ranks | None, *args: Any) -> Found:
        call = StatsCall(*args)
        ctx.engine = engine
        found = _run(call, engine, keep=True)
        kept = (found.logprob, found.entropy, found.lse, found.argmax, found.top_logprob)
        # copies: the caller may write to what it was given
        save_for_recompute(ctx, *(call[i] for i in _TENSORS), *(x.clone() for x in kept))
        ctx.scalars = [None if i in _TENSORS else field for i, field in enumerate(call)]
        ctx.mark_non_differentiable(*(x for name, x in found._asdict().items() if name not in DIFFERENTIABLE))
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # what nobody differentiates costs nothing
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        refuse_batched("linear_token_stats", *upstream)
        fields = list(ctx.scalars)
        tensors = saved_for_recompute(ctx, "linear_token_stats")
        for i, tensor in zip(_TENSORS, tensors, strict=False):
            fields[i] = tensor
        call = StatsCall(*fields)
        wanted = tuple(ctx.needs_input_grad[1 + i] for i in _TRAINED)
        given = [x if name in call.wanted else None for name, x in zip(Found._fields, upstream, strict=True)][
            : len(DIFFERENTIABLE)
        ]
        if all(x is None for x in given):
            return (None,) * (1 + len(StatsCall._fields))
        args = (*call, *wanted, *given, *tensors[len(_TENSORS) :])
        with torch.no_grad():
            if ctx.engine is None and watched(args):
                found = token_stats_backward(*args)
            else:
                found = _gradients(*_split(args), ctx.engine)
        grads = wanted_gradients(found, wanted, call.linear_bias)
        sources = (call.input, call.linear_weight, call.linear_bias, *given)
        return None, *in_places(grads, _TRAINED, len(StatsCall._fields), sources)

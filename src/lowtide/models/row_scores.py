"""Logsumexp and argmax of all rows of one call of the head, for code that then reads a few rows at a time.

lm-evaluation-harness reads the argmax and the log-probabilities of each continuation by itself. A pass over the weight
for each costs more than the GEMM of a short batch, so the first one computes both for all rows. A log-probability is
then a dot product with one row of the weight.

Legend: hidden [..., D], logits [..., V].
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.head.apply import linear_apply
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_token_stats
from lowtide.models.recorded_logits import RecordedLogits
from lowtide.models.steps import LogitArguments, Step, TensorBase, replay, rows_of, same_steps

_ROWS_OF_A_PASS = 256  # a GEMM of so many rows takes about as long as reading the weight


@dataclass(frozen=True)
class RowScores:
    """Numbers of all rows of a call, after steps that change values."""

    steps: tuple[Step, ...]
    lse: Tensor  # [...], of unrounded logits
    argmax: Tensor  # [...] int64

    def lse_of(self, input: RecordedLogits) -> Tensor:
        """Return the logsumexp of the rows of ``input``."""
        return _rows(self.lse, input)

    def argmax_of(self, input: RecordedLogits) -> Tensor:
        """Return the argmax of the rows of ``input``."""
        return _rows(self.argmax, input)


def row_scores(input: RecordedLogits, folded: LogitArguments) -> RowScores | None:
    """Return the scores of the call's rows, computed on the first request; None where reading the weight is cheaper.

    ``folded`` are the steps of ``input``. If their dtype has fewer bits than float32, the argmax is of what they give
    in it, the log-softmax included.
    """
    call, rows = input.call, input.shape[:-1].numel()
    N, B = call.hidden.shape[:-1].numel(), call.hidden.shape[0]
    has_graph = input.grad_mode and torch.is_grad_enabled()
    if not call.scores or call.sharded or has_graph or folded.sign != 1:
        return None
    if rows == N or 2 * B * max(rows, _ROWS_OF_A_PASS) < N:  # two results of each sequence
        return None
    steps = changing(input.steps)
    known: list[RowScores] = call.row_scores
    found = next((scores for scores in known if same_steps(scores.steps, steps)), None)
    if found is None:
        found = _computed(input, folded, steps)
        known.append(found)
    return found


def changing(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps that change values, be it by rounding."""
    same = (TensorBase.contiguous, TensorBase.clone, TensorBase.detach)
    return tuple(step for step in steps if step.of_hidden is None and step.function not in same)


def is_rounded(input: RecordedLogits) -> bool:
    """Whether the argmax of these logits depends on how they are rounded: some are equal then."""
    between = [x for step in input.steps for x in step.args if isinstance(x, torch.dtype)]
    return not input.call.sharded and any(x.itemsize < 4 for x in (input.call.dtype(), *between, input.dtype))


def rounded(logits: Tensor, dtype: torch.dtype, steps: Iterable[Step]) -> Tensor:
    """Return rows of logits [C, V] in their own dtype after the steps."""
    return replay(logits.to(dtype), _of_chunks(steps))


def _computed(input: RecordedLogits, folded: LogitArguments, steps: tuple[Step, ...]) -> RowScores:
    lse: list[Tensor] = []

    def stats(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
        kwargs |= {"normalised": folded.normalised, "options": of_tokens(options)}
        of_rows, argmax = lse_and_argmax(hidden, head, **kwargs)
        lse.append(of_rows)
        return argmax

    def of_rounded(hidden: Tensor, head: Tensor, *, linear_bias: Any, options: HeadOptions | None, **_: Any) -> Tensor:
        settings = (input.call.dtype(), steps)
        of_rows, argmax = linear_apply(
            _rounded_scores, hidden, head, linear_bias=linear_bias, params=settings, options=in_torch(options)
        )
        lse.append(of_rows)
        return argmax  # type: ignore[no-any-return]

    if is_rounded(input):
        argmax = input.call.without_logits((), UNFOLDED, of_rounded)
    else:
        argmax = input.call.without_logits((), folded, stats)
    return RowScores(steps, lse[0], argmax)


def lse_and_argmax(hidden: Tensor, head: Tensor, *, normalised: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return of each row the logsumexp of its logits, and the argmax of these or, ``normalised``, of their log-softmax.

    With a logit that is NaN or +inf the log-softmax of all classes is NaN, and its argmax the first class.
    """
    found = linear_token_stats(hidden, head, want=("lse", "argmax"), **kwargs)
    assert found.lse is not None
    assert found.argmax is not None
    return found.lse, found.argmax.where(found.lse.isfinite(), 0) if normalised else found.argmax


def _rounded_scores(logits: Tensor, dtype: torch.dtype, steps: tuple[Step, ...]) -> tuple[Tensor, Tensor]:
    unrounded = [step for step in steps if step.function not in (TensorBase.to, TensorBase.log_softmax)]
    lse = torch.logsumexp(replay(logits, _of_chunks(unrounded)), -1)
    return lse, rounded(logits, dtype, steps).argmax(-1)


def _of_chunks(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps whose arguments are vectors [V], whatever the axes of the logits were."""
    return tuple(
        Step(step.function, tuple(x.flatten() if isinstance(x, Tensor) and x.dim() else x for x in step.args))
        for step in steps
    )


def in_torch(options: HeadOptions | None) -> HeadOptions | None:
    """Return options for `linear_apply` of tokens, whose backend cannot be chosen."""
    return None if options is None else replace(options, backend="auto", gradient="auto")


def of_tokens(options: HeadOptions | None) -> HeadOptions | None:
    """Return options for values per token: only a loss that is one number can have its gradients in forward."""
    in_forward = options is not None and options.gradient == "forward"
    return replace(options, gradient="auto") if options is not None and in_forward else options


def _rows(values: Tensor, input: RecordedLogits) -> Tensor:
    """Return of values [...] of all rows a copy of those of ``input``."""
    moves = (step for step in input.steps if step.of_hidden is not None)
    return rows_of(values[..., None], moves)[..., 0].clone(memory_format=torch.contiguous_format)


UNFOLDED = LogitArguments(1.0, None, (), normalised=False, sign=1)

"""A row's divergence from a teacher's logits, and its gradient in the student's place: in plain PyTorch, or by kernels.

C rows of a chunk, V and U the student's and the teacher's classes on this rank. s and t are the probabilities, a and b
their logarithms. With m = beta t + (1 - beta) s a row's value is

    forward_kl  sum t (b - a)              reverse_kl  sum s (a - b)
    jsd         beta sum t (b - log m) + (1 - beta) sum s (a - log m)          tv  sum |s - t| / 2

A class that only one side has is one of probability 0 on the other, and what has probability 0 adds 0.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.engine import Chunks, Numbers, Terms, UpstreamOf
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows, slices
from lowtide.head.terms.statistics import logsumexp

NUMBERS = ("value", "lse", "other_lse", "pivot")  # of each row


class Dense(Terms):
    """Divergence of a student's head from a teacher's own, in plain PyTorch; ``beta`` is above 0 and below 1."""

    def __init__(
        self, head: Head, plan: HeadPlan, teacher: Head, teacher_plan: HeadPlan, rows: Rows, kind: str, beta: float
    ) -> None:
        self.head, self.kind, self.beta, self.columns, self.kept = head, kind, beta, plan.columns, rows.kept
        self.narrow, self.teacher = plan.backward_gemm == "narrow", teacher
        self.apart = self.raw and head.dtype != head.wide
        self._of_teacher = Chunks(teacher, rows, teacher_plan, self)

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "value", both sides' logsumexps "lse" and "other_lse", and "pivot", see `gradient_`.

        The logits become log-probabilities.
        """
        return self._numbers(self._sides(z, part))

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor) -> Tensor | None:
        """Turn the student's logits into the gradient: with c a class's derivative by a, ``c - s (sum c / sum s)``.

        The quotient is the pivot: an error in a logsumexp, which shifts all of a row's a or b, moves it along with c.
        """
        return self._gradient_(self._sides(z, part), known, g, False)

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """Return `numbers` and what `gradient_` does, from one product with each side's weight."""
        sides = self._sides(z, part)
        known = self._numbers(sides)
        return known, self._gradient_(sides, known, upstream(known, part), True)

    def _sides(self, z: Tensor, part: slice) -> Any:
        """Return both sides of a chunk, and which rows count."""
        t = self._of_teacher.logits(self._of_teacher.hidden(part))
        kept_C = None if self.kept is None else self.kept[part]
        return z[:, : self.head.ranks.rows], t[:, : self.teacher.ranks.rows], kept_C

    def _numbers(self, sides: Any) -> Numbers:
        ranks, (z_CV, t_CU, _) = self.head.ranks, sides
        both_lse = ranks.logsumexp_of(torch.stack([logsumexp(x, self.columns) for x in (z_CV, t_CU)]))
        value, pivot, mass = sums = both_lse.new_zeros(3, len(z_CV))  # of the classes here
        for a, b in _blocks(z_CV, t_CU, self.columns):
            a.sub_(both_lse[0][:, None])
            b.sub_(both_lse[1][:, None])
            s, c = outcomes(a, b, self.kind, self.beta, value)
            pivot += c.sum(1)
            mass += s.sum(1)
        value, pivot, mass = ranks.sum_of(sums)
        pivot = pivot / mass.where(mass != 0, 1)  # 0 in a row that does not count
        lse, other_lse = (x.clone() for x in both_lse)  # an operator returns no two views of one memory
        return {"value": value.clamp(min=0), "lse": lse, "other_lse": other_lse, "pivot": pivot}

    def _gradient_(self, sides: Any, known: Numbers, factor_C: Tensor, normalised: bool) -> Tensor | None:
        """See `gradient_`; ``normalised`` sides are log-probabilities already."""
        z_CV, t_CU, kept_C = sides
        head, lse, other_lse = self.head, known["lse"][:, None], known["other_lse"][:, None]
        if head.scale is not None:
            factor_C = factor_C * head.scale
        for a, b in _blocks(z_CV, t_CU[:, : z_CV.shape[1]], self.columns):
            slope = None if head.softcap is None else cap_slope(a + lse if normalised else a, head.softcap)
            if not normalised:
                a.sub_(lse)
                b.sub_(other_lse)
            s, c = outcomes(a, b, self.kind, self.beta)
            torch.addcmul(c, s, known["pivot"][:, None], value=-1, out=a)
            if slope is not None:
                a.mul_(slope)
            if not self.narrow:
                a.mul_(factor_C[:, None])
        if kept_C is not None:
            z_CV.masked_fill_(~kept_C[:, None], 0)  # infinities and NaN of a row that does not count, times 0
        return factor_C if self.narrow else None


class DenseKernels(Dense):
    """The same by one kernel over rows of logits, with the whole vocabulary here.

    Forward leaves the logits unmodified; a gradient is written over them, or to ``out`` if it is narrower.
    """

    raw = True

    @cached_property
    def _transforms(self) -> Any:
        from lowtide.head.kernels.gemm import LogitTransform

        number = partial(torch.full, (), dtype=self.head.wide, device=self.head.input.device)

        def of(x: Head) -> LogitTransform:
            return LogitTransform(x.bias_V, x.scale, number(x.softcap) if isinstance(x.softcap, float) else x.softcap)

        return of(self.head), of(self.teacher)

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """See `Dense.numbers`."""
        numbers = {name: z.new_empty(len(z)) for name in NUMBERS}  # no views of one memory
        self._rows(z, part, numbers)
        return numbers

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """Return "value" and what `gradient_` does."""
        factor_C = upstream({}, part)
        known = {"value": torch.empty_like(factor_C)}
        return known, self._rows(z, part, known, factor_C)

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor) -> Tensor | None:
        """See `Dense.gradient_`."""
        return self._rows(z, part, {name: known[name] for name in NUMBERS[1:]}, g)

    def _rows(self, z: Tensor, part: slice, numbers: Numbers, factor_C: Tensor | None = None) -> Tensor | None:
        """Launch the kernel, with a factor for the gradient; return what each row of that lacks."""
        from lowtide.head.kernels.logit_rows import pair_rows

        z_CV, t_CU, kept_C = self._sides(z, part)
        out = None if factor_C is None else z_CV if self.out is None else self.out
        lift_C = pair_rows(
            z_CV, t_CU, kept_C, self._transforms, self.kind, self.beta, [*map(numbers.get, NUMBERS)], out,
            None if self.apart else factor_C,
        )  # fmt: skip
        if not self.apart or factor_C is None:
            return None
        return factor_C if lift_C is None else factor_C * lift_C


def _blocks(z_CV: Tensor, t_CU: Tensor, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of both sides, -inf for classes that only one of them has."""
    V, U = z_CV.shape[1], t_CU.shape[1]
    for part in slices(min(V, U), columns):
        yield z_CV[:, part], t_CU[:, part]
    for part in slices(abs(V - U), columns):
        longer = (z_CV[:, U:] if V > U else t_CU[:, V:])[:, part]
        none = torch.full_like(longer, -torch.inf)
        yield (longer, none) if V > U else (none, longer)


def outcomes(
    a: Tensor, b: Tensor, kind: str, beta: float, value_C: Tensor | None = None, *, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Return each outcome's s, and its term's derivative c by a; add each row's terms to ``value_C``.

    The derivative is but for multiples of s, which drop out where both sides are ``normalised``, that is sum to 1. Then
    s - t (or the reverse) is added to the KLs' terms, 0 in sum but for rounding: an error in a logsumexp, which shifts
    all of a row's a or b, cancels between the two.
    """
    s = a.exp()
    if kind == "reverse_kl":
        c = _times(s, a - b)
        if value_C is not None:
            value_C += (b.exp().sub_(s).add_(c) if normalised else c).sum(1)
        return s, c
    t = b.exp()
    if kind == "forward_kl":
        if value_C is not None:
            value = _times(t, b - a)
            value_C += (value.add_(s).sub_(t) if normalised else value).sum(1)
        return s, t.neg_()
    if kind == "jsd":
        log_m = torch.lerp(s, t, beta).clamp_(min=torch.finfo(s.dtype).tiny).log_()  # of beta t + (1 - beta) s
        c = _times(s, a - log_m).mul_(1 - beta)
        if value_C is not None:
            value_C += c.sum(1) + beta * _times(t, torch.sub(b, log_m, out=log_m)).sum(1)
        return s, c
    difference = torch.sub(s, t, out=t)
    c = difference.sign().mul_(s).mul_(0.5)
    if value_C is not None:
        value_C += difference.abs_().sum(1) / 2
    return s, c


def cap_slope(z: Tensor, cap: Tensor | float) -> Tensor:
    """Return the derivative of ``cap * tanh(x / cap)``, where that is ``z``; 0 of -inf, which no cap lets pass."""
    return (z.clamp(min=-cap) / cap).square_().neg_().add_(1)


def _times(p: Tensor, x: Tensor) -> Tensor:
    """Return ``p * x`` in the memory of ``x``, with ``0 * inf = 0``."""
    return x.masked_fill_(p == 0, 0).mul_(p)

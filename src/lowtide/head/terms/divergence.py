"""A row's divergence from a teacher's logits, or its K known classes, and its gradient in the student's place.

C rows of a chunk, V and U the student's and the teacher's classes on this rank. s and t are the probabilities, a and b
their logarithms. With m = beta t + (1 - beta) s a row's value is

    forward_kl  sum t (b - a)              reverse_kl  sum s (a - b)
    jsd         beta sum t (b - log m) + (1 - beta) sum s (a - log m)          tv  sum |s - t| / 2

A class that only one side has is one of probability 0 on the other, and what has probability 0 adds 0. Of a teacher's
K known classes both sides are cut down to the same outcomes: these as they are ("drop"), these made to sum to 1
("renormalise"), or these and one more that holds the rest ("bucket").
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import DivergenceArgs, Head
from lowtide.head.engine import Chunks, Numbers, Terms, UpstreamOf
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows, slices
from lowtide.head.terms.statistics import cap_slope, logsumexp

NUMBERS = ("value", "lse", "other_lse", "pivot")  # of each row


class Dense(Terms):
    """Divergence of a student's head from a teacher's own, in plain PyTorch; ``beta`` is above 0 and below 1."""

    _normalised: Tensor | None = None  # a chunk's log-probabilities of the teacher, once `numbers` has computed them

    def __init__(
        self, head: Head, plan: HeadPlan, teacher: Head, teacher_plan: HeadPlan, rows: Rows, kind: str, beta: float
    ) -> None:
        self.head, self.kind, self.beta, self.columns, self.kept = head, kind, beta, plan.columns, rows.kept
        self.narrow, self.teacher = plan.backward_gemm == "narrow", teacher
        self.apart = self.raw and head.dtype != head.wide
        self._of_teacher = Chunks(teacher, rows, teacher_plan, self)

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "value", both sides' logsumexps "lse" and "other_lse", and "pivot", see `gradient_`.

        The logits become log-probabilities, and the teacher's are kept.
        """
        ranks, columns = self.head.ranks, self.columns
        sides = z[:, : ranks.rows], self._teacher(part)
        both_lse = ranks.logsumexp_of(torch.stack([logsumexp(x, columns) for x in sides]))
        value, pivot, mass = sums = both_lse.new_zeros(3, len(z))  # of the classes here
        for a, b in _blocks(*sides, columns):
            a.sub_(both_lse[0][:, None])
            b.sub_(both_lse[1][:, None])
            s, c = outcomes(a, b, self.kind, self.beta, value)
            pivot += c.sum(1)
            mass += s.sum(1)
        self._normalised = sides[1]
        value, pivot, mass = ranks.sum_of(sums)
        pivot = pivot / mass.where(mass != 0, 1)  # 0 in a row that does not count
        lse, other_lse = (x.clone() for x in both_lse)  # an operator returns no two views of one memory
        return {"value": value.clamp(min=0), "lse": lse, "other_lse": other_lse, "pivot": pivot}

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor) -> Tensor | None:
        """Turn the student's logits into the gradient: with c a class's derivative by a, ``c - s (sum c / sum s)``.

        The quotient is the pivot: an error in a logsumexp, which shifts all of a row's a or b, moves it along with c.
        """
        head, t_CU = self.head, self._normalised
        lse, other_lse, pivot = (known[name][:, None] for name in NUMBERS[1:])
        z_CV, factor_C = z[:, : head.ranks.rows], g if head.scale is None else g * head.scale
        both = _blocks(z_CV, (self._teacher(part) if t_CU is None else t_CU)[:, : z_CV.shape[1]], self.columns)
        for a, b in both:
            slope = None if head.softcap is None else cap_slope(a if t_CU is None else a + lse, head.softcap)
            if t_CU is None:
                a.sub_(lse)
                b.sub_(other_lse)
            s, c = outcomes(a, b, self.kind, self.beta)
            torch.addcmul(c, s, pivot, value=-1, out=a)
            if slope is not None:
                a.mul_(slope)
            if not self.narrow:
                a.mul_(factor_C[:, None])
        if self.kept is not None:
            z_CV.masked_fill_(~self.kept[part, None], 0)  # infinities and NaN of a row that does not count, times 0
        return factor_C if self.narrow else None

    def _teacher(self, part: slice) -> Tensor:
        """Return the teacher's logits of a chunk."""
        return self._of_teacher.logits(self._of_teacher.hidden(part), part)[:, : self.teacher.ranks.rows]


class DenseKernels(Dense):
    """The same by one kernel over rows of logits, with the whole vocabulary here.

    Forward leaves the logits unmodified; a gradient is written over them, or to ``out`` if it is narrower.
    """

    raw = True

    @cached_property
    def _transforms(self) -> Any:
        from lowtide.head.kernels.gemm import LogitTransform

        sides = self.head, self.teacher
        caps = [x.softcap for x in sides]
        caps = [self.head.input.new_full((), c, dtype=torch.float32) if isinstance(c, float) else c for c in caps]
        return [LogitTransform(x.bias_V, x.scale, cap) for x, cap in zip(sides, caps, strict=True)]

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

        kept_C = None if self.kept is None else self.kept[part]
        out = None if factor_C is None else z if self.out is None else self.out
        lift_C = pair_rows(
            z, self._teacher(part), kept_C, self._transforms, self.kind, self.beta, [*map(numbers.get, NUMBERS)], out,
            None if self.apart else factor_C,
        )  # fmt: skip
        if not self.apart or factor_C is None:
            return None
        return factor_C if lift_C is None else factor_C * lift_C


class KnownClasses(Terms):
    """Divergence from a teacher's top k, in plain PyTorch; ``head`` is the student's."""

    spare = True

    def __init__(self, head: Head, plan: HeadPlan, args: DivergenceArgs, rows: Rows) -> None:
        self.head, self.rows, self.columns, self.narrow = head, rows, plan.columns, plan.backward_gemm == "narrow"
        self.kind, self.beta, self.tail = args.kind, args.beta, args.tail
        self.topk: Any = args.topk_ids, args.topk_logprobs

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "value", the logsumexp "lse" over the outcomes' classes, "other_lse" over the others, and "pivot"."""
        ranks, (ids, b_CK) = self.head.ranks, self._known(part)
        own = z.gather(1, ids)
        chosen = ranks.highest_of(own)
        rest = torch.full_like(chosen[:, 0], -torch.inf)
        if self.tail != "renormalise":
            z.scatter_(1, ids, -torch.inf)
            rest = ranks.logsumexp_of(logsumexp(z[:, :-1], self.columns))
            z.scatter_(1, ids, own)
        lse = torch.logaddexp(rest, chosen.logsumexp(1))
        value = torch.zeros_like(lse)
        s, c = self._outcomes(chosen, b_CK, lse, rest, value)
        if self.tail != "drop":
            value.clamp_(min=0)
        return {"value": value, "lse": lse, "other_lse": rest, "pivot": c.sum(1) / s.sum(1)}

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor) -> Tensor | None:
        """Turn logits into the gradient: an outcome's is ``c - s pivot``, the others' is spread over their classes.

        Where other ranks hold classes, what is computed of theirs here is left out: the pivot is known from `numbers`.
        """
        head, lse, rest = self.head, known["lse"], known["other_lse"]
        ids, b_CK = self._known(part)
        own = z.gather(1, ids)
        s, c = self._outcomes(own, b_CK, lse, rest)
        q = torch.addcmul(c, s, known["pivot"][:, None], value=-1)
        factor_C = g if head.scale is None else g * head.scale
        if not self.narrow:
            q *= factor_C[:, None]
        at_ids, others = q[:, :-1], q[:, -1:]
        others_lse = rest.masked_fill(rest == -torch.inf, torch.inf)[:, None]  # where there are none
        for cols in slices(z.shape[1] - 1, self.columns):
            block = z[:, cols]
            weight = others if head.softcap is None else cap_slope(block, head.softcap).mul_(others)
            block.sub_(others_lse).exp_().mul_(weight)
        z.scatter_(1, ids, at_ids if head.softcap is None else at_ids * cap_slope(own, head.softcap))
        if self.rows.kept is not None:
            z.masked_fill_(~self.rows.kept[part, None], 0)  # infinities and NaN of an ignored row, times 0
        return factor_C if self.narrow else None

    def _known(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return a chunk's classes, the spare column where one is not here, and their log-probabilities."""
        rows, ranks = part if self.rows.index is None else self.rows.index[part], self.head.ranks
        ids, logprobs = (x[rows] for x in self.topk)
        logprobs = logprobs.to(self.head.wide)
        there, own = logprobs > -torch.inf, ids - ranks.first
        here = there & (own >= 0) & (own < ranks.rows)
        return own.where(here, ranks.rows), logprobs.masked_fill((ids < 0) & there, torch.nan)

    def _outcomes(
        self, chosen: Tensor, b_CK: Tensor, lse: Tensor, rest: Tensor, value_C: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `outcomes` does of the classes, and of all others as the last one."""
        a, b, tail = torch.cat((chosen, rest[:, None]), 1) - lse[:, None], b_CK, self.tail
        mass = b.logsumexp(1, keepdim=True)
        # less than the sum's own rounding is the same as 0: else a KL would jump to infinity there
        left = torch.log(-torch.expm1(mass.clamp(max=-torch.finfo(mass.dtype).eps)))
        left = left.masked_fill(rest[:, None] == -torch.inf, -torch.inf)  # no class is left
        if tail == "renormalise":
            b = b - mass
        elif tail == "drop":
            left = a[:, -1:]  # adds nothing
        s, c = outcomes(a, torch.cat((b, left), 1), self.kind, self.beta, value_C, normalised=tail != "drop")
        if tail == "drop":
            c = c + s if self.kind == "reverse_kl" else c
            c[:, -1] = 0
        return s, c


def _blocks(z_CV: Tensor, t_CU: Tensor, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of both sides, -inf for classes that only one of them has."""
    V, U = z_CV.shape[1], t_CU.shape[1]
    both, longer = min(V, U), z_CV if V > U else t_CU
    for part in slices(both, columns):
        yield z_CV[:, part], t_CU[:, part]
    for part in slices(max(V, U) - both, columns):
        x = longer[:, both:][:, part]
        none = torch.full_like(x, -torch.inf)
        yield (x, none) if V > U else (none, x)


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


def _times(p: Tensor, x: Tensor) -> Tensor:
    """Return ``p * x`` in the memory of ``x``, with ``0 * inf = 0``."""
    return x.masked_fill_(p == 0, 0).mul_(p)

"""A row's divergence from a teacher's logits, and its gradient in the student's place: plain PyTorch, and by kernels.

C rows of a chunk, V and U the student's and the teacher's classes on this rank. s and t are the probabilities, a and b
their logarithms. With m = beta t + (1 - beta) s a row's value is

    forward_kl  sum t (b - a)              reverse_kl  sum s (a - b)
    jsd         beta sum t (b - log m) + (1 - beta) sum s (a - log m)          tv  sum |s - t| / 2

A class that only one side has is one of probability 0 on the other, and what has probability 0 adds 0.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.engine import Chunks, Numbers, Terms, Upstream
from lowtide.head.matmul import column_blocks
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows
from lowtide.head.terms.statistics import row_sums

if TYPE_CHECKING:
    from lowtide.head.kernels.pair_rows import Pair


class Dense(Terms):
    """Divergence from a teacher's own head, in plain PyTorch.

    Args:
        head: The student's.
        plan: Its plan.
        teacher: The teacher's head.
        teacher_plan: Its plan, for the same rows.
        rows: Which tokens.
        kind: "forward_kl", "reverse_kl", "jsd" (with ``beta`` above 0 and below 1) or "tv".
        beta: The teacher's share of the jsd's mixture.
    """

    def __init__(
        self, head: Head, plan: HeadPlan, teacher: Head, teacher_plan: HeadPlan, rows: Rows, kind: str, beta: float
    ) -> None:
        self.head, self.kind, self.beta, self.columns, self.kept = head, kind, beta, plan.columns, rows.kept
        self.narrow, self.teacher = plan.backward_gemm == "narrow", teacher
        self._of_teacher = Chunks(teacher, rows, teacher_plan, self)

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "value", both sides' logsumexps "lse" and "other_lse", and "pivot", see `gradient_`.

        The logits become log-probabilities.
        """
        return self._numbers(*self._both_sides(z, part))

    def gradient_(
        self,
        z: Tensor,
        part: slice,
        known: Numbers,
        g: Tensor,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        """Turn the student's logits into the gradient: with c a class's derivative by a, ``c - s (sum c / sum s)``.

        The quotient is the pivot: an error in a logsumexp, which shifts all of a row's a or b, moves it along with c.
        """
        return self._gradient_(*self._both_sides(z, part), part, known, g, normalised=False)

    def both_(
        self,
        z: Tensor,
        part: slice,
        upstream: Upstream,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Numbers, Tensor | None]:
        """Return `numbers` and what `gradient_` does, from one product with each side's weight."""
        z, t = self._both_sides(z, part)
        known = self._numbers(z, t)
        return known, self._gradient_(z, t, part, known, upstream(known, part), normalised=True)

    def _both_sides(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        t = self._of_teacher.logits(self._of_teacher.hidden(part))
        return z[:, : self.head.ranks.rows], t[:, : self.teacher.ranks.rows]

    def _numbers(self, z_CV: Tensor, t_CU: Tensor) -> Numbers:
        ranks = self.head.ranks
        both_lse = ranks.logsumexp_of(torch.stack([row_sums(x, self.columns).lse for x in (z_CV, t_CU)]))
        lse, other_lse = (x.clone() for x in both_lse)  # an operator returns no two views of one memory
        value, pivot, mass = torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(lse)
        for a, b in _blocks(z_CV, t_CU, self.columns):
            a.sub_(lse[:, None])
            b.sub_(other_lse[:, None])
            s, c = outcomes(a, b, self.kind, self.beta, value)
            if self.kind != "forward_kl":  # whose pivot is -1
                pivot += c.sum(1)
                mass += s.sum(1)
        value, pivot, mass = ranks.sum_of(torch.stack((value, pivot, mass)))
        pivot = pivot if self.kind == "forward_kl" else pivot / mass
        return {"value": value.clamp(min=0), "lse": lse, "other_lse": other_lse, "pivot": pivot}

    def _gradient_(
        self, z_CV: Tensor, t_CU: Tensor, part: slice, known: Numbers, factor_C: Tensor, *, normalised: bool
    ) -> Tensor | None:
        """``normalised``: both sides are log-probabilities already."""
        head, lse, other_lse = self.head, known["lse"][:, None], known["other_lse"][:, None]
        if head.scale is not None:
            factor_C = factor_C * head.scale
        for a, b in _blocks(z_CV, t_CU[:, : z_CV.shape[1]], self.columns):
            slope = None if head.softcap is None else cap_slope(a + lse if normalised else a, head.softcap)
            if not normalised:
                a.sub_(lse)
                b.sub_(other_lse)
            if self.kind == "forward_kl":
                a.exp_().sub_(b.exp_())
            else:
                s, c = outcomes(a, b, self.kind, self.beta)
                torch.addcmul(c, s, known["pivot"][:, None], value=-1, out=a)
            if slope is not None:
                a.mul_(slope)
            if not self.narrow:
                a.mul_(factor_C[:, None])
        if self.kept is not None:
            z_CV.masked_fill_(~self.kept[part, None], 0)  # infinities and NaN of a row that does not count, times 0
        return factor_C if self.narrow else None


class DenseKernels(Dense):
    """The same by kernels over rows of both sides' products; with the whole vocabulary here one kernel a direction."""

    raw = True

    def __init__(
        self, head: Head, plan: HeadPlan, teacher: Head, teacher_plan: HeadPlan, rows: Rows, kind: str, beta: float
    ) -> None:
        super().__init__(head, plan, teacher, teacher_plan, rows, kind, beta)
        self.apart = head.dtype != head.wide
        self._caps = [_as_tensor(side.softcap, head) for side in (head, teacher)]

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return the same numbers; the products are left unmodified."""
        return self._of_pair(self._pair(z, part))

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Write the gradient over the products, or to ``out`` where it is narrower."""
        return self._write(self._pair(z, part), known, g, out)[1]

    def both_(
        self, z: Tensor, part: slice, upstream: Upstream, out: Tensor | None = None
    ) -> tuple[Numbers, Tensor | None]:
        """Return "value" and what `gradient_` does."""
        pair = self._pair(z, part)
        known = None if self.head.ranks.alone else self._of_pair(pair)
        return self._write(pair, known, upstream(known or {}, part), out)

    def _pair(self, z: Tensor, part: slice) -> "Pair":
        from lowtide.head.kernels.pair_rows import Pair, Side

        heads = zip((self.head, self.teacher), self._both_sides(z, part), self._caps, strict=True)
        sides = (Side.of(products, head.bias_V, head.scale, cap) for head, products, cap in heads)
        return Pair(next(sides), next(sides), self.kind, self.beta, None if self.kept is None else self.kept[part])

    def _of_pair(self, pair: "Pair") -> Numbers:
        from lowtide.head.kernels.pair_rows import pair_logsumexps, pair_rows, pair_sums

        ranks = self.head.ranks
        if ranks.alone:
            return dict(zip(("value", "lse", "other_lse", "pivot"), pair_rows(pair), strict=True))
        both_lse = ranks.logsumexp_of(pair_logsumexps(pair))
        value, pivot, mass = ranks.sum_of(pair_sums(pair, both_lse))
        pivot = pivot / mass.where(mass != 0, 1)  # 0 in a row that does not count
        return {"value": value.clamp(min=0), "lse": both_lse[0], "other_lse": both_lse[1], "pivot": pivot}

    def _write(
        self, pair: "Pair", known: Numbers | None, factor_C: Tensor, out: Tensor | None
    ) -> tuple[Numbers, Tensor | None]:
        from lowtide.head.kernels.pair_rows import pair_gradient

        rows = None if known is None else (known["lse"], known["other_lse"], known["pivot"])
        lift_C = torch.empty_like(factor_C) if self.head.dtype == torch.float16 else None
        inside, outside = (None, factor_C) if self.apart else (factor_C, None)
        value = pair_gradient(pair, pair.student.z_CV if out is None else out, rows, factor_C=inside, lift_C=lift_C)
        if lift_C is not None:
            outside = factor_C * lift_C
        return known or {} if value is None else {"value": value}, outside


def _as_tensor(softcap: float | Tensor | None, head: Head) -> Tensor | None:
    if softcap is None or isinstance(softcap, Tensor):
        return softcap
    return torch.full((), softcap, dtype=head.wide, device=head.input.device)


def _blocks(z_CV: Tensor, t_CU: Tensor, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of both sides, -inf for classes that only one of them has."""
    V, U = z_CV.shape[1], t_CU.shape[1]
    for part in column_blocks(min(V, U), columns):
        yield z_CV[:, part], t_CU[:, part]
    for part in column_blocks(abs(V - U), columns):
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

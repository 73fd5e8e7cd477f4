"""A chunk's divergence from its two sides' logits, and the gradient of it in the student's place: plain PyTorch.

C rows of the chunk, V vocabulary (the larger of the two, what one side lacks is -inf there), K classes of a teacher's
top k. s and t are the student's and the teacher's probabilities, a and b their logarithms. What has probability 0 adds
0, whatever the other side says. What overwrites the logits it is given says so.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.head.matmul import column_blocks
from lowtide.head.terms.statistics import row_sums


class Kind(NamedTuple):
    """Which divergence: "forward_kl", "reverse_kl", "jsd" (with ``beta`` above 0 and below 1) or "tv"."""

    name: str
    beta: float


class RowNumbers(NamedTuple):
    """A row's value [C], and the three numbers from which backward rebuilds its gradient [C]."""

    value: Tensor
    lse: Tensor  # the student's logsumexp
    other_lse: Tensor  # the teacher's; with its top k, the student's over the other classes
    pivot: Tensor  # what the gradient measures each class against, see `dense_gradient_`; with top k, `topk_gradient_`


class Everyone(Protocol):
    """Those who hold the classes: what each finds in its own, as numbers [..., C], put together."""

    def sum_of(self, x: Tensor) -> Tensor:
        """Return the sum of everyone's."""

    def logsumexp_of(self, x: Tensor) -> Tensor:
        """Return the logarithm of the sum of everyone's exponentials."""

    def highest_of(self, x: Tensor) -> Tensor:
        """Return the highest of everyone's."""


class _Alone:
    """One holds them all."""

    def sum_of(self, x: Tensor) -> Tensor:
        return x

    logsumexp_of = highest_of = sum_of


ALONE = _Alone()


def dense_rows(z_CV: Tensor, teacher_CV: Tensor, kind: Kind, columns: int, everyone: Everyone = ALONE) -> RowNumbers:
    """Return the divergence of each row. With m = beta t + (1 - beta) s:

        forward_kl  sum t (b - a)              reverse_kl  sum s (a - b)
        jsd         beta sum t (b - log m) + (1 - beta) sum s (a - log m)          tv  sum |s - t| / 2

    To the KLs sum s - sum t (or the reverse) is added, 0 but for rounding: an error in a logsumexp, which shifts all of
    a row's a or b, cancels between the two. The pivot is an average over s that such a shift moves along with a.

    The logits become log-probabilities, a and b.
    """
    lse, teacher_lse = everyone.logsumexp_of(torch.stack((_lse(z_CV, columns), _lse(teacher_CV, columns))))
    value, pivot, mass = torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(lse)
    for part in column_blocks(z_CV.shape[1], columns):
        a, b = z_CV[:, part].sub_(lse[:, None]), teacher_CV[:, part].sub_(teacher_lse[:, None])
        s, t = a.exp(), b.exp()
        if kind.name == "forward_kl":
            value += _expectation(t, b - a).add_(s).sub_(t).sum(1)
            continue
        mass += s.sum(1)
        if kind.name == "reverse_kl":
            terms = _expectation(s, a - b)
            pivot += terms.sum(1)
            value += terms.add_(t).sub_(s).sum(1)
        elif kind.name == "jsd":
            log_m = _log_mixture(s, t, kind.beta)
            from_student = _expectation(s, a - log_m).sum(1)
            pivot += from_student
            value += (1 - kind.beta) * from_student + kind.beta * _expectation(t, b - log_m).sum(1)
        else:
            difference = s - t
            pivot += s.mul_(difference.sign()).sum(1)
            value += difference.abs_().sum(1) / 2
    value, pivot, mass = everyone.sum_of(torch.stack((value, pivot, mass)))
    return RowNumbers(value.clamp(min=0), lse, teacher_lse, pivot if kind.name == "forward_kl" else pivot / mass)


def _lse(z_CV: Tensor, columns: int) -> Tensor:
    """Return each row's logsumexp, -inf where there is nothing to sum."""
    if not z_CV.shape[1]:
        return z_CV.new_full((z_CV.shape[0],), -torch.inf)
    return row_sums(z_CV, columns).lse


def dense_gradient_(
    z_CV: Tensor,
    teacher_CV: Tensor,
    rows: RowNumbers,
    kind: Kind,
    factor_C: Tensor | None,
    columns: int,
    *,
    cap: Tensor | float | None = None,
    normalised: bool = False,
) -> None:
    """Turn the student's logits z, in place, into the gradient of ``sum(factor * value)`` with respect to them.

    forward_kl  s - t                       reverse_kl  s (a - b - value)
    jsd         (1 - beta) s (a - log m - KL(s || m))          tv  s (sign(s - t) - sum s sign(s - t)) / 2

    With ``cap``, which they come no further than, it is that by what was capped: times ``1 - (z / cap)**2``. With
    ``normalised`` both sides are log-probabilities already, as `dense_rows` leaves them.
    """
    for part in column_blocks(z_CV.shape[1], columns):
        a, b = z_CV[:, part], teacher_CV[:, part]
        slope = None if cap is None else _slope(a + rows.lse[:, None] if normalised else a, cap)
        if not normalised:
            a.sub_(rows.lse[:, None])
            b.sub_(rows.other_lse[:, None])
        if kind.name == "forward_kl":
            a.exp_().sub_(b.exp_())
        elif kind.name == "reverse_kl":
            s = a.exp()
            a.sub_(b).masked_fill_(s == 0, 0).sub_(rows.pivot[:, None]).mul_(s)
        elif kind.name == "jsd":
            s = a.exp()
            log_m = _log_mixture(s, b.exp_(), kind.beta)
            a.sub_(log_m).masked_fill_(s == 0, 0).sub_(rows.pivot[:, None]).mul_(s).mul_(1 - kind.beta)
        else:
            s = a.exp()
            a.copy_(s).sub_(b.exp_()).sign_().sub_(rows.pivot[:, None]).mul_(s).mul_(0.5)
        if slope is not None:
            a.mul_(slope)
        if factor_C is not None:
            a.mul_(factor_C[:, None])


def topk_rows(
    z_CE: Tensor, ids_CK: Tensor, b_CK: Tensor, tail: str, kind: Kind, columns: int, everyone: Everyone = ALONE
) -> RowNumbers:
    """Return the divergence of each row from a teacher of which K classes are known.

    Both sides are cut down to the same outcomes: the K classes as they are (``tail`` "drop"), these made to sum to 1
    ("renormalise"), or these and one more that holds the rest ("bucket"). The logits are left as they are.

    Args:
        z_CE: The student's logits, and one column more (E = V + 1), where classes that the student lacks are read and
            written.
        ids_CK: The classes; V where the student lacks one, or where there is none.
        b_CK: The teacher's log-probabilities, -inf where there is none.
        tail: As above.
        kind: Which divergence.
        columns: Width of the blocks.
        everyone: Those who hold the classes; the student's here, and with them V, are one's own.
    """
    z_CE[:, -1] = -torch.inf
    own = z_CE.gather(1, ids_CK)
    chosen = everyone.highest_of(own)
    of_chosen = chosen.logsumexp(1)
    rest = torch.full_like(of_chosen, -torch.inf)
    if tail == "renormalise":
        lse = of_chosen
    else:
        z_CE.scatter_(1, ids_CK, -torch.inf)
        rest = everyone.logsumexp_of(_lse(z_CE[:, :-1], columns))
        z_CE.scatter_(1, ids_CK, own)
        lse = torch.logaddexp(rest, of_chosen)
    rows = RowNumbers(torch.zeros_like(lse), lse, rest, torch.zeros_like(lse))
    a, b = _outcomes(chosen, b_CK, rows, tail)
    value, c = _few_outcomes(a, b, kind, normalised=tail != "drop")
    return rows._replace(value=value, pivot=c.sum(1))


def topk_gradient_(
    z_CE: Tensor,
    ids_CK: Tensor,
    b_CK: Tensor,
    rows: RowNumbers,
    tail: str,
    kind: Kind,
    factor_C: Tensor | None,
    columns: int,
    *,
    cap: Tensor | float | None = None,
) -> None:
    """Turn the student's logits, in place, into the gradient of ``sum(factor * value)`` with respect to them.

    With c_j the value's derivative by the log-probability of outcome j, an outcome's logit has the gradient
    ``q_j = c_j - s_j sum(c)``; the bucket's goes to its classes by their share in it. ``cap`` as in `dense_gradient_`.
    Where others hold classes, what is found of theirs here is left out: the sum is known from `topk_rows`.
    """
    K = ids_CK.shape[1]
    z_CE[:, -1] = -torch.inf
    chosen = z_CE.gather(1, ids_CK)
    a, b = _outcomes(chosen, b_CK, rows, tail)
    _, c = _few_outcomes(a, b, kind, normalised=tail != "drop")
    q = c - a.exp() * rows.pivot[:, None]
    others = -rows.pivot if tail == "drop" else q[:, -1]
    lse = rows.lse if tail == "drop" else rows.other_lse.masked_fill(rows.other_lse == -torch.inf, 0)
    if factor_C is not None:
        q, others = q * factor_C[:, None], others * factor_C
    if tail == "renormalise":
        z_CE.zero_()
    else:
        for part in column_blocks(z_CE.shape[1] - 1, columns):
            z = z_CE[:, part]
            slope = None if cap is None else _slope(z, cap)
            z.sub_(lse[:, None]).exp_().mul_(others[:, None])
            if slope is not None:
                z.mul_(slope)
    z_CE.scatter_(1, ids_CK, q[:, :K] if cap is None else q[:, :K] * _slope(chosen, cap))


def _outcomes(chosen: Tensor, b_CK: Tensor, rows: RowNumbers, tail: str) -> tuple[Tensor, Tensor]:
    """Return both sides' log-probabilities of the outcomes, of which the bucket is the last."""
    a = chosen - rows.lse[:, None]
    if tail == "drop":
        return a, b_CK
    mass = b_CK.logsumexp(1, keepdim=True)
    if tail == "renormalise":
        return a, b_CK - mass
    # what is less than the sum's own rounding cannot be told from 0: without this a KL would jump to infinity there
    left = torch.log(-torch.expm1(mass.clamp(max=-torch.finfo(mass.dtype).eps)))
    rest = rows.other_lse[:, None]
    left = left.masked_fill(rest == -torch.inf, -torch.inf)  # no class is left
    return torch.cat((a, rest - rows.lse[:, None]), 1), torch.cat((b_CK, left), 1)


def _few_outcomes(a: Tensor, b: Tensor, kind: Kind, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the value [C], as `dense_rows` has it, and its derivatives by each of ``a`` [C, J]."""
    s, t = a.exp(), b.exp()
    if kind.name == "forward_kl":
        terms, c = _expectation(t, b - a), -t
        terms = terms + s - t if normalised else terms
    elif kind.name == "reverse_kl":
        terms = _expectation(s, a - b)
        c = terms + s
        terms = terms + t - s if normalised else terms
    elif kind.name == "jsd":
        log_m = _log_mixture(s, t, kind.beta)
        c = (1 - kind.beta) * _expectation(s, a - log_m)
        terms = c + kind.beta * _expectation(t, b - log_m)
    else:
        c = (s - t).sign() * s / 2
        terms = (s - t).abs() / 2
    value = terms.sum(1)
    return (value.clamp(min=0) if normalised else value), c


def _slope(z: Tensor, cap: Tensor | float) -> Tensor:
    """Return the derivative of ``cap * tanh(x / cap)``, where that is ``z``; 0 of -inf, which no cap lets pass."""
    return (z.clamp(min=-cap) / cap).square_().neg_().add_(1)


def _expectation(p: Tensor, x: Tensor) -> Tensor:
    """Return ``p * x`` in the memory of ``x``, with ``0 * inf = 0``."""
    return x.masked_fill_(p == 0, 0).mul_(p)


def _log_mixture(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Return the logarithm of beta t + (1 - beta) s, that of the smallest normal number where it is less."""
    return torch.lerp(s, t, beta).clamp_(min=torch.finfo(s.dtype).tiny).log_()

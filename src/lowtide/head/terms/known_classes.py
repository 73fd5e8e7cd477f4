"""A row's divergence from a teacher's K known classes, and its gradient, written over the student's logits.

C rows of a chunk, V the student's classes on this rank. Both sides are cut down to the same outcomes: the K classes as
they are ("drop"), these made to sum to 1 ("renormalise"), or these and one more that holds the rest ("bucket").
"""

import torch
from torch import Tensor

from lowtide.head.call import DivergenceArgs, Head
from lowtide.head.engine import Numbers, Terms
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows, slices
from lowtide.head.terms.dense import cap_slope, outcomes
from lowtide.head.terms.statistics import logsumexp


class KnownClasses(Terms):
    """Divergence from a teacher's top k, in plain PyTorch; ``head`` is the student's."""

    spare = True

    def __init__(self, head: Head, plan: HeadPlan, args: DivergenceArgs, rows: Rows) -> None:
        self.head, self.args, self.rows, self.columns = head, args, rows, plan.columns
        self.narrow, self.tail = plan.backward_gemm == "narrow", args.tail

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "value", the logsumexp "lse" over the outcomes' classes, "other_lse" over the others, and "pivot"."""
        ranks, (ids, b_CK) = self.head.ranks, self._known(part)
        own = z.gather(1, ids)
        chosen = ranks.highest_of(own)
        lse = of_chosen = chosen.logsumexp(1)
        rest = torch.full_like(lse, -torch.inf)
        if self.tail != "renormalise":
            z.scatter_(1, ids, -torch.inf)
            rest = ranks.logsumexp_of(logsumexp(z[:, :-1], self.columns))
            z.scatter_(1, ids, own)
            lse = torch.logaddexp(rest, of_chosen)
        value = torch.zeros_like(lse)
        s, c = self._outcomes(chosen, b_CK, lse, rest, value)
        pivot = c.sum(1)
        if self.tail != "drop":
            value, pivot = value.clamp(min=0), pivot / s.sum(1)
        return {"value": value, "lse": lse, "other_lse": rest, "pivot": pivot}

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Tensor) -> Tensor | None:
        """Turn logits into the gradient: an outcome's is ``c - s pivot``, the bucket's is spread over its classes.

        Where other ranks hold classes, what is computed of theirs here is left out: the pivot is known from `numbers`.
        """
        head, tail, lse, rest, pivot = self.head, self.tail, known["lse"], known["other_lse"], known["pivot"]
        ids, b_CK = self._known(part)
        own = z.gather(1, ids)
        s, c = self._outcomes(own, b_CK, lse, rest)
        q = torch.addcmul(c, s, pivot[:, None], value=-1)
        others, others_lse = (-pivot, lse) if tail == "drop" else (q[:, -1], rest.masked_fill(rest == -torch.inf, 0))
        factor_C = g if head.scale is None else g * head.scale
        if not self.narrow:
            q, others = q * factor_C[:, None], others * factor_C
        if tail == "renormalise":
            z.zero_()
        else:
            for cols in slices(z.shape[1] - 1, self.columns):
                block = z[:, cols]
                weight = others[:, None]
                if head.softcap is not None:
                    weight = cap_slope(block, head.softcap).mul_(weight)
                block.sub_(others_lse[:, None]).exp_().mul_(weight)
        at_ids = q[:, : ids.shape[1]]
        z.scatter_(1, ids, at_ids if head.softcap is None else at_ids * cap_slope(own, head.softcap))
        if self.rows.kept is not None:
            z.masked_fill_(~self.rows.kept[part, None], 0)  # infinities and NaN of an ignored row, times 0
        return factor_C if self.narrow else None

    def _known(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return a chunk's classes, the spare column where one is not here, and their log-probabilities."""
        rows = part if self.rows.index is None else self.rows.index[part]
        assert self.args.topk_ids is not None
        assert self.args.topk_logprobs is not None
        ids, logprobs = self.args.topk_ids[rows], self.args.topk_logprobs[rows].to(self.head.wide)
        there, (own, here) = logprobs > -torch.inf, self.head.ranks.here(ids)
        if here is None:
            here = (ids >= 0) & (ids < self.head.ranks.rows)
        return own.where(there & here, self.head.ranks.rows), logprobs.masked_fill((ids < 0) & there, torch.nan)

    def _outcomes(
        self, chosen: Tensor, b_CK: Tensor, lse: Tensor, rest: Tensor, value_C: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `outcomes` does of the classes, and of the bucket as the last one."""
        a, b, kind, dropped = chosen - lse[:, None], b_CK, self.args.kind, self.tail == "drop"
        if not dropped:
            mass = b.logsumexp(1, keepdim=True)
        if self.tail == "renormalise":
            b = b - mass
        elif self.tail == "bucket":
            # less than the sum's own rounding is the same as 0: else a KL would jump to infinity there
            left = torch.log(-torch.expm1(mass.clamp(max=-torch.finfo(mass.dtype).eps)))
            left = left.masked_fill(rest[:, None] == -torch.inf, -torch.inf)  # no class is left
            a, b = torch.cat((a, (rest - lse)[:, None]), 1), torch.cat((b, left), 1)
        s, c = outcomes(a, b, kind, self.args.beta, value_C, normalised=not dropped)
        return s, c + s if dropped and kind == "reverse_kl" else c

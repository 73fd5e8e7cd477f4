"""The divergence of `dense` by kernels over rows of logits; with the whole vocabulary here one kernel per direction."""

from functools import cached_property, partial

import torch
from torch import Tensor

from lowtide.head.engine import Numbers, UpstreamOf
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.kernels.pair_rows import Pair, pair_gradient, pair_logsumexps, pair_rows, pair_sums
from lowtide.head.terms.dense import Dense


class DenseKernels(Dense):
    """Forward leaves the logits unmodified; a gradient is written over them, or to ``out`` if it is narrower."""

    raw = True

    @cached_property
    def _transforms(self) -> list[LogitTransform]:
        number = partial(torch.full, (), dtype=self.head.wide, device=self.head.input.device)
        caps = (number(x.softcap) if isinstance(x.softcap, float) else x.softcap for x in (self.head, self.teacher))
        return [LogitTransform(x.bias_V, x.scale, cap) for x, cap in zip((self.head, self.teacher), caps, strict=True)]

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """Return "value" and what `gradient_` does."""
        if not self.head.ranks.alone:
            return super().both_(z, part, upstream)
        factor_C = upstream({}, part)
        known = {"value": torch.empty_like(factor_C)}
        return known, self._gradient_(self._sides(z, part), known, factor_C, True)

    def _sides(self, z: Tensor, part: slice) -> Pair:
        z_CV, t_CU, kept_C = super()._sides(z, part)
        student, teacher = self._transforms
        return Pair(z_CV, t_CU, self.kind, self.beta, kept_C, student, teacher)

    def _numbers(self, sides: Pair) -> Numbers:
        return pair_rows(sides) if self.head.ranks.alone else super()._numbers(sides)

    def _logsumexps(self, sides: Pair) -> Tensor:
        return pair_logsumexps(sides)

    def _sums(self, sides: Pair, both_lse: Tensor) -> Tensor:
        return pair_sums(sides, both_lse)

    def _gradient_(self, sides: Pair, known: Numbers, factor_C: Tensor, _normalised: bool) -> Tensor | None:
        inside, outside = (None, factor_C) if self.apart else (factor_C, None)
        lift_C = pair_gradient(sides, sides.z_CV if self.out is None else self.out, known, inside)
        return outside if lift_C is None else factor_C * lift_C

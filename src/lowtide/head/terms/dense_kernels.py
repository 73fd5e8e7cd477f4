"""The divergence of `dense` by kernels over rows of logits; with the whole vocabulary here one kernel per direction."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.engine import Numbers, UpstreamOf
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.kernels.pair_rows import pair_rows
from lowtide.head.terms.dense import Dense

NUMBERS = ("value", "lse", "other_lse", "pivot")  # of each row


class DenseKernels(Dense):
    """Forward leaves the logits unmodified; a gradient is written over them, or to ``out`` if it is narrower."""

    raw = True

    @cached_property
    def _transforms(self) -> tuple[LogitTransform, LogitTransform]:
        number = partial(torch.full, (), dtype=self.head.wide, device=self.head.input.device)

        def of(x: Any) -> LogitTransform:
            return LogitTransform(x.bias_V, x.scale, number(x.softcap) if isinstance(x.softcap, float) else x.softcap)

        return of(self.head), of(self.teacher)

    def _rows(
        self, sides: Any, numbers: Sequence[Tensor | None], out_CV: Tensor | None = None,
        factor_C: Tensor | None = None, *, known: bool = False,
    ) -> Tensor | None:  # fmt: skip
        z_CV, t_CU, kept_C = sides
        of = self._transforms, self.kind, self.beta, numbers, out_CV, factor_C
        return pair_rows(z_CV, t_CU, kept_C, *of, known=known)

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """Return "value" and what `gradient_` does."""
        if not self.head.ranks.alone:
            return super().both_(z, part, upstream)
        factor_C = upstream({}, part)
        known = {"value": torch.empty_like(factor_C)}
        return known, self._gradient_(self._sides(z, part), known, factor_C, True)

    def _numbers(self, sides: Any) -> Numbers:
        if not self.head.ranks.alone:
            return super()._numbers(sides)
        numbers = {name: sides[0].new_empty(len(sides[0])) for name in NUMBERS}  # no views of one memory
        self._rows(sides, (*numbers.values(), None))
        return numbers

    def _logsumexps(self, sides: Any) -> Tensor:
        both_lse: Tensor = sides[0].new_empty(2, len(sides[0]))
        self._rows(sides, (None, *both_lse, None, None))
        return both_lse

    def _sums(self, sides: Any, both_lse: Tensor) -> Tensor:
        value, pivot, mass = sums = both_lse.new_empty(3, both_lse.shape[1])
        self._rows(sides, (value, *both_lse, pivot, mass), known=True)
        return sums

    def _gradient_(self, sides: Any, known: Numbers, factor_C: Tensor, _normalised: bool) -> Tensor | None:
        out, is_known = sides[0] if self.out is None else self.out, "lse" in known
        value, *rest = (known.get(name) for name in NUMBERS)
        numbers = (None if is_known else value, *rest, None)
        lift_C = self._rows(sides, numbers, out, None if self.apart else factor_C, known=is_known)
        if not self.apart:
            return None
        return factor_C if lift_C is None else factor_C * lift_C

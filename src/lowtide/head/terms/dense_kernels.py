"""The divergence of `dense` by kernels over rows of products; with the whole vocabulary here one kernel a direction."""

from functools import cached_property, partial

import torch
from torch import Tensor

from lowtide.head.engine import Numbers, Upstream
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.kernels.pair_rows import Pair, pair_gradient, pair_logsumexps, pair_rows, pair_sums
from lowtide.head.terms.dense import Dense


class DenseKernels(Dense):
    """Leaves the products unmodified; a gradient is written over them, or to ``out`` where it is narrower."""

    raw = True

    @cached_property
    def _transforms(self) -> list[LogitTransform]:
        number = partial(torch.full, (), dtype=self.head.wide, device=self.head.input.device)
        caps = (number(x.softcap) if isinstance(x.softcap, float) else x.softcap for x in (self.head, self.teacher))
        return [LogitTransform(x.bias_V, x.scale, cap) for x, cap in zip((self.head, self.teacher), caps, strict=True)]

    def both_(
        self, z: Tensor, part: slice, upstream: Upstream, out: Tensor | None = None
    ) -> tuple[Numbers, Tensor | None]:
        """Return "value" and what `gradient_` does."""
        if not self.head.ranks.alone:
            return super().both_(z, part, upstream, out)
        value, outside = self._write(self._sides(z, part), None, upstream({}, part), out)
        assert value is not None
        return {"value": value}, outside

    def _sides(self, z: Tensor, part: slice) -> Pair:
        z_CV, t_CU, kept_C = super()._sides(z, part)
        student, teacher = self._transforms
        return Pair(z_CV, t_CU, self.kind, self.beta, kept_C, student, teacher)

    def _numbers(self, sides: Pair) -> Numbers:
        if not self.head.ranks.alone:
            return super()._numbers(sides)
        return dict(zip(("value", "lse", "other_lse", "pivot"), pair_rows(sides), strict=True))

    def _logsumexps(self, sides: Pair) -> Tensor:
        return pair_logsumexps(sides)

    def _sums(self, sides: Pair, both_lse: Tensor) -> Tensor:
        return pair_sums(sides, both_lse)

    def _gradient_(
        self, sides: Pair, known: Numbers, factor_C: Tensor, out: Tensor | None, _normalised: bool
    ) -> Tensor | None:
        return self._write(sides, (known["lse"], known["other_lse"], known["pivot"]), factor_C, out)[1]

    def _write(
        self, pair: Pair, known: tuple[Tensor, Tensor, Tensor] | None, factor_C: Tensor, out: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return each row's divergence where nothing is known, and what its gradient lacks."""
        inside, outside = (None, factor_C) if self.apart else (factor_C, None)
        value, lift_C = pair_gradient(pair, pair.z_CV if out is None else out, known, inside)
        return value, outside if lift_C is None else factor_C * lift_C

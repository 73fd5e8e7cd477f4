"""The case of `experts.py`: a mixture's hidden states, routing and weights, and its bare grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.bench.case import Function, Values
from lowtide.bench.mlp import ModuleCase
from lowtide.mlp.experts import Groups, sorted_by_expert


@dataclass(frozen=True, kw_only=True)
class Mixture(ModuleCase):
    """The case of a mixture's experts, with the routing and the weights."""

    ids: Tensor  # [N, K]
    weights: tuple[Tensor | None, ...]  # gate_up, down and their biases
    gemm: Callable[[int], None]

    @property
    def routing(self) -> Tensor:
        """The weight of each token's experts [N, K]."""
        return self.leaves[1]

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the weights are [E, in, out], with biases, gate and up interleaved and limited."""
        return self.weights[2] is not None

    @property
    def flops(self) -> int:
        return 3 * 3 * 2 * self.ids.numel() * self.shape.D * self.shape.F

    @property
    def sizes(self) -> tuple[int, ...]:
        """GEMMs: those that a step cannot do without, and with gate and up recomputed."""
        return 6, 7

    def call(self, function: Function) -> Values:
        """Return the output of what a peer has built, which holds its inputs."""
        return (function(),)

    def bare(self, size: int) -> None:
        """Run the grouped GEMMs of a step: 6, or 7 with one twice."""
        self.gemm(size)


def make_mixture(shape: Any, dtype: torch.dtype, device: torch.device) -> Mixture:
    """Return random hidden states and weights, and a routing in which each token draws its experts."""
    generator = torch.Generator(device).manual_seed(0)
    N, D, F, E, K = shape.N, shape.D, shape.F, shape.E, shape.K

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator).mul_(scale).to(dtype)

    oss = shape.name.startswith("gpt-oss")
    sizes = ((E, D, 2 * F), (E, F, D), (E, 2 * F), (E, D)) if oss else ((E, 2 * F, D), (E, D, F))
    scales = (D**-0.5, F**-0.5, 1.0, 1.0)
    weights = [nn.Parameter(random(*size, scale=s)) for size, s in zip(sizes, scales, strict=False)]
    scores, ids = torch.randn(N, E, device=device, generator=generator).topk(min(K, E))
    x, routing = random(N, D).requires_grad_(), scores.softmax(-1).to(dtype).requires_grad_()
    order, ends = sorted_by_expert(ids, E)
    groups, rows = Groups(ends), x.detach()[order // K]
    gate_up, down = (w.detach() if oss else w.detach().transpose(1, 2) for w in weights[:2])
    both, h = rows.new_zeros(len(rows), 2 * F), rows.new_zeros(len(rows), F)

    @torch.no_grad()
    def gemm(gemms: int) -> None:
        """Run the grouped GEMMs of a step, on rows that are there: 6, or 7 with one twice."""
        for _ in range(gemms - 5):
            groups.times(rows, gate_up)
        groups.times(h, down)
        groups.times(rows, down.transpose(1, 2))
        groups.outer(*((h, rows) if oss else (rows, h)))
        groups.outer(*((rows, both) if oss else (both, rows)))
        groups.times(both, gate_up.transpose(1, 2))

    return Mixture(
        shape=shape, name="the experts", ids=ids, weights=(*weights, *[None] * (4 - len(weights))),
        upstream=(random(N, D),), leaves=(x, routing, *weights), gemm=gemm,
    )  # fmt: skip

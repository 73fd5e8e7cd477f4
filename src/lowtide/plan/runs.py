"""Layers one after the other with one policy, and where what they save is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.layer_costs import PAGES, LayerCost

Groups = Sequence[tuple[ActivationPolicy, int]]  # runs of equal layers, from the first layer on


def runs_of(groups: Groups) -> list[tuple[ActivationPolicy, int, bool]]:
    """Return the runs with whether what they save goes to the host: not that of the last offloaded layers."""
    to_move = max(0, sum(policy.saves(n) for policy, n in groups if policy.offload) - ON_DEVICE)
    found = []
    for policy, n in groups:
        moved = min(n, to_move * policy.every) if policy.offload else 0
        to_move -= policy.saves(moved)
        found += [(policy, m, moves) for m, moves in ((moved, True), (n - moved, False)) if m]
    return found


class Run(NamedTuple):
    """Layers one after the other with one policy."""

    costs: tuple[LayerCost, ...]  # of each kind of layer
    counts: tuple[int, ...]  # of each kind, in the run
    first: int
    moves: bool  # what they save goes to the host

    @property
    def on_gpu(self) -> int:
        """Return the bytes that all of them save on the GPU."""
        return 0 if self.moves else self._saved()

    @property
    def on_host(self) -> int:
        """Return the bytes that all of them save on the host."""
        return self._saved(PAGES) if self.moves else 0

    def _saved(self, more: int = 0) -> int:
        """Return the bytes that all of them save, and ``more`` for each that does."""
        layers = sum(self.counts)
        total = sum(n * (cost.saved + more) for n, cost in zip(self.counts, self.costs, strict=True))
        return total * self.costs[0].policy.saves(layers) // layers

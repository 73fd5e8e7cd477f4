"""Which layer saves what: all mixtures of up to three policies, the fastest that fits, and the front of the others.

A mixture is a number of layers for each policy. Those that save less come first: backward reaches
them last, when what the others saved is free again, and offloaded ones have the longest time to travel. Each is tried
with a few amounts of optimizer states offloaded as well, of those that travel without holding the layers up. Policies
by which one layer of several saves its input are tried beside one other policy at most: they cost a forward for less
than anything else saves, so that they matter where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from lowtide.measure.units import gib
from lowtide.memory.optimizer import BLOCK_BYTES
from lowtide.memory.policy import ActivationPolicy, Mixture, words_of
from lowtide.plan.job import Job
from lowtide.plan.step_costs import BESIDE, PAGES, Groups, StepCosts

THIRDS = 16  # a mixture of three is tried in steps of a sixteenth of the layers
EIGHTHS = 8  # of the optimizer states: the amounts that are tried
EVERY = (4, 2)  # layers of which one saves its input: the numbers that are tried
ROUND = 2**30 // 16  # bytes: the amounts of states between none and all are whole sixteenths of a GiB


@dataclass(frozen=True)
class Candidate:
    """A mixture of policies, and what a step with it takes."""

    groups: Mixture
    peak: int  # bytes on the GPU
    host: int  # bytes in pinned memory, those of optimizer states among them
    seconds: float
    states: int = 0  # bytes of optimizer states that are offloaded
    late: bool = False  # they come back only after backward

    def __str__(self) -> str:
        late = " until after backward" if self.late else ""
        states = f", {gib(self.states):.2f} GiB of states offloaded{late}" if self.states else ""
        return words_of(self.groups) + states


class Search:
    """The mixtures of one job.

    Attributes:
        ladder: The policies of a layer, from what saves the least on the GPU to what saves the most; those that offload
            save nothing. Attention's output can be saved only where all layers run fused attention.
        sparse: The policies by which one layer of several saves its input, the leanest first; none for several GPUs.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.host_bytes, self.costs = job, job.size("host_gib") or 0, StepCosts(job)
        levels, places = job.levels, (False, True)[: 1 + bool(self.host_bytes)]
        attends = all(one.attended for one in self.costs.job.readings(levels[0]))
        keeps: Any = ("all", "attention", "input") if attends else ("all", "input")
        rungs = [
            ActivationPolicy(keep=keep, mlp_level=level, offload=out)
            for out in places
            for keep in keeps[out:]
            for level in levels
        ]
        self.ladder = sorted(rungs, key=lambda p: not p.offload and self.costs.of_layers(p).saved.sum())
        self.sparse = [
            ActivationPolicy(keep="input", mlp_level=levels[-1], every=k, offload=out)
            for out in reversed(places)
            for k in EVERY
            if job.gpus == 1
        ]
        states = self.costs.states * bool(self.host_bytes)
        # The states of experts are so large that an amount between none and all may not be had.
        tried = [states * i // EIGHTHS for i in range(1, EIGHTHS if not job.model.experts else 1)]
        self._amounts = sorted(({amount // ROUND * ROUND for amount in tried} | {states}) - {0})

    def candidates_of(self, groups: Groups) -> list[Candidate]:
        """Return a mixture, and the same with optimizer states offloaded as far as that lowers its peak.

        None where the host lacks the room, or only layers would be offloaded that are the last and stay.
        """
        groups, costs = tuple(groups), self.costs
        step = costs.step(groups)
        if step.host > self.host_bytes or (not step.host and any(policy.offload for policy, _ in groups)):
            return []
        found = [Candidate(groups, costs.peak(step), step.host, step.seconds)]
        for late in (False, True):
            least = found[0].peak
            for n in self._amounts:
                host = step.host + n + (n // BLOCK_BYTES + 2) * PAGES
                peak = costs.peak(step, n, late=late)
                if n <= step.travels and host <= self.host_bytes and peak < least:
                    least = peak
                    waits = (BESIDE + (1 if late else BESIDE)) * n / self.job.gpu.pcie
                    found.append(Candidate(groups, peak, host, step.seconds + waits, n, late))
        return found

    def _all_of(self, mixtures: Iterable[Groups]) -> list[Candidate]:
        return [one for groups in mixtures for one in self.candidates_of(groups)]

    def _uniform(self) -> list[Candidate]:
        """Return the mixtures of one policy alone."""
        return self._all_of([(policy, self.job.layers)] for policy in (*self.sparse, *self.ladder))

    @cached_property
    def front(self) -> list[Candidate]:
        """Return the mixtures that no other one beats in both memory and time, from the leanest to the fastest."""
        L, step = self.job.layers, -(-self.job.layers // THIRDS)
        pairs = (  # one layer of several saves its input in whole groups
            [(a, n), (b, L - n)]
            for a, b in combinations([*self.sparse, *self.ladder], 2)
            if a.every == 1 or not b.offload
            for n in range(a.every, L, a.every)
        )
        found = pareto(self._uniform() + self._all_of(pairs))
        used = {policy for one in found for policy, _ in one.groups}
        threes = (
            [(a, i), (b, j), (c, L - i - j)]
            for a, b, c in combinations([policy for policy in self.ladder if policy in used], 3)
            for i in range(step, L, step)
            for j in range(step, L - i, step)
        )
        return pareto(found + self._all_of(threes))

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest mixture within the budget, None where there is none."""
        fitting = [one for one in self.front if one.peak <= budget_bytes]
        return fitting[-1] if fitting else None

    def leanest(self) -> Candidate:
        """Return the mixture of the lowest peak that has one policy for all layers: about the lowest of all."""
        return pareto(self._uniform())[0]


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that no other beats in both memory and time, by memory."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.peak, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found

"""Which layer saves what: all mixtures of up to three policies, the fastest that fits, and the front of the others.

A mixture is a number of layers for each policy. Those that save less come first: backward reaches
them last, when what the others saved is free again, and offloaded ones have the longest time to travel. Each is tried
with a few amounts of optimizer states offloaded as well, of those that travel without holding the layers up. Policies
by which one layer of several saves its input are tried beside one other policy at most: they cost a forward for less
than anything else saves, so that they matter where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from lowtide.measure.units import gib
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.policy import ActivationPolicy, Mixture, words_of
from lowtide.plan.job import Job
from lowtide.plan.step_costs import StepCosts

THIRDS = 16  # a mixture of three is tried in steps of a sixteenth of the layers
EIGHTHS = 8  # of the optimizer states: the amounts that are tried
EVERY = (2, 4)  # layers of which one saves its input: the numbers that are tried
STEP = 256  # tokens: the longest sequence is a multiple of it
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

    @property
    def policies(self) -> tuple[ActivationPolicy, ...]:
        """Return one policy for each layer."""
        return tuple(policy for policy, n in self.groups for _ in range(n))

    @property
    def moves(self) -> bool:
        """Return whether something is on the host where it is to offload: the last layers' stays."""
        return self.host > 0 or not any(policy.offload for policy, _ in self.groups)

    def __str__(self) -> str:
        late = " until after backward" if self.late else ""
        states = f", {gib(self.states):.2f} GiB of states offloaded{late}" if self.states else ""
        return words_of(self.groups) + states


def ladder(job: Job) -> list[ActivationPolicy]:
    """Return the policies of a layer, from what saves the most on the GPU to what saves the least.

    Attention's output can be saved only where all layers run fused attention.
    """
    levels = (0, 1) if job.fused_mlp and job.shape.levels else (None,)
    rungs: Any = [("all", False)]
    for offload in (False, True)[: 1 + bool(job.size("host_gib"))]:
        rungs += [("attention", offload)] * job.shape.attends + [("input", offload)]
    return [ActivationPolicy(keep=keep, mlp_level=n, offload=out) for keep, out in rungs for n in levels]


def sparse(job: Job) -> list[ActivationPolicy]:
    """Return the policies by which one layer of several saves its input; none for compiled ones or several GPUs."""
    if job.gpus > 1 or job.compile_layers:
        return []
    places = (False, True)[: 1 + bool(job.size("host_gib"))]
    level = 1 if job.fused_mlp and job.shape.levels else None
    each = [(k, place) for place in places for k in EVERY if k <= job.shape.layers]
    return [ActivationPolicy(keep="input", mlp_level=level, every=k, offload=place) for k, place in each]


class Search:
    """The mixtures of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.host_bytes, self.costs = job, job.size("host_gib") or 0, StepCosts(job)
        self.ladder, self.sparse = ladder(job), sparse(job)
        states = self.costs.states if job.offload_states and self.host_bytes else 0
        # The states of experts are so large that an amount between none and all may not be had.
        tried = [states * i // EIGHTHS for i in range(1, EIGHTHS if not job.shape.experts else 1)]
        self._amounts = sorted(({amount // ROUND * ROUND for amount in tried} | {states}) - {0})

    def candidate(self, groups: Sequence[tuple[ActivationPolicy, int]]) -> Candidate:
        """Return a mixture with what it takes, all optimizer states on the GPU."""
        groups = tuple((policy, n) for policy, n in groups if n)
        costs = self.costs
        return Candidate(groups, costs.peaks(groups)[0], costs.on_host(groups), costs.seconds(groups))

    def with_offloads(self, one: Candidate) -> list[Candidate]:
        """Return a mixture, and the same with optimizer states offloaded, as far as that lowers its peak."""
        found, room = [one], self.host_bytes - one.host
        most = self.costs.travels(one.groups) if self._amounts else 0
        hosts = {n: self.costs.states_on_host(n) for n in self._amounts if n <= most}
        amounts = [n for n, host in hosts.items() if host <= room]
        for late in (False, True)[: 2 * bool(amounts)]:
            least = one.peak
            for n, peak in zip(amounts, self.costs.peaks(one.groups, amounts, late=late), strict=True):
                if peak < least:
                    seconds = one.seconds + self.costs.on_the_way(n, late=late)
                    found.append(Candidate(one.groups, peak, one.host + hosts[n], seconds, n, late))
                least = min(least, peak)
        return found

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Return every mixture of one or two policies, and of three that matter, that the host has room for."""
        layers = self.job.shape.layers
        lean_first = sorted(self.ladder, key=self._on_gpu)
        pairs = [self.candidate([(policy, layers)]) for policy in lean_first]
        for a, b in combinations(lean_first, 2):
            pairs += [self.candidate([(a, n), (b, layers - n)]) for n in range(1, layers)]
        every = [one for one in pairs if one.moves]
        used, step = _used(every), -(-layers // THIRDS)
        for a, b, c in combinations([policy for policy in lean_first if policy in used], 3):
            for i in range(step, layers, step):
                every += [self.candidate([(a, i), (b, j), (c, layers - i - j)]) for j in range(step, layers - i, step)]
        for a in self.sparse:  # in whole groups, before one other policy
            every.append(self.candidate([(a, layers)]))
            for b in self._beside(a):
                every += [self.candidate([(a, n), (b, layers - n)]) for n in range(a.every, layers, a.every)]
        fitting = (one for one in every if one.host <= self.host_bytes and one.moves)
        return [each for one in fitting for each in self.with_offloads(one)]

    def _beside(self, policy: ActivationPolicy) -> list[ActivationPolicy]:
        """Return the policies of layers that stay on the GPU, behind those of a policy that saves less."""
        return [b for b in (*self.ladder, *self.sparse) if not b.offload and (b.every == 1 or b.every < policy.every)]

    def _on_gpu(self, policy: ActivationPolicy) -> int:
        """Return the bytes that a layer saves on the GPU, where one that offloads moves."""
        return self.costs.layers[policy].places(moves=policy.offload)[0]

    @cached_property
    def front(self) -> list[Candidate]:
        """Return the mixtures that no other one beats in both memory and time, from the leanest to the fastest."""
        return pareto(self.candidates)

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest mixture within the budget, None where there is none."""
        fitting = [one for one in self.front if one.peak <= budget_bytes]
        return fitting[-1] if fitting else None

    def least(self) -> Candidate:
        """Return the mixture of the lowest peak, among one policy for all layers and as many offloaded as fit.

        No other mixture is lower, but for some pages of host memory: the head coincides with what all layers save, and
        each backward with what its own layer recomputes. The last layer may keep all: temporaries of a recompute, such
        as numbers of a mask, do not coincide with what the others save then. Host memory goes to layers first, or to an
        amount of optimizer states.
        """
        lean = (one for one in self._lean() if one.host <= self.host_bytes and one.moves)
        return min((each for one in lean for each in self.with_offloads(one)), key=lambda one: (one.peak, one.seconds))

    def _lean(self) -> Iterator[Candidate]:
        layers = self.job.shape.layers
        left = [self.host_bytes, *(self.host_bytes - self.costs.states_on_host(n) for n in self._amounts)]
        for policy in (*self.ladder, *self.sparse):
            each, k = self.costs.layers[policy].places(moves=policy.offload)[1], policy.every
            for room in {layers if not each else min(layers, (h // each + ON_DEVICE) * k) for h in left if h >= 0}:
                if room < layers:
                    others = self._beside(policy)
                    yield from (self.candidate([(policy, room), (other, layers - room)]) for other in others)
                    continue
                yield self.candidate([(policy, layers)])
                ends = [(last, 1) for last in self.ladder if last.keep == "all" and last != policy and layers > 1]
                if policy.every > 1:  # in whose last group the inputs of all groups are there
                    ends += [(one, (layers - 1) % k + 1) for one in self._beside(policy) if one.keep == "input"]
                yield from (self.candidate([(policy, layers - n), (last, n)]) for last, n in ends)

    def longest_sequence(self, budget_bytes: int) -> int:
        """Return the longest sequence that fits at the job's batch size, in steps of `STEP` tokens; 0: none does."""
        return STEP * largest(lambda n: Search(replace(self.job, seq_len=n * STEP)).least().peak, budget_bytes)

    def largest_batch(self, budget_bytes: int) -> int:
        """Return the largest batch that fits at the job's sequence length; 0: none does."""
        return largest(lambda n: Search(replace(self.job, batch_size=n)).least().peak, budget_bytes)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that no other beats in both memory and time, by memory."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.peak, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _used(candidates: Sequence[Candidate]) -> set[ActivationPolicy]:
    """Return the policies on the front of any budget of host memory.

    Of any, so that what is tried for a small one is tried for a larger one too: more host memory is never slower.
    """
    by_host: dict[int, list[Candidate]] = {}
    for one in candidates:
        by_host.setdefault(one.host, []).append(one)
    found, front = set[ActivationPolicy](), list[Candidate]()
    for host in sorted(by_host):
        front = pareto([*front, *by_host[host]])
        found.update(policy for one in front for policy, _ in one.groups)
    return found


def largest(peak_of: Callable[[int], int], limit: int) -> int:
    """Return the largest number whose peak is within the limit, and whose successor's is not; 0 where 1's is not.

    Peaks grow about linearly, so that the next number to try is where a line through the last two meets the limit.
    """
    fits, peak = 1, peak_of(1)
    if peak > limit:
        return 0
    fails, slope, turn = 0, 0.0, 0  # 0: none is known
    while fails != fits + 1:
        guess = fits + max(1, int((limit - peak) / slope)) if slope > 0 else 2 * fits
        if fails:
            guess = (fits + fails) // 2 if turn % 3 == 2 else max(fits + 1, min(guess, fails - 1))
        else:
            guess = min(guess + turn, 64 * fits)
        turn, found = turn + 1, peak_of(guess)
        if guess != fits:
            slope = (found - peak) / (guess - fits)
        if found <= limit:
            fits, peak = guess, found
        else:
            fails = guess
    return fits

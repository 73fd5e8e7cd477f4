"""What one training step holds in memory, by phase, and how long it takes. Symbols as in `layer_costs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from lowtide.memory.optimizer_blocks import BLOCK_BYTES, layers_to_leave, share_away, share_back, share_out
from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import PAGES, LayerCosts
from lowtide.plan.runs import Groups, Run, runs_of
from lowtide.plan.sharding import SLOWS, Exchange, ranks_of

MIB = 2**20
# What cuBLAS takes in each of the two threads that multiply, forward's and backward's: from Hopper on, and before.
WORKSPACE, OLD_WORKSPACE = 32 * MIB, 8 * MIB + MIB // 8
HEAD_SHARE = 0.95  # of the GEMMs' rate, over its three GEMMs: benchmarks/results, lowtide bench head
# Share of a transfer's time that it takes from the GEMMs it runs beside: 6 of 139 ms, and 3 of 68, in
# benchmarks/results, 2026-11-21-policy-32768-h100.
BESIDE = 0.05
ON_TIME = 0.9  # share of the layers' time in which optimizer states are to have travelled
# The parts of a phase's bytes, and how they are printed.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "head": "output layer and loss",
    "transients": "temporaries",
    "other": "workspaces, positions",
    "gathered": "gathered, to exchange",
}


class Phase(NamedTuple):
    """A moment of a step, and the bytes that it holds by kind: `PARTS`."""

    name: str  # "forward", "head", "backward", "embedding" or "optimizer"
    layer: int  # that is at work; -1: none
    weights: int
    gradients: int  # that exist by then
    optimizer: int
    activations: int  # that layers save for backward, and what of one was recomputed
    head: int  # the output layer's scratch, and the gradients that it holds
    other: int  # workspaces, position embeddings, token ids
    transients: int  # within the phase alone
    away: float = 0.0  # share of the offloaded optimizer states that is on the host then
    away_late: float = 0.0  # the same where they come back only after backward
    gathered: int = 0  # whole parameters, and buffers of exchanges, where several GPUs share them

    @property
    def bytes(self) -> int:
        """Return the sum."""
        return sum(self[2:9]) + self.gathered

    def parts(self) -> dict[str, int]:
        """Return the bytes by kind."""
        return {name: getattr(self, name) for name in PARTS}

    def __str__(self) -> str:
        return self.name if self.layer < 0 else f"{self.name} of layer {self.layer}"


def _counts_before(kind_of: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return for each layer, and for the end, how many layers of each kind come before it."""
    counts, found = [0] * (max(kind_of) + 1), []
    for kind in kind_of:
        found.append(tuple(counts))
        counts[kind] += 1
    return [*found, tuple(counts)]


def _nearest(kind_of: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return for each layer the nearest of each kind from it on; where there is none, the number of layers."""
    nearest, found = [len(kind_of)] * (max(kind_of) + 1), []
    for layer in range(len(kind_of) - 1, -1, -1):
        nearest[kind_of[layer]] = layer
        found.append(tuple(nearest))
    return found[::-1]


class StepCosts:
    """The bytes and the seconds of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.ranks = ranks = ranks_of(job)
        self.job = job = ranks.job
        self.layers = LayerCosts(job)
        shape, e, N, seq_len = job.shape, job.element, job.tokens, job.seq_len
        kind, numbers = OPTIMIZERS[job.optimizer], job.trained_adapters
        self.weights, self.states, self.all_gradients = ranks.weights, ranks.states, ranks.gradients
        self.vocab_gradients = shape.vocab_params * e if numbers is None else 0
        self.fixed_seconds = head_seconds(job) + optimizer_seconds(job, ranks.stepped) + embedding_seconds(job)
        runs, waits = ranks.seconds(ranks.others)
        self.fixed_seconds += waits + SLOWS * runs + ranks.waits
        # of a layer and all after it
        self._gradients_from = [*accumulate(reversed(ranks.layer_gradients), initial=0)][::-1]
        ids = 2 * 8 * N  # and labels
        positions = seq_len * (8 + 2 * shape.head_dim * e)  # with their cosines and sines, for all layers
        # The masks that all layers share: one of bools, and another for those with a window.
        masks = max(1, len(set(map(bool, shape.windows)))) * job.batch_size * seq_len**2 * job.attention_mask
        workspace = WORKSPACE if job.gpu.capability >= (9, 0) else OLD_WORKSPACE
        self.other = 2 * workspace + ids + positions + masks
        # Where it is tied, the weight's gradient from the head waits for the embedding's, beside one that was there.
        self._waiting = self.vocab_gradients if shape.tied and job.keep_gradients else 0
        self._stream = N * shape.hidden * e
        # The head holds gradients until its backward. An accumulator's is made when the scratch is gone.
        head = job.head_plan
        beside = head.scratch_bytes - (self.vocab_gradients if head.accumulator_bytes else 0)
        self._head = self._stream + self.vocab_gradients + head.accumulator_bytes + max(0, beside) + head.cast_bytes
        # The embedding's kernel adds up the rows of each token in float32 first.
        embedding = self._stream + 4 * N * shape.hidden + self._waiting
        embedding += self.vocab_gradients if shape.tied or job.keep_gradients else 0  # not the first gradient there
        step = kind.temporary * self.all_gradients
        layers = shape.layers
        self._counts = _counts_before(shape.kind_of)
        back = _nearest(shape.kind_of[::-1])[::-1]
        self._ahead, self._behind = _nearest(shape.kind_of), [[shape.layers - 1 - n for n in each] for each in back]
        self._shares = [(share_away(k, layers), 1 - share_back(layers - 1 - k, layers)) for k in range(layers)]
        # Layers besides a policy's first and last in which the most may be held: of states, and of what is gathered.
        self._turns = (1, layers_to_leave(layers) - 1, layers - 2, layers - 1)
        gathered = max(ranks.embedding, ranks.reduction - embedding)
        self._runs_of: tuple[Groups, list[Run]] = (), []
        self._last = [
            self._phase("embedding", -1, self.all_gradients - ranks.to_come, 0, 0, embedding, 0.0, 1.0, gathered),
            self._phase("optimizer", -1, self.all_gradients, 0, 0, step, 0.0, 0.0, ranks.step),
        ]

    def peak(self, groups: Groups, states: int = 0, *, late: bool = False) -> Phase:
        """Return the phase that holds the most."""
        return max(self.phases(groups, states, late=late), key=lambda phase: phase.bytes)

    def peaks(self, groups: Groups, amounts: Sequence[int]) -> dict[bool, list[int]]:
        """Return the bytes of that phase for several amounts of offloaded states: by whether they come back late."""
        found = [(phase.bytes, phase.away, phase.away_late) for phase in self._phases(groups)]
        early = [max(held - int(n * away) for held, away, _ in found) for n in amounts]
        return {False: early, True: [max(held - int(n * late) for held, _, late in found) for n in amounts]}

    def on_host(self, groups: Groups) -> int:
        """Return the bytes that layers save in host memory."""
        return sum(run.on_host for run in self._runs(groups))

    def states_on_host(self, states: int) -> int:
        """Return the host memory that so many bytes of optimizer states take."""
        return states + (states // BLOCK_BYTES + 2) * PAGES

    def phases(self, groups: Groups, states: int = 0, *, late: bool = False) -> list[Phase]:
        """Return the phases that can hold the most: in a run of equal layers that is its first or its last.

        With ``states`` bytes of optimizer states offloaded, also the layers from which on they leave, and by which they
        are back; in between the bytes are a linear function of the layer. ``late`` ones come back after backward.
        """
        found = [*self._phases(groups)]
        if not states:  # as the search asks for every mixture
            return found
        away = [int(states * (phase.away_late if late else phase.away)) for phase in found]
        return [phase._replace(optimizer=phase.optimizer - n) for phase, n in zip(found, away, strict=True)]

    def _phases(self, groups: Groups) -> Iterator[Phase]:
        upto, leaving, kind_of = 0, 0, self.job.shape.kind_of
        for run in self._runs(groups):
            first, last = run.first, run.first + sum(run.counts) - 1
            every = run.costs[0].policy.every
            ends = (*self._ahead[first], *self._behind[last], *self._turns)  # the first and last of each kind
            if every > 1:  # and of the first group, the last whole one, and what is left
                whole = first + (last + 1 - first) // every * every
                marks = (first + every - 1, whole - every, whole - 1, whole)
                near = {min(max(first, at), last) for at in marks}
                ends += tuple(at for mark in near for at in (*self._ahead[mark], *self._behind[mark]))
            for layer in sorted({min(max(first, at), last) for at in ends}):
                cost = run.costs[kind_of[layer]]
                on_gpu, on_host = cost.places(moves=run.moves)
                follows = (layer - first) % every  # its input and those of as many before it are there, recomputed
                again = 0 if cost.policy.keep == "all" else cost.whole - on_gpu + follows * cost.saved
                saved = upto + self._run(cost.policy, first, layer + 1, moves=run.moves).on_gpu
                # On their way: the checkpoint of the layer before, fetched ahead; in forward its own as well.
                before = leaving if layer - first < every else run.costs[kind_of[layer - 1]].places(moves=run.moves)[1]
                away, not_back = self._shares[layer]
                forward, held = saved + on_host + before, saved + again + before
                forward += cost.saved if follows else 0
                gathered = self.ranks.forward[layer]
                yield self._phase("forward", layer, 0, forward, 0, cost.forward_bytes, away, away, gathered)
                done = self._gradients_from[layer + 1] + self.ranks.head_gradient
                transients, gathered = cost.backward_bytes + self._waiting, self.ranks.backward[layer]
                yield self._phase("backward", layer, done, held, 0, transients, not_back, 1.0, gathered)
            leaving = run.costs[kind_of[last]].places(moves=run.moves)[1]
            upto += run.on_gpu
        saved = upto + 2 * self._stream  # and the final norm's input and output
        yield self._phase("head", -1, 0, saved, self._head, 0, 1.0, 1.0, self.ranks.head)
        yield from self._last

    def _phase(self, name: str, layer: int, gradients: int, activations: int, head: int, *more: Any) -> Phase:
        """Return a phase; ``more`` are its temporaries, shares of offloaded states that are away, what is gathered."""
        if self.job.keep_gradients and name != "optimizer":
            gradients = self.ranks.accumulated
        return Phase(name, layer, self.weights, gradients, self.states, activations, head, self.other, *more)

    def _runs(self, groups: Groups) -> list[Run]:
        """Return the runs of layers with one policy, from the first layer on; those of the last call are at hand."""
        if groups is self._runs_of[0]:
            return self._runs_of[1]
        found, first = [], 0
        for policy, n, moves in runs_of(groups):
            found.append(self._run(policy, first, first + n, moves=moves))
            first += n
        if isinstance(groups, tuple):  # which nobody changes
            self._runs_of = groups, found
        return found

    def _run(self, policy: ActivationPolicy, first: int, stop: int, *, moves: bool) -> Run:
        counts = tuple(after - before for before, after in zip(self._counts[first], self._counts[stop], strict=True))
        return Run(self.layers.kinds(policy), counts, first, moves)

    def seconds(self, groups: Groups) -> float:
        """Return the seconds of a step, all optimizer states on the GPU.

        A copy to the host or back runs beside one layer's work: the longer of the two counts, and what the copy takes
        from the other's rate. An exchange with other GPUs runs beside a layer's work too, and slows its GEMMs.
        """
        seconds = self.fixed_seconds
        (out, wait_out), (home, wait_home) = map(self.ranks.seconds, (self.ranks.ahead, self.ranks.behind))
        for run in self._runs(groups):
            for cost, n in zip(run.costs, run.counts, strict=True):
                copy = cost.transfer * run.moves
                forward = cost.forward + SLOWS * min(out, cost.forward)
                backward = cost.backward + SLOWS * min(home, cost.backward)
                layer = max(forward, copy, out) + max(backward, copy, home) + wait_out + wait_home
                seconds += n * (layer + 2 * BESIDE * copy)
        return seconds

    @property
    def exchanged(self) -> Exchange:
        """Return what a GPU receives from the others in a step."""
        ranks, layers = self.ranks, self.job.shape.layers
        sums = zip(ranks.others, ranks.ahead, ranks.behind, strict=True)
        return Exchange(*(others + layers * (ahead + behind) for others, ahead, behind in sums))

    def travels(self, groups: Groups) -> int:
        """Return the bytes of optimizer states that leave within forward, and come back within backward.

        As many travel beside each layer: beside the one that has the least time left by its own checkpoint's copy.
        """
        layers = self.job.shape.layers
        costs = [(run.costs[kind], run.moves) for run in self._runs(groups) for kind, n in enumerate(run.counts) if n]
        out = min(one.forward - one.transfer * moves for one, moves in costs)
        back = min(one.backward - one.transfer * moves for one, moves in costs)
        seconds = min(out / share_out(0, layers), back / share_back(1, layers))
        return int(max(0.0, seconds) * ON_TIME * self.job.gpu.pcie)

    def on_the_way(self, states: int, *, late: bool = False) -> float:
        """Return the seconds that so many bytes of offloaded states add: no more than `travels`, or late."""
        return (BESIDE + (1 if late else BESIDE)) * states / self.job.gpu.pcie


def head_seconds(job: Job) -> float:
    """Return the seconds of the output layer and its loss, forward and backward."""
    plan = job.head_plan
    gemms = 4 if plan.schedule == "blocks" or plan.gradient == "recompute" else 3
    gemms -= job.adapters is not None  # a frozen weight has no gradient
    flop = 2 * gemms * job.tokens * job.shape.vocab_params
    passes = 0 if plan.backend == "exp" else 3 * 4 * job.tokens * job.shape.vocab  # float32 logits, read and written
    return flop / (job.gemm_rate * HEAD_SHARE) + passes / job.gpu.bandwidth


def optimizer_seconds(job: Job, trained: int) -> float:
    """Return the seconds of the optimizer's step over so many bytes of parameters."""
    return OPTIMIZERS[job.optimizer].traffic * trained / job.gpu.bandwidth


def embedding_seconds(job: Job) -> float:
    """Return the seconds of the embedding's gradient: a table of zeros, and where tied its sum with the head's."""
    if job.adapters is not None:
        return 0.0
    passes = 4 if job.shape.tied else 1
    return passes * job.shape.vocab_params * job.element / job.gpu.bandwidth

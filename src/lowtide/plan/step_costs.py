"""What one training step holds in memory, by phase, and how long it takes.

Each is a sum of arrays with an entry for each layer: what a policy saves, holds and takes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.optimizer_blocks import BLOCK_BYTES, share_away, share_back, share_out
from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import PAGES, LayerCosts
from lowtide.plan.sharding import SLOWS, Exchange, ranks_of

Groups = Sequence[tuple[ActivationPolicy, int]]  # runs of equal layers, from the first layer on

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
    "gradients": "gradients",  # that exist by then
    "optimizer": "optimizer states",
    "activations": "activations",  # that layers save for backward, and what of one was recomputed
    "head": "output layer and loss",  # its scratch, and the gradients that it holds
    "transients": "temporaries",  # within the phase alone
    "other": "workspaces, positions",
    "gathered": "gathered, to exchange",  # whole parameters, and buffers, where several GPUs share them
}


class Phase(NamedTuple):
    """A moment of a step, and the bytes that it holds by kind: `PARTS`."""

    name: str  # "forward", "head", "backward", "embedding" or "optimizer"
    layer: int  # that is at work; -1: none
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    transients: int
    other: int
    gathered: int

    @property
    def bytes(self) -> int:
        """Return the sum."""
        return sum(self[2:])

    def __str__(self) -> str:
        return self.name if self.layer < 0 else f"{self.name} of layer {self.layer}"


def runs_of(groups: Groups) -> list[tuple[ActivationPolicy, int, bool]]:
    """Return the runs with whether what they save goes to the host: not that of the last offloaded layers."""
    to_move = max(0, sum(policy.saves(n) for policy, n in groups if policy.offload) - ON_DEVICE)
    found = []
    for policy, n in groups:
        moved = min(n, to_move * policy.every) if policy.offload else 0
        to_move -= policy.saves(moved)
        found += [(policy, m, moves) for m, moves in ((moved, True), (n - moved, False)) if m]
    return found


class _Stack(NamedTuple):
    """Arrays over a model's layers, under a mixture of policies."""

    saved: Any  # bytes on the GPU for backward
    host: Any  # bytes on the host
    forward: Any  # bytes of activations at the end of a layer's forward, those of its copies in flight among them
    backward: Any  # the same when its backward runs, with what was recomputed
    forward_bytes: Any  # temporaries
    backward_bytes: Any
    seconds: Any
    seconds_back: Any
    transfer: Any


class StepCosts:
    """The bytes and the seconds of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.ranks = ranks = ranks_of(job)
        self.job = job = ranks.job
        self.layers = LayerCosts(job)
        self._tables: dict[ActivationPolicy, dict[str, Any]] = {}
        self._kinds = np.array(job.shape.kind_of)
        self.weights, self.states, self.all_gradients = ranks.weights, ranks.states, ranks.gradients
        others = ranks.seconds(ranks.others)
        self.fixed_seconds = head_seconds(job) + optimizer_seconds(job, ranks.stepped) + embedding_seconds(job)
        self.fixed_seconds += others[1] + SLOWS * others[0] + ranks.waits
        self._stream = job.tokens * job.shape.hidden * job.element
        self._names = [(name, k) for name in ("forward", "backward") for k in range(job.shape.layers)]
        self._names += [("head", -1), ("embedding", -1), ("optimizer", -1)]
        self._fixed = self._without_layers()
        self._fixed_bytes = self._fixed.sum(0)
        L = job.shape.layers
        out = np.array([share_away(k, L) for k in range(L)])
        back = 1 - np.array([share_back(L - 1 - k, L) for k in range(L)])
        # The share of offloaded optimizer states that is on the host in each phase, where they come back late or not.
        self._away = {late: np.concatenate((out, np.maximum(back, late), [1, late, 0])) for late in (False, True)}

    def _without_layers(self) -> Any:
        """Return the bytes of each part (a row) in each phase (a column) that no policy changes."""
        job, ranks = self.job, self.ranks
        shape, e, L, seq_len = job.shape, job.element, job.shape.layers, job.seq_len
        vocab = shape.vocab_params * e if job.adapters is None else 0
        # Where it is tied, the weight's gradient from the head waits for the embedding's, beside one that was there.
        waiting = vocab if shape.tied and job.keep_gradients else 0
        # The head holds gradients until its backward. An accumulator's is made when the scratch is gone.
        head = job.head_plan
        beside = max(0, head.scratch_bytes - (vocab if head.accumulator_bytes else 0))
        # The embedding's kernel adds up the rows of each token in float32 first.
        embedding = self._stream + 4 * job.tokens * shape.hidden + waiting
        embedding += vocab if shape.tied or job.keep_gradients else 0  # not the first gradient there
        positions = seq_len * (8 + 2 * shape.head_dim * e)  # with their cosines and sines, for all layers
        # The masks that all layers share: one of bools, and another for those with a window.
        masks = max(1, len(set(map(bool, shape.windows)))) * job.batch_size * seq_len**2 * job.attention_mask
        workspace = WORKSPACE if job.gpu.capability >= (9, 0) else OLD_WORKSPACE
        self.other = 2 * workspace + 2 * 8 * job.tokens + positions + masks  # token ids and labels too
        zeros = [0] * L
        after = np.cumsum([0, *ranks.layer_gradients[::-1]])[:-1][::-1] + ranks.head_gradient
        gradients = [*zeros, *after, 0, self.all_gradients - ranks.to_come, self.all_gradients]
        if job.keep_gradients:
            gradients = [ranks.accumulated] * (2 * L + 2) + [self.all_gradients]
        temporary = OPTIMIZERS[job.optimizer].temporary * self.all_gradients
        last = [ranks.head, max(ranks.embedding, ranks.reduction - embedding), ranks.step]
        held = self._stream + vocab + head.accumulator_bytes + beside + head.cast_bytes
        rows = {
            "weights": [self.weights] * (2 * L + 3),
            "gradients": gradients,
            "optimizer": [self.states] * (2 * L + 3),
            "activations": [*zeros, *zeros, 2 * self._stream, 0, 0],  # the final norm's input and output
            "head": [*zeros, *zeros, held, 0, 0],
            "transients": [*zeros, *[waiting] * L, 0, embedding, temporary],
            "other": [self.other] * (2 * L + 3),
            "gathered": [*ranks.forward, *ranks.backward, *last],
        }
        return np.array([rows[name] for name in PARTS], dtype=np.int64)

    def _table(self, policy: ActivationPolicy) -> dict[str, Any]:
        """Return a policy's costs as arrays over the layers."""
        if policy not in self._tables:
            names = ("saved", "whole", "forward_bytes", "backward_bytes", "forward", "backward", "transfer")
            kinds = self.layers.kinds(policy)
            self._tables[policy] = {n: np.array([getattr(one, n) for one in kinds])[self._kinds] for n in names}
        return self._tables[policy]

    def _stack(self, groups: Groups) -> _Stack:
        """Return what the layers take under a mixture."""
        parts, first = [], 0
        for policy, n, moves in runs_of(groups):
            at = slice(first, first + n)
            t = {name: values[at] for name, values in self._table(policy).items()}
            follows = np.arange(n) % policy.every  # inputs of so many before it are there, recomputed
            on_host = t["saved"] + PAGES if moves else 0 * t["saved"]
            again = 0 * t["saved"]
            if policy.keep != "all":
                again = t["whole"] - (0 if moves else t["saved"]) + follows * t["saved"]
            begins = np.arange(n) - follows + first - 1  # the layer before its group, whose copy is fetched ahead
            kept = 0 * t["saved"] if moves else t["saved"] * (follows == 0)
            parts.append(
                (kept, on_host, on_host * (follows == 0), again, t["saved"] * (follows > 0), begins,
                 t["forward_bytes"], t["backward_bytes"], t["forward"], t["backward"], t["transfer"] * moves)
            )  # fmt: skip
            first += n
        kept, on_host, host, again, own, begins, *rest = (np.concatenate(each) for each in zip(*parts, strict=True))
        upto, before = np.cumsum(kept), np.where(begins >= 0, on_host[begins], 0)
        return _Stack(kept, host, upto + on_host + before + own, upto + again + before, *rest)

    def _bytes(self, stack: _Stack) -> Any:
        """Return the bytes of each phase, all optimizer states on the GPU."""
        found = self._fixed_bytes.copy()
        L = self.job.shape.layers
        found[:L] += stack.forward + stack.forward_bytes
        found[L : 2 * L] += stack.backward + stack.backward_bytes
        found[2 * L] += stack.saved.sum()
        return found

    def peaks(self, groups: Groups, amounts: Sequence[int] = (0,), *, late: bool = False) -> list[int]:
        """Return the most that a step holds, for several amounts of offloaded optimizer states."""
        held = self._bytes(self._stack(groups))
        return [int((held - (n * self._away[late]).astype(np.int64)).max()) for n in amounts]

    def phases(self, groups: Groups, states: int = 0, *, late: bool = False) -> list[Phase]:
        """Return all phases, with so many bytes of optimizer states offloaded; ``late`` ones return after backward."""
        stack, parts, L = self._stack(groups), self._fixed.copy(), self.job.shape.layers
        row = {name: parts[i] for i, name in enumerate(PARTS)}
        row["activations"][: 2 * L] += np.concatenate((stack.forward, stack.backward))
        row["activations"][2 * L] += stack.saved.sum()
        row["transients"][: 2 * L] += np.concatenate((stack.forward_bytes, stack.backward_bytes))
        row["optimizer"] -= (states * self._away[late]).astype(np.int64)
        return [Phase(*name, *map(int, column)) for name, column in zip(self._names, parts.T, strict=True)]

    def peak(self, groups: Groups, states: int = 0, *, late: bool = False) -> Phase:
        """Return the phase that holds the most."""
        return max(self.phases(groups, states, late=late), key=lambda phase: phase.bytes)

    def on_host(self, groups: Groups) -> int:
        """Return the bytes that layers save in host memory."""
        return int(self._stack(groups).host.sum())

    def states_on_host(self, states: int) -> int:
        """Return the host memory that so many bytes of optimizer states take."""
        return states + (states // BLOCK_BYTES + 2) * PAGES

    def seconds(self, groups: Groups) -> float:
        """Return the seconds of a step, all optimizer states on the GPU.

        A copy to the host or back runs beside one layer's work: the longer of the two counts, and what the copy takes
        from the other's rate. An exchange with other GPUs runs beside a layer's work too, and slows its GEMMs.
        """
        stack, total = self._stack(groups), self.fixed_seconds
        exchanges = self.ranks.ahead, self.ranks.behind
        for work, exchange in zip((stack.seconds, stack.seconds_back), exchanges, strict=True):
            runs, waits = self.ranks.seconds(exchange)
            beside = np.maximum(work + SLOWS * np.minimum(runs, work), np.maximum(stack.transfer, runs))
            total += float(beside.sum()) + waits * len(beside)
        return total + 2 * BESIDE * float(stack.transfer.sum())

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
        stack, layers = self._stack(groups), self.job.shape.layers
        out, back = ((work - stack.transfer).min() for work in (stack.seconds, stack.seconds_back))
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

"""What one training step holds in memory, by phase, and how long it takes.

Each is a sum of arrays with an entry for each layer: what a policy saves, holds and takes there. That follows from
`Reading`s: a layer's own code ran, on the meta device, at the planned size and as `lowtide.patch` has patched it, with
attention that stores no scores. Bytes are exact for what a layer saves; seconds are those of its FLOP and traffic at
the GPU's rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.optimizer import share_away, share_back, share_out
from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.plan.config import BYTES, SCALES
from lowtide.plan.job import Job
from lowtide.plan.meter import Work
from lowtide.plan.model import Reading
from lowtide.plan.sharding import ranks_of

Groups = Sequence[tuple[ActivationPolicy, int]]  # runs of equal layers, from the first layer on

MIB = 2**20
# What cuBLAS takes in each of the two threads that multiply, forward's and backward's: from Hopper on, and before.
WORKSPACE, OLD_WORKSPACE = 32 * MIB, 8 * MIB + MIB // 8
HEAD_SHARE = 0.95  # of the GEMMs' rate, over its three GEMMs: benchmarks/results, lowtide bench head
# Share of a transfer's time that it takes from the GEMMs it runs beside: 6 of 139 ms, and 3 of 68, in
# benchmarks/results, 2026-11-21-policy-32768-h100; and an exchange's with other GPUs, in steps of two H200.
BESIDE, SLOWS = 0.05, 0.8
ON_TIME = 0.9  # share of the layers' time in which optimizer states are to have travelled
PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
BACKWARD_ATTENTION = 2.5  # GEMMs of attention's backward for each of its forward's
HALF_RATE = 0.3e6  # numbers of a weight at which a GEMM of many tokens runs at half the rate of large ones
THIN = 0.9  # share of the copy's bandwidth that operators between GEMMs reach
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


class LayerCost(NamedTuple):
    """What one layer with a policy takes: numbers; or all layers: arrays of them."""

    saved: Any  # bytes for backward, wherever they are; with ``every`` only the first layer of a group has them
    whole: Any  # bytes that it has for backward once it is recomputed
    forward_bytes: Any  # the most that lives within its forward alone
    backward_bytes: Any  # the same of its backward, with its weights' gradients
    forward: Any  # seconds
    backward: Any  # seconds, with the recompute
    transfer: Any  # seconds to the host, and as many back, the mean of a group; 0: not offloaded


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


class Step(NamedTuple):
    """A step under a mixture of policies, all optimizer states on the GPU."""

    parts: dict[str, Any]  # bytes of each of `PARTS`, in each phase
    held: Any  # their sum
    host: int  # bytes that layers save in host memory
    seconds: float
    travels: int  # bytes of optimizer states that leave within forward, and come back within backward


def layer_costs(job: Job, policy: ActivationPolicy) -> tuple[LayerCost, ...]:
    """Return what a layer of each kind takes with a policy."""
    readings = job.readings(policy.mlp_level)
    return tuple(_cost(job, policy, one, _windowed(job, kind)) for kind, one in enumerate(readings))


def _windowed(job: Job, kind: int) -> float:
    """Return the share of causal attention's pairs that the windows of a kind's layers leave, the mean over them."""
    T, model = job.seq_len, job.model
    widths = [min(w or T, T) for w, one in zip(model.windows, model.kind_of, strict=True) if one == kind]
    return sum((w * T - w * w / 2) / (T * T / 2) for w in widths) / len(widths)


def _cost(job: Job, policy: ActivationPolicy, one: Reading, windowed: float) -> LayerCost:
    """Return what a layer with a policy takes, from its reading."""
    flop = one.forward.attention * windowed
    ahead, behind = job.gpu.attention(job.narrow, job.model.head_dim, job.seq_len)
    forward = _seconds(job, one, one.forward) + flop / ahead
    backward = _seconds(job, one, one.backward) + BACKWARD_ATTENTION * flop / behind
    saved = whole = one.saved
    most, most_back = one.forward_peak, one.backward_peak
    if policy.keep != "all":
        saved = one.input + one.attended * (policy.keep == "attention")
        whole, most, most_back = one.with_input, one.checkpointed_peak, max(one.backward_peak, one.forward_peak)
        backward += _seconds(job, one, one.recompute) + flop / ahead * (policy.keep == "input")
    # The largest weight that one GEMM dequantises, with its scales in float32.
    dense = int(max(job.model.linears) * (job.narrow + SCALES)) if job.packed_params else 0
    return LayerCost(
        saved=int(saved),
        whole=int(whole),
        forward_bytes=int(most) + dense,
        backward_bytes=int(most_back) + dense,
        forward=forward,
        backward=backward + (1 - 1 / policy.every) * forward,  # layers of a group run once more
        transfer=int(saved) / policy.every / job.gpu.pcie if policy.offload else 0.0,
    )


def _seconds(job: Job, one: Reading, work: Work) -> float:
    """Return the seconds of GEMMs, small weights slower, and of what is between them; not of attention."""
    gemms = (work.flop + 2 * HALF_RATE * work.rows) / job.gpu.gemm(job.narrow)
    # Each pass over the weights dequantises them: they are read, and written.
    passes, packed = work.flop / max(1.0, one.forward.flop), job.packed_params / job.layers
    dequantised = passes * packed * (BYTES[job.quantised.four_bit] + job.narrow)
    return gemms + (dequantised + work.thin / THIN) / job.gpu.bandwidth


class StepCosts:
    """The bytes and the seconds of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.ranks = ranks = ranks_of(job)
        self.job = job = ranks.job
        self.of_layers = cache(self._of_layers)
        self.weights, self.states, self.all_gradients = ranks.weights, ranks.states, ranks.gradients
        self.fixed_seconds = _seconds_without_layers(job, ranks.stepped)
        self.fixed_seconds += (ranks.awaited + SLOWS * ranks.beside) / job.link_rate
        L = job.layers
        self._fixed = self._without_layers()
        self._names = [(name, k) for name in ("forward", "backward") for k in range(L)]
        self._names += [("head", -1), ("embedding", -1), ("optimizer", -1)]
        out = np.array([share_away(k, L) for k in range(L)])
        back = 1 - np.array([share_back(L - 1 - k, L) for k in range(L)])
        # The share of offloaded optimizer states that is on the host in each phase, where they come back late or not.
        self._away = {late: np.r_[out, np.maximum(back, late), 1, late, 0] for late in (False, True)}

    def _without_layers(self) -> dict[str, Any]:
        """Return the bytes of each part in each phase that no policy changes."""
        job, ranks, model = self.job, self.ranks, self.job.model
        e, L, seq_len = job.dtype.itemsize, job.layers, job.seq_len
        stream = job.tokens * model.hidden * e
        vocab = model.vocab_params * e * (job.adapters is None)
        # Where it is tied, the weight's gradient from the head waits for the embedding's, beside one that was there.
        waiting = vocab if model.tied and job.keep_gradients else 0
        # The head holds gradients until its backward. An accumulator's is made when the scratch is gone.
        head = job.head_plan
        beside = max(0, head.scratch_bytes - (vocab if head.accumulator_bytes else 0))
        # The embedding's kernel adds up the rows of each token in float32 first.
        embedding = stream + 4 * job.tokens * model.hidden + waiting
        embedding += vocab if model.tied or job.keep_gradients else 0  # not the first gradient there
        positions = seq_len * (8 + 2 * model.head_dim * e)  # with their cosines and sines, for all layers
        # The masks that all layers share: one of bools, and another for those with a window.
        masks = len(set(map(bool, model.windows))) * job.batch_size * seq_len**2 * job.attention_mask
        workspace = WORKSPACE if job.gpu.capability >= (9, 0) else OLD_WORKSPACE
        self.other = 2 * workspace + 2 * 8 * job.tokens + positions + masks  # token ids and labels too
        after = np.cumsum([0, *ranks.layer_gradients[:0:-1]])[::-1] + ranks.head_gradient
        temporary = OPTIMIZERS[job.optimizer].temporary * self.all_gradients

        def row(forward: Any = 0, backward: Any = 0, head: int = 0, embedding: int = 0, optimizer: int = 0) -> Any:
            layers = np.zeros(L, np.int64)
            return np.r_[layers + forward, layers + backward, head, embedding, optimizer]

        gradients: Any = [0, after, 0, self.all_gradients - ranks.to_come, self.all_gradients]
        if job.keep_gradients:
            gradients = [*[ranks.accumulated] * 4, self.all_gradients]
        return {
            "weights": row(*[self.weights] * 5),
            "gradients": row(*gradients),
            "optimizer": row(*[self.states] * 5),
            "activations": row(head=2 * stream),  # the final norm's input and output
            "head": row(head=stream + vocab + head.accumulator_bytes + beside + head.cast_bytes),
            "transients": row(backward=waiting, embedding=embedding, optimizer=temporary),
            "other": row(*[self.other] * 5),
            "gathered": row(ranks.forward, ranks.backward, ranks.head,
                            max(ranks.embedding, ranks.reduction - embedding), ranks.step),
        }  # fmt: skip

    def _of_layers(self, policy: ActivationPolicy) -> LayerCost:
        """Return what each layer takes with a policy, as arrays."""
        kinds = layer_costs(self.job, policy)
        rows = (kinds[kind] for kind in self.job.model.kind_of)
        return LayerCost(*map(np.array, zip(*rows, strict=True)))

    def step(self, groups: Groups) -> Step:
        """Return the step under a mixture.

        A copy to the host or back runs beside one layer's work: the longer of the two counts, and what the copy takes
        from the other's rate. An exchange with other GPUs runs beside a layer's work too, and slows its GEMMs.
        """
        L, ends = self.job.layers, np.cumsum([n for _, n in groups])
        rows = ([x[end - n : end] for x in self.of_layers(one)] for (one, n), end in zip(groups, ends, strict=True))
        each = LayerCost(*map(np.concatenate, zip(*rows, strict=True)))
        follows = np.concatenate([np.arange(n) % policy.every for policy, n in groups])  # inputs recomputed before it
        saved, first, offloads = each.saved, follows == 0, each.transfer > 0
        # What is saved goes to the host, but for the last that would: so many begin with a layer, or with its group.
        begin = np.cumsum((offloads & first)[::-1])[::-1] + ~first
        moves = offloads & (begin > ON_DEVICE)
        again = each.whole - ~moves * saved + follows * saved  # is there besides in its backward
        copy = moves * (saved + PAGES)  # on the GPU as long as it travels
        upto = np.cumsum(~moves * saved * first)
        before = np.arange(L) - follows - 1  # the layer before its group, whose copy is fetched ahead
        ahead = np.where(before >= 0, copy[before], 0)
        parts = dict(self._fixed)
        parts["activations"] = (
            parts["activations"] + np.r_[upto + copy + ahead + saved * ~first, upto + again + ahead, upto[-1], 0, 0]
        )
        parts["transients"] = parts["transients"] + np.r_[each.forward_bytes, each.backward_bytes, 0, 0, 0]
        seconds, left, transfer = self.fixed_seconds, [], moves * each.transfer
        for work, exchange in ((each.forward, self.ranks.ahead), (each.backward, self.ranks.behind)):
            comes = exchange / self.job.link_rate
            beside = np.maximum(work + SLOWS * np.minimum(comes, work), np.maximum(transfer, comes))
            seconds += float(beside.sum())
            left.append(float((work - transfer).min()))  # beside the layer that has the least left by its own copy
        travels = max(0.0, min(left[0] / share_out(0, L), left[1] / share_back(1, L))) * ON_TIME * self.job.gpu.pcie
        seconds += 2 * BESIDE * float(transfer.sum())
        return Step(parts, sum(parts.values()), int((copy * first).sum()), seconds, int(travels))

    def peak(self, step: Step, states: int = 0, *, late: bool = False) -> int:
        """Return the most that a step holds, with so many bytes of optimizer states offloaded."""
        return int((step.held - (states * self._away[late]).astype(np.int64)).max())

    def phases(self, groups: Groups, states: int = 0, *, late: bool = False) -> list[Phase]:
        """Return all phases, with so many bytes of optimizer states offloaded; ``late`` ones return after backward."""
        parts = self.step(groups).parts
        parts["optimizer"] = parts["optimizer"] - (states * self._away[late]).astype(np.int64)
        return [Phase(*name, *map(int, held)) for name, *held in zip(self._names, *parts.values(), strict=True)]


def _seconds_without_layers(job: Job, stepped: int) -> float:
    """Return the seconds of the output layer and its loss, of the embedding's gradient and of the optimizer's step.

    The embedding's is a table of zeros, and where tied its sum with the head's; the optimizer reads and writes so many
    bytes of parameters.
    """
    plan, model, full = job.head_plan, job.model, job.adapters is None  # a frozen weight has no gradient
    gemms = (4 if plan.schedule == "blocks" or plan.gradient == "recompute" else 3) - (not full)
    flop = 2 * gemms * job.tokens * model.vocab_params
    read: float = 0 if plan.backend == "exp" else 3 * 4 * job.tokens * model.vocab  # float32 logits, read and written
    read += (4 if model.tied else 1) * model.vocab_params * job.dtype.itemsize * full
    read += OPTIMIZERS[job.optimizer].traffic * stepped
    return float(flop / (job.gpu.gemm(job.narrow) * HEAD_SHARE) + read / job.gpu.bandwidth)

"""What one layer of each kind stores and how long it takes, by policy: bytes, floating-point operations, seconds.

All of it follows from `Reading`s: the layer's own code ran, on the meta device, at the planned size and as
`lowtide.patch` has patched it, with attention that stores no scores. Bytes are exact for what a layer saves; seconds
are those of its FLOP and traffic at the GPU's rates. A compiled layer is planned as in eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.gpus import HALF_RATE, attention_reaches
from lowtide.plan.job import Job
from lowtide.plan.readings import LayerRun, Reading, Work, mixed
from lowtide.plan.shapes import refused

PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
BACKWARD_ATTENTION = 2.5  # GEMMs of attention's backward for each of its forward's
THIN = 0.9  # share of the copy's bandwidth that operators between GEMMs reach
MOST_OPERATORS = 600  # of layers with a loop over tokens: with more they are read with three shorter sequences
STEP = 256  # tokens: those are whole multiples, as chunks of linear attention and state spaces divide them


@dataclass(frozen=True)
class LayerCost:
    """What one layer with a policy takes."""

    policy: ActivationPolicy
    saved: int  # bytes for backward, wherever they are; with ``every`` only the first layer of a group has them
    whole: int  # bytes that it has for backward once it is recomputed
    forward_bytes: int  # the most that lives within its forward alone
    backward_bytes: int  # the same of its backward, with its weights' gradients
    forward: float  # seconds
    backward: float  # seconds, with the recompute
    transfer: float  # seconds to the host, and as many back, the mean of a group; 0: not offloaded
    flop: float  # operations of the recompute

    def places(self, *, moves: bool) -> tuple[int, int]:
        """Return the bytes that it saves on the GPU and on the host, where what it saves ``moves`` there or not."""
        return (0, self.saved + PAGES) if moves else (self.saved, 0)


class LayerCosts(dict[ActivationPolicy, LayerCost]):
    """The cost of a job's layer by policy, the mean over its layers; each computed when it is first read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kinds: dict[ActivationPolicy, tuple[LayerCost, ...]] = {}

    def kinds(self, policy: ActivationPolicy) -> tuple[LayerCost, ...]:
        """Return the cost of a layer of each kind."""
        if policy not in self._kinds:
            readings = _readings(self._job, _run(self._job, policy))
            self._kinds[policy] = tuple(_cost(self._job, policy, kind, one) for kind, one in enumerate(readings))
        return self._kinds[policy]

    def __missing__(self, policy: ActivationPolicy) -> LayerCost:
        kinds = self.kinds(policy)
        cost = self[policy] = kinds[0] if len(kinds) == 1 else _mean([kinds[i] for i in self._job.shape.kind_of])
        return cost


def flop_of_layers(job: Job) -> tuple[float, float]:
    """Return the FLOP of all layers' GEMMs, and of their attention, in forward."""
    works = [reading.forward for reading in _readings(job, _run(job, ActivationPolicy()))]
    attention = [work.attention * _windowed(job, kind) for kind, work in enumerate(works)]
    return sum(works[kind].flop for kind in job.shape.kind_of), sum(attention[kind] for kind in job.shape.kind_of)


def _mean(costs: list[LayerCost]) -> LayerCost:
    def mean(name: str) -> float:
        return float(sum(getattr(cost, name) for cost in costs) / len(costs))

    nbytes: Any = {name: round(mean(name)) for name in ("saved", "whole", "forward_bytes", "backward_bytes")}
    numbers: Any = {name: mean(name) for name in ("forward", "backward", "transfer", "flop")}
    return LayerCost(costs[0].policy, **nbytes, **numbers)


def _run(job: Job, policy: ActivationPolicy) -> LayerRun:
    """Return how a job's layers run under a policy."""
    return LayerRun(
        job.shape.config,
        job.dtype,
        job.fused_mlp,
        job.adapters,
        job.batch_size,
        job.seq_len,
        policy.mlp_level,
        policy.mlp_tile_tokens,
        frozen=job.adapters is not None,
        keep_gradients=job.keep_gradients,
        autocast=job.autocast or (job.adapters is not None and job.narrow == 2),
        masked=job.attention_mask,
    )


def _readings(job: Job, run: LayerRun) -> tuple[Reading, ...]:
    """Return the readings of each kind of layer at the job's size.

    A layer with a loop over tokens would take minutes at that size. Its figures are a + b N + c N T, with N tokens in
    sequences of T: the coefficients follow from three short sequences.
    """
    from lowtide.plan.meta_model import readings_of  # it imports Triton, as PyTorch's table of FLOP does

    def read(tokens: int, run: LayerRun = run) -> tuple[Reading, ...]:
        with refused(job.shape.model_type):
            return readings_of(run._replace(batch_size=1, seq_len=tokens))

    with refused(job.shape.model_type):
        T = job.seq_len
        if T <= 3 * STEP:
            return readings_of(run)
        few, more = (sum(one.forward.operators for one in read(n * STEP)) for n in (1, 2))
    unit = STEP if more == few else max(1, int(((MOST_OPERATORS - few) / (more - few) + 1) / 3)) * STEP
    if more == few or 3 * unit >= T:
        with refused(job.shape.model_type):
            return readings_of(run)
    points = (unit, 2 * unit, 3 * unit)

    def extrapolated(run: LayerRun) -> list[Reading]:
        kinds = zip(*(read(n, run) for n in points), strict=True)
        return [_extrapolated(list(short), points, job) for short in kinds]

    # In short sequences the gradients of weights are the peak of backward; in long ones those of activations, so that
    # it is at least what it would be with frozen weights, which save less.
    pairs = zip(extrapolated(run), extrapolated(run._replace(frozen=True)), strict=True)
    least = [(one, bare.backward_peak + bare.saved - one.saved) for one, bare in pairs]
    return tuple(one._replace(backward_peak=max(one.backward_peak, peak)) for one, peak in least)


def _extrapolated(short: list[Reading], points: tuple[int, ...], job: Job) -> Reading:
    """Return a reading at the job's size from three of one short sequence each.

    A peak is the largest of several sums: a line through the longer two extrapolates it.
    """
    T, B = job.seq_len, job.batch_size

    def shares(points: tuple[int, ...]) -> list[float]:
        return [(1 - B) * _lagrange(0, at, points) + B * _lagrange(T, at, points) for at in points]

    one, line = mixed(short, shares(points)), mixed(short[1:], shares(points[1:]))
    peaks = ("forward_peak", "checkpointed_peak", "backward_peak")
    return one._replace(**{name: getattr(line, name) for name in peaks})


def _lagrange(T: int, at: int, points: tuple[int, ...]) -> float:
    """Return the share that one of several points has in the polynomial through them."""
    share = 1.0
    for other in points:
        share *= (T - other) / (at - other) if other != at else 1.0
    return share


def _windowed(job: Job, kind: int) -> float:
    """Return the share of causal attention's pairs that the windows of a kind's layers leave, the mean over them."""
    T, pairs = job.seq_len, 0.0
    windows = [w for w, one in zip(job.shape.windows, job.shape.kind_of, strict=True) if one == kind]
    for window in windows:
        w = min(window or T, T)
        pairs += (w * T - w * w / 2) / (T * T / 2)
    return pairs / len(windows) if windows else 1.0


def _cost(job: Job, policy: ActivationPolicy, kind: int, one: Reading) -> LayerCost:
    """Return what a layer with a policy takes, from its reading."""
    recomputes, dense, windowed = policy.keep != "all", job.dequantised_bytes, _windowed(job, kind)
    checkpoint = one.input + (one.attended if policy.keep == "attention" else 0)
    saved = int(checkpoint if recomputes else one.saved)
    attention, attention_back = _attention_seconds(job, one.forward.attention * windowed)
    forward = _seconds(job, one, one.forward) + attention
    backward = _seconds(job, one, one.backward) + attention_back
    flop = 0.0
    if policy.mlp_level == 1:  # the MLP itself recomputes
        gradients = 1 if job.adapters is not None else 2
        flop = max(0.0, one.backward.flop - gradients * one.forward.flop)
    if recomputes:
        backward += _seconds(job, one, one.recompute) + (attention if policy.keep == "input" else 0.0)
        flop += one.recompute.flop + (one.recompute.attention * windowed if policy.keep == "input" else 0.0)
    more = 1 - 1 / policy.every  # layers of a group that run once more
    backward += more * forward
    flop += more * (one.forward.flop + one.forward.attention * windowed)
    return LayerCost(
        policy,
        saved=saved,
        whole=int(one.with_input if recomputes else one.saved),
        forward_bytes=int(one.checkpointed_peak if recomputes else one.forward_peak) + dense,
        backward_bytes=int(max(one.backward_peak, one.forward_peak) if recomputes else one.backward_peak) + dense,
        forward=forward,
        backward=backward,
        transfer=saved / policy.every / job.gpu.pcie if policy.offload else 0.0,
        flop=flop,
    )


def _seconds(job: Job, one: Reading, work: Work) -> float:
    """Return the seconds of GEMMs, small weights slower, and of what is between them; not of attention."""
    gemms = (work.flop + 2 * HALF_RATE * work.rows) / job.gemm_rate
    passes = work.flop / max(1.0, one.forward.flop)  # over the weights, which each dequantises
    gemms += passes * job.shape.packed_params / job.shape.layers * job.dequantise_seconds
    return gemms + work.thin / (job.gpu.bandwidth * THIN)


def _attention_seconds(job: Job, flop: float) -> tuple[float, float]:
    """Return the seconds of fused attention in forward and backward."""
    gpu = job.gpu
    reached = gpu.wide_head if job.shape.head_dim >= 96 else 1.0
    reached *= 1.0 if job.narrow == 2 else gpu.gemm32 / gpu.gemm
    reached *= attention_reaches(job.seq_len, job.shape.widest_window)
    return flop / (gpu.attention * reached), BACKWARD_ATTENTION * flop / (gpu.attention_backward * reached)

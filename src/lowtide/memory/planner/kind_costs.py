"""The costs of each kind of layer: by the formulas of `layer_costs`, or read from the layer itself.

What is read is exact for what a layer saves: the layer's own code ran, on the meta device, at the planned size. Its
time is its FLOP and traffic at the rates of the formulas.
"""

from __future__ import annotations

from lowtide.memory.planner.gpus import HALF_RATE, attention_reaches
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import (
    BACKWARD_ATTENTION,
    HOST_ATTENTION,
    HOST_BACKWARD,
    HOST_FORWARD,
    HOST_HEAD_NORMS,
    HOST_RECOMPUTE,
    THIN,
    LayerCost,
    attention_flop,
    gemm_sizes,
    host_of_a_unit,
    layer_cost,
    slower,
)
from lowtide.memory.planner.readings import Reading, Way, Work, mixed
from lowtide.memory.planner.traced import refused
from lowtide.memory.policy import ActivationPolicy

LAYER_OPERATORS = 13  # that a patched Llama's layer launches in forward, to which `HOST_FORWARD` belongs
LAYER_OURS = 5  # of lowtide's among these: a further one takes the host as long as a norm on heads
LAUNCH = 10e-6  # seconds of the host for any other operator beyond these, an estimate
MOST_OPERATORS = 2000  # beyond these, layers have a loop over tokens, and are read with three shorter sequences
STEP = 256  # tokens: those are whole multiples, as chunks of linear attention and state spaces divide them


class LayerCosts(dict[ActivationPolicy, LayerCost]):
    """The cost of a job's layer by policy, the mean over its layers; each computed when it is first read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._each: dict[ActivationPolicy, tuple[LayerCost, ...]] = {}

    def each(self, policy: ActivationPolicy) -> tuple[LayerCost, ...]:
        """Return the cost of a layer of each kind."""
        if policy not in self._each:
            self._each[policy] = _costs(self._job, policy)
        return self._each[policy]

    def __missing__(self, policy: ActivationPolicy) -> LayerCost:
        each, kind_of = self.each(policy), self._job.shape.kind_of
        cost = self[policy] = each[0] if len(each) == 1 else _mean([each[kind] for kind in kind_of])
        return cost


def flop_of_layers(job: Job) -> tuple[float, float]:
    """Return the FLOP of all layers' GEMMs, and of their attention, in forward."""
    shape = job.shape
    if shape.traced is None:
        return shape.layers * 2.0 * job.tokens * sum(map(sum, gemm_sizes(job))), shape.layers * attention_flop(job)
    each = _readings(job, Way())
    windowed = [_windowed(job, kind) for kind in range(len(each))]
    every = [(each[kind].forward, windowed[kind]) for kind in shape.kind_of]
    return sum(work.flop for work, _ in every), sum(work.attention * share for work, share in every)


def _mean(costs: list[LayerCost]) -> LayerCost:
    def mean(name: str) -> float:
        return float(sum(getattr(cost, name) for cost in costs) / len(costs))

    return LayerCost(
        costs[0].policy,
        saved=round(mean("saved")),
        whole=round(mean("whole")),
        forward_bytes=round(mean("forward_bytes")),
        backward_bytes=round(mean("backward_bytes")),
        forward=mean("forward"),
        backward=mean("backward"),
        transfer=mean("transfer"),
        flop=mean("flop"),
    )


def _readings(job: Job, way: Way) -> tuple[Reading, ...]:
    """Return the readings of each kind of layer at the job's size.

    A layer with a loop over tokens would take minutes at that size. Its figures are a + b N + c N T, with N tokens in
    sequences of T: the coefficients follow from three short sequences.
    """
    from lowtide.memory.planner.meta_model import readings_of  # it imports Triton, as PyTorch's table of FLOP does

    assert job.shape.traced is not None

    def read(batch_size: int, seq_len: int, way: Way) -> tuple[Reading, ...]:
        with refused(job.shape.model_type):
            return readings_of(config, job.dtype, job.fused_mlp, batch_size, seq_len, way)

    config, T = job.shape.traced.config, job.seq_len
    if T <= 3 * STEP:
        return read(job.batch_size, T, way)
    few, more = (sum(one.forward.operators for one in read(1, n * STEP, Way())) for n in (1, 2))
    if more == few or few + (more - few) * (T / STEP - 1) <= MOST_OPERATORS:
        return read(job.batch_size, T, way)
    unit = max(1, int(((MOST_OPERATORS - few) / (more - few) + 1) / 3)) * STEP
    points = (unit, 2 * unit, 3 * unit)

    def extrapolated(way: Way) -> list[Reading]:
        each = zip(*(read(1, n, way) for n in points), strict=True)
        return [_extrapolated(list(short), points, job) for short in each]

    # In short sequences the gradients of weights are the peak of backward; in long ones those of activations, so that
    # it is at least what it would be with frozen weights, which save less.
    found = zip(extrapolated(way), extrapolated(way._replace(frozen=True)), strict=True)
    least = [(one, bare.backward_peak + bare.saved - one.saved) for one, bare in found]
    return tuple(one._replace(backward_peak=max(one.backward_peak, peak)) for one, peak in least)


def _extrapolated(short: list[Reading], points: tuple[int, ...], job: Job) -> Reading:
    """Return a reading at the job's size from three of one short sequence each.

    A peak is the largest of several sums: a line through the longer two extrapolates it. A larger batch launches no
    more operators.
    """
    T, B = job.seq_len, job.batch_size

    def shares(points: tuple[int, ...]) -> list[float]:
        return [(1 - B) * _lagrange(0, at, points) + B * _lagrange(T, at, points) for at in points]

    one, line = mixed(short, shares(points)), mixed(short[1:], shares(points[1:]))
    launched = mixed(short, [_lagrange(T, at, points) for at in points])
    works = {name: (getattr(one, name), getattr(launched, name)) for name in ("forward", "recompute", "backward")}
    counted = {name: work._replace(operators=o.operators, ours=o.ours) for name, (work, o) in works.items()}
    peaks = {name: getattr(line, name) for name in ("forward_peak", "checkpointed_peak", "backward_peak")}
    return one._replace(**counted, **peaks)


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


def _costs(job: Job, policy: ActivationPolicy) -> tuple[LayerCost, ...]:
    if job.shape.traced is None:
        return (layer_cost(job, policy),)
    way = Way(policy.mlp_level, frozen=job.adapters is not None, keep_gradients=job.keep_gradients)
    return tuple(_cost(job, policy, one, _windowed(job, kind)) for kind, one in enumerate(_readings(job, way)))


def _cost(job: Job, policy: ActivationPolicy, one: Reading, windowed: float) -> LayerCost:
    """Return what a layer with a policy takes, from its reading."""
    recomputes = policy.keep != "all"
    checkpoint = one.input + (one.attended if policy.keep == "attention" else 0)
    saved = int(checkpoint if recomputes else one.saved)
    attention, attention_back = _attention_seconds(job, one.forward, windowed)
    forward = _seconds(job, one.forward) + attention
    backward = _seconds(job, one.backward) + attention_back
    flop, dense = 0.0, job.dequantised_bytes
    if policy.mlp_level == 1:  # the MLP itself recomputes
        gradients = 1 if job.adapters is not None else 2
        flop = max(0.0, one.backward.flop - gradients * one.forward.flop)
    if recomputes:
        again = attention if policy.keep == "input" else 0.0
        backward += _seconds(job, one.recompute) + again
        flop += one.recompute.flop + (one.recompute.attention * windowed if policy.keep == "input" else 0.0)
    host, host_back = _host_seconds(one, policy)
    unit, unit_back = host_of_a_unit(job)
    host, host_back = host + unit, host_back + unit_back
    more = 1 - 1 / policy.every  # layers of a group that run once more
    backward += more * forward
    flop += more * (one.forward.flop + one.forward.attention * windowed)
    return LayerCost(
        policy,
        saved=saved,
        whole=int(one.with_input if recomputes else one.saved),
        forward_bytes=int(one.checkpointed_peak if recomputes else one.forward_peak) + dense,
        backward_bytes=int(max(one.backward_peak, one.forward_peak) if recomputes else one.backward_peak) + dense,
        forward=slower(forward, host),
        backward=slower(backward, host_back + more * host),
        transfer=saved / policy.every / job.gpu.pcie if policy.offload else 0.0,
        flop=flop,
    )


def _host_seconds(one: Reading, policy: ActivationPolicy) -> tuple[float, float]:
    """Return what the host takes to launch a layer's forward, and its backward with the recompute."""
    expected = LAYER_OURS - (policy.mlp_level == 1)  # whose forward has no operator for gate and up
    ours = max(0.0, one.forward.ours - expected) / 2  # of the two norms that `HOST_HEAD_NORMS` is for
    others = LAUNCH * max(0.0, one.forward.operators - one.forward.ours - LAYER_OPERATORS + LAYER_OURS)
    others_back = LAUNCH * max(0.0, one.backward.operators - one.backward.ours - 2 * LAYER_OPERATORS)
    more, more_back = HOST_HEAD_NORMS[0] * ours + others, HOST_HEAD_NORMS[1] * ours + others_back
    watched = HOST_ATTENTION if policy.keep == "attention" else 0.0
    again = HOST_RECOMPUTE + more if policy.keep != "all" else 0.0
    return HOST_FORWARD + more + watched, HOST_BACKWARD + more_back + again


def _seconds(job: Job, work: Work) -> float:
    """Return the seconds of GEMMs, small weights slower, and of what is between them; not of attention."""
    gemms = (work.flop + 2 * HALF_RATE * work.rows) / job.gemm_rate
    gemms += work.flop / (2 * job.tokens) * job.dequantise_seconds  # of weights that all tokens pass
    return gemms + work.thin / (job.gpu.bandwidth * THIN)


def _attention_seconds(job: Job, work: Work, windowed: float) -> tuple[float, float]:
    """Return the seconds of fused attention in forward and backward."""
    gpu = job.gpu
    reached = gpu.wide_head if job.shape.head_dim >= 96 else 1.0
    reached *= 1.0 if job.narrow == 2 else gpu.gemm32 / gpu.gemm
    reached *= attention_reaches(job.seq_len, job.shape.widest_window)
    flop = work.attention * windowed
    return flop / (gpu.attention * reached), BACKWARD_ATTENTION * flop / (gpu.attention_backward * reached)

"""The costs of each kind of layer: by the formulas of `layer_costs`, or read from the layer itself.

What is read is exact for what a layer saves: the layer's own code ran, on the meta device, at the planned size. Its
time is its FLOP and traffic at the rates of the formulas.
"""

from __future__ import annotations

from lowtide.memory.planner.gpus import HALF_LENGTH, HALF_RATE
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
    layer_cost,
    slower,
)
from lowtide.memory.planner.readings import Reading, Way, Work, mixed
from lowtide.memory.planner.traced import refused
from lowtide.memory.policy import ActivationPolicy

LAYER_OPERATORS = 13  # that a patched Llama's layer launches in forward, to which `HOST_FORWARD` belongs
LAYER_OURS = 5  # of lowtide's among these: a further one takes the host as long as a norm on heads
LAUNCH = 10e-6  # seconds of the host for any other operator beyond these, an estimate
MOST_OPERATORS = 6000  # beyond these, a layer has a loop over tokens, and is read with `SHORT` sequences
SHORT = (256, 512, 768)


class LayerCosts(dict[ActivationPolicy, LayerCost]):
    """The cost of a job's layer by policy, the mean over its layers; each computed when it is first read."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._each: dict[ActivationPolicy, tuple[LayerCost, ...]] = {}

    def each(self, policy: ActivationPolicy) -> tuple[LayerCost, ...]:
        """Return the cost of a layer of each kind."""
        if policy not in self._each:
            job = self._job
            self._each[policy] = (layer_cost(job, policy),) if job.shape.traced is None else _costs(job, policy)
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

    config = job.shape.traced.config
    T, step = job.seq_len, SHORT[1] - SHORT[0]
    if max(SHORT) < T:
        few, more = (sum(one.forward.operators for one in read(1, n, Way())) for n in SHORT[:2])
        if few + (more - few) * (T - SHORT[0]) / step > MOST_OPERATORS:
            at_0, at_T = ([_lagrange(n, at) for at in SHORT] for n in (0, T))
            shares = [(1 - job.batch_size) * a + job.batch_size * b for a, b in zip(at_0, at_T, strict=True)]
            short = [read(1, n, way) for n in SHORT]
            of_any_batch = zip(*short, strict=True)
            return tuple(_launched(mixed(list(each), shares), mixed(list(each), at_T)) for each in of_any_batch)
    return read(job.batch_size, T, way)


def _launched(one: Reading, other: Reading) -> Reading:
    """Return a reading with the operators of another: a larger batch launches no more of them."""
    works = {name: (getattr(one, name), getattr(other, name)) for name in ("forward", "recompute", "backward")}
    counted = {name: work._replace(operators=o.operators, ours=o.ours) for name, (work, o) in works.items()}
    return one._replace(**counted)


def _lagrange(T: int, at: int) -> float:
    """Return the share that the short sequence ``at`` has in the parabola through all three."""
    share = 1.0
    for other in SHORT:
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
    flop = 0.0
    if policy.mlp_level == 1:  # the MLP itself recomputes
        gradients = 1 if job.adapters is not None else 2
        flop = max(0.0, one.backward.flop - gradients * one.forward.flop)
    if recomputes:
        again = attention if policy.keep == "input" else 0.0
        backward += _seconds(job, one.recompute) + again
        flop += one.recompute.flop + (one.recompute.attention * windowed if policy.keep == "input" else 0.0)
    host, host_back = _host_seconds(one, policy)
    return LayerCost(
        policy,
        saved=saved,
        whole=int(one.saved),
        forward_bytes=int(one.checkpointed_peak if recomputes else one.forward_peak),
        backward_bytes=int(max(one.backward_peak, one.forward_peak) if recomputes else one.backward_peak),
        forward=slower(forward, host),
        backward=slower(backward, host_back),
        transfer=saved / job.gpu.pcie if policy.offload else 0.0,
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
    return gemms + work.thin / (job.gpu.bandwidth * THIN)


def _attention_seconds(job: Job, work: Work, windowed: float) -> tuple[float, float]:
    """Return the seconds of fused attention in forward and backward."""
    gpu = job.gpu
    reached = gpu.wide_head if job.shape.head_dim >= 96 else 1.0
    reached *= 1.0 if job.narrow == 2 else gpu.gemm32 / gpu.gemm
    reached *= job.seq_len / (job.seq_len + HALF_LENGTH)
    flop = work.attention * windowed
    return flop / (gpu.attention * reached), BACKWARD_ATTENTION * flop / (gpu.attention_backward * reached)

"""What one layer of each kind stores and how long it takes, by policy: bytes and seconds.

All of it follows from `Reading`s: the layer's own code ran, on the meta device, at the planned size and as
`lowtide.patch` has patched it, with attention that stores no scores. Bytes are exact for what a layer saves; seconds
are those of its FLOP and traffic at the GPU's rates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowtide.memory.policy import ActivationPolicy
from lowtide.plan.config import BYTES, SCALES
from lowtide.plan.job import Job
from lowtide.plan.meter import Work
from lowtide.plan.model import Reading

PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
BACKWARD_ATTENTION = 2.5  # GEMMs of attention's backward for each of its forward's
HALF_RATE = 0.3e6  # numbers of a weight at which a GEMM of many tokens runs at half the rate of large ones
THIN = 0.9  # share of the copy's bandwidth that operators between GEMMs reach


class LayerCost(NamedTuple):
    """What one layer with a policy takes: numbers; or all layers: arrays of them."""

    saved: Any  # bytes for backward, wherever they are; with ``every`` only the first layer of a group has them
    whole: Any  # bytes that it has for backward once it is recomputed
    forward_bytes: Any  # the most that lives within its forward alone
    backward_bytes: Any  # the same of its backward, with its weights' gradients
    forward: Any  # seconds
    backward: Any  # seconds, with the recompute
    transfer: Any  # seconds to the host, and as many back, the mean of a group; 0: not offloaded


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
    recomputes = policy.keep != "all"
    # The largest weight that one GEMM dequantises, with its scales in float32.
    dense = int(max(job.model.linears) * (job.narrow + SCALES)) if job.packed_params else 0
    checkpoint = one.input + (one.attended if policy.keep == "attention" else 0)
    saved = int(checkpoint if recomputes else one.saved)
    flop = one.forward.attention * windowed
    ahead, behind = job.gpu.attention(job.narrow, job.model.head_dim, job.seq_len)
    forward = _seconds(job, one, one.forward) + flop / ahead
    backward = _seconds(job, one, one.backward) + BACKWARD_ATTENTION * flop / behind
    if recomputes:
        backward += _seconds(job, one, one.recompute) + (flop / ahead if policy.keep == "input" else 0.0)
    backward += (1 - 1 / policy.every) * forward  # layers of a group run once more
    return LayerCost(
        saved=saved,
        whole=int(one.with_input if recomputes else one.saved),
        forward_bytes=int(one.checkpointed_peak if recomputes else one.forward_peak) + dense,
        backward_bytes=int(max(one.backward_peak, one.forward_peak) if recomputes else one.backward_peak) + dense,
        forward=forward,
        backward=backward,
        transfer=saved / policy.every / job.gpu.pcie if policy.offload else 0.0,
    )


def _seconds(job: Job, one: Reading, work: Work) -> float:
    """Return the seconds of GEMMs, small weights slower, and of what is between them; not of attention."""
    gemms = (work.flop + 2 * HALF_RATE * work.rows) / job.gpu.gemm(job.narrow)
    # Each pass over the weights dequantises them: they are read, and written.
    passes, packed = work.flop / max(1.0, one.forward.flop), job.packed_params / job.layers
    dequantised = passes * packed * (BYTES[job.quantised.four_bit] + job.narrow)
    return gemms + (dequantised + work.thin / THIN) / job.gpu.bandwidth

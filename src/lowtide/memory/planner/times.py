"""How long a training step takes: floating-point operations over rates, bytes over bandwidths, and the host's floor.

Symbols as in `layer_bytes`. A GEMM's operations are counted as 2 a multiplication; causal attention's without the
half that is masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lowtide.memory.optimizer_blocks import share_back, share_out
from lowtide.memory.planner.gpus import HALF_LENGTH, HALF_RATE
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_bytes import checkpoint_bytes, level_of
from lowtide.memory.planner.optimizers import OPTIMIZERS
from lowtide.memory.planner.step_bytes import Groups, placed
from lowtide.memory.policy import ActivationPolicy

HEAD_SHARE = 0.95  # of the GEMMs' rate, over its three products: benchmarks/results, lowtide bench head
BACKWARD_ATTENTION = 2.5  # products of attention's backward for each of its forward's
THIN_AGAIN = 0.6  # of what forward's other operations read and write: not the MLP's product, nor the last addition
# Share of a transfer's time that it takes from the products it runs beside: 6 of 139 ms, and 3 of 68, in
# benchmarks/results, 2026-11-21-policy-32768-h100.
BESIDE = 0.05
ON_TIME = 0.9  # share of the layers' time in which optimizer states are to have travelled
# What the host takes to launch a layer's forward, backward and recompute, in seconds: below this no GPU is faster.
# Fitted to short sequences on one host (benchmarks/results, 2026-11-21-plan-h100-short): others differ by tens of
# percent. A layer that keeps attention looks at every operator; norms on the heads add kernels, either way.
HOST_FORWARD, HOST_BACKWARD, HOST_RECOMPUTE = 1.4e-3, 2.4e-3, 2.2e-3
HOST_KEEPING, HOST_HEAD_NORMS = 1.2e-3, (0.8e-3, 1.2e-3)
HIDDEN = 0.01  # share of the quicker of GPU and host that counts: where the host sets the pace, another may not
THIN = 0.9  # share of the copy's bandwidth that norms, rotary embedding and additions reach


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer.

    Attributes:
        forward: Of its forward.
        backward: Of its backward, with what it recomputes.
        recompute: The part of ``backward`` that is recomputed.
        transfer: Of its checkpoint's way to the host, and as much for the way back; 0 where it stays.
        flop: Operations of the part that is recomputed.
    """

    forward: float
    backward: float
    recompute: float
    transfer: float
    flop: float


def gemm_rate(job: Job) -> float:
    """Return the FLOP a second of the job's products."""
    return job.gpu.gemm32 if job.operand == torch.float32 else job.gpu.gemm


def attention_flop(job: Job) -> float:
    """Return the operations of one layer's attention in forward: the mean over layers, whose windows may differ."""
    shape, T = job.shape, job.seq_len
    pairs = 0.0
    for window in shape.windows or (0,):
        w = min(window or T, T)
        pairs += w * T - w * (w - 1) / 2 if w < T else T * T / 2
    return 4 * job.batch_size * shape.query_width * pairs / len(shape.windows or (0,))


def _attention_rates(job: Job) -> tuple[float, float]:
    share = job.gpu.wide_head if job.shape.head_dim >= 96 else 1.0
    share *= 1.0 if job.narrow == 2 else job.gpu.gemm32 / job.gpu.gemm
    share *= job.seq_len / (job.seq_len + HALF_LENGTH)
    return job.gpu.attention * share, job.gpu.attention_backward * share


def projection_flop(job: Job) -> float:
    """Return the operations of the products to queries, keys, values and out of attention, in forward."""
    return 2 * job.tokens * sum(_projections(job))


def mlp_flop(job: Job) -> float:
    """Return the operations of an MLP's products in forward, a mixture's router among them."""
    return 2 * job.tokens * sum(_mlp_weights(job))


def _projections(job: Job) -> list[int]:
    """Return the numbers of the weights that a token is multiplied with in attention, a number for each product."""
    shape = job.shape
    return [shape.hidden * width for width in (shape.query_width, shape.kv_width, shape.kv_width, shape.query_width)]


def _mlp_weights(job: Job) -> list[int]:
    """Return the same of the MLP, or of the experts that a token visits."""
    shape = job.shape
    products = [shape.hidden * shape.intermediate] * (3 * max(1, shape.experts_per_token))
    return products + ([shape.hidden * shape.experts] if shape.experts else [])


def _seconds(job: Job, weights: list[int]) -> float:
    """Return the seconds of all tokens' products with weights of so many numbers; small ones run slower."""
    return 2 * job.tokens * sum(numbers + HALF_RATE for numbers in weights) / gemm_rate(job)


def thin_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes that a layer's operations between the products read and write, in forward and backward."""
    shape, width = job.shape, job.shape.token_mlp_width()
    e, n = job.element, job.narrow
    rope = 2 * (shape.query_width + shape.kv_width) * n
    norms = 2 * shape.hidden * shape.layer_norms * e + rope * shape.head_norms
    adds = 2 * 3 * shape.hidden * e
    casts = 4 * shape.hidden * (e + n) if job.autocast else 0  # the inputs of products, and their gradients
    forward = job.tokens * (norms + rope + adds + casts + 3 * width * n)
    backward = job.tokens * (1.5 * norms + rope + adds + casts + 6 * width * n)
    weights = shape.layer_params * (e + n) if job.autocast else 0
    return forward + weights, backward + weights


def layer_time(job: Job, policy: ActivationPolicy) -> LayerTime:
    """Return the seconds of one layer with a policy."""
    thin_rate = job.gpu.bandwidth * THIN
    forward_rate, backward_rate = _attention_rates(job)
    thin, thin_back = (size / thin_rate for size in thin_bytes(job))
    products = _seconds(job, _projections(job) + _mlp_weights(job))
    attention = attention_flop(job)
    forward = products + attention / forward_rate + thin
    gradients = 2 if job.adapters is None else 1  # of what was multiplied, and of the weights unless they are frozen
    backward = gradients * products + BACKWARD_ATTENTION * attention / backward_rate + thin_back
    # Gate and up are recomputed, by the checkpoint or by the MLP itself; its last GEMM is not. Experts' is.
    share = 1.0 if job.shape.experts else 2 / 3
    recompute = flop = 0.0
    if policy.keep != "all" or level_of(policy) == 1:
        recompute = share * _seconds(job, _mlp_weights(job))
        flop = share * mlp_flop(job)
    if policy.keep != "all":
        again = attention if policy.keep == "input" else 0.0
        recompute += _seconds(job, _projections(job)) + again / forward_rate + THIN_AGAIN * thin
        flop += projection_flop(job) + again
    transfer = checkpoint_bytes(job, policy) / job.gpu.pcie if policy.offload else 0.0
    norms, norms_back = HOST_HEAD_NORMS if job.shape.head_norms else (0.0, 0.0)
    host_forward = HOST_FORWARD + norms + (HOST_KEEPING if policy.keep == "attention" else 0.0)
    host_backward = HOST_BACKWARD + norms_back + (HOST_RECOMPUTE + norms if policy.keep != "all" else 0.0)
    return LayerTime(
        forward=_at_once(forward, host_forward),
        backward=_at_once(backward + recompute, host_backward),
        recompute=recompute,
        transfer=transfer,
        flop=flop,
    )


def _at_once(gpu: float, host: float) -> float:
    return max(gpu, host) + HIDDEN * min(gpu, host)


def head_seconds(job: Job) -> float:
    """Return the seconds of the output layer and its loss, forward and backward."""
    plan = job.head_plan
    products = 4 if plan.schedule == "blocks" or plan.gradient == "recompute" else 3
    products -= job.adapters is not None  # a frozen weight has no gradient
    flop = 2 * products * job.tokens * job.shape.vocab_params
    passes = 0 if plan.backend == "exp" else 3 * 4 * job.tokens * job.shape.vocab  # float32 logits, read and written
    return flop / (gemm_rate(job) * HEAD_SHARE) + passes / job.gpu.bandwidth


def optimizer_seconds(job: Job) -> float:
    """Return the seconds of the optimizer's step."""
    adapters = job.trained_adapters
    trained = job.shape.params * job.element if adapters is None else 4 * adapters
    return OPTIMIZERS[job.optimizer].traffic * trained / job.gpu.bandwidth


def embedding_seconds(job: Job) -> float:
    """Return the seconds of the embedding's gradient: a table of zeros, and where tied its sum with the head's."""
    if job.adapters is not None:
        return 0.0
    passes = 4 if job.shape.tied else 1
    return passes * job.shape.vocab_params * job.element / job.gpu.bandwidth


class Times:
    """The seconds of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fixed = head_seconds(job) + optimizer_seconds(job) + embedding_seconds(job)
        self._layers: dict[ActivationPolicy, LayerTime] = {}

    def of(self, policy: ActivationPolicy) -> LayerTime:
        """Return the seconds of a layer with a policy."""
        if policy not in self._layers:
            self._layers[policy] = layer_time(self.job, policy)
        return self._layers[policy]

    def travels(self, groups: Groups) -> int:
        """Return the bytes of optimizer states that leave within forward, and come back within backward.

        As many travel beside each layer: beside the one that has the least time left by its own checkpoint's copy.
        """
        out = back = math.inf
        for policy, _, moves in placed(groups):
            one = self.of(policy)
            transfer = one.transfer if moves else 0.0
            out, back = min(out, one.forward - transfer), min(back, one.backward - transfer)
        layers = self.job.shape.layers
        seconds = min(out / share_out(0, layers), back / share_back(1, layers))
        return int(max(0.0, seconds) * ON_TIME * self.job.gpu.pcie)

    def on_the_way(self, states: int, *, late: bool = False) -> float:
        """Return the seconds that so many bytes of offloaded states add: no more than `travels`, or late."""
        return (BESIDE + (1 if late else BESIDE)) * states / self.job.gpu.pcie

    def step(self, groups: Groups) -> float:
        """Return the seconds of a step.

        A copy to the host or back runs beside one layer's work: the longer of the two counts, and what the copy takes
        from the other's rate.
        """
        seconds = self.fixed
        for policy, n, moves in placed(groups):
            one = self.of(policy)
            transfer = one.transfer if moves else 0.0
            seconds += n * (max(one.forward, transfer) + max(one.backward, transfer) + 2 * BESIDE * transfer)
        return seconds

"""Several GPUs: what each holds of a model, what is whole for a moment, and what a step exchanges.

Of S bytes in all, a gather or a reduce-scatter brings S (n - 1) / n to each of n GPUs, a sum over them twice that.

Units of FSDP2 are as accelerate makes them, and so trainers do: one for each layer; one for the
embedding; one for the last norm and the output layer, with the embedding where it is tied, which stays gathered from
its forward to its backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.plan.arguments import DDP, FSDP2, OPTIMIZERS, ZERO3
from lowtide.plan.config import BYTES
from lowtide.plan.job import Job

# DeepSpeed's defaults, in parameters: stage3_max_live_parameters, reduce_bucket_size, sub_group_size.
LIVE, BUCKET, SUB_GROUP = 10**9, 5 * 10**8, 10**9


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one GPU has and exchanges. The last fields are of several GPUs; one exchanges nothing.

    Lists have an entry for each layer; ``gathered`` bytes are those of whole parameters and of exchanges' buffers.
    """

    job: Job  # what it computes
    weights: int
    states: int
    gradients: int
    stepped: int  # bytes of parameters that the optimizer updates, in its dtype
    accumulated: int  # gradients that a pass begins with, where they are accumulated over several
    layer_gradients: list[int]
    head_gradient: int  # the output layer's, during the layers' backward
    forward: list[int]  # gathered
    backward: list[int]  # gathered
    head: int = 0  # gathered
    embedding: int = 0  # gathered in its backward
    reduction: int = 0  # gathered when its gradient is reduced, and nothing else is left
    to_come: int = 0  # gradients that are not reduced by then
    step: int = 0  # held in the optimizer's step alone
    ahead: float = 0.0  # bytes that come from other GPUs beside a layer's forward
    behind: float = 0.0  # beside its backward
    beside: float = 0.0  # beside everything but the layers
    awaited: float = 0.0  # beside nothing

    @property
    def received(self) -> float:
        """Return the bytes that come from other GPUs in a step."""
        return self.job.layers * (self.ahead + self.behind) + self.beside + self.awaited


class _Units:
    """The parts of a model that are gathered one after another: parameters, and those of them that are trained."""

    def __init__(self, job: Job) -> None:
        model, L = job.model, job.layers
        packed = job.packed_params // L  # of a layer; in bytes of a parameter in the job's dtype:
        smaller = packed - packed * BYTES[job.quantised.four_bit] / job.element
        added = model.adapter_params // L
        self.full = job.adapters is None  # trained
        self.layers = [int(params - smaller) + added for params in model.layer_params]
        self.trained = [*model.layer_params] if self.full else [added] * L
        self.embedding = 0 if model.tied else model.vocab_params
        self.tail = model.params - sum(model.layer_params) - self.embedding  # the unit of the output layer
        self.params = sum(self.layers) + self.embedding + self.tail
        self.first = self.embedding or self.tail  # the unit that is gathered first, and reduced last

    def exchanges(self, job: Job, gathered: int, reduced: int) -> dict[str, Any]:
        """Return the exchanges of a step: nothing runs beside the first gathers, nor beside the last sum."""
        received, L = (job.gpus - 1) / job.gpus, len(self.layers)
        gather, reduce = (received * size for size in (gathered, reduced))
        mean, sums = gather * sum(self.layers) / L, reduce * sum(self.trained) / L
        every = gather * (self.tail + 2 * self.embedding) + reduce * (self.tail + self.embedding) * self.full
        awaited = gather * (self.first + self.layers[0]) + reduce * self.first * self.full
        return {"ahead": mean, "behind": mean + sums, "beside": every - awaited, "awaited": awaited}


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    if job.gpus == 1:
        return _alone(job)
    return {DDP: _ddp, FSDP2: _fsdp2, ZERO3: _zero3}[job.parallel](job)


def _alone(job: Job) -> Ranks:
    """Return a GPU that has all of a job."""
    model, kind, L = job.model, OPTIMIZERS[job.optimizer], job.layers
    # Adapters are float32, whatever the frozen weights are.
    full, size = job.adapters is None, job.element if job.adapters is None else 4
    trained = model.params if full else model.adapter_params
    by_layer = model.layer_params if full else [trained // L] * L
    return Ranks(
        job=job,
        weights=job.weight_bytes + 4 * model.adapter_params,
        states=int(trained * (kind.states * size + kind.bytes_each)),
        gradients=trained * size,
        stepped=trained * size,
        accumulated=trained * size,
        layer_gradients=[params * size for params in by_layer],
        head_gradient=model.vocab_params * size * full,
        forward=[0] * L,
        backward=[0] * L,
    )


def _ddp(job: Job) -> Ranks:
    """Return a GPU under DistributedDataParallel, whose buckets hold the gradients a second time."""
    alone, L = _alone(job), job.layers
    buckets = alone.gradients
    received = 2 * (job.gpus - 1) / job.gpus
    by_layer = received * sum(alone.layer_gradients) / L
    return replace(
        alone,
        forward=[buckets] * L,
        backward=[buckets] * L,
        head=buckets,
        embedding=buckets,
        step=buckets,
        behind=by_layer,
        awaited=received * buckets - L * by_layer,
    )


def _narrow(job: Job) -> Job:
    """Return what a GPU computes under autocast: parameters are cast before they are gathered, and so is the stream."""
    return replace(job, dtype=torch.bfloat16, autocast=False) if job.autocast else job


def _fsdp2(job: Job) -> Ranks:
    """Return a GPU under PyTorch's fully_shard.

    A unit is gathered into a buffer and copied out of it. In forward the buffer stays until the next unit's is copied
    out; in backward it goes at once, and the buffer of the unit before is there already. Gradients are whole until the
    end of the unit's backward, are copied into a buffer in the dtype of the reduction, and that stays until the end of
    the next unit's backward. Those that are accumulated are whole, and reduced in the last pass.
    """
    alone, whole, n, units = _alone(_narrow(job)), _alone(job), job.gpus, _Units(job)
    g, r, tied = alone.job.element, job.element if units.full else 4, job.model.tied
    layers, sums, tail = [g * unit for unit in units.layers], [r * unit for unit in units.trained], units.tail
    stays, reduced = g * tail * tied, r * tail * units.full

    def share(size: int) -> int:
        return -(-size // n)

    before, after = (g * units.embedding, *layers[:-1]), (*sums[1:], 0 if tied else reduced)
    head = stays + layers[-1]
    if not tied:  # its buffer is there as well; or its gradient, in two buffers, and the last layer gathered
        head = max(2 * g * tail, reduced + share(reduced) + layers[-1])
    first = r * units.first * units.full
    return replace(
        alone,
        weights=share(whole.weights),
        states=share(whole.states),
        gradients=share(whole.gradients),
        stepped=share(whole.stepped),
        accumulated=whole.gradients,
        layer_gradients=[*map(share, sums)],
        head_gradient=alone.head_gradient if tied else share(reduced),
        forward=[stays + 2 * layer for layer in layers],
        backward=[stays + layer + b + a for layer, b, a in zip(layers, before, after, strict=True)],
        head=head,
        embedding=2 * g * units.first + sums[0],
        reduction=g * units.first + first + share(first),
        to_come=0 if job.keep_gradients else share(first),
        **units.exchanges(job, g, r),
    )


def _zero3(job: Job) -> Ranks:
    """Return a GPU under DeepSpeed's ZeRO-3 in 16 bits.

    Parameters and gradients are 16-bit shards, in buffers that are never freed; besides there are float32 shards of the
    trained weights and the optimizer's states. What is gathered is DeepSpeed's choice, up to `LIVE` parameters, and
    counted as that. Gradients wait in a bucket, and are copied out of it to be reduced.
    """
    alone, n, units = _alone(replace(_narrow(job), keep_gradients=True)), job.gpus, _Units(_narrow(job))
    g, trained = alone.job.element, job.model.params if units.full else sum(units.trained)

    def share(params: int, size: int = g) -> int:
        return -(-params * size // n)

    live = g * (min(units.params, max(LIVE, units.tail, *units.layers)) + BUCKET)
    reduced = live + g * min(trained, max(BUCKET, units.tail if units.full else 0))
    return replace(
        alone,
        weights=share(units.params),
        states=share(trained, 4 * (OPTIMIZERS[job.optimizer].states + 1)),
        gradients=share(trained),
        stepped=share(trained, 4),
        accumulated=share(trained),
        layer_gradients=[*map(share, units.trained)],
        head_gradient=share(units.tail) * units.full,
        forward=[live] * len(units.layers),
        backward=[reduced] * len(units.layers),
        head=reduced,
        embedding=reduced,
        step=g * BUCKET + 4 * min(SUB_GROUP, -(-trained // n)),
        **units.exchanges(job, g, g),
    )

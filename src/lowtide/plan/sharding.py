"""Several GPUs: what each holds of a model, what is whole for a moment, and what a step exchanges.

Of S bytes in all, a gather or a reduce-scatter brings S (n - 1) / n to each of n GPUs, a sum over them twice that.

Units of FSDP2 are as accelerate makes them, and so trainers do: one for each layer; one for the
embedding; one for the last norm and the output layer, with the embedding where it is tied, which stays gathered from
its forward to its backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lowtide.plan.arguments import DDP, OPTIMIZERS, ZERO3
from lowtide.plan.config import BYTES
from lowtide.plan.job import Job

# DeepSpeed's defaults, in parameters: stage3_max_live_parameters, reduce_bucket_size, sub_group_size.
LIVE, BUCKET, SUB_GROUP = 10**9, 5 * 10**8, 10**9


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one GPU has and exchanges. The last fields are of several GPUs; one exchanges nothing.

    Arrays have an entry for each layer; ``gathered`` bytes are those of whole parameters and of exchanges' buffers.
    """

    job: Job  # what it computes
    weights: int
    states: int
    gradients: int
    stepped: int  # bytes of parameters that the optimizer updates, in its dtype
    accumulated: int  # gradients that a pass begins with, where they are accumulated over several
    layer_gradients: Any
    head_gradient: int  # the output layer's, during the layers' backward
    forward: Any = 0  # gathered
    backward: Any = 0  # gathered
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


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    if job.gpus == 1:
        return _alone(job)
    return _ddp(job) if job.parallel == DDP else _sharded(job)


def _alone(job: Job) -> Ranks:
    """Return a GPU that has all of a job."""
    model, kind, L = job.model, OPTIMIZERS[job.optimizer], job.layers
    size, trained, by_layer = job.dtype.itemsize, model.params, np.array(model.layer_params)
    if job.adapters is not None:  # in float32, whatever the frozen weights are
        size, trained, by_layer = 4, model.adapter_params, np.full(L, model.adapter_params // L)
    gradients = trained * size
    return Ranks(
        job=job,
        weights=job.weight_bytes + 4 * model.adapter_params,
        states=int(gradients * kind.states + trained * kind.bytes_each),
        gradients=gradients,
        stepped=gradients,
        accumulated=gradients,
        layer_gradients=size * by_layer,
        head_gradient=model.vocab_params * size * (job.adapters is None),
    )


def _ddp(job: Job) -> Ranks:
    """Return a GPU under DistributedDataParallel, whose buckets hold the gradients a second time."""
    alone = _alone(job)
    received = 2 * (job.gpus - 1) / job.gpus
    behind = received * alone.layer_gradients.mean()
    buckets: Any = dict.fromkeys(("forward", "backward", "head", "embedding", "step"), alone.gradients)
    return replace(
        alone,
        **buckets,
        behind=behind,
        awaited=received * alone.gradients - job.layers * behind,
    )


def _sharded(job: Job) -> Ranks:
    """Return a GPU under PyTorch's fully_shard, or DeepSpeed's ZeRO-3 in 16 bits.

    fully_shard gathers a unit into a buffer and copies it out. In forward the buffer stays until the next unit's is
    copied out; in backward it goes at once, and the buffer of the unit before is there already. Gradients are whole
    until the end of the unit's backward, are copied into a buffer in the dtype of the reduction, and that stays until
    the end of the next unit's backward. Those that are accumulated are whole, and reduced in the last pass.

    ZeRO-3 has parameters and gradients as 16-bit shards, in buffers that are never freed, and float32 shards of the
    trained weights and the optimizer's states. What is gathered is DeepSpeed's choice, up to `LIVE` parameters, and
    counted as that. Gradients wait in a bucket, and are copied out of it to be reduced.
    """
    n, L, model, full, deepspeed = job.gpus, job.layers, job.model, job.adapters is None, job.parallel == ZERO3
    # Under autocast parameters are cast before they are gathered, and so is the stream.
    narrow = replace(job, dtype=torch.bfloat16, autocast=False) if job.autocast else job
    alone, whole = _alone(replace(narrow, keep_gradients=job.keep_gradients or deepspeed)), _alone(job)
    g = narrow.dtype.itemsize  # bytes of what is gathered, and of what is reduced:
    r = g if deepspeed else job.dtype.itemsize if full else 4
    # Numbers of the units, of which those in 4 bits count as what they take in the job's dtype; and the trained ones.
    packed, added = job.packed_params // L, model.adapter_params // L
    smaller = packed * (1 - BYTES[job.quantised.four_bit] / job.dtype.itemsize)
    layers = (np.array(model.layer_params) - smaller).astype(int) + added
    trained = np.array(model.layer_params) if full else np.full(L, added)
    embedding = 0 if model.tied else model.vocab_params
    tail = model.params - sum(model.layer_params) - embedding  # the unit of the output layer
    first = embedding or tail  # the unit that is gathered first, and reduced last

    def share(size: Any) -> Any:
        return -(-size // n)

    # Nothing runs beside the first gathers, nor beside the last reduction.
    gather, reduce = (size * (n - 1) / n for size in (g, r))
    awaited = gather * (first + layers[0]) + reduce * first * full
    every = gather * (tail + 2 * embedding) + reduce * (tail + embedding) * full
    ahead, sums = gather * layers.mean(), reduce * trained.mean()
    exchanges = {"ahead": ahead, "behind": ahead + sums, "beside": every - awaited, "awaited": awaited}
    if deepspeed:
        numbers = model.params if full else model.adapter_params
        params = sum(layers) + embedding + tail
        live = g * (min(params, max(LIVE, tail, *layers)) + BUCKET)
        reduced = live + g * min(numbers, max(BUCKET, tail * full))
        return replace(
            alone,
            weights=share(g * params),
            states=share(4 * numbers * (OPTIMIZERS[job.optimizer].states + 1)),
            gradients=share(g * numbers),
            stepped=share(4 * numbers),
            accumulated=share(g * numbers),
            layer_gradients=share(g * trained),
            head_gradient=share(g * tail) * full,
            forward=live,
            **dict.fromkeys(("backward", "head", "embedding"), reduced),
            step=g * BUCKET + 4 * min(SUB_GROUP, share(numbers)),
            **exchanges,
        )
    layers, trained, reduced, once = g * layers, r * trained, r * tail * full, r * first * full
    stays = g * tail * model.tied
    before, after = [g * embedding, *layers[:-1]], [*trained[1:], reduced * (not model.tied)]
    # Untied, the head's buffer is there as well; or its gradient, in two buffers, and the last layer gathered.
    head = stays + layers[-1] if model.tied else max(2 * g * tail, reduced + share(reduced) + layers[-1])
    return replace(
        alone,
        **{name: share(getattr(whole, name)) for name in ("weights", "states", "gradients", "stepped")},
        accumulated=whole.gradients,
        layer_gradients=share(trained),
        head_gradient=alone.head_gradient if model.tied else share(reduced),
        forward=stays + 2 * layers,
        backward=stays + layers + before + after,
        head=head,
        embedding=2 * g * first + trained[0],
        reduction=g * first + once + share(once),
        to_come=share(once) * (not job.keep_gradients),
        **exchanges,
    )

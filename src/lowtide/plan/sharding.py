"""Several GPUs: what each holds of a sharded model, what is whole for a moment, and what a step exchanges.

Of S bytes in all, a gather or a reduce-scatter brings S (n - 1) / n to each of n GPUs.

Units of FSDP2 are as accelerate, and so ``lowtide train --parallel fsdp2``, makes them: one for each layer; one for the
embedding; one for the last norm and the output layer, with the embedding where it is tied, which stays gathered from
its forward to its backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.plan.arguments import FSDP2, OPTIMIZERS, ZERO3
from lowtide.plan.job import Job

# Share of an exchange's time that it takes from the GEMMs it runs beside. Fitted to the steps of two H200.
SLOWS = 0.8
# Seconds that a layer takes longer under ZeRO-3 than its exchanges do. Fitted to two steps of two and four H200.
ZERO3_WAITS = 4e-3
# DeepSpeed's defaults, in parameters: stage3_max_live_parameters, reduce_bucket_size, sub_group_size.
LIVE, BUCKET, SUB_GROUP = 10**9, 5 * 10**8, 10**9


class Exchange(NamedTuple):
    """What a GPU receives from the others during some work, and copies for that; in bytes."""

    beside: float = 0.0  # come while the work runs
    before: float = 0.0  # the work waits for them
    copied: float = 0.0  # are read and written to pack and unpack them

    @property
    def bytes(self) -> float:
        """Return the bytes received."""
        return self.beside + self.before


NOTHING = Exchange()


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one GPU has and exchanges. The last fields are of several GPUs; one exchanges nothing.

    Lists have an entry for each layer; ``gathered`` bytes are those of whole parameters and of exchanges' buffers.
    """

    job: Job  # what it computes
    tokens: int  # of a step, on all GPUs
    weights: int
    states: int
    gradients: int
    stepped: int  # parameters that the optimizer updates, in its dtype
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
    ahead: Exchange = NOTHING  # of a layer's forward
    behind: Exchange = NOTHING  # of its backward
    others: Exchange = NOTHING  # of everything but the layers
    waits: float = 0.0  # seconds of a step besides

    def seconds(self, exchange: Exchange) -> tuple[float, float]:
        """Return the seconds of an exchange that run beside the work, and those that it waits."""
        link = self.job.link_rate
        return exchange.beside / link, exchange.before / link + exchange.copied / self.job.gpu.bandwidth


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    if job.gpus == 1:
        return _alone(job)
    return _zero3(job) if job.parallel == ZERO3 else _fsdp2(job)


def _alone(job: Job) -> Ranks:
    """Return a GPU that has all of a job."""
    shape, adapters, kind = job.shape, job.trained_adapters, OPTIMIZERS[job.optimizer]
    # Adapters are float32, whatever the frozen weights are.
    trained, size = (shape.params, job.element) if adapters is None else (adapters, 4)
    by_layer = [params * size for params in shape.layer_params]
    if adapters is not None:
        by_layer = [trained * size // shape.layers] * shape.layers
    nothing = [0] * shape.layers
    return Ranks(
        job=job,
        tokens=job.tokens,
        weights=job.weight_bytes + 4 * (adapters or 0),
        states=int(trained * (kind.states * size + kind.bytes_each)),
        gradients=trained * size,
        stepped=trained * size,
        accumulated=trained * size,
        layer_gradients=by_layer,
        head_gradient=shape.vocab_params * size if adapters is None else 0,
        forward=nothing,
        backward=nothing,
    )


class _Units:
    """The units of a sharded model, in parameters, and what it takes to exchange them."""

    def __init__(self, job: Job, gathered: int, reduced: int) -> None:
        shape = job.shape
        self.gathered, self.reduced = gathered, reduced  # bytes of a parameter
        self.layers, self.params = shape.layer_params, shape.params
        self.embedding = 0 if shape.tied else shape.vocab_params
        self.tail = shape.params - sum(self.layers) - self.embedding  # the unit of the output layer
        self.first = self.embedding or self.tail  # the unit that is gathered first, and reduced last
        self._received = (job.gpus - 1) / job.gpus

    def exchange(self, params: float, gathers: int, reduces: int) -> Exchange:
        """Return what it takes to gather parameters, and reduce their gradients, by way of buffers."""
        g, r = self.gathered, self.reduced
        received = self._received * params * (gathers * g + reduces * r)
        return Exchange(received, 0.0, params * (2 * gathers * g + reduces * (g + r)))

    def exchanges(self) -> dict[str, Any]:
        """Return the exchanges of a step: nothing runs beside the first gathers, nor beside the last sum."""
        mean = sum(self.layers) / len(self.layers)
        tail, embedding = self.exchange(self.tail, 1, 1), self.exchange(self.embedding, 2, 1)
        before = self.exchange(self.first, 1, 1).beside + self.exchange(self.layers[0], 1, 0).beside
        others = Exchange(tail.beside + embedding.beside - before, before, tail.copied + embedding.copied)
        return {"ahead": self.exchange(mean, 1, 0), "behind": self.exchange(mean, 1, 1), "others": others}


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
    alone, n, tied = _alone(_narrow(job)), job.gpus, job.shape.tied
    units = _Units(alone.job, alone.job.element, job.element)
    g, r, layers, tail, first = units.gathered, units.reduced, units.layers, units.tail, units.first
    stays = g * tail * tied

    def share(params: int) -> int:
        return -(-params * job.element // n)

    before, after = (units.embedding, *layers[:-1]), (*layers[1:], 0 if tied else tail)
    head = stays + g * layers[-1]
    if not tied:  # its buffer is there as well; or its gradient, in two buffers, and the last layer gathered
        head = max(2 * g * tail, r * tail + share(tail) + g * layers[-1])
    return replace(
        alone,
        tokens=n * job.tokens,
        weights=share(units.params),
        states=-(-_alone(job).states // n),
        gradients=share(units.params),
        stepped=share(units.params),
        accumulated=r * units.params,
        layer_gradients=[*map(share, layers)],
        head_gradient=alone.head_gradient if tied else share(tail),
        forward=[stays + 2 * g * layer for layer in layers],
        backward=[stays + g * (layer + b) + r * a for layer, b, a in zip(layers, before, after, strict=True)],
        head=head,
        embedding=2 * g * first + r * layers[0],
        reduction=g * first + r * first + share(first),
        to_come=0 if job.keep_gradients else share(first),
        **units.exchanges(),
    )


def _zero3(job: Job) -> Ranks:
    """Return a GPU under DeepSpeed's ZeRO-3 in 16 bits.

    Parameters and gradients are 16-bit shards, in buffers that are never freed; besides there are float32 shards of the
    weights and the optimizer's states. What is gathered is DeepSpeed's choice, up to `LIVE` parameters, and counted as
    that. Gradients wait in a bucket, and are copied out of it to be reduced.
    """
    alone, n = _alone(replace(_narrow(job), keep_gradients=True)), job.gpus
    g = alone.job.element
    units = _Units(alone.job, g, g)

    def share(params: int, size: int = g) -> int:
        return -(-params * size // n)

    live = g * (min(units.params, max(LIVE, units.tail, *units.layers)) + BUCKET)
    reduced = live + g * min(units.params, max(BUCKET, units.tail))
    return replace(
        alone,
        tokens=n * job.tokens,
        weights=share(units.params),
        states=share(units.params, 4 * (OPTIMIZERS[job.optimizer].states + 1)),
        gradients=share(units.params),
        stepped=share(units.params, 4),
        accumulated=share(units.params),
        layer_gradients=[*map(share, units.layers)],
        head_gradient=share(units.tail),
        forward=[live] * len(units.layers),
        backward=[reduced] * len(units.layers),
        head=reduced,
        embedding=reduced,
        step=g * BUCKET + 4 * min(SUB_GROUP, -(-units.params // n)),
        waits=ZERO3_WAITS * len(units.layers),
        **units.exchanges(),
    )


def check_sharding(job: Job) -> None:
    """Check that a step of several GPUs can be planned.

    Raises:
        ArgumentValueError: It offloads, or has adapters, an optimizer without shards, or ZeRO-3 in float32.
    """
    if job.gpus == 1:
        return
    shard = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.shards)
    dtype = str(job.dtype).removeprefix("torch.")
    wide = job.parallel == ZERO3 and job.element > 2 and not job.autocast
    refused: list[tuple[str, object, str, bool]] = [
        ("host_gib", job.host_gib, "0: offloading is planned for one GPU alone", bool(job.size("host_gib"))),
        ("adapters", job.adapters, "None: adapters are planned for one GPU alone", job.adapters is not None),
        ("optimizer", repr(job.optimizer), f"one that shards: {shard}", not OPTIMIZERS[job.optimizer].shards),
        ("dtype", dtype, "bfloat16 or float16, or autocast: DeepSpeed's float32 training is not planned", wide),
    ]
    for name, got, expected, applies in refused:
        if applies:
            hint = f"For {job.gpus} GPUs by {job.parallel}, leave it out or change it; or plan for one GPU."
            raise ArgumentValueError(message(name, expected, f"{got}", hint))


def notes_on(job: Job) -> tuple[str, ...]:
    """Return the notes on a plan of several GPUs."""
    if job.gpus == 1:
        return ()
    how = "--link 50GB, in Python link='50GB', plans a network of 400 Gb/s"
    where = f"; assumes {job.gpus} GPUs in one host: {how}" if job.link is None else ""
    sharded = {
        FSDP2: "units of FSDP2: each layer; the embedding; the last norm and the output layer, which stay gathered",
        ZERO3: f"ZeRO-3 with DeepSpeed's defaults: weights and states in float32 besides, up to {LIVE:,} gathered"
        f" parameters, a bucket of {BUCKET:,} gradients: an upper bound",
    }
    return f"exchanges at {job.link_rate / 1e9:.0f} GB/s each way{where}", sharded[job.parallel]


def sharding_lines(job: Job) -> list[str]:
    """Return the Python that shards a model, once it is patched and has its policies."""
    if job.gpus == 1:
        return []
    processes = f"# in each of {job.gpus} processes"
    if job.parallel == ZERO3:
        return [f"{processes}: deepspeed.initialize(model=model, ...), or lowtide train --parallel zero3"]
    lines, policy = [f"{processes}, or without these lines lowtide train --parallel fsdp2:"], ""
    if job.autocast:
        lines += ["import torch", "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
        lines.append("precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)")
        policy = ", mp_policy=precision"
    else:
        lines.append("from torch.distributed.fsdp import fully_shard")
    lines += ["for layer in model.get_decoder().layers:", f"    fully_shard(layer{policy})"]
    if not job.shape.tied:
        lines.append(f"fully_shard(model.get_input_embeddings(){policy})")
        lines.append(f"fully_shard(model.get_output_embeddings(), reshard_after_forward=False{policy})")
    return [*lines, f"fully_shard(model{policy})"]

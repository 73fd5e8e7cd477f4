"""Several GPUs: what each has of a model, what is whole for a moment, and what a step exchanges.

A gather of S bytes in all, or a reduce-scatter, brings S (n - 1) / n to each of n GPUs, and an all-reduce twice that.

Units of FSDP2 are as accelerate, and so ``lowtide train --parallel fsdp2``, makes them: one for each layer, or for
several (``--fsdp-layers``); one for the embedding; one for the last norm and the output layer, with the embedding where
it is tied, which stays gathered from its forward to its backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowtide.memory.planner.job import Job
from lowtide.memory.planner.optimizers import CP, FSDP2, OPTIMIZERS, ZERO3

# Share of an exchange's time that it takes from the GEMMs it runs beside, also where copy engines make it. Fitted to
# the steps of two GPUs in benchmarks/results, 2026-11-21-scaling-16384-h200.
SLOWS = 0.8
# Seconds that a layer takes longer under ZeRO-3 than its exchanges do: fitted to two steps of two and four GPUs
# (benchmarks/results, 2026-11-28-scaling-strong-ranks-4-h200), less what reducing float32 gradients took there.
ZERO3_WAITS = 4e-3
# DeepSpeed's defaults, in numbers: stage3_max_live_parameters, reduce_bucket_size, sub_group_size.
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

    def and_also(self, beside: float = 0.0, before: float = 0.0) -> Exchange:
        """Return it with more bytes."""
        return Exchange(self.beside + beside, self.before + before, self.copied)


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
    kept: int  # gradients that a pass begins with, where they are accumulated over several
    layer_gradients: list[int]
    head_gradient: int  # the output layer's, during the layers' backward
    forward: list[int]  # gathered
    backward: list[int]  # gathered
    whole_gradients: list[int]  # at the end of a layer's backward, where they are reduced then
    turns: tuple[int, ...] = ()  # layers besides a policy's first and last in whose backward the most may be gathered
    head: int = 0  # gathered
    embedding: int = 0  # gathered in its backward
    reduction: int = 0  # gathered when its gradient is reduced, and nothing else is left
    to_come: int = 0  # gradients that are not reduced by then
    lookup: int = 0  # of the embedding's backward alone
    step: int = 0  # held in the optimizer's step alone
    ahead: Exchange = NOTHING  # of a layer's forward
    behind: Exchange = NOTHING  # of its backward
    again: Exchange = NOTHING  # of its recompute
    others: Exchange = NOTHING  # of everything but the layers
    waits: float = 0.0  # seconds of a step besides

    def seconds(self, one: Exchange) -> tuple[float, float]:
        """Return the seconds of an exchange that run beside the work, and those that it waits."""
        link = self.job.link_rate
        return one.beside / link, one.before / link + one.copied / self.job.gpu.bandwidth


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    if job.gpus == 1:
        return _alone(job)
    if job.group_size > 1:
        return _tensor_parallel(job)
    return {FSDP2: _fsdp2, CP: _context_parallel, ZERO3: _zero3}[job.parallel](job)


def _alone(job: Job) -> Ranks:
    """Return a GPU that has all of a job, or of its own part of one."""
    shape, adapters, kind = job.shape, job.trained_adapters, OPTIMIZERS[job.optimizer]
    # Adapters are float32, whatever the frozen weights are.
    numbers, size = (shape.params, job.element) if adapters is None else (adapters, 4)
    by_layer = [params * size for params in shape.params_of_layers]
    if adapters is not None:
        by_layer = [numbers * size // shape.layers] * shape.layers
    nothing = [0] * shape.layers
    return Ranks(
        job=job,
        tokens=job.tokens,
        weights=job.weight_bytes + 4 * (adapters or 0),
        states=int(numbers * (kind.states * size + kind.bytes_each)),
        gradients=numbers * size,
        stepped=numbers * size,
        kept=numbers * size,
        layer_gradients=by_layer,
        head_gradient=shape.vocab_params * size if adapters is None else 0,
        forward=nothing,
        backward=nothing,
        whole_gradients=nothing,
    )


class _Units:
    """The units of a sharded model, in numbers, and what it takes to exchange them."""

    def __init__(self, job: Job, gathered: int, reduced: int) -> None:
        shape = job.shape
        self.gathered, self.reduced = gathered, reduced  # bytes of a number
        self.layers, self.tied, self.params = shape.params_of_layers, shape.tied, shape.params
        self.embedding = 0 if shape.tied else shape.vocab_params
        self.of_layers = [sum(self.layers[i : i + job.fsdp_layers]) for i in range(0, shape.layers, job.fsdp_layers)]
        self.tail = shape.params - sum(self.layers) - self.embedding  # the unit of the output layer
        self.first = self.tail if shape.tied else self.embedding  # the unit that is gathered first, and reduced last
        self._received = (job.groups - 1) / job.groups

    def exchange(self, numbers: float, gathers: int, reduces: int) -> Exchange:
        """Return what it takes to gather parameters, and reduce their gradients: through buffers, with a copy each."""
        g, r = self.gathered, self.reduced
        received = self._received * numbers * (gathers * g + reduces * r)
        return Exchange(received, 0.0, numbers * (2 * gathers * g + reduces * (g + r)))

    def exchanging(self, ranks: Ranks) -> Ranks:
        """Return a GPU with the exchanges of a step: nothing runs beside the first gathers, nor beside the last sum."""
        mean = sum(self.layers) / len(self.layers)
        tail, embedding = self.exchange(self.tail, 1, 1), self.exchange(self.embedding, 2, 1)
        before = self.exchange(self.first, 1, 1).beside + self.exchange(self.of_layers[0], 1, 0).beside
        others = Exchange(tail.beside + embedding.beside - before, before, tail.copied + embedding.copied)
        return replace(ranks, ahead=self.exchange(mean, 1, 0), behind=self.exchange(mean, 1, 1), others=others)


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
    own, n, size = _alone(_narrow(job)), job.groups, job.fsdp_layers
    units = _Units(own.job, own.job.element, job.element)
    g, r, layers, of_layers, tied = units.gathered, units.reduced, units.layers, units.of_layers, units.tied
    stays, last = g * units.tail * tied, len(layers) - 1

    def share(numbers: int) -> int:
        return -(-numbers * job.element // n)

    before, after = [units.embedding, *of_layers[:-1]], [*of_layers[1:], 0 if tied else units.tail]
    in_backward = [stays + g * (one + b) + r * a for one, b, a in zip(of_layers, before, after, strict=True)]
    done = [g * sum(layers[i + 1 : i - i % size + size]) for i in range(len(layers))]  # whole gradients of its unit
    head = stays + g * of_layers[-1]
    if not tied:  # its buffer is there as well; or its gradient, in two buffers, and the last layers' unit gathered
        head = max(2 * g * units.tail, r * units.tail + share(units.tail) + g * of_layers[-1])
    whole, begins = g * units.first, last - last % size
    found = replace(
        own,
        tokens=n * job.tokens,
        weights=share(units.params),
        states=-(-_alone(job).states // n),
        gradients=share(units.params),
        stepped=share(units.params),
        kept=r * units.params,
        layer_gradients=[0 if i % size else share(of_layers[i // size]) for i in range(len(layers))],
        head_gradient=own.head_gradient if tied else share(units.tail),
        forward=[stays + 2 * g * of_layers[i // size] for i in range(len(layers))],
        backward=[in_backward[i // size] + done[i] for i in range(len(layers))],
        whole_gradients=[g * one for one in layers],
        turns=(min(size, last), begins, max(0, begins - size)),
        head=head,
        embedding=2 * whole + r * of_layers[0],
        reduction=whole + r * units.first + share(units.first),
        to_come=0 if job.keep_gradients else share(units.first),
    )
    return units.exchanging(found)


def _zero3(job: Job) -> Ranks:
    """Return a GPU under DeepSpeed's ZeRO-3 in 16 bits.

    Parameters and gradients are 16-bit shards, in buffers that are never freed; besides there are float32 shards of the
    weights and the optimizer's states. What is gathered is DeepSpeed's choice, up to `LIVE` numbers, and counted as
    that. Gradients wait in a bucket, and are copied out of it to be reduced.
    """
    own, n = _alone(replace(_narrow(job), keep_gradients=True)), job.gpus
    g = own.job.element
    units = _Units(own.job, g, g)

    def share(numbers: int, size: int = g) -> int:
        return -(-numbers * size // n)

    live = g * (min(units.params, max(LIVE, units.tail, *units.layers)) + BUCKET)
    reduced = live + g * min(units.params, max(BUCKET, units.tail))
    found = replace(
        own,
        tokens=n * job.tokens,
        weights=share(units.params),
        states=share(units.params, 4 * (OPTIMIZERS[job.optimizer].states + 1)),
        gradients=share(units.params),
        stepped=share(units.params, 4),
        kept=share(units.params),
        layer_gradients=[*map(share, units.layers)],
        head_gradient=share(units.tail),
        forward=[live] * len(units.layers),
        backward=[reduced] * len(units.layers),
        head=reduced,
        embedding=reduced,
        step=g * BUCKET + 4 * min(SUB_GROUP, -(-units.params // n)),
        waits=ZERO3_WAITS * len(units.layers),
    )
    return units.exchanging(found)


def _tensor_parallel(job: Job) -> Ranks:
    """Return a GPU that has a share of the heads, of the MLPs and of the vocabulary; its group has the same sequences.

    Attention and MLP of each layer add up their outputs over the group, and in backward the gradients of their inputs:
    for queries, keys and values each, for a fused MLP once (docs/distributed.md, a patched model). Rows of the
    embedding are added up too; the output layer's exchanges are in docs/scale.md. The embedding's gradient, a DTensor,
    is that of the whole vocabulary for a moment. Sums of DTensors' gradients are not in place: neither its own with a
    tied output layer's, nor the output layer's with that of earlier passes. FSDP2 shards each GPU's share over the
    groups, and gathers and copies it where there is one group, too.
    """
    shape, n = job.shape, job.group_size
    cut = {name: getattr(shape, name) // n for name in ("heads", "kv_heads", "intermediate")}
    shared = replace(job, shape=replace(shape, vocab=-(-shape.vocab // n), **cut))
    own = _fsdp2(shared) if job.parallel == FSDP2 else _alone(shared)
    vocabulary, share = shape.vocab_params * own.job.element, own.job.shape.vocab_params * own.job.element
    summed = own.job.shape.vocab_params * job.element * (job.keep_gradients and not shape.tied)
    stream = job.tokens * shape.hidden * job.narrow
    one = 2 * (n - 1) / n * stream  # of an all-reduce
    inputs = (1 if shape.stacked else 3) + (1 if job.fused_mlp or shape.stacked else 2)
    gradient = 2 * (n - 1) / n * 4 * job.tokens * shape.hidden
    return replace(
        own,
        forward=[stream + gathered for gathered in own.forward],  # what is added up, beside the sum
        backward=[stream + gathered for gathered in own.backward],
        head=own.head + summed,
        ahead=own.ahead.and_also(before=2 * one),
        behind=own.behind.and_also(before=inputs * one),
        again=own.again.and_also(before=one),
        lookup=vocabulary + share * shape.tied,
        others=own.others.and_also(gradient, one + 12.0 * (n - 1) * job.tokens),
    )


def _context_parallel(job: Job) -> Ranks:
    """Return a GPU that has a share of each sequence; FSDP2 shards the model over all.

    By PyTorch's context_parallel: keys and values of all GPUs are gathered beside attention of the own ones. Their
    gradients go round the GPUs in float32, and there are three copies of them: the sum, what it is sent from, what
    comes. The output, and the gradient of queries, are summed in float32 too.
    """
    shape, n = job.shape, job.gpus
    own = replace(job, seq_len=-(-job.seq_len // n), context=n)
    found = _fsdp2(own)
    keys = 2 * own.tokens * shape.kv_width  # numbers of keys and values
    gathered, sums, round_trip = keys * own.narrow, 4 * own.tokens * shape.query_width, 4 * keys

    return replace(
        found,
        tokens=job.tokens,
        forward=[one + (n + 1) * gathered + sums for one in found.forward],
        backward=[one + n * gathered + 3 * round_trip + sums for one in found.backward],
        ahead=found.ahead.and_also((n - 1) * gathered),
        behind=found.behind.and_also((n - 1) * gathered + n * round_trip),
        # Of keep="attention" as well, whose recompute gathers nothing: an upper bound.
        again=found.again.and_also((n - 1) * gathered),
    )

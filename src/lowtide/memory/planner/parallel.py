"""Several GPUs: what each has of a model, what is whole for a moment, and what a step exchanges.

A gather of S bytes in all, or a reduce-scatter, brings S (n - 1) / n to each of n GPUs, and an all-reduce twice that.

Units of FSDP2 are as accelerate, and so ``lowtide train --parallel fsdp2``, makes them: one for each layer; one for the
embedding; one for the last norm and the output layer, with the embedding where it is tied, which stays gathered from
its forward to its backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.optimizers import CP, FSDP2, OPTIMIZERS, TP, ZERO3

# Share of an exchange's time that it takes from the GEMMs it runs beside, whose multiprocessors it uses. Fitted to the
# steps of two GPUs in benchmarks/results, 2026-11-21-scaling-16384-h200.
SLOWS = 0.8
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
    step: int = 0  # held in the optimizer's step alone
    ahead: Exchange = NOTHING  # of a layer's forward
    behind: Exchange = NOTHING  # of its backward
    again: Exchange = NOTHING  # of its recompute
    others: Exchange = NOTHING  # of everything but the layers

    def seconds(self, one: Exchange) -> tuple[float, float]:
        """Return the seconds of an exchange that run beside the work, and those that it waits."""
        link = self.job.link_rate
        return one.beside / link, one.before / link + one.copied / self.job.gpu.bandwidth


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    return (
        {FSDP2: _fsdp2, TP: _tensor_parallel, CP: _context_parallel, ZERO3: _zero3}[job.parallel](job)
        if job.gpus > 1
        else _alone(job)
    )


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
        self.tail = shape.params - sum(self.layers) - self.embedding  # the unit of the output layer
        self.first = self.tail if shape.tied else self.embedding  # the unit that is gathered first, and reduced last
        self._received = (job.gpus - 1) / job.gpus

    def exchange(self, numbers: float, gathers: int, reduces: int) -> Exchange:
        """Return what it takes to gather parameters, and reduce their gradients: through buffers, with a copy each."""
        g, r = self.gathered, self.reduced
        received = self._received * numbers * (gathers * g + reduces * r)
        return Exchange(received, 0.0, numbers * (2 * gathers * g + reduces * (g + r)))

    def exchanging(self, ranks: Ranks) -> Ranks:
        """Return a GPU with the exchanges of a step: nothing runs beside the first gathers, nor beside the last sum."""
        mean = sum(self.layers) / len(self.layers)
        tail, embedding = self.exchange(self.tail, 1, 1), self.exchange(self.embedding, 2, 1)
        before = self.exchange(self.first, 1, 1).beside + self.exchange(self.layers[0], 1, 0).beside
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
    own, n = _alone(_narrow(job)), job.gpus
    units = _Units(own.job, own.job.element, job.element)
    g, r, layers, tied, last = units.gathered, units.reduced, units.layers, units.tied, len(units.layers) - 1
    stays = g * units.tail * tied

    def share(numbers: int) -> int:
        return -(-numbers * job.element // n)

    before, after = [units.embedding, *layers[:-1]], [*layers[1:], 0 if tied else units.tail]
    head = stays + g * layers[-1]
    if not tied:  # its buffer is there as well; or its gradient, in two buffers, and the last layer's gathered
        head = max(2 * g * units.tail, r * units.tail + share(units.tail) + g * layers[-1])
    whole = g * units.first
    found = replace(
        own,
        tokens=n * job.tokens,
        weights=share(units.params),
        states=-(-_alone(job).states // n),
        gradients=share(units.params),
        stepped=share(units.params),
        kept=r * units.params,
        layer_gradients=[*map(share, layers)],
        head_gradient=own.head_gradient if tied else share(units.tail),
        forward=[stays + 2 * g * one for one in layers],
        backward=[stays + g * (one + b) + r * a for one, b, a in zip(layers, before, after, strict=True)],
        whole_gradients=[g * one for one in layers],
        turns=(min(1, last), max(0, last - 1)),
        head=head,
        embedding=2 * whole + r * layers[0],
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
    )
    return units.exchanging(found)


def _tensor_parallel(job: Job) -> Ranks:
    """Return a GPU that has a share of the heads, of the MLPs and of the vocabulary; all have the same sequences.

    Attention and MLP of each layer add up their outputs over the GPUs, and in backward the gradients of their inputs:
    for queries, keys and values each, for a fused MLP once (docs/distributed.md, a patched model). Rows of the
    embedding are added up too; the output layer's exchanges are in docs/scale.md.
    """
    shape, n = job.shape, job.gpus
    cut = {name: getattr(shape, name) // n for name in ("heads", "kv_heads", "intermediate")}
    own = _alone(replace(job, shape=replace(shape, vocab=-(-shape.vocab // n), **cut)))
    stream = job.tokens * shape.hidden * job.narrow
    one = 2 * (n - 1) / n * stream  # of an all-reduce
    inputs = (1 if shape.stacked else 3) + (1 if job.fused_mlp or shape.stacked else 2)
    gradient = 2 * (n - 1) / n * 4 * job.tokens * shape.hidden
    return replace(
        own,
        forward=[stream] * shape.layers,  # what is added up, beside the sum
        backward=[stream] * shape.layers,
        ahead=Exchange(0.0, 2 * one),
        behind=Exchange(0.0, inputs * one),
        again=Exchange(0.0, one),
        others=Exchange(gradient, one + 12.0 * (n - 1) * job.tokens),
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

    def with_ring(one: Exchange, more: int) -> Exchange:
        return one._replace(beside=one.beside + more)

    return replace(
        found,
        tokens=job.tokens,
        forward=[one + (n + 1) * gathered + sums for one in found.forward],
        backward=[one + n * gathered + 3 * round_trip + sums for one in found.backward],
        ahead=with_ring(found.ahead, (n - 1) * gathered),
        behind=with_ring(found.behind, (n - 1) * gathered + n * round_trip),
        # Of keep="attention" as well, whose recompute gathers nothing: an upper bound.
        again=with_ring(found.again, (n - 1) * gathered),
    )


def check_parallel(job: Job, host_bytes: int) -> None:
    """Check that a step of several GPUs can be planned.

    Raises:
        ArgumentValueError: It has a part that is planned for one GPU alone, or sizes that cannot be shared out.
    """
    if job.gpus == 1:
        return
    shape, way = job.shape, job.parallel
    others = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.shards)
    alone: list[tuple[str, bool, Any, str]] = [
        ("host_gib", host_bytes > 0, f"{host_bytes / 2**30:g}", "0: offloading is planned for one GPU alone"),
        ("adapters", job.adapters is not None, job.adapters, "None: adapters are planned for one GPU alone"),
        ("optimizer", not OPTIMIZERS[job.optimizer].shards, repr(job.optimizer), f"one that shards: {others}"),
    ]
    if way == TP:
        sizes = {"attention heads": shape.heads, "key and value heads": shape.kv_heads}
        sizes["numbers of intermediate_size"] = shape.intermediate
        alone += [
            ("parallel", shape.traced is not None, f"'tp' for {shape.model_type}", "fsdp2 or zero3 for traced layers"),
            ("parallel", shape.experts > 0, "'tp'", "fsdp2 or zero3 for a mixture of experts"),
        ]
        alone += [
            ("gpus", size % job.gpus > 0, job.gpus, f"a divisor of the model's {size:,} {name}")
            for name, size in sizes.items()
        ]
    if way == CP:
        alone += [
            (
                "parallel",
                any(shape.windows) or shape.traced is not None,
                f"'cp' for {shape.model_type}",
                "fsdp2 or zero3: the ring is planned for full attention of layers that are not traced",
            ),
            ("attention_mask", job.attention_mask, True, "False: the ring takes none"),
            ("seq_len", job.seq_len % (2 * job.gpus) > 0, f"{job.seq_len}", f"a multiple of {2 * job.gpus}"),
        ]
    if way == ZERO3:
        alone += [
            (
                "dtype",
                job.element > 2 and not job.autocast,
                str(job.dtype).removeprefix("torch."),
                "bfloat16 or float16, or autocast: DeepSpeed's float32 training is not planned",
            )
        ]
    for name, refused, got, expected in alone:
        if refused:
            hint = f"For {job.gpus} GPUs by {way}, leave it out or change it; or plan for one GPU."
            raise ArgumentValueError(message(name, expected, f"{got}", hint))


def notes_on(job: Job) -> tuple[str, ...]:
    """Return the notes on a plan of several GPUs."""
    if job.gpus == 1:
        return ()
    how = "--link 50GB, in Python link='50GB', plans a network of 400 Gb/s"
    where = f"; assumes {job.gpus} GPUs in one host: {how}" if job.link is None else ""
    notes = [f"exchanges at {job.link_rate / 1e9:.0f} GB/s each way{where}"]
    if job.parallel == FSDP2:
        notes.append(
            "units of FSDP2: each layer; the embedding; the last norm and the output layer, which stay gathered"
        )
    if job.parallel == ZERO3:
        notes.append(
            f"ZeRO-3 with DeepSpeed's defaults: weights and states in float32 besides, up to {LIVE:,} gathered"
            f" parameters, a bucket of {BUCKET:,} gradients: an upper bound"
        )
    if job.parallel == CP:
        notes.append(
            "context parallelism by PyTorch's, whose exchanges are taken to hide behind attention: not measured"
        )
    if job.parallel == TP:
        notes.append(
            "tensor parallelism: exchanges hide behind nothing but in the output layer; times were not measured"
        )
    return tuple(notes)


def lines_of(job: Job) -> list[str]:
    """Return the Python that shards a model, once it is patched and has its policies."""
    if job.gpus == 1:
        return []
    if job.parallel not in (FSDP2, CP):
        runs = {ZERO3: "deepspeed.initialize(model=model, ...), or lowtide train --parallel zero3"}
        runs[TP] = f"first load the model with distributed_config=DistributedConfig(tp_size={job.gpus})"
        return [f"# in each of {job.gpus} processes: {runs[job.parallel]}"]
    kwargs, tied = "", job.shape.tied
    without = ", or without these lines lowtide train --parallel fsdp2:"
    lines = [
        f"# in each of {job.gpus} processes{without if job.parallel == FSDP2 else ', steps inside context_parallel:'}"
    ]
    lines.append("from torch.distributed.fsdp import fully_shard")
    if job.autocast:
        lines[-1] = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
        lines += ["import torch", "precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)"]
        kwargs = ", mp_policy=precision"
    lines += ["for layer in model.get_decoder().layers:", f"    fully_shard(layer{kwargs})"]
    if not tied:
        lines.append(f"fully_shard(model.get_input_embeddings(){kwargs})")
        lines.append(f"fully_shard(model.get_output_embeddings(), reshard_after_forward=False{kwargs})")
    return [*lines, f"fully_shard(model{kwargs})"]

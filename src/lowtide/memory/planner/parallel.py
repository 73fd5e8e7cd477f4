"""Several GPUs: what each has of a model, what is whole for a moment, and what a step exchanges.

`Ranks` is one GPU, which has everything and exchanges nothing; its children are the ways of `_WAYS`. Each says what one
GPU computes (a `Job` of its own), what it holds besides, and what it receives from the others: a gather of S bytes in
all, or a reduce-scatter, takes S (n - 1) / n from n GPUs, and an all-reduce twice that.

Units of FSDP2 are as accelerate, and so ``lowtide train --parallel fsdp2``, makes them: one for each layer; one for the
embedding; one for the last norm and the output layer, with the embedding where it is tied, which stays gathered from
its forward to its backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.optimizers import FSDP2, OPTIMIZERS, TP, ZERO3
from lowtide.memory.policy import ActivationPolicy

# Share of an exchange's time that it takes from the GEMMs it runs beside, whose multiprocessors it uses. Fitted to the
# steps of two GPUs in benchmarks/results, 2026-11-21-scaling-16384-h200.
SLOWS = 0.8
# DeepSpeed's defaults, in numbers: stage3_max_live_parameters, reduce_bucket_size, sub_group_size.
LIVE, BUCKET, SUB_GROUP = 10**9, 5 * 10**8, 10**9


class Exchange(NamedTuple):
    """What a GPU receives from the others during some work, and what that takes."""

    beside: float = 0.0  # bytes that come while the work runs
    before: float = 0.0  # bytes that the work waits for
    copied: float = 0.0  # bytes that are read and written to pack and unpack them

    @property
    def bytes(self) -> float:
        """Return the bytes received."""
        return self.beside + self.before


class Ranks:
    """One GPU.

    Attributes:
        job: What one GPU computes.
        tokens: Of a step, on all GPUs.
        turns: Layers besides the first and last of a policy, in whose backward the most may be gathered.
    """

    turns: tuple[int, ...] = ()

    def __init__(self, job: Job) -> None:
        self.whole = self.job = job
        self.tokens = job.tokens

    def stored(self, numbers: int) -> int:
        """Return the bytes of so many of the model's parameters on one GPU; their gradients take as many."""
        return numbers * self.job.element

    @property
    def weights(self) -> int:
        """Return the bytes of the model's parameters, without adapters."""
        return self.job.weight_bytes

    def states(self, numbers: int, element: int) -> int:
        """Return the bytes of the optimizer's states for so many trained parameters."""
        kind = OPTIMIZERS[self.job.optimizer]
        return int(numbers * (kind.states * element + kind.bytes_each))

    @property
    def head_gradient(self) -> int:
        """Return the bytes of the output layer's gradient during the layers' backward."""
        return self.job.shape.vocab_params * self.job.element

    def forward(self, layer: int) -> int:
        """Return the bytes that stand gathered, or to be exchanged, while a layer's forward runs."""
        del layer
        return 0

    def backward(self, layer: int) -> int:
        """Return the same while its backward runs."""
        del layer
        return 0

    def new_gradients(self, layer: int) -> int:
        """Return the bytes of a layer's whole gradients at the end of its backward, where these go elsewhere then."""
        del layer
        return 0

    @property
    def head(self) -> int:
        """Return the bytes that stand gathered, or to be exchanged, in the output layer and its loss."""
        return 0

    def embedding(self, temporaries: int) -> tuple[int, int]:
        """Return the same in the embedding's backward, beside its temporaries, and the gradients still to come."""
        del temporaries
        return 0, 0

    @property
    def step(self) -> int:
        """Return the bytes that the optimizer's step holds besides."""
        return 0

    def layer(self, policy: ActivationPolicy) -> tuple[Exchange, Exchange]:
        """Return what is exchanged for a layer in forward, and in backward."""
        del policy
        return Exchange(), Exchange()

    @property
    def others(self) -> Exchange:
        """Return what is exchanged for everything but the layers."""
        return Exchange()

    def seconds(self, one: Exchange) -> tuple[float, float]:
        """Return the seconds of an exchange that run beside the work, and those that it waits."""
        link, bandwidth = self.whole.link_rate, self.job.gpu.bandwidth
        return one.beside / link, one.before / link + one.copied / bandwidth


class Sharded(Ranks):
    """Parameters, gradients and states are sharded; each GPU has its own sequences."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        # Under autocast parameters are float32, and cast before they are gathered: the stream is in 16 bits as well.
        self.job = replace(job, dtype=torch.bfloat16, autocast=False) if job.autocast else job
        shape, n = self.job.shape, job.gpus
        self.tokens = n * job.tokens
        self.layers, self.tied = shape.params_of_layers, shape.tied
        self.vocab = 0 if shape.tied else shape.vocab_params  # numbers of the embedding's unit
        self.tail = shape.params - sum(self.layers) - self.vocab  # of the output layer's
        self.gathered, self.reduced = self.job.element, job.element  # bytes of a number
        self.received = (n - 1) / n  # of what is gathered, or reduced
        last = len(self.layers) - 1
        self.turns = (min(1, last), max(0, last - 1))

    def stored(self, numbers: int) -> int:
        return -(-numbers * self.whole.element // self.whole.gpus)

    @property
    def weights(self) -> int:
        return self.stored(self.job.shape.params)

    def states(self, numbers: int, element: int) -> int:
        return -(-super().states(numbers, element) // self.whole.gpus)

    def layer(self, policy: ActivationPolicy) -> tuple[Exchange, Exchange]:
        del policy
        mean = sum(self.layers) / len(self.layers)
        return self._exchange(mean, 1, 0), self._exchange(mean, 1, 1)

    def _exchange(self, numbers: float, gathers: int, reduces: int) -> Exchange:
        """Return what it takes to gather parameters, and to reduce their gradients: copied out of, and into, a buffer."""
        g, r = self.gathered, self.reduced
        bytes_in_all = numbers * (gathers * g + reduces * r)
        return Exchange(self.received * bytes_in_all, 0.0, numbers * (2 * gathers * g + reduces * (g + r)))

    @property
    def others(self) -> Exchange:
        """The first gathers come before anything runs, and the last reduction after everything has."""
        tail, vocab = self._exchange(self.tail, 1, 1), self._exchange(self.vocab, 2, 1)
        first, last = (self.tail, self.tail) if self.tied else (self.vocab, self.vocab)
        waited = self.received * ((first + self.layers[0]) * self.gathered + last * self.reduced)
        both = tail.beside + vocab.beside
        return Exchange(both - waited, waited, tail.copied + vocab.copied)


class Fsdp2(Sharded):
    """PyTorch's fully_shard.

    A unit is gathered into a buffer and copied out of it. In forward the buffer stays until the next unit's is copied
    out; in backward it goes at once, and the buffer of the unit before is there already. Gradients are whole until the
    end of the unit's backward, are copied into a buffer in the dtype of the reduction, and that stays until the end of
    the next unit's backward.
    """

    @property
    def head_gradient(self) -> int:
        return super().head_gradient if self.tied else self.stored(self.tail)

    def forward(self, layer: int) -> int:
        return self.gathered * (2 * self.layers[layer] + self.tail * self.tied)

    def backward(self, layer: int) -> int:
        last = len(self.layers) - 1
        before = self.layers[layer - 1] if layer else self.vocab
        after = self.layers[layer + 1] if layer < last else self.tail * (not self.tied)
        return self.gathered * (self.layers[layer] + before + self.tail * self.tied) + self.reduced * after

    def new_gradients(self, layer: int) -> int:
        return self.gathered * self.layers[layer]

    @property
    def head(self) -> int:
        g, r, last = self.gathered, self.reduced, self.layers[-1]
        if self.tied:
            return g * (self.tail + last)
        return max(2 * g * self.tail, r * self.tail + self.stored(self.tail) + g * last)

    def embedding(self, temporaries: int) -> tuple[int, int]:
        numbers = self.tail if self.tied else self.vocab
        whole, waiting = self.gathered * numbers, self.reduced * self.layers[0]
        reduction = whole + self.reduced * numbers + self.stored(numbers)
        return max(2 * whole + waiting, reduction - temporaries), self.stored(numbers)


class Zero3(Sharded):
    """DeepSpeed's ZeRO-3 in 16 bits: 16-bit shards of parameters and gradients, float32 ones of weights and states.

    What is gathered is DeepSpeed's choice, up to `LIVE` numbers, and counted as that; gradients wait in a bucket.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.job = replace(self.job, keep_gradients=True)  # in a buffer that is never freed
        self.reduced = self.gathered
        largest = max(*self.layers, self.tail)
        live = min(self.job.shape.params, max(LIVE, largest))
        self._forward = self.gathered * (live + BUCKET)
        self._backward = self._forward + self.gathered * min(self.job.shape.params, max(BUCKET, self.tail))

    def stored(self, numbers: int) -> int:
        return -(-numbers * self.gathered // self.whole.gpus)

    def states(self, numbers: int, element: int) -> int:
        """Return the bytes of the states, all in float32, and of the float32 weights that they are of."""
        del element
        kind = OPTIMIZERS[self.job.optimizer]
        return -(-4 * numbers * (kind.states + 1) // self.whole.gpus)

    @property
    def head_gradient(self) -> int:
        return self.stored(self.tail)

    def forward(self, layer: int) -> int:
        del layer
        return self._forward

    def backward(self, layer: int) -> int:
        del layer
        return self._backward

    @property
    def head(self) -> int:
        return self._backward

    def embedding(self, temporaries: int) -> tuple[int, int]:
        del temporaries
        return self._backward, 0

    @property
    def step(self) -> int:
        """Return the bytes of the bucket, and of the float32 gradients of one group of parameters."""
        return self.gathered * BUCKET + 4 * min(SUB_GROUP, -(-self.job.shape.params // self.whole.gpus))


class Tensor(Ranks):
    """Tensor parallelism: heads, MLPs and the vocabulary are sharded; all GPUs have the same sequences.

    Attention and MLP of each layer add up their outputs over the GPUs, and in backward the gradients of their inputs:
    for queries, keys and values each, for a fused MLP once (docs/distributed.md, a patched model).
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        shape, n = job.shape, job.gpus
        cut = {name: getattr(shape, name) // n for name in ("heads", "kv_heads", "intermediate")}
        self.job = replace(job, shape=replace(shape, vocab=-(-shape.vocab // n), head_dim=shape.head_dim, **cut))
        self._stream = self.job.tokens * shape.hidden * self.job.narrow
        self._received = 2 * (n - 1) / n * self._stream  # of one sum

    def forward(self, layer: int) -> int:
        """Return the bytes of an output of which the GPUs have their summands."""
        del layer
        return self._stream

    def backward(self, layer: int) -> int:
        del layer
        return self._stream

    def layer(self, policy: ActivationPolicy) -> tuple[Exchange, Exchange]:
        attention = 1 if self.job.shape.stacked else 3
        mlp = 1 if self.job.fused_mlp or self.job.shape.stacked else 2
        again = policy.keep != "all"  # attention's output
        return Exchange(0.0, 2 * self._received), Exchange(0.0, (attention + mlp + again) * self._received)

    @property
    def others(self) -> Exchange:
        """The embedding's rows, and the output layer's exchanges (docs/scale.md)."""
        n, tokens = self.whole.gpus, self.job.tokens
        gradient = 2 * (n - 1) / n * 4 * tokens * self.job.shape.hidden
        return Exchange(gradient, self._received + 12.0 * (n - 1) * tokens)


_WAYS: dict[str, type[Ranks]] = {FSDP2: Fsdp2, TP: Tensor, ZERO3: Zero3}


def ranks_of(job: Job) -> Ranks:
    """Return what one GPU of a job has."""
    return _WAYS[job.parallel](job) if job.gpus > 1 else Ranks(job)


def check_parallel(job: Job, host_bytes: int) -> None:
    """Check that a step of several GPUs can be planned.

    Raises:
        ArgumentValueError: It has a part that is planned for one GPU alone, or sizes that cannot be shared out.
    """
    if job.gpus == 1:
        return
    shape, way = job.shape, job.parallel
    alone: list[tuple[str, bool, Any, str]] = [
        ("host_gib", host_bytes > 0, f"{host_bytes / 2**30:g}", "0: offloading is planned for one GPU alone"),
        ("adapters", job.adapters is not None, job.adapters, "None: adapters are planned for one GPU alone"),
        (
            "optimizer",
            not OPTIMIZERS[job.optimizer].shards,
            repr(job.optimizer),
            f"one that shards under {way}: {_others()}",
        ),
        (
            "keep_gradients",
            job.keep_gradients and way == FSDP2,
            True,
            "False: FSDP2's accumulated gradients, whole on each GPU, are not planned",
        ),
    ]
    if way == TP:
        alone += [
            ("parallel", shape.traced is not None, f"'tp' for {shape.model_type}", "fsdp2 or zero3 for traced layers"),
            ("parallel", shape.experts > 0, "'tp'", "fsdp2 or zero3 for a mixture of experts"),
        ]
        alone += [
            ("gpus", size % job.gpus > 0, job.gpus, f"a divisor of the model's {size:,} {name.replace('_', ' ')}")
            for name, size in _divided(job).items()
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
    if job.parallel == TP:
        notes.append(
            "tensor parallelism: exchanges hide behind nothing but in the output layer; times were not measured"
        )
    return tuple(notes)


def lines_of(job: Job) -> list[str]:
    """Return the Python that shards a model, once it is patched and has its policies."""
    if job.gpus == 1:
        return []
    if job.parallel != FSDP2:
        runs = {ZERO3: "deepspeed.initialize(model=model, ...), or lowtide train --parallel zero3"}
        runs[TP] = f"first load the model with distributed_config=DistributedConfig(tp_size={job.gpus})"
        return [f"# in each of {job.gpus} processes: {runs[job.parallel]}"]
    kwargs, tied = "", job.shape.tied
    lines = [f"# in each of {job.gpus} processes, or without these lines lowtide train --parallel fsdp2:"]
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


def _divided(job: Job) -> dict[str, int]:
    shape = job.shape
    return {
        "attention_heads": shape.heads,
        "key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
    }


def _others() -> str:
    return ", ".join(name for name, kind in OPTIMIZERS.items() if kind.shards)

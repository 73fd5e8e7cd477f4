"""The ways in which several GPUs share a step: which can be planned, what is said of each, and how to run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.optimizers import CP, FSDP2, OPTIMIZERS, TP, ZERO3
from lowtide.memory.planner.parallel import BUCKET, LIVE

_UNITS = (FSDP2, CP)  # ways with units of FSDP2


def ways_of(job: Job) -> list[Job]:
    """Return a step of several GPUs in each way that is planned, those by tensor parallelism in groups of each size."""
    sizes = [size for size in range(2, job.gpus) if job.gpus % size == 0]
    ways = [(FSDP2, 1), *((FSDP2, size) for size in sizes), (TP, 1), (CP, 1), (ZERO3, 1)]
    together = {way: job.fsdp_layers if way in _UNITS else 1 for way, _ in ways}
    return [replace(job, parallel=way, tensor_parallel=size, fsdp_layers=together[way]) for way, size in ways]


def name_of(job: Job) -> str:
    """Return the name of the way in which several GPUs share a step."""
    over_groups = f" x tp {job.tensor_parallel}" if job.parallel == FSDP2 and job.tensor_parallel > 1 else ""
    return f"{job.parallel}{over_groups}" + (f", {job.fsdp_layers} layers" if job.fsdp_layers > 1 else "")


class Refusal(NamedTuple):
    """Why a step of several GPUs is not planned: an argument, what it has to be, and what it is."""

    name: str
    expected: str
    got: str


def refusal_of(job: Job, host_bytes: int) -> Refusal | None:
    """Return why a step of several GPUs cannot be planned.

    It has a part that is planned for one GPU alone, or sizes that cannot be shared out.
    """
    if job.gpus == 1:
        return None
    shape, way, size, given = job.shape, job.parallel, job.group_size, job.tensor_parallel
    others = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.shards)
    alone: list[tuple[str, bool, Any, str]] = [
        ("host_gib", host_bytes > 0, f"{host_bytes / 2**30:g}", "0: offloading is planned for one GPU alone"),
        ("adapters", job.adapters is not None, job.adapters, "None: adapters are planned for one GPU alone"),
        ("optimizer", not OPTIMIZERS[job.optimizer].shards, repr(job.optimizer), f"one that shards: {others}"),
    ]
    if given > 1:
        alone += [
            ("tensor_parallel", way not in (FSDP2, TP), given, f"1 beside {way}: FSDP2 alone shards over groups"),
            ("tensor_parallel", way == TP and given != job.gpus, given, f"{job.gpus}, or fsdp2 beside it"),
        ]
    if job.fsdp_layers > 1 and way not in _UNITS:
        alone += [("fsdp_layers", True, job.fsdp_layers, f"1 for {way}, which has no units of FSDP2")]
    if size > 1:
        sizes = {"attention heads": shape.heads, "key and value heads": shape.kv_heads}
        sizes["numbers of intermediate_size"] = shape.intermediate
        kind, alone_fits = repr(name_of(job)), "fsdp2 or zero3 alone for"
        alone += [
            ("parallel", shape.traced is not None, f"{kind} for {shape.model_type}", f"{alone_fits} traced layers"),
            ("parallel", shape.experts > 0, kind, f"{alone_fits} a mixture of experts"),
        ]
        argument = "gpus" if way == TP else "tensor_parallel"
        alone += [
            (argument, number % size > 0, size, f"a divisor of the model's {number:,} {name}")
            for name, number in sizes.items()
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
    return next((Refusal(name, expected, f"{got}") for name, refused, got, expected in alone if refused), None)


def check_parallel(job: Job, host_bytes: int) -> None:
    """Check that a step of several GPUs can be planned.

    Raises:
        ArgumentValueError: It cannot: see `refusal_of`.
    """
    if refusal := refusal_of(job, host_bytes):
        hint = f"For {job.gpus} GPUs by {name_of(job)}, leave it out or change it; or plan for one GPU."
        raise ArgumentValueError(message(*refusal, hint))


def notes_on(job: Job) -> tuple[str, ...]:
    """Return the notes on a plan of several GPUs."""
    if job.gpus == 1:
        return ()
    how = "--link 50GB, in Python link='50GB', plans a network of 400 Gb/s"
    where = f"; assumes {job.gpus} GPUs in one host: {how}" if job.link is None else ""
    notes = [f"exchanges at {job.link_rate / 1e9:.0f} GB/s each way{where}"]
    if job.parallel == FSDP2:
        each = "each layer" if job.fsdp_layers == 1 else f"every {job.fsdp_layers} layers"
        notes.append(f"units of FSDP2: {each}; the embedding; the last norm and the output layer, which stay gathered")
    if job.parallel == ZERO3:
        notes.append(
            f"ZeRO-3 with DeepSpeed's defaults: weights and states in float32 besides, up to {LIVE:,} gathered"
            f" parameters, a bucket of {BUCKET:,} gradients: an upper bound; what a layer waits is that of"
            " two measured steps"
        )
    if job.parallel == CP:
        notes.append(
            "context parallelism by PyTorch's, whose exchanges are taken to hide behind attention: not measured"
        )
    if job.group_size > 1:
        notes.append(
            "tensor parallelism: exchanges hide behind nothing but in the output layer; what the host takes for a layer"
            " is that of one measured step"
        )
    return tuple(notes)


def lines_of(job: Job) -> list[str]:
    """Return the Python that shards a model, once it is patched and has its policies."""
    if job.gpus == 1:
        return []
    size = job.fsdp_layers
    together = f" --fsdp-layers {size}" if size > 1 else ""
    if job.tensor_parallel > 1 or job.parallel not in _UNITS:
        runs = {ZERO3: "deepspeed.initialize(model=model, ...), or lowtide train --parallel zero3"}
        runs[TP] = f"first load the model with distributed_config=DistributedConfig(tp_size={job.gpus})"
        runs[FSDP2] = f"lowtide train --parallel fsdp2 --tensor-parallel {job.tensor_parallel}{together}"
        return [f"# in each of {job.gpus} processes: {runs[job.parallel]}"]
    kwargs, tied = "", job.shape.tied
    without = f", or without these lines lowtide train --parallel fsdp2{together}:"
    lines = [
        f"# in each of {job.gpus} processes{without if job.parallel == FSDP2 else ', steps inside context_parallel:'}"
    ]
    lines.append("from torch.distributed.fsdp import fully_shard")
    if job.autocast:
        lines[-1] = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
        lines += ["import torch", "precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)"]
        kwargs = ", mp_policy=precision"
    if size == 1:
        lines += ["for layer in model.get_decoder().layers:", f"    fully_shard(layer{kwargs})"]
    else:
        lines += ["layers = [*model.get_decoder().layers]", f"for i in range(0, len(layers), {size}):"]
        lines.append(f"    fully_shard(layers[i : i + {size}]{kwargs})")
    if not tied:
        lines.append(f"fully_shard(model.get_input_embeddings(){kwargs})")
        lines.append(f"fully_shard(model.get_output_embeddings(), reshard_after_forward=False{kwargs})")
    return [*lines, f"fully_shard(model{kwargs})"]

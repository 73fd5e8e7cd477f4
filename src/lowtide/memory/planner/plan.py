"""`plan_memory`: what fits in a budget of memory, and the fastest way to spend it, by arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lowtide.arguments import check_flag, check_name
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.units import gib, gib_text
from lowtide.memory.pinned import budget_bytes
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.gpus import Gpu, find_gpu
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.optimizers import DTYPES, FSDP2, OPTIMIZERS, PARALLEL
from lowtide.memory.planner.report import MemoryPlan
from lowtide.memory.planner.search import Candidate, Search
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.planner.sharding import check_sharding, notes_on
from lowtide.memory.policy import check_count

CLOSE = 0.8  # of a GPU's memory: PyTorch's allocator held up to a fifth more than tensors took


def plan_memory(
    model_or_config: Any,
    seq_len: int,
    batch_size: int,
    budget_gib: float | str | None = None,
    host_gib: float | str = 0,
    device: str | torch.device | Gpu | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    optimizer: str = "adamw",
    autocast: bool = False,
    keep_gradients: bool = False,
    options: HeadOptions | None = None,
    adapters: int | Adapters | None = None,
    attention_mask: bool = False,
    fused_mlp: bool = True,
    compile_layers: bool = False,
    offload_states: Literal["auto", False] = "auto",
    gpus: int = 1,
    parallel: str = FSDP2,
    link: float | str | None = None,
) -> MemoryPlan:
    """Choose what each layer saves for backward, so that a training step is the fastest that fits in a budget.

    Nothing runs on a GPU, no weights are needed: transformers builds the model on the meta device, `lowtide.patch`
    patches it, and one layer of each kind runs there, which shows what it saves, allocates and computes. The peak is
    the largest of what is live at the end of forward, in the head, in each layer's backward, in the embedding's and in
    the optimizer's step: parameters, gradients as far as they exist, optimizer states, what the layers save, and the
    phase's own temporaries. The time is that of the GEMMs and of attention at the GPU's rates, of the bytes that the
    other operations read and write, of transfers where they are not hidden, and never less than what the host takes to
    launch it.

    It describes full training of a decoder-only model that `lowtide.patch` has patched, ``use_cache`` off, with
    attention that stores no scores (flash attention), on one GPU or several.

    Args:
        model_or_config: A `transformers` model (on any device, the meta device too) or config, a dictionary like a
            config.json's, or the path of one. With a ``quantization_config`` of bitsandbytes in 4 bits the layers'
            linear layers are planned so: frozen, with ``adapters``.
        seq_len: Tokens of a sequence.
        batch_size: Sequences per step, of each GPU.
        budget_gib: GPU memory for tensors, in GiB, or as a text with a unit: ``"40GiB"``, ``"40GB"``; at most the GPU's
            memory less 2% and at least 1 GiB, which the allocator needs. None: 93% of its memory, if that is less.
        host_gib: Pinned host memory for offloaded layers and optimizer states, likewise; 0: nothing is offloaded.
        device: The GPU: a name such as ``"h100"`` or ``"rtx4090"``, or a `Gpu`; ``"cuda"``: the one at hand; None: the
            one at hand, without a GPU an H100. A GPU that the table lacks has its own memory and the rates of an H100.
        dtype: Of parameters, activations, gradients and optimizer states: ``"bfloat16"``, ``"float16"``,
            ``"float32"`` or the `torch.dtype`. None: the model's own, bfloat16 for a config, float32 with ``autocast``.
        optimizer: ``"adamw"`` (fused), ``"adamw-foreach"``, ``"adamw-8bit"``, ``"sgd"`` or ``"sgd-momentum"``.
        autocast: Whether parameters, gradients and states are float32 and GEMMs run in bfloat16 (``torch.autocast``).
        keep_gradients: Whether gradients outlive a backward pass, as where they are accumulated over several.
        options: How the loss is to run, as for `lowtide.patch`.
        adapters: With LoRA, its `Adapters`, or how many float32 parameters they have: the model is frozen then, and
            only they have gradients and optimizer states. Given as a number, what they save and compute is not
            counted. With 16-bit weights the GEMMs run under autocast. None: no adapters.
        attention_mask: Whether attention takes a [T, T] mask for each sequence, as
            ``torch.nn.functional.scaled_dot_product_attention`` does where documents packed into one do not see each
            other: T^2 numbers of each sequence in each layer with ``keep="all"``, beside keys and values that are
            repeated for each query head.
        fused_mlp: False for ``lowtide.patch(model, mlp=False)``. Stock MLPs save twice as much, and have no levels.
        compile_layers: Whether each decoder layer is compiled by itself (``layer.compile(dynamic=False)``, after
            `apply_policy`). Layers that offload run in eager even so.
        offload_states: ``"auto"``: with ``host_gib``, as many optimizer states as make the step faster go to the host
            during forward and come back during backward (`lowtide.memory.offload_optimizer`), at most what travels
            without holding the layers up, or where that does not fit, after backward; False: none.
        gpus: How many GPUs share the step. The plan is that of one of them. Offloading, adapters and the 8-bit
            optimizer are planned for one GPU alone.
        parallel: With several, what shards parameters, gradients and optimizer states: ``"fsdp2"`` or ``"zero3"``
            (DeepSpeed, in 16 bits).
        link: What a GPU receives from the others per second, in GiB, or a text: ``"50GB"``. None: by NVLink where the
            GPU has it, else by PCIe, all GPUs in one host.

    Returns:
        MemoryPlan: print it for the table; ``policies`` is what `lowtide.memory.apply_policy` takes.

    Raises:
        ArgumentTypeError: An argument of a wrong type.
        ArgumentValueError: A value that is not allowed; a config that lacks a field or has one that cannot be planned;
            a budget in which nothing fits, with what is missing and what would help.
        UnsupportedError: ``device="cuda"`` without a GPU.

    Example:
        >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        ...           "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": True}
        >>> plan = plan_memory(config, seq_len=2048, batch_size=4, budget_gib=2)
        >>> len(plan.policies)
        4
    """
    for name, size in (("seq_len", seq_len), ("batch_size", batch_size)):
        check_count(name, size)
    flags = {"autocast": autocast, "keep_gradients": keep_gradients, "attention_mask": attention_mask}
    flags["compile_layers"] = compile_layers
    for name, flag in (*flags.items(), ("fused_mlp", fused_mlp)):
        check_flag(name, flag)
    if options is not None and not isinstance(options, HeadOptions):
        raise ArgumentTypeError(message("options", "a lowtide.HeadOptions or None", type(options).__name__))
    check_name("optimizer", optimizer, tuple(OPTIMIZERS))
    if adapters is not None and not isinstance(adapters, Adapters):
        check_count("adapters", adapters)
    if offload_states is not False and offload_states != "auto":
        raise ArgumentValueError(message("offload_states", "'auto' or False", f"{offload_states!r}"))
    check_count("gpus", gpus)
    check_name("parallel", parallel, PARALLEL)
    gpu = find_gpu(device)
    requested = gpu.default_budget_bytes
    if budget_gib is not None:
        requested = budget_bytes("budget_gib", budget_gib, above_0=True)
    host = budget_bytes("host_gib", host_gib)
    shape = read_shape(model_or_config)
    job = Job(
        shape=shape,
        seq_len=seq_len,
        batch_size=batch_size,
        gpu=gpu,
        dtype=_dtype(dtype, model_or_config, autocast),
        optimizer=optimizer,
        head=options,
        adapters=adapters,
        fused_mlp=fused_mlp,
        gpus=gpus,
        parallel=parallel,
        link=None if link is None else budget_bytes("link", link, above_0=True),
        **flags,
    )
    check_sharding(job, host)
    search = Search(job, host, offload_states=offload_states == "auto")
    costs, budget = search.costs, min(requested, gpu.most_bytes)
    chosen = search.fastest(budget)
    if chosen is None:
        raise _refusal(search, search.least(), budget, requested)
    rungs = *search.ladder, *(policy for policy in search.sparse if not policy.offload)
    return MemoryPlan(
        policies=chosen.policies,
        peak_bytes=chosen.peak,
        seconds=chosen.seconds,
        tokens_per_second=costs.ranks.tokens / chosen.seconds,
        phase=costs.peak(chosen.groups, chosen.states, late=chosen.late),
        phases=tuple(costs.phases(chosen.groups, chosen.states, late=chosen.late)),
        host_bytes=chosen.host,
        exchanged=costs.exchanged,
        budget_bytes=budget,
        requested_bytes=requested,
        host_budget_bytes=search.host_bytes,
        front=tuple(search.front),
        ladder=tuple(costs.layers[policy] for policy in rungs),
        offload_states=search.offload_states,
        job=job,
        chosen=chosen,
        notes=tuple(note for note, applies in _notes(costs.job, chosen).items() if applies) + notes_on(job),
    )


def _refusal(search: Search, least: Candidate, budget: int, requested: int) -> ArgumentValueError:
    """Return the error where nothing fits: how much is missing, and what would help."""
    job, costs = search.job, search.costs
    states = costs.weights + costs.all_gradients + costs.states
    others = [name for name, one in OPTIMIZERS.items() if name != job.optimizer and (job.gpus == 1 or one.shards)]
    lighter = [name for name in others if search.fits(budget, optimizer=name)]
    helps = [f"optimizer {' or '.join(lighter)} fits"] if lighter else []
    more = [job.gpus * 2**k for k in range(1, 11)] if job.gpus > 1 else []
    if enough := next((gpus for gpus in more if search.fits(budget, gpus=gpus)), None):
        helps.append(f"gpus={enough} fits")
    if states > budget:
        smaller = "take more GPUs"
        if job.gpus == 1 and (job.adapters is None or not job.shape.four_bit):
            packed = "put the frozen weights into 4 bits (quantization_config of bitsandbytes, --load-in-4bit)"
            smaller = f"{'train adapters (LoRA)' if job.adapters is None else packed}, or {smaller}"
        way_out = "" if lighter else f": {smaller}"
        helps.append(f"parameters, gradients and optimizer states alone take {gib_text(states)} GiB{way_out}")
    else:
        fits = {"batch_size": search.largest_batch(budget), "seq_len": search.longest_sequence(budget)}
        helps += [f"{name}={most} fits" for name, most in fits.items() if most]
    if not helps and (most := search.of(replace(job, batch_size=1)).longest_sequence(budget)):
        helps.append(f"batch_size=1 with seq_len={most} fits")
    roomy = search.of(job, 2**60 if job.gpus == 1 else 0).least()
    if roomy.host > search.host_bytes and roomy.peak <= budget:
        helps.append(f"host_gib={math.ceil(gib(roomy.host))} fits, with {roomy}")
    phase = costs.peak(least.groups, least.states, late=least.late)
    tokens = f"{job.batch_size} x {job.seq_len} tokens{f' by {job.parallel}' if job.gpus > 1 else ''}"
    expected = f"at least {gib_text(least.peak)} for {tokens} ({least}; peak in {phase})"
    usable = f", of which the {job.gpu.name} can use {gib_text(budget)}" if budget < requested else ""
    got = f"{gib_text(requested)}{usable}, {gib_text(least.peak - budget)} GiB too little"
    hint = f"What would help: {'; '.join(helps)}." if helps else ""
    return ArgumentValueError(message("budget_gib", expected, got, hint))


def _notes(job: Job, chosen: Candidate) -> dict[str, bool]:
    """Return each note on a plan's figures, and whether it applies."""
    shape, gpu = job.shape, job.gpu
    by_rank = isinstance(job.adapters, Adapters)
    adapted = f"{job.trained_adapters or 0:,} numbers of adapters are trained{f', {job.adapters}' if by_rank else ''}"
    mask = gib(job.narrow * job.batch_size * job.seq_len**2)
    kinds, dtype = f"{max(shape.kind_of) + 1} kind(s)", str(job.dtype).removeprefix("torch.")
    close = CLOSE * gpu.memory_bytes < chosen.peak <= gpu.memory_bytes
    why = "close to the GPU's size" if close else "states leave and come back in each step"
    return {
        f"head: {str(job.head_plan).splitlines()[0]}": True,
        f"rates of the {gpu.name} from a table": not gpu.like,
        f"memory of the {gpu.name}; its rates are not in the table: times are those of the {gpu.like}": bool(gpu.like),
        f"{adapted}{'' if by_rank else ': what they save and compute is not counted'}": job.adapters is not None,
        f"attention has a mask of {mask:.3g} GiB in each layer with keep='all'; flash attention needs none": (
            job.attention_mask
        ),
        f"{why}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragmentation": (
            close or chosen.states > 0
        ),
        f"only the text part of {shape.part_of} is planned, not its vision or audio": bool(shape.part_of),
        f"the config's max_position_embeddings is {shape.positions:,}: longer sequences need other positions": (
            0 < shape.positions < job.seq_len
        ),
        f"{kinds} of layers, traced in {shape.model_class} without weights": True,
        "lowtide.patch does not fuse every layer's MLP, so that they have no levels": not shape.levels,
        f"not every layer of {shape.model_type} runs fused attention: keep='attention' is not planned": (
            not shape.attends
        ),
        "attention is transformers' eager one, which stores its scores: another attn_implementation saves less": (
            shape.attention == "eager" and shape.heads > 0 and not shape.attends
        ),
        "compiled layers are planned as in eager, but for the time of the host": job.compile_layers,
        f"the checkpoint has {shape.quantised} weights: planned as loaded in {dtype}": bool(shape.quantised),
        "float32: assumes attention that stores no scores, which PyTorch lacks for grouped queries": (
            job.operand == torch.float32
        ),
        "experts get equal shares of the tokens": shape.experts > 0,
        "experts stay in 16 or 32 bits: transformers puts none into 4": bool(shape.experts and shape.four_bit),
        "experts are not fused: their saved bytes are those of transformers' grouped_mm": (
            shape.experts > 0 and not job.fused_mlp
        ),
        "layers have sliding windows: attention must take them without a [T, T] mask (flash attention)": (
            any(0 < window < job.seq_len for window in shape.windows)
        ),
        "attention caps its scores: assumes a kernel that does so without storing them": shape.capped_scores,
    }


def _dtype(dtype: object, model_or_config: Any, autocast: bool) -> torch.dtype:
    if dtype is None:
        if not isinstance(model_or_config, nn.Module):
            return torch.float32 if autocast else torch.bfloat16
        dtype = next(model_or_config.parameters()).dtype
    found = getattr(torch, dtype) if dtype in DTYPES else dtype
    if found not in [getattr(torch, name) for name in DTYPES]:
        raise ArgumentValueError(message("dtype", f"one of {', '.join(DTYPES)}", f"{dtype!r}"))
    assert isinstance(found, torch.dtype)
    if autocast and found != torch.float32:
        raise ArgumentValueError(message("dtype", "float32 with autocast=True", f"{dtype!r}"))
    return found

"""`plan_memory`: what fits in a budget of memory, and the fastest way to spend it, by arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.units import as_gib, gib, gib_text
from lowtide.memory.planner.adapters import Adapters, numbers_alone
from lowtide.memory.planner.at_hand import find_gpu
from lowtide.memory.planner.gpus import Gpu
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_bytes import checkpoint_bytes
from lowtide.memory.planner.optimizers import DTYPES, OPTIMIZERS
from lowtide.memory.planner.report import MemoryPlan, rung_of
from lowtide.memory.planner.search import Candidate, Search, largest_batch, longest_sequence
from lowtide.memory.planner.shapes import KINDS, read_shape

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
    offload_states: Literal["auto", False] = "auto",
) -> MemoryPlan:
    """Choose what each layer keeps for backward so that a training step is the fastest that fits in a budget.

    Nothing is computed on a GPU, no weights are needed: peak memory and time of a step follow from the model's shape.
    The peak is the largest of what is live at the end of forward, in the head, in each layer's backward, in the
    embedding's and in the optimizer's step: parameters, gradients as far as they exist, optimizer states, what the
    layers keep, and the phase's own temporaries. The time is that of the matrix products and of attention at the GPU's
    rates, of the bytes that the other operations read and write, of transfers where they are not hidden, and never less
    than what the host takes to launch it.

    It describes full training of a decoder-only model that `lowtide.patch` has patched, ``use_cache`` off, with
    attention that builds no scores (flash attention), on one GPU.

    Args:
        model_or_config: A `transformers` model (on any device, the meta device too) or config, a dictionary like a
            config.json's, or the path of one.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of a step.
        budget_gib: What tensors may take on the GPU, in GiB, or as a text with a unit: ``"40GiB"``, ``"40GB"``; at most
            the GPU's memory less 2% and at least 1 GiB, which the allocator needs. None: 93% of its memory, if that is
            less.
        host_gib: Pinned host memory for offloaded layers and optimizer states, likewise; 0: nothing is offloaded.
        device: The GPU: a name such as ``"h100"`` or ``"rtx4090"``; ``"cuda"``: the one at hand, measured once in some
            seconds and remembered in ``$XDG_CACHE_HOME/lowtide/gpus.json``; None: the one at hand by its name (measured
            where the table lacks it), and an H100 where there is none.
        dtype: Of parameters, activations, gradients and optimizer states: ``"bfloat16"``, ``"float16"``,
            ``"float32"`` or the `torch.dtype`. None: the model's own, bfloat16 for a config, float32 with ``autocast``.
        optimizer: ``"adamw"`` (fused), ``"adamw-foreach"``, ``"adamw-8bit"``, ``"sgd"`` or ``"sgd-momentum"``.
        autocast: Whether parameters, gradients and states are float32 and the products run in bfloat16, under
            ``torch.autocast``.
        keep_gradients: Whether gradients outlive a backward pass, as where they are accumulated over several.
        options: How the loss is to run, as for `lowtide.patch`.
        adapters: With LoRA, its `Adapters`, or how many numbers they have, float32 ones: the model is frozen then, and
            only they have gradients and optimizer states. What they compute is not counted, nor, given as a number,
            what they keep. With 16-bit weights the products run under autocast. None: no adapters.
        attention_mask: Whether attention takes a [T, T] mask for each sequence, as
            ``torch.nn.functional.scaled_dot_product_attention`` does where documents packed into one do not see each
            other: T^2 numbers of each sequence in each layer that keeps all, beside keys and values that are repeated
            for each query head.
        fused_mlp: False where `lowtide.patch` is told to leave the MLPs as they are (``mlp=False``). These keep twice
            as much, and have no levels; so do those that it cannot fuse (Phi-3's, or with another activation), which
            the plan sees by itself, and notes.
        offload_states: ``"auto"``: with ``host_gib``, as many optimizer states as make the step faster go to the host
            during forward and come back during backward (`lowtide.memory.offload_optimizer`), at most what travels
            without holding the layers up, or where that does not fit, behind backward; False: none.

    Returns:
        MemoryPlan: print it for the table; ``policies`` is what `lowtide.memory.apply_policy` takes.

    Raises:
        ArgumentTypeError: An argument of a wrong type.
        ArgumentValueError: A value that is not allowed; a config that lacks a field or has one that cannot be planned
            for; a budget in which nothing fits, with what is lacking and what would help.
        UnsupportedError: ``device="cuda"`` without a GPU.

    Example:
        >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        ...           "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": True}
        >>> plan = plan_memory(config, seq_len=2048, batch_size=4, budget_gib=2)
        >>> len(plan.policies)
        4
    """
    for name, size in (("seq_len", seq_len), ("batch_size", batch_size)):
        _check_size(name, size)
    flags = {"autocast": autocast, "keep_gradients": keep_gradients, "attention_mask": attention_mask}
    flags["fused_mlp"] = fused_mlp
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentTypeError(message(name, "a bool", f"{flag!r}"))
    if options is not None and not isinstance(options, HeadOptions):
        raise ArgumentTypeError(message("options", "a lowtide.HeadOptions or None", type(options).__name__))
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ArgumentValueError(message("optimizer", f"one of {', '.join(OPTIMIZERS)}", f"{optimizer!r}"))
    if adapters is not None and not isinstance(adapters, Adapters):
        _check_size("adapters", adapters)
    if offload_states is not False and offload_states != "auto":
        raise ArgumentValueError(message("offload_states", "'auto' or False", f"{offload_states!r}"))
    gpu = find_gpu(device)
    requested = gpu.default_budget_bytes if budget_gib is None else _gib_bytes("budget_gib", budget_gib)
    host = _gib_bytes("host_gib", host_gib)
    shape = read_shape(model_or_config)
    job = Job(
        shape=shape,
        seq_len=seq_len,
        batch_size=batch_size,
        gpu=gpu,
        dtype=_dtype(dtype, model_or_config, autocast),
        optimizer=optimizer,
        keep_gradients=keep_gradients,
        head=options,
        autocast=autocast,
        adapters=adapters,
        attention_mask=attention_mask,
        fused_mlp=fused_mlp and not shape.stock_mlp,
    )
    if isinstance(adapters, Adapters) and (kind := numbers_alone(shape)):
        hint = "Count the parameters that are trained."
        raise ArgumentValueError(message("adapters", f"a number, for {kind}", str(adapters), hint))
    if autocast and job.shape.experts:
        raise ArgumentValueError(message("autocast", "False for a mixture of experts", "True"))
    return _plan(job, requested, int(host), offload_states == "auto")


def _plan(job: Job, requested: int, host: int, offload_states: bool) -> MemoryPlan:
    budget = min(requested, job.gpu.most_bytes)
    search = Search(job, host, offload_states=offload_states)
    chosen = search.fastest(budget)
    if chosen is None:
        raise _refusal(search, search.least(), requested, offload_states)
    phases = tuple(search.memory.phases(chosen.groups, chosen.states, late=chosen.late))
    return MemoryPlan(
        policies=chosen.policies,
        peak_bytes=chosen.peak,
        seconds=chosen.seconds,
        tokens_per_second=job.tokens / chosen.seconds,
        phase=search.memory.peak(chosen.groups, chosen.states, late=chosen.late),
        phases=phases,
        host_bytes=chosen.host,
        budget_bytes=budget,
        requested_bytes=requested,
        host_budget_bytes=host,
        front=tuple(search.front),
        ladder=tuple(
            rung_of(job, policy, checkpoint_bytes(job, policy), search.times.of(policy)) for policy in search.ladder
        ),
        offload_states=offload_states,
        job=job,
        chosen=chosen,
        notes=_notes(job, chosen),
    )


def _refusal(search: Search, least: Candidate, requested: int, offload_states: bool) -> ArgumentValueError:
    """Return the error that says by how much nothing fits, and what would help."""
    job, memory = search.job, search.memory
    budget = min(requested, job.gpu.most_bytes)
    states = memory.weights + memory.all_gradients + memory.states
    phase = memory.peak(least.groups, least.states, late=least.late)
    helps = []
    lighter = [name for name in OPTIMIZERS if name != job.optimizer and _fits(search, name, budget, offload_states)]
    if lighter:
        helps.append(f"optimizer {' or '.join(lighter)} fits")
    if states > budget:
        ways = "take more GPUs" if job.adapters is not None else "train adapters (LoRA), or take more GPUs"
        way_out = "" if lighter else f": {ways}"
        helps.append(f"parameters, gradients and optimizer states alone take {gib_text(states)} GiB{way_out}")
    else:
        sequence = longest_sequence(job, budget, search.host_bytes, offload_states=offload_states)
        batch = largest_batch(job, budget, search.host_bytes, offload_states=offload_states)
        if batch:
            helps.append(f"batch_size={batch} fits")
        if sequence:
            helps.append(f"seq_len={sequence} fits")
    roomy = Search(job, 2**60, offload_states=offload_states).least()
    if roomy.host > search.host_bytes and roomy.peak <= budget:
        helps.append(f"host_gib={math.ceil(gib(roomy.host))} would do, with {roomy}")
    tokens = f"{job.batch_size} x {job.seq_len} tokens"
    expected = f"at least {gib_text(least.peak)} for {tokens} ({least}; peak in {phase})"
    usable = f", of which the {job.gpu.name} can use {gib_text(budget)}" if budget < requested else ""
    got = f"{gib_text(requested)}{usable}, {gib_text(least.peak - budget)} GiB too little"
    return ArgumentValueError(
        message("budget_gib", expected, got, f"What would help: {'; '.join(helps)}." if helps else "")
    )


def _fits(search: Search, optimizer: str, budget: int, offload_states: bool) -> bool:
    """Return whether a step with another optimizer would fit."""
    job = replace(search.job, optimizer=optimizer)
    return Search(job, search.host_bytes, offload_states=offload_states).least().peak <= budget


def _notes(job: Job, chosen: Candidate) -> tuple[str, ...]:
    shape, peak = job.shape, chosen.peak
    found = [f"head: {str(job.head_plan).splitlines()[0]}"]
    if not job.gpu.measured:
        measured = "`lowtide plan --gpu cuda`, in Python device='cuda', measures the GPU at hand"
        found.append(f"rates of the {job.gpu.name} from a table; {measured}")
    if job.adapters is not None:
        what, left_out = ("", "keep and compute") if isinstance(job.adapters, int) else (f", {job.adapters}", "compute")
        numbers = f"{job.trained_adapters:,} numbers of adapters are trained{what}"
        found.append(f"{numbers}: what they {left_out} is left out")
    if job.attention_mask:
        each = gib(job.narrow * job.batch_size * job.seq_len**2)
        found.append(f"attention has a mask of {each:.3g} GiB in each layer that keeps all; flash attention has none")
    close = CLOSE * job.gpu.memory_bytes < peak <= job.gpu.memory_bytes
    if close or chosen.states:
        why = "close to the GPU's size" if close else "states leave and come back in each step"
        found.append(f"{why}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against gaps")
    if shape.part_of:
        found.append(f"the text part of {shape.part_of} alone: what sees or hears beside it is left out")
    if 0 < shape.positions < job.seq_len:
        found.append(
            f"the config's max_position_embeddings is {shape.positions:,}: longer sequences need other positions"
        )
    if shape.stock_mlp and not shape.experts:
        found.append(f"lowtide.patch leaves the MLPs as they are, so that they have no levels: {shape.stock_mlp}")
    if shape.model_type not in KINDS:
        found.append(f"{shape.model_type}: that lowtide.patch fuses its norms, rotary embedding and MLP is assumed")
    if not (shape.activation or shape.stock_mlp or shape.experts):
        found.append(
            "the config has no hidden_act: assumed is an activation that lowtide.patch fuses; "
            "with another the MLPs keep more: --no-fused-mlp, in Python fused_mlp=False, plans that"
        )
    if job.operand == torch.float32:
        found.append("float32: assumed is attention that builds no scores, which PyTorch lacks for grouped queries")
    if shape.experts:
        found.append(
            "experts are not fused: what they keep is that of transformers' grouped_mm; temporaries are a guess"
        )
    if any(shape.windows) and job.seq_len > min(w for w in shape.windows if w):
        found.append("layers look back on a window: attention has to take it without a [T, T] mask (flash attention)")
    if shape.capped_scores:
        found.append("attention caps its scores: assumed is a kernel that does so without building them")
    return tuple(found)


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentTypeError(message(name, "a whole number", f"{size!r}"))
    if size < 1:
        raise ArgumentValueError(message(name, "at least 1", str(size)))


def _gib_bytes(name: str, size: object) -> int:
    value = as_gib(name, size) * 2**30
    if not math.isfinite(value) or value < 0 or (value == 0 and name == "budget_gib"):
        least = "above 0" if name == "budget_gib" else "of at least 0"
        raise ArgumentValueError(message(name, f"a finite number of GiB {least}", f"{size!r}"))
    return int(value)


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

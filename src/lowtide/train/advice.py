"""Out of memory: what would fit, by the planner's numbers, instead of a stack trace."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import LowtideError
from lowtide.head.options import HeadOptions
from lowtide.measure import available_bytes, gib, resident_bytes
from lowtide.memory.planner import USABLE
from lowtide.memory.planner_bytes import Job
from lowtide.memory.planner_choice import Candidate, Search
from lowtide.memory.planner_gpus import GPUS, find_gpu
from lowtide.memory.planner_shapes import read_shape
from lowtide.train.activations import (
    as_mixture,
    as_text,
    current_policies,
    has_levels,
    planned_dtype,
    planned_optimizer,
    without_levels,
)
from lowtide.train.config import TrainConfig

if TYPE_CHECKING:
    from lowtide.train.activations import Chosen

_MARGIN = 0.95  # what is advised must be expected to take less than what has just failed


class OutOfMemory(LowtideError, MemoryError):
    """The run needs more memory than there is; the text says what would fit, in several lines."""

    exit_status = 3


def advise(
    error: BaseException,
    config: TrainConfig,
    args: Any,
    *,
    model: Any = None,
    chosen: Chosen | None = None,
    step: int | None = None,
    go_on: str,
) -> OutOfMemory:
    """Return the error that says what happened and what would fit.

    Args:
        error: what was raised.
        config: the run's settings.
        args: Trainer's arguments.
        model: the model; None where it was not there yet.
        chosen: the policy that was applied.
        step: the step in which it happened; None before the first.
        go_on: what to do with the run's folder.
    """
    rank = f" on rank {args.process_index}" if args.world_size > 1 else ""
    when = f"in step {step}" if step else "before the first step"
    lines = [
        f"out of memory{rank} {when}, at {config.batch_size} x {config.seq_len} tokens. {_first_line(error)}",
        *_what_fits(config, args, model, chosen),
        go_on,
    ]
    return OutOfMemory("\n".join(line for line in lines if line))


def _what_fits(config: TrainConfig, args: Any, model: Any, chosen: Chosen | None) -> list[str]:
    """Return lines of advice with the planner's numbers, or why there are none."""
    if model is None:
        return ["The model itself does not fit: take a smaller one, --weights bfloat16 or more GPUs."]
    try:
        job = _job(config, args, model)
    except (LowtideError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
        return [f"The planner has no numbers for it ({why}): lower --batch-size or --seq-len."]
    policies = current_policies(config, chosen, job.shape.layers)
    host = max(1, sum(policy.offload for policy in policies)) * 2**40  # room on the host was not what was lacking
    search = Search(job, host if any(policy.offload for policy in policies) else 0)
    now = search.candidate(as_mixture(policies))
    memory, where = _memory(args)
    limit = min(memory, _MARGIN * now.peak) if memory else _MARGIN * now.peak
    left = f"; {where} has {gib(memory):.2f} GiB for it" if memory else ""
    lines = [f"By the planner this step takes {gib(now.peak):.2f} GiB{left}."]
    if not config.patch:
        return [*lines, "That is with lowtide's loss. A stock model's logits come on top: leave --no-patch out."]
    helps = [*_other_policy(search, limit, levels=has_levels(model)), *_smaller(job, now, limit)]
    if helps:
        width = max(len(options) for options, _ in helps)
        lines += ["What would fit:", *(f"  {options:<{width}}  {gib(peak):.2f} GiB" for options, peak in helps)]
        lines.append("A resumed run can be given another --policy; another batch or length is another run.")
    else:
        lines.append(_nothing(search, limit))
    return [*lines, f"The numbers: {plan_line(config, args, limit)}"]


def _other_policy(search: Search, limit: float, *, levels: bool) -> list[tuple[str, int]]:
    found = search.fastest(int(limit)) or search.least()
    if found.peak > limit:
        return []
    policies = found.policies if levels else without_levels(found.policies)
    return [(f"--policy {shlex.quote(as_text(as_mixture(policies)))}", found.peak)]


def _smaller(job: Job, now: Candidate, limit: float) -> list[tuple[str, int]]:
    """Return the largest halvings of batch and sequence that fit with the policy as it is, and their bytes."""
    found = []
    for name, size in (("batch-size", job.batch_size), ("seq-len", job.seq_len)):
        for halved in range(1, size.bit_length()):
            left = size >> halved
            if name == "batch-size":
                smaller = replace(job, batch_size=left, keep_gradients=True)
                options = f"--batch-size {left} and {2**halved} times the --grad-accum"
            else:
                smaller, options = replace(job, seq_len=left), f"--seq-len {left}"
            peak = Search(smaller, 0).candidate(now.groups).peak
            if peak <= limit:
                found.append((options, peak))
                break
    return found


def _nothing(search: Search, limit: float) -> str:
    memory = search.memory
    fixed = memory.weights + memory.states + memory.all_gradients
    if fixed < limit / 2:
        return (
            "No smaller step would take much less: look for what else has the memory, other programs or data outside "
            "the step."
        )
    return (
        f"Nothing fits in {gib(limit):.2f} GiB: weights, gradients and optimizer states take {gib(fixed):.2f}. Train "
        "adapters (--lora-rank 16 --weights bfloat16), take an optimizer with smaller states (--trainer-args "
        "optim=adamw_bnb_8bit), or share it out over more GPUs (--parallel fsdp2)."
    )


def plan_line(config: TrainConfig, args: Any, limit: float) -> str:
    """Return the command that shows all of a plan."""
    words = ["lowtide plan", f"--model {shlex.quote(config.model)}", f"--seq-len {config.seq_len}"]
    words += [f"--batch-size {config.batch_size}", f"--budget {gib(limit):.2f}GiB"]
    dtype = planned_dtype(config, args)
    words.append("--autocast" if dtype.get("autocast") else f"--dtype {str(dtype['dtype']).removeprefix('torch.')}")
    with contextlib.suppress(LowtideError):
        words.append(f"--optimizer {planned_optimizer(args)}")
    if config.grad_accum > 1:
        words.append(f"--grad-accum {config.grad_accum}")
    return " ".join(words)


def _job(config: TrainConfig, args: Any, model: Any) -> Job:
    dtype = planned_dtype(config, args)
    try:
        gpu = find_gpu(None) if args.device.type == "cuda" else GPUS["h100"]
    except (LowtideError, RuntimeError):  # an unknown one would be measured, for which there is no memory now
        gpu = GPUS["h100"]
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad) if config.lora_rank else None
    return Job(
        shape=read_shape(model.config),
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        gpu=gpu,
        dtype=dtype["dtype"],
        optimizer=planned_optimizer(args),
        keep_gradients=config.grad_accum > 1,
        head=HeadOptions(workspace_mib=config.workspace_mib),
        autocast=bool(dtype.get("autocast")),
        adapters=adapters,
    )


def _memory(args: Any) -> tuple[int, str]:
    """Return the bytes that this process's tensors can have, and of what; 0 where that is not known."""
    if args.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(args.device)
        mine = torch.cuda.memory_reserved(args.device)
        return int(min(total * USABLE, free + mine)), "this GPU"
    return resident_bytes() + available_bytes(), "this machine"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]

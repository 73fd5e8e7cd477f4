"""Out of memory: what would fit, by the planner's numbers, instead of a stack trace."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.measure.resident import available_bytes, resident_bytes
from lowtide.measure.units import gib
from lowtide.models.budget import planned_step
from lowtide.plan import plan_memory

_SHARE = 0.9  # of the memory there is: what is advised must be expected to take less than what has just failed


class OutOfMemory(LowtideError, MemoryError):
    """The run needs more memory than there is; the text says what would fit, in several lines."""

    exit_status = 3


def advise(error: BaseException, trainer: Any, *, resume: str = "") -> OutOfMemory:
    """Return the error with what happened, what would fit, and how to resume.

    Args:
        error: that PyTorch raised.
        trainer: of transformers or TRL, whose step it was; None: there was none yet.
        resume: what to do after a run that ended early.
    """
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if trainer is None:
        ways = "The model itself does not fit: take a smaller one, --dtype bfloat16 or more GPUs."
        return OutOfMemory(f"out of memory before the first step. {first_line}\n{ways}")
    args, step = trainer.args, trainer.state.global_step
    rank = f" on rank {args.process_index}" if args.world_size > 1 else ""
    lines = [f"out of memory{rank} in step {step + 1}. {first_line}", *_what_fits(trainer), resume]
    return OutOfMemory("\n".join(filter(None, lines)))


def _what_fits(trainer: Any) -> Iterator[str]:
    """Yield lines of advice with the planner's figures, or why there are none."""
    args, limit = trainer.args, gib(_SHARE * _memory(trainer.args))
    try:
        step = planned_step(trainer.model, args)
    except (LowtideError, OSError, RuntimeError) as failed:
        reason = " ".join(str(failed).split())[:300]
        yield f"The planner has no figures for it ({reason}): lower --per_device_train_batch_size or --max_length."
        return
    helps, why = [], ""
    for name, divided, more in (
        ("max_length", 1, ""),
        ("per_device_train_batch_size", 2, ", and twice the steps accumulated"),
        ("max_length", 2, ""),
    ):
        changed, value = copy(args), getattr(args, name) // divided
        setattr(changed, name, value)
        if value:
            try:
                plan = plan_memory(trainer.model.config, **planned_step(trainer.model, changed), budget_gib=limit)
            except LowtideError as failed:
                why = str(failed).partition(": ")[2]
            else:
                change = f"--{name} {value}{more} beside " if divided > 1 else ""
                helps.append(f"  {change}--memory-budget {limit:.2f}GiB: {gib(plan.peak_bytes):.2f} GiB")
    if not helps:
        yield f"Nothing near it fits: {' '.join(why.split())}"
        return
    yield f"What would fit, by the planner, of {step['batch_size']} x {step['seq_len']} tokens:"
    yield from helps


def _memory(args: Any) -> int:
    """Return the bytes that this process's tensors can have."""
    if args.device.type == "cuda":
        return torch.cuda.mem_get_info(args.device)[0] + torch.cuda.memory_reserved(args.device)
    return resident_bytes() + available_bytes()

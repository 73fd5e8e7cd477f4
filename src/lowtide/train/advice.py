"""Out of memory: what would fit, by the planner's numbers, instead of a stack trace."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.measure.resident import available_bytes, resident_bytes
from lowtide.measure.units import gib
from lowtide.memory.policy import mixture_of, words_of
from lowtide.plan.arguments import PROJECTIONS, PlanArguments
from lowtide.plan.four_bit import NESTED
from lowtide.plan.gpus import GPUS, USABLE, find_gpu
from lowtide.plan.job import Job
from lowtide.plan.search import Search
from lowtide.plan.step_costs import StepCosts
from lowtide.train.activations import current_policies, planned_job, planned_optimizer
from lowtide.train.checkpoints import how_to_resume
from lowtide.train.config import TrainConfig
from lowtide.train.files import why
from lowtide.train.parallel import uses_deepspeed, uses_fsdp
from lowtide.train.run_state import RunState
from lowtide.train.settings import Settings

_MARGIN = 0.95  # what is advised must be expected to take less than what has just failed


class OutOfMemory(LowtideError, MemoryError):
    """The run needs more memory than there is; the text says what would fit, in several lines."""

    exit_status = 3


def advise(error: BaseException, run: RunState) -> OutOfMemory:
    """Return the error with what happened in a run, what would fit, and how to resume it."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if run.model is None:
        ways = "The model itself does not fit: take a smaller one, --dtype bfloat16 or more GPUs."
        return OutOfMemory(f"out of memory before the first step. {first_line}\n{ways}")
    args, batch = run.settings.args, run.batch
    rank = f" on rank {args.process_index}" if args.world_size > 1 else ""
    when = "before the first step" if run.step is None else f"in step {run.step + 1}"
    size = f"{batch.rows} x {batch.seq_len} tokens"
    lines = [f"out of memory{rank} {when}, at {size}. {first_line}", *_what_fits(run)]
    return OutOfMemory("\n".join([*lines, how_to_resume(run.output)] if run.saves else lines))


def _what_fits(run: RunState) -> list[str]:
    """Return lines of advice with the planner's figures, or why there are none."""
    config, settings, plan = run.config, run.settings, run.plan
    try:
        job = _job(run)
    except (LowtideError, OSError, RuntimeError) as error:
        return [f"The planner has no figures for it ({why(error)}): lower --per_device_train_batch_size or --seq-len."]
    policies = current_policies(run, job.shape.layers)
    host = max(1, sum(policy.offload for policy in policies)) * 2**40  # room on the host was not what was lacking
    offloads = any(policy.offload for policy in policies)
    search = Search(replace(job, host_gib=host / 2**30 if offloads else 0, offload_states=False))
    every = search.costs.states if config.offload_states else 0
    away, late = (plan.chosen.states, plan.chosen.late) if plan is not None else (every, False)
    groups = mixture_of(policies)
    takes = search.costs.peak(groups, away, late=late).bytes
    memory, where = _memory(settings.args)
    limit = min(memory, _MARGIN * takes) if memory else _MARGIN * takes
    left = f"; {where} has {gib(memory):.2f} GiB for it" if memory else ""
    lines = [f"According to the planner this step takes {gib(takes):.2f} GiB{left}."]
    if not config.patch:
        return [*lines, "That is with lowtide's loss. A stock model's logits are added to it: leave --no-patch out."]
    helps = [*_other_policy(search, limit, every)]
    if not (config.offload_states or settings.args.device.type != "cuda" or uses_fsdp() or uses_deepspeed()):
        helps.append(("--offload-states", search.costs.peak(groups, search.costs.states).bytes))
    helps += _smaller(job, limit, lambda costs: costs.peak(groups, away, late=late).bytes)
    helps = [(options, peak) for options, peak in helps if peak <= limit]
    if helps:
        width = max(len(options) for options, _ in helps)
        lines += ["What would fit:", *(f"  {options:<{width}}  {gib(peak):.2f} GiB" for options, peak in helps)]
        may = "another --policy" + " and --offload-states" * any("states" in options for options, _ in helps)
        lines.append(f"A resumed run can be given {may}; another length is another run.")
    else:
        lines.append(_nothing(job, search, limit))
    line = _plan_line(config, settings, job, limit)
    return [*lines, f"The figures: {line}"] if line else lines


def _other_policy(search: Search, limit: float, away: int) -> Iterator[tuple[str, int]]:
    """Yield the fastest policy that fits with this many bytes of optimizer states on the host, and its bytes."""
    peaks = [(search.costs.peak(one.groups, away).bytes, one) for one in (*search.front, search.least())]
    fitting = [(one.seconds, peak, words_of(one.groups)) for peak, one in peaks if peak <= limit]
    for _, peak, words in sorted(fitting)[:1]:
        yield f"--policy {shlex.quote(words)}", peak


def _smaller(job: Job, limit: float, peak_of: Callable[[StepCosts], int]) -> Iterator[tuple[str, int]]:
    """Yield the largest part of the batch, and of the sequence, that fits with the same policy, and their bytes.

    A part of the batch is one that more batches make whole again.
    """
    rows, more = job.batch_size, "times the --gradient_accumulation_steps"
    parts = {
        f"--per_device_train_batch_size {n} and {rows // n} {more}": replace(job, batch_size=n, keep_gradients=True)
        for n in range(rows // 2, 0, -1)
        if rows % n == 0
    }
    lengths = [job.seq_len >> halved for halved in range(1, job.seq_len.bit_length() - 1)]
    for jobs in (parts, {f"--seq-len {n}": replace(job, seq_len=n) for n in lengths}):
        peaks = ((options, peak_of(StepCosts(smaller))) for options, smaller in jobs.items())
        yield from islice((each for each in peaks if each[1] <= limit), 1)


def _nothing(job: Job, search: Search, limit: float) -> str:
    memory = search.costs
    fixed = memory.weights + memory.states + memory.all_gradients
    if fixed < limit / 2:
        return (
            "No smaller step would take much less: look for what else has the memory, other programs or data outside "
            "the step."
        )
    ways = ["train adapters (--use_peft --dtype bfloat16)"] if job.adapters is None else []
    if job.adapters is not None and not job.shape.four_bit:
        ways.append("store the frozen weights in 16 bits (--dtype bfloat16) or in 4 (--load_in_4bit)")
    ways += ["take smaller optimizer states (--optim adamw_bnb_8bit)", "shard it over more GPUs (--parallel fsdp2)"]
    return (
        f"Nothing fits in {gib(limit):.2f} GiB: weights, gradients and optimizer states take {gib(fixed):.2f}. "
        f"To change that: {'; '.join(ways)}."
    )


def _plan_line(config: TrainConfig, settings: Settings, job: Job, limit: float) -> str:
    """Return the ``lowtide plan`` command that shows the whole plan; "" where it has no option for the adapters."""
    words = ["lowtide plan", f"--model {shlex.quote(config.model)}", f"--seq-len {job.seq_len}"]
    words += [f"--batch-size {job.batch_size}", f"--budget {gib(limit):.2f}GiB"]
    words.append("--autocast" if job.autocast else f"--dtype {str(job.dtype).removeprefix('torch.')}")
    words.append(f"--optimizer {planned_optimizer(settings.args)}")
    if settings.args.gradient_accumulation_steps > 1:
        words.append(f"--grad-accum {settings.args.gradient_accumulation_steps}")
    words += [f"--gpus {job.gpus} --parallel {job.parallel}"] if job.gpus > 1 else []
    if config.host_budget:
        words.append(f"--host {shlex.quote(config.host_budget)}")
        words += [] if config.offload_states else ["--no-offload-states"]
    if job.adapters is not None:
        words.append(f"--lora-rank {job.adapters.rank}")
        if job.adapters.targets != PROJECTIONS:
            words.append(f"--lora-targets {' '.join(job.adapters.targets)}")
    words += ["--load-in-4bit"] if job.shape.four_bit else []
    words += ["--use-bnb-nested-quant"] if job.shape.four_bit == NESTED else []
    words += ["--attention-mask"] if job.attention_mask else []
    words += [] if job.fused_mlp or job.shape.experts else ["--no-fused-mlp"]
    return " ".join(words)


def _job(run: RunState) -> Job:
    gpu = find_gpu(None) if run.settings.args.device.type == "cuda" else GPUS["h100"]
    return Job.of(run.model.config, PlanArguments(device=gpu, **planned_job(run)))


def _memory(args: Any) -> tuple[int, str]:
    """Return the bytes that this process's tensors can have, and of what; 0 where that is not known."""
    if args.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(args.device)
        mine = torch.cuda.memory_reserved(args.device)
        return int(min(total * USABLE, free + mine)), "this GPU"
    return resident_bytes() + available_bytes(), "this machine"

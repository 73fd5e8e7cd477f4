"""`plan_memory`: what fits in a budget of memory, and the fastest way to spend it, by arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import gib, gib_text
from lowtide.plan.arguments import DDP, PlanArguments
from lowtide.plan.gpus import Gpu
from lowtide.plan.job import Job
from lowtide.plan.report import MemoryPlan
from lowtide.plan.search import Search

if TYPE_CHECKING:
    import torch


def plan_memory(
    config: Any,
    seq_len: int,
    batch_size: int = 1,
    budget_gib: float | str | None = None,
    host_gib: float | str = 0,
    device: str | torch.device | Gpu | None = None,
    **arguments: Any,
) -> MemoryPlan:
    """Choose what each layer saves for backward, so that a training step is the fastest that fits in a budget.

    Nothing runs on a GPU, no weights are needed: transformers builds the model on the meta device, `lowtide.patch`
    patches it, and one layer of each kind runs there, which shows what it saves, allocates and computes. The peak is
    the largest of what is live at the end of forward, in the head, in each layer's backward, in the embedding's and in
    the optimizer's step: parameters, gradients as far as they exist, optimizer states, what the layers save, and the
    phase's own temporaries. The time is that of the GEMMs and of attention at the GPU's rates, of the bytes that the
    other operations read and write, and of transfers where they are not hidden.

    It describes training of a decoder-only model that `lowtide.patch` has patched, ``use_cache`` off, with attention
    that stores no scores (flash attention), on one GPU or several.

    Args:
        config: A `transformers` config, a dictionary like a config.json's, or the path of one. With a
            ``quantization_config`` of bitsandbytes in 4 bits the layers' linear layers are planned so: frozen, with
            ``adapters``.
        seq_len: Tokens of a sequence.
        batch_size: Sequences per step, of each GPU.
        budget_gib: GPU memory for tensors, in GiB or as a text with a unit.
        host_gib: Pinned host memory for offloading, likewise.
        device: The GPU, by name.
        **arguments: The other fields of `PlanArguments`, which has them all.

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
    step = PlanArguments(
        seq_len=seq_len,
        batch_size=batch_size,
        budget_gib=budget_gib,
        host_gib=host_gib,
        device=device,
        **arguments,
    )
    job = Job.of(config, step)
    search, budget = Search(job), job.gpu.budget(job.size("budget_gib"))
    fastest = search.fastest(budget)
    chosen = fastest or search.front[0]
    plan = MemoryPlan(search=search, chosen=chosen, budget_bytes=budget)
    if fastest is None:
        raise _refusal(plan)
    return plan


def _refusal(plan: MemoryPlan) -> ArgumentValueError:
    """Return the error where nothing fits, not even a plan's choice: how much is missing, and what would help."""
    job, costs, budget = plan.job, plan.search.costs, plan.budget_bytes
    states = costs.weights + costs.all_gradients + costs.states
    tried: dict[str, Iterable[Any]] = {}  # arguments' values, of which the first that fits helps
    helps = []
    if job.gpus == 1 and job.optimizer.startswith("adamw"):
        tried["optimizer"] = ["adamw-8bit"]
    if job.gpus > 1 and job.parallel != DDP:
        tried["gpus"] = (job.gpus * 2**k for k in range(1, 5))
    if states <= budget:
        # What is there beside them is about in proportion to the tokens: the halves around that are tried.
        k = math.ceil(math.log2((plan.peak_bytes - states) / max(1, budget - states)))
        for name in ("batch_size", "seq_len"):
            tried[name] = filter(None, [getattr(job, name) >> i for i in range(max(1, k - 1), k + 3)])
    for name, values in tried.items():
        fitting = (v for v in values if Search(replace(job, **{name: v})).leanest().peak <= budget)
        helps += [f"{name}={value} fits" for value in islice(fitting, 1)]
    if states > budget:
        ways = ["train adapters (LoRA)"] if job.adapters is None else []
        if job.adapters is not None and not job.quantised.four_bit:
            ways.append("put the frozen weights into 4 bits (quantization_config of bitsandbytes, --load-in-4bit)")
        if job.autocast:
            ways.append("store weights and states in 16 bits (dtype bfloat16)")
        way_out = " or ".join([*ways, "take more GPUs"])
        helps.append(f"parameters, gradients and optimizer states alone take {gib_text(states)} GiB: {way_out}")
    if job.gpus == 1:
        roomy = Search(replace(job, host_gib=2**30)).leanest()
        if roomy.host > plan.search.host_bytes and roomy.peak <= budget:
            helps.append(f"host_gib={math.ceil(gib(roomy.host))} fits, with {roomy}")
    tokens = f"{job.batch_size} x {job.seq_len} tokens{f' by {job.parallel}' if job.gpus > 1 else ''}"
    expected = f"at least {gib_text(plan.peak_bytes)} GiB for {tokens} ({plan.chosen}; peak in {plan.phase})"
    got = f"{gib_text(budget)} GiB of the {job.gpu.name}, {gib_text(plan.peak_bytes - budget)} GiB too little"
    hint = f"What would help: {'; '.join(helps)}." if helps else ""
    return ArgumentValueError(message("budget_gib", expected, got, hint))

"""`MemoryPlan`: the result of `plan_memory`, as an answer of three lines, a table, and JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lowtide.errors import ArgumentValueError
from lowtide.measure.text import folded, table
from lowtide.measure.units import gib
from lowtide.memory.policy import ActivationPolicy, word_of
from lowtide.plan.arguments import DDP, FSDP2, ZERO3
from lowtide.plan.job import Job
from lowtide.plan.search import Candidate, Search
from lowtide.plan.sharding import BUCKET, LIVE
from lowtide.plan.step_costs import PARTS, Phase

CLOSE = 0.8  # of a GPU's memory: PyTorch's allocator held up to a fifth more than tensors took
HOST_TOKENS = 4096  # of a step on a GPU: with fewer the host, which launches the kernels, sets the pace
_ASKED = (
    "seq_len",
    "batch_size",
    "autocast",
    "attention_mask",
    "fused_mlp",
    "keep_gradients",
    "optimizer",
    "gpus",
    "parallel",
)
_SHARDED = {
    DDP: "DDP: each GPU has all of the model; buckets hold the gradients a second time",
    FSDP2: "units of FSDP2: each layer; the embedding; the last norm and the output layer, which stay gathered",
    ZERO3: f"ZeRO-3 with DeepSpeed's defaults: weights and states in float32 besides, up to {LIVE:,} gathered"
    f" parameters, a bucket of {BUCKET:,} gradients: an upper bound; its hooks' own time is not planned",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A training step that fits in a budget: print it for a table.

    Attributes:
        search: The mixtures of policies that were tried: ``search.front`` has those that no other beats in both memory
            and time, from the leanest to the fastest.
        chosen: The fastest of them that fits: ``host`` is the pinned host memory that it takes, ``states`` what
            optimizer states take of that.
        budget_bytes: GPU memory that tensors may take: the budget that was asked for, less where the GPU's allocator
            needs the rest.
    """

    search: Search
    chosen: Candidate
    budget_bytes: int

    @property
    def job(self) -> Job:
        """The step: its arguments, the model and the GPU."""
        return self.search.job

    @property
    def policies(self) -> tuple[ActivationPolicy, ...]:
        """One `ActivationPolicy` for each layer, as `lowtide.memory.apply_policy` takes them."""
        return tuple(policy for policy, n in self.chosen.groups for _ in range(n))

    @property
    def peak_bytes(self) -> int:
        """The most that tensors take on the GPU at once."""
        return self.chosen.peak

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.chosen.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of training, of all GPUs."""
        return self.job.gpus * self.job.tokens / self.seconds

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The moments of the step, with what is held then."""
        return tuple(self.search.costs.phases(self.chosen.groups, self.chosen.states, late=self.chosen.late))

    @property
    def phase(self) -> Phase:
        """The one that holds the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @cached_property
    def other(self) -> tuple[Job, Candidate | None] | None:
        """The step with weights of the other width, and its choice in the same budget.

        None for layers in 4 bits, and where the model does not run so.
        """
        if self.job.quantised.four_bit:
            return None
        wide = self.job.dtype == torch.float32
        job = replace(self.job, dtype=torch.bfloat16 if wide else torch.float32, autocast=not wide)
        try:
            return job, Search(job).fastest(self.budget_bytes)
        except ArgumentValueError:  # some models mix their operands' dtypes in 16 bits
            return None

    @property
    def states_gib(self) -> float | None:
        """The optimizer states to offload as `lowtide.memory.offload_optimizer` takes them: in GiB, None for all."""
        return None if self.chosen.states == self.search.costs.states else gib(self.chosen.states)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and texts, for JSON."""
        job, model = self.job, self.job.model
        asked = {name: getattr(job, name) for name in _ASKED}
        return {
            **asked,
            "model": {"model_type": job.model_type, "model_class": model.name, "layers": job.layers}
            | {"params": model.params, "kind_of": model.kind_of},
            "gpu": job.gpu.name,
            "dtype": job.dtype_name,
            "adapters": None if job.adapters is None else str(job.adapters),
            "budget_gib": gib(self.budget_bytes),
            "host_budget_gib": gib(self.search.host_bytes),
            "choice": _candidate(self.chosen),
            "other": None if self.other is None or self.other[1] is None else _candidate(self.other[1]),
            "tokens_per_second": self.tokens_per_second,
            "peak_phase": str(self.phase),
            "peak_parts_gib": {name: gib(getattr(self.phase, name)) for name in PARTS},
            "phases_gib": {str(phase): gib(phase.bytes) for phase in self._highest},
            "front": [_candidate(one) for one in self.search.front],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, *, checkpointed: bool = False) -> str:
        """Return the answer, the table and the notes, for a terminal of so many letters; None: no line is folded.

        With ``checkpointed`` also what the step takes where every layer saves its input alone.
        """
        answer = self.answer()
        if checkpointed:
            policy = ActivationPolicy(keep="input", mlp_level=self.job.levels[0])
            (one, *_) = self.search.candidates_of([(policy, self.job.layers)])
            answer += f"\nwith gradient_checkpointing, as the run has it: {self._taken(self.job, one, '')}"
        return f"{folded(answer, width)}\n\n{self._phase_table()}\n\n" + folded("\n".join(self.notes), width)

    @property
    def title(self) -> str:
        """What was planned, in one line: the model, the step and the GPU."""
        job = self.job
        model = f"{job.model_type}, {job.model.params / 1e9:.2f} billion parameters in {job.layers} layers"
        gpu = f"{job.gpus} x {job.gpu.name} by {job.parallel}" if job.gpus > 1 else job.gpu.name
        adapters = "" if job.adapters is None else f", LoRA of {job.adapters}"
        each = " on each GPU" * (job.gpus > 1)
        return f"{model}; {job.batch_size} x {job.seq_len} tokens{each}, {job.optimizer}{adapters}, on {gpu}"

    def answer(self) -> str:
        """Return the first three lines: what the step takes, what it takes in the other precision, what it is."""
        lines = [self._taken(self.job, self.chosen, f" of {gib(self.budget_bytes):.2f}")]
        if self.other is not None:
            job, chosen = self.other
            option = f" (--dtype {job.dtype_name})"
            fails = f"{_precision(job)}{option}: does not fit"
            lines.append(fails if chosen is None else self._taken(job, chosen, "", option))
        return "\n".join([*lines, self.title])

    def _taken(self, job: Job, one: Candidate, budget: str, option: str = "") -> str:
        each = job.tokens / one.seconds
        fast = f"{each:,.0f} tokens/s{f' per GPU, {job.gpus * each:,.0f} in all' * (job.gpus > 1)}"
        least = "at least " if job.tokens < HOST_TOKENS or (job.gpus > 1 and job.parallel == ZERO3) else ""
        host = f", {gib(one.host):.2f} of host memory" if one.host else ""
        peak = f"peak {gib(one.peak):.2f}{budget} GiB{host}"
        return f"{_precision(job)}{option}: {peak}, {least}{one.seconds:.3f} s per step, {fast}; {one}"

    @property
    def _highest(self) -> list[Phase]:
        """The highest phase of each name, in the order of a step."""
        names = ("forward", "head", "backward", "embedding", "optimizer")
        return [max((p for p in self.phases if p.name == name), key=lambda p: p.bytes) for name in names]

    def _phase_table(self) -> str:
        columns = self._highest
        parts = {name: label for name, label in PARTS.items() if name != "gathered" or self.job.gpus > 1}
        return table(
            [
                ["GiB", *(phase.name for phase in columns)],
                ["", *(f"layer {phase.layer}" if phase.layer >= 0 else "" for phase in columns)],
                *([label, *(f"{gib(getattr(p, name)):.2f}" for p in columns)] for name, label in parts.items()),
                ["sum", *(f"{gib(phase.bytes):.2f}" for phase in columns)],
                ["", *("the peak" if phase.bytes == self.peak_bytes else "" for phase in columns)],
            ]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures assume."""
        job, model, gpu, packed = self.job, self.job.model, self.job.gpu, self.job.quantised
        attends = any(policy.keep == "attention" for policy in self.search.ladder)
        mask = gib(job.narrow * job.batch_size * job.seq_len**2)
        ranks = self.search.costs.ranks
        waited, beside = (n / job.link_rate for n in (ranks.awaited, ranks.received - ranks.awaited))
        several, part = job.gpus > 1, job.settings.get("part_of")
        notes = {
            f"each GPU receives {gib(ranks.received):.2f} GiB per step at {job.link_rate / 1e9:.0f} GB/s"
            f"{'' if job.link else ', in one host (--link 50GB plans a network of 400 Gb/s)'}:"
            f" {beside:.3f} s beside the layers' work, {waited:.3f} s that it waits for": several,
            _SHARDED[job.parallel]: several,
            f"fewer than {HOST_TOKENS:,} tokens: the host, which launches the kernels, sets the pace": (
                job.tokens < HOST_TOKENS
            ),
            f"head: {str(job.head_plan).splitlines()[0]}": True,
            f"memory of the {gpu.name}; its rates are not in the table: times are those of the {gpu.like}": gpu.like,
            f"{model.adapter_params:,} numbers of adapters are trained, {job.adapters}": job.adapters,
            f"attention has a mask of {mask:.3g} GiB in each layer with keep='all'; flash attention needs none": (
                job.attention_mask
            ),
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragmentation": (
                self.chosen.states or self.peak_bytes > CLOSE * gpu.memory_bytes
            ),
            f"only the text part of {part} is planned, not its vision or audio": part,
            f"{max(model.kind_of) + 1} kind(s) of layers, traced in {model.name} without weights": True,
            "lowtide.patch does not fuse every layer's MLP, so that they have no levels": not model.levels,
            f"not every layer of {job.model_type} runs fused attention: keep='attention' is not planned": (not attends),
            f"the checkpoint has {packed.loaded} weights: planned as loaded in {job.dtype}": packed.loaded,
            "float32: assumes attention that stores no scores, which PyTorch lacks for grouped queries": (
                job.operand == torch.float32
            ),
            f"experts get equal shares of the tokens{', and stay in 16 or 32 bits' * bool(packed.four_bit)}": (
                model.experts
            ),
            "layers have sliding windows: attention must take them without a [T, T] mask (flash attention)": (
                any(0 < window < job.seq_len for window in model.windows)
            ),
            "attention caps its scores: assumes a kernel that does so without storing them": (
                job.settings.get("attn_logit_softcapping")
            ),
        }
        return tuple(note for note, applies in notes.items() if applies)


def _precision(job: Job) -> str:
    """Return how a job's weights and GEMMs are, in a few words."""
    packed = f", layers in {job.quantised.four_bit}" if job.quantised.four_bit else ""
    return f"{job.dtype_name} weights{' under bfloat16 autocast' * job.autocast}{packed}"


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "keep": [{"policy": word_of(policy), "layers": n} for policy, n in one.groups],
        "peak_gib": gib(one.peak),
        "host_gib": gib(one.host),
        "seconds": one.seconds,
        "states_gib": gib(one.states),
        "late": one.late,
    }

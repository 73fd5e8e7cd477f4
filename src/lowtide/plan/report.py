"""`MemoryPlan`: the result of `plan_memory`, as a table, Python to paste, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from lowtide.head.options import HeadOptions
from lowtide.measure.text import folded, table
from lowtide.measure.units import gib
from lowtide.memory.policy import ActivationPolicy, word_of
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCost
from lowtide.plan.search import Candidate, Search
from lowtide.plan.sharding import Exchange, notes_on, sharding_lines
from lowtide.plan.step_costs import PARTS, Phase

CLOSE = 0.8  # of a GPU's memory: PyTorch's allocator held up to a fifth more than tensors took
HOST_TOKENS = 4096  # of a step on a GPU: with fewer the host, which launches the kernels, sets the pace
FRONT_LINES = 10
FRONT_INDENT = 32  # letters before the last column of the front's table
RUNGS = """\
all: what backward reads but the MLP's product (/0), or but gate and up too (/1);
attention: the layer's input and attention's output; input: its input, or that of one layer of several (every 2);
backward recomputes the rest"""
COMPILE = ("for layer in model.get_decoder().layers:", "    layer.compile(dynamic=False)")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A training step that fits in a budget: print it for a table.

    Attributes:
        search: The mixtures of policies that were tried.
        chosen: The fastest of them that fits; its ``states`` are the bytes of optimizer states that are offloaded.
        budget_bytes: GPU memory that tensors may take.
        requested_bytes: The requested budget: more than that where the GPU's allocator needs the rest.
    """

    search: Search
    chosen: Candidate
    budget_bytes: int
    requested_bytes: int

    @property
    def job(self) -> Job:
        """The step: its arguments, the model's shape and the GPU."""
        return self.search.job

    @property
    def policies(self) -> tuple[ActivationPolicy, ...]:
        """One `ActivationPolicy` for each layer, as `lowtide.memory.apply_policy` takes them."""
        return self.chosen.policies

    @property
    def peak_bytes(self) -> int:
        """The most that tensors take on the GPU at once."""
        return self.chosen.peak

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that offloaded layers and optimizer states take."""
        return self.chosen.host

    @property
    def host_budget_bytes(self) -> int:
        """Pinned host memory that may be taken."""
        return self.search.host_bytes

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.chosen.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of training, of all GPUs."""
        return self.search.costs.ranks.tokens / self.seconds

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The moments of the step, with what is held then."""
        return tuple(self.search.costs.phases(self.chosen.groups, self.chosen.states, late=self.chosen.late))

    @property
    def phase(self) -> Phase:
        """The one that holds the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def exchanged(self) -> Exchange:
        """What a GPU receives from the others in a step, in bytes."""
        return self.search.costs.exchanged

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The mixtures that no other beats in both memory and time, from the leanest to the fastest."""
        return tuple(self.search.front)

    @property
    def ladder(self) -> tuple[LayerCost, ...]:
        """What each policy stores and takes, for one layer."""
        rungs = *self.search.ladder, *(policy for policy in self.search.sparse if not policy.offload)
        return tuple(self.search.costs.layers[policy] for policy in rungs)

    @cached_property
    def longest_sequence(self) -> int:
        """The longest that fits in the budget at this batch size, in steps of 256 tokens, and no shorter than planned.

        Searched for when it is first read: another search, in steps, while what was planned fits in any case.
        """
        return max(self.search.longest_sequence(self.budget_bytes), self.job.seq_len)

    @cached_property
    def largest_batch(self) -> int:
        """The largest that fits at this sequence length; searched for when it is first read."""
        return max(self.search.largest_batch(self.budget_bytes), self.job.batch_size)

    @cached_property
    def other(self) -> tuple[Job, Candidate | None] | None:
        """The step with weights of the other width, and its choice in the same budget; None for layers in 4 bits."""
        if self.job.shape.four_bit:
            return None
        wide = self.job.dtype == torch.float32
        job = replace(self.job, dtype=torch.bfloat16 if wide else torch.float32, autocast=not wide)
        return job, Search(job).fastest(self.budget_bytes)

    @property
    def states_gib(self) -> float | None:
        """The optimizer states to offload as `lowtide.memory.offload_optimizer` takes them: in GiB, None for all."""
        return None if self.chosen.states == self.phases[-1].optimizer else gib(self.chosen.states)

    def lines(self) -> str:
        """Return the lines of Python that apply the plan to ``model``, and to ``optimizer`` where states move."""
        job, late, states = self.job, self.chosen.late, self.chosen.states
        patched = "" if job.fused_mlp else ", mlp=False"
        if job.options not in (None, HeadOptions()):
            patched += f", options=lowtide.{_constructor(job.options)}"
        names = {policy: f"p{i}" for i, (policy, _) in enumerate(self.chosen.groups)}
        layers = " + ".join(f"[{names[policy]}] * {n}" for policy, n in self.chosen.groups)
        moved = any(policy.offload for policy in names)
        host = f", host_gib={gib(self.host_budget_bytes):g}" if moved else ""
        used = ["ActivationPolicy", "apply_policy", *["offload_optimizer"] * (states > 0)]
        lines = [
            "import lowtide",
            f"from lowtide.memory import {', '.join(used)}",
            "",
            "model.config.use_cache = False",
            f"lowtide.patch(model{patched})",
            *(f"{name} = {_constructor(policy, 'keep')}" for policy, name in names.items()),
            f"apply_policy(model, {layers}{host})",
            *(COMPILE if job.compile_layers else ()),
            *sharding_lines(job),
        ]
        if states and job.keep_gradients and not late:  # late ones come back after all of them
            lines.append("# with backwards_per_step=N, for N backward passes per step:")
        if states:
            amount = "" if self.states_gib is None else f", gib={self.states_gib:g}"
            lines.append(f"offload_optimizer(optimizer, model{amount}{', late=True' if late else ''})")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and texts, for JSON."""
        job = self.job
        flags = ("autocast", "attention_mask", "fused_mlp", "compile_layers", "keep_gradients")
        found = {
            "model": {name: value for name, value in asdict(job.shape).items() if name != "config"},
            "params": job.shape.params,
            "gpu": job.gpu.name,
            "dtype": str(job.dtype).removeprefix("torch."),
            **{name: getattr(job, name) for name in ("seq_len", "batch_size", *flags, "optimizer")},
            "adapters": None if job.adapters is None else str(job.adapters),
            "budget_gib": gib(self.budget_bytes),
            "host_budget_gib": gib(self.host_budget_bytes),
            "choice": _candidate(self.chosen),
            "other": None if self.other is None or self.other[1] is None else _candidate(self.other[1]),
            "tokens_per_second": self.tokens_per_second,
            "peak_phase": str(self.phase),
            "peak_parts_gib": {name: gib(getattr(self.phase, name)) for name in PARTS},
            "phases_gib": {str(phase): gib(phase.bytes) for phase in self._highest},
            "front": [_candidate(one) for one in self.front],
            "ladder": [
                {
                    "policy": word_of(cost.policy),
                    "bytes_per_token": cost.saved / cost.policy.every / job.tokens,
                    "recompute_flop": cost.flop,
                    "forward_s": cost.forward,
                    "backward_s": cost.backward,
                    "transfer_s": cost.transfer,
                }
                for cost in self.ladder
            ],
            "longest_sequence": self.longest_sequence,
            "largest_batch": self.largest_batch,
            "python": self.lines(),
            "notes": list(self.notes),
        }
        if job.gpus > 1:
            hidden, waited = self.search.costs.ranks.seconds(self.exchanged)
            found |= {
                "gpus": job.gpus,
                "parallel": job.parallel,
                "link_gb_s": job.link_rate / 1e9,
                "tokens_per_second_per_gpu": self.tokens_per_second / job.gpus,
                "exchange": {"gib": gib(self.exchanged.bytes), "hidden_s": hidden, "waited_s": waited},
            }
        return found

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, *, checkpointed: bool = False) -> str:
        """Return all of it, for a terminal of so many letters across; None: no line is folded, as for a file.

        With ``checkpointed`` also what the step takes where every layer saves its input alone.
        """
        answer = self.answer()
        if checkpointed:
            level = self.ladder[0].policy.mlp_level
            policy = ActivationPolicy(keep="input", mlp_level=level)
            one = self.search.candidate([(policy, self.job.shape.layers)])
            answer += f"\nwith gradient_checkpointing, as the run has it: {self._taken(self.job, one, '')}"
        limits = (
            f"longest sequence in this budget: {self.longest_sequence:,} tokens at batch {self.job.batch_size};"
            f" largest batch: {self.largest_batch} at {self.job.seq_len:,} tokens"
        )
        parts = [
            folded(answer, width),
            self._phase_table(),
            f"{self._ladder_table()}\n{folded(RUNGS, width)}",
            folded(self._front_table(), width, indent=FRONT_INDENT),
            folded("\n".join([limits, *self.notes]), width),
            "in a script that has the model:",
            self.lines(),
        ]
        return "\n\n".join(parts)

    @property
    def title(self) -> str:
        """What was planned, in one line: the model, the step and the GPU."""
        job, shape = self.job, self.job.shape
        model = f"{shape.model_type}, {shape.params / 1e9:.2f} billion parameters in {shape.layers} layers"
        gpu = f"{job.gpus} x {job.gpu.name} by {job.parallel}" if job.gpus > 1 else job.gpu.name
        adapters = "" if job.adapters is None else f", LoRA of {job.adapters}"
        how = f"{job.optimizer}{adapters}{', layers compiled' * job.compile_layers}, on {gpu}"
        return f"{model}; {job.batch_size} x {job.seq_len} tokens{' on each GPU' * (job.gpus > 1)}, {how}"

    def answer(self) -> str:
        """Return the first three lines: what the step takes, what it takes in the other precision, what it is."""
        lines = [self._taken(self.job, self.chosen, f" of {gib(self.budget_bytes):.2f}")]
        if self.other is not None:
            job, chosen = self.other
            option = "--dtype bfloat16" if job.dtype == torch.bfloat16 else "--dtype float32"
            fails = f"{_precision(job)} ({option}): does not fit"
            lines.append(fails if chosen is None else self._taken(job, chosen, "", option))
        return "\n".join([*lines, self.title])

    def _taken(self, job: Job, one: Candidate, budget: str, option: str = "") -> str:
        speed = self.search.costs.ranks.tokens / one.seconds
        fast = f"{speed:,.0f} tokens/s"
        if job.gpus > 1:
            fast = f"{speed / job.gpus:,.0f} tokens/s per GPU, {speed:,.0f} in all"
        least = "at least " if job.tokens < HOST_TOKENS else ""
        host = f", {gib(one.host):.2f} of host memory" if one.host else ""
        return (
            f"{_precision(job)}{f' ({option})' if option else ''}: peak {gib(one.peak):.2f}{budget} GiB{host}, "
            f"{least}{one.seconds:.3f} s per step, {fast}; {one}"
        )

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

    def _ladder_table(self) -> str:
        tokens, hidden = self.job.tokens, self.job.shape.hidden
        rows = [
            ["a layer saves", "bytes/", "in h", "GiB", "recompute", "forward", "backward", "PCIe"],
            ["", "token", "", "", "TFLOP", "ms", "ms", "ms"],
        ]
        for cost in self.ladder:
            saved = cost.saved / cost.policy.every
            each, seconds = saved / tokens, (cost.forward, cost.backward, cost.transfer)
            stored = [word_of(cost.policy), f"{each:,.0f}", f"{each / hidden:.1f}h", f"{gib(saved):.3f}"]
            times = [f"{time * 1e3:.2f}" if time else "" for time in seconds]
            rows.append([*stored, f"{cost.flop / 1e12:.2f}", *times])
        return table(rows)

    def _front_table(self) -> str:
        shown = list(self.front[:: -(-len(self.front) // FRONT_LINES)])
        shown += [one for one in dict.fromkeys((self.front[-1], self.chosen)) if one not in shown]
        rows = [["peak GiB", "host GiB", "s per step", "policies"]]
        for one in sorted(shown, key=lambda one: one.peak):
            mark = " <" if one == self.chosen else ""
            rows.append([f"{gib(one.peak):.2f}", f"{gib(one.host):.2f}", f"{one.seconds:.3f}", f"{one}{mark}"])
        return table(rows, left=(3,))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures assume."""
        job, shape, gpu = self.job, self.job.shape, self.job.gpu
        budget, requested = (f"{gib(n):.2f} GiB" for n in (self.budget_bytes, self.requested_bytes))
        mask = gib(job.narrow * job.batch_size * job.seq_len**2)
        close = CLOSE * gpu.memory_bytes < self.peak_bytes <= gpu.memory_bytes
        why = "close to the GPU's size" if close else "states leave and come back in each step"
        hidden, waited = self.search.costs.ranks.seconds(self.exchanged)
        notes = {
            f"each GPU receives {gib(self.exchanged.bytes):.2f} GiB per step: {hidden:.3f} s beside the layers' work,"
            f" {waited:.3f} s that it waits for": job.gpus > 1,
            f"budget {budget}, not {requested}: the rest of the {gpu.memory_gib:.2f} GiB is its allocator's": (
                self.requested_bytes > self.budget_bytes and budget != requested
            ),
            f"fewer than {HOST_TOKENS:,} tokens: the host, which launches the kernels, sets the pace": (
                job.tokens < HOST_TOKENS
            ),
            f"head: {str(job.head_plan).splitlines()[0]}": True,
            f"memory of the {gpu.name}; its rates are not in the table: times are those of the {gpu.like}": bool(
                gpu.like
            ),
            f"{job.trained_adapters or 0:,} numbers of adapters are trained, {job.adapters}": job.adapters is not None,
            f"attention has a mask of {mask:.3g} GiB in each layer with keep='all'; flash attention needs none": (
                job.attention_mask
            ),
            f"{why}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragmentation": (
                close or self.chosen.states > 0
            ),
            f"only the text part of {shape.part_of} is planned, not its vision or audio": bool(shape.part_of),
            f"the config's max_position_embeddings is {shape.positions:,}: longer sequences need other positions": (
                0 < shape.positions < job.seq_len
            ),
            f"{max(shape.kind_of) + 1} kind(s) of layers, traced in {shape.model_class} without weights": True,
            "lowtide.patch does not fuse every layer's MLP, so that they have no levels": not shape.levels,
            f"not every layer of {shape.model_type} runs fused attention: keep='attention' is not planned": (
                not shape.attends
            ),
            "attention is transformers' eager one, which stores its scores: another attn_implementation saves less": (
                shape.attention == "eager" and shape.heads > 0 and not shape.attends
            ),
            f"the checkpoint has {shape.quantised} weights: planned as loaded in {job.dtype}": bool(shape.quantised),
            "float32: assumes attention that stores no scores, which PyTorch lacks for grouped queries": (
                job.operand == torch.float32
            ),
            "experts get equal shares of the tokens": shape.experts > 0,
            "experts stay in 16 or 32 bits: transformers puts none into 4": bool(shape.experts and shape.four_bit),
            "layers have sliding windows: attention must take them without a [T, T] mask (flash attention)": (
                any(0 < window < job.seq_len for window in shape.windows)
            ),
            "attention caps its scores: assumes a kernel that does so without storing them": shape.capped_scores,
        }
        return (*(note for note, applies in notes.items() if applies), *notes_on(job))


def _precision(job: Job) -> str:
    """Return how a job's weights and GEMMs are, in a few words."""
    dtype = str(job.dtype).removeprefix("torch.")
    packed = f", layers in {job.shape.four_bit}" if job.shape.four_bit else ""
    return f"{dtype} weights{' under bfloat16 autocast' * job.autocast}{packed}"


def _constructor(value: Any, *always: str) -> str:
    """Return the Python that makes a dataclass: the fields that are not at their defaults, and those of ``always``."""
    every = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
    given = [f"{name}={now!r}" for name, now, default in every if name in always or now != default]
    return f"{type(value).__name__}({', '.join(given)})".replace("'", '"')


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "keep": [{"policy": word_of(policy), "layers": n} for policy, n in one.groups],
        "peak_gib": gib(one.peak),
        "host_gib": gib(one.host),
        "seconds": one.seconds,
        "states_gib": gib(one.states),
        "late": one.late,
    }

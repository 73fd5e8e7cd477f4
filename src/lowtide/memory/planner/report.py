"""What `plan_memory` found, to read, to draw, to paste."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lowtide.head.options import HeadOptions
from lowtide.measure.text import folded, table
from lowtide.measure.units import gib
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.search import Candidate, largest_batch, longest_sequence
from lowtide.memory.planner.step_bytes import Phase
from lowtide.memory.planner.times import LayerTime
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.policy_words import word_of

CHART_WIDTH, CHART_HEIGHT = 60, 12
LEAST_CHART, BESIDE_CHART = 30, 12  # letters: the narrowest chart, and what stands left of one
FRONT_LINES = 10
FRONT_INDENT = 30  # letters before the last column of the front's table
RUNGS = """\
all: what backward reads but the MLP's product (/0), or but its gate and up too (/1);
attention: the layer's input and attention's output; input: its input; backward computes the rest again"""
_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "head": "output layer and loss",
    "transients": "temporaries",
    "other": "workspaces, positions",
}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One policy, for one layer.

    Attributes:
        policy: Which.
        bytes_per_token: What it keeps for backward, wherever that lies.
        hidden_multiples: The same in hidden sizes, h: bytes a token over the hidden size.
        kept_bytes: The same for all tokens.
        recompute_flop: Operations that backward repeats.
        time: Seconds.
    """

    policy: ActivationPolicy
    bytes_per_token: float
    hidden_multiples: float
    kept_bytes: int
    recompute_flop: float
    time: LayerTime


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What fits, and what to do: print it for a table.

    Attributes:
        policies: One `ActivationPolicy` for each layer, as `lowtide.memory.apply_policy` takes them.
        peak_bytes: The most that tensors take on the GPU at once.
        seconds: Of a step.
        tokens_per_second: Of training.
        phase: When the peak is reached, and by what.
        phases: The moments that were compared.
        host_bytes: Pinned host memory that offloaded layers and optimizer states take.
        budget_bytes: What was to spend on the GPU.
        requested_bytes: The budget that was requested, more than that where the GPU's allocator needs the rest.
        host_budget_bytes: What was to spend on the host.
        front: The mixtures that no other beats in both memory and time, from the leanest to the fastest.
        ladder: What each policy keeps and costs, for one layer.
        offload_states: Whether optimizer states may be offloaded.
        job: What was planned: the model's shape, the GPU, dtype and optimizer.
        chosen: The mixture behind ``policies``; its ``states`` are the bytes of optimizer states that are offloaded.
        notes: What the figures assume.
    """

    policies: tuple[ActivationPolicy, ...]
    peak_bytes: int
    seconds: float
    tokens_per_second: float
    phase: Phase
    phases: tuple[Phase, ...]
    host_bytes: int
    budget_bytes: int
    requested_bytes: int
    host_budget_bytes: int
    front: tuple[Candidate, ...]
    ladder: tuple[Rung, ...]
    offload_states: bool
    job: Job
    chosen: Candidate
    notes: tuple[str, ...]

    @cached_property
    def longest_sequence(self) -> int:
        """The longest that fits in the budget at this batch size, in steps of 256 tokens, and no shorter than planned.

        Searched for when it is first read: another search, in steps, while what was planned fits in any case.
        """
        job, offload_states = self.job, self.offload_states
        found = longest_sequence(job, self.budget_bytes, self.host_budget_bytes, offload_states=offload_states)
        return max(found, job.seq_len)

    @cached_property
    def largest_batch(self) -> int:
        """The largest that fits at this sequence length; searched for when it is first read."""
        job, offload_states = self.job, self.offload_states
        found = largest_batch(job, self.budget_bytes, self.host_budget_bytes, offload_states=offload_states)
        return max(found, job.batch_size)

    def lines(self) -> str:
        """Return the lines of Python that put the plan to work on ``model``, and on ``optimizer`` where states move."""
        names = {policy: f"p{i}" for i, (policy, _) in enumerate(self.chosen.groups)}
        policies = [f"{name} = {_constructor(policy)}" for policy, name in names.items()]
        layers = " + ".join(f"[{names[policy]}] * {n}" for policy, n in self.chosen.groups)
        states = self.chosen.states
        layers_move = any(policy.offload for policy in self.policies)
        host = f", host_gib={gib(self.host_budget_bytes):g}" if layers_move else ""
        amount = "" if self.states_gib is None else f", gib={self.states_gib:g}"
        late = ", late=True" if self.chosen.late else ""
        offload = [f"offload_optimizer(optimizer, model{amount}{late})"] if states else []
        if states and self.job.keep_gradients and not late:  # a late one comes back behind all of them
            offload.insert(0, "# with backwards_per_step=N, for N backward passes of a step:")
        return "\n".join(
            [
                "import lowtide",
                f"from lowtide.memory import ActivationPolicy, apply_policy{', offload_optimizer' if states else ''}",
                "",
                "model.config.use_cache = False",
                f"lowtide.patch(model{_options(self.job)})",
                *policies,
                f"apply_policy(model, {layers}{host})",
                *offload,
            ]
        )

    @property
    def states_gib(self) -> float | None:
        """The optimizer states to offload as `lowtide.memory.offload_optimizer` takes them: in GiB, None for all."""
        return None if self.chosen.states == self.phases[-1].optimizer else gib(self.chosen.states)

    def chart(self, width: int = CHART_WIDTH) -> str:
        """Return the front as a picture in characters, so many across: time a step against peak memory."""
        points = [(gib(one.peak), one.seconds) for one in self.front]
        least, most = min(x for x, _ in points), max(max(x for x, _ in points), gib(self.budget_bytes))
        fast, slow = min(y for _, y in points), max(y for _, y in points)

        def at(x: float, y: float) -> tuple[int, int]:
            across = round((x - least) / (most - least or 1) * (width - 1))
            return across, round((slow - y) / (slow - fast or 1) * (CHART_HEIGHT - 1))

        grid = [[" "] * width for _ in range(CHART_HEIGHT)]
        limit = at(gib(self.budget_bytes), slow)[0]
        for row in grid:
            if 0 <= limit < width:
                row[limit] = ":"
        for x, y in points:
            across, down = at(x, y)
            grid[down][across] = "o"
        across, down = at(gib(self.chosen.peak), self.chosen.seconds)
        grid[down][across] = "X"
        left = [f"{slow:8.3f} s", *[" " * 10] * (CHART_HEIGHT - 2), f"{fast:8.3f} s"]
        rows = [f"{label} |{''.join(row)}".rstrip() for label, row in zip(left, grid, strict=True)]
        axis = f"{' ' * 10} +{'-' * width}"
        scale = f"{' ' * 11} {f'{least:.1f} GiB':<{width - 10}}{f'{most:.1f} GiB':>10}"
        return "\n".join([*rows, axis, scale, f"{' ' * 12}o the front, X the choice, : the budget"])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and words, for JSON."""
        job = self.job
        return {
            "model": {name: getattr(job.shape, name) for name in type(job.shape).__dataclass_fields__},
            "params": job.shape.params,
            "gpu": job.gpu.name,
            "seq_len": job.seq_len,
            "batch_size": job.batch_size,
            "dtype": str(job.dtype).removeprefix("torch."),
            "autocast": job.autocast,
            "adapters": None if job.adapters is None else str(job.adapters),
            "attention_mask": job.attention_mask,
            "fused_mlp": job.fused_mlp,
            "keep_gradients": job.keep_gradients,
            "optimizer": job.optimizer,
            "budget_gib": gib(self.budget_bytes),
            "host_budget_gib": gib(self.host_budget_bytes),
            "choice": _candidate(self.chosen),
            "tokens_per_second": self.tokens_per_second,
            "peak_phase": str(self.phase),
            "peak_parts_gib": {name: gib(size) for name, size in self.phase.parts().items()},
            "phases_gib": {str(phase): gib(phase.bytes) for phase in self.phases},
            "front": [_candidate(one) for one in self.front],
            "ladder": [
                {
                    "policy": word_of(rung.policy),
                    "bytes_per_token": rung.bytes_per_token,
                    "recompute_flop": rung.recompute_flop,
                    "forward_s": rung.time.forward,
                    "backward_s": rung.time.backward,
                    "transfer_s": rung.time.transfer,
                }
                for rung in self.ladder
            ],
            "longest_sequence": self.longest_sequence,
            "largest_batch": self.largest_batch,
            "python": self.lines(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return all of it, for a terminal of so many letters across; None: as wide as it comes, as for a file."""
        across = CHART_WIDTH if width is None else max(LEAST_CHART, min(CHART_WIDTH, width - BESIDE_CHART))
        front = folded(self._front(), width, indent=FRONT_INDENT)
        ladder = f"{self._ladder()}\n{folded(RUNGS, width)}"
        parts = [folded(self._headline(), width), self._parts(), ladder, front, self.chart(across)]
        return "\n\n".join([*parts, folded(self._limits(), width), "in a script that has the model:", self.lines()])

    def _headline(self) -> str:
        job, host = self.job, ""
        dtype = "bfloat16 by autocast" if job.autocast else str(job.dtype).removeprefix("torch.")
        if self.host_budget_bytes:
            host = f", pinned host memory {gib(self.host_bytes):.2f} of {gib(self.host_budget_bytes):.2f} GiB"
        return "\n".join(
            [
                f"{job.shape.model_type}, {job.shape.params / 1e9:.2f} billion parameters in {job.shape.layers} layers;"
                f" {job.batch_size} x {job.seq_len} tokens, {dtype}, {job.optimizer},"
                f" on {job.gpu.name}",
                *self._cap(),
                f"keep {self.chosen}",
                f"peak {gib(self.peak_bytes):.2f} of {gib(self.budget_bytes):.2f} GiB{host};"
                f" {self.seconds:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s",
            ]
        )

    def _cap(self) -> list[str]:
        gpu, budget, requested = self.job.gpu, f"{gib(self.budget_bytes):.2f}", f"{gib(self.requested_bytes):.2f}"
        if self.requested_bytes <= self.budget_bytes or budget == requested:
            return []
        left = f"of the {gpu.memory_gib:.2f} GiB of the {gpu.name} its allocator needs 2% and at least 1 GiB"
        return [f"budget {budget} GiB, not {requested}: {left}"]

    def _parts(self) -> str:
        highest: dict[str, Phase] = {}
        for phase in self.phases:
            if phase.name not in highest or phase.bytes > highest[phase.name].bytes:
                highest[phase.name] = phase
        names = ("forward", "head", "backward", "embedding", "optimizer")
        columns = [highest[name] for name in names if name in highest]
        rows = [["GiB", *(phase.name for phase in columns)]]
        rows.append(["", *(f"layer {phase.layer}" if phase.layer >= 0 else "" for phase in columns)])
        for name, label in _KINDS.items():
            rows.append([label, *(f"{gib(phase.parts()[name]):.2f}" for phase in columns)])
        rows.append(["sum", *(f"{gib(phase.bytes):.2f}" for phase in columns)])
        rows.append(["", *("the peak" if phase.bytes == self.peak_bytes else "" for phase in columns)])
        return table(rows)

    def _ladder(self) -> str:
        rows = [
            ["a layer keeps", "bytes", "in h", "GiB", "TFLOP", "forward", "backward", "PCIe"],
            ["", "a token", "", "", "again", "ms", "ms", "ms"],
        ]
        rows += [
            [
                word_of(rung.policy),
                f"{rung.bytes_per_token:,.0f}",
                f"{rung.hidden_multiples:.1f}h",
                f"{gib(rung.kept_bytes):.3f}",
                f"{rung.recompute_flop / 1e12:.2f}",
                f"{rung.time.forward * 1e3:.2f}",
                f"{rung.time.backward * 1e3:.2f}",
                f"{rung.time.transfer * 1e3:.2f}" if rung.time.transfer else "",
            ]
            for rung in self.ladder
        ]
        return table(rows)

    def _front(self) -> str:
        shown = list(self.front[:: -(-len(self.front) // FRONT_LINES)])
        for one in (self.front[-1], self.chosen):
            if one not in shown:
                shown.append(one)
        rows = [["peak GiB", "host GiB", "s a step", "keep"]]
        for one in sorted(shown, key=lambda one: one.peak):
            mark = " <" if one == self.chosen else ""
            rows.append([f"{gib(one.peak):.2f}", f"{gib(one.host):.2f}", f"{one.seconds:.3f}", f"{one}{mark}"])
        return table(rows, left=(3,))

    def _limits(self) -> str:
        lines = [
            f"longest sequence in this budget: {self.longest_sequence:,} tokens at batch {self.job.batch_size};"
            f" largest batch: {self.largest_batch} at {self.job.seq_len:,} tokens",
            *self.notes,
        ]
        return "\n".join(lines)


def rung_of(job: Job, policy: ActivationPolicy, kept_bytes: int, time: LayerTime) -> Rung:
    """Return a line of the ladder."""
    each = kept_bytes / job.tokens
    return Rung(
        policy=policy,
        bytes_per_token=each,
        hidden_multiples=each / job.shape.hidden,
        kept_bytes=kept_bytes,
        recompute_flop=time.flop,
        time=time,
    )


def _constructor(policy: ActivationPolicy) -> str:
    words = [f"keep={policy.keep!r}".replace("'", '"')]
    if policy.mlp_level is not None:
        words.append(f"mlp_level={policy.mlp_level}")
    if policy.offload:
        words.append("offload=True")
    if policy.mlp_tile_tokens is not None:
        words.append(f"mlp_tile_tokens={policy.mlp_tile_tokens}")
    return f"ActivationPolicy({', '.join(words)})"


def _options(job: Job) -> str:
    """Return the arguments of `lowtide.patch`: what the plan was made with, where that is not the default."""
    stock = "" if job.fused_mlp else ", mlp=False"
    if job.head is None or job.head == HeadOptions():
        return stock
    said = [(f.name, getattr(job.head, f.name), f.default) for f in fields(job.head)]
    words = ", ".join(f"{name}={value!r}" for name, value, default in said if value != default)
    return stock + f", options=lowtide.HeadOptions({words})".replace("'", '"')


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "keep": [{"policy": word_of(policy), "layers": n} for policy, n in one.groups],
        "peak_gib": gib(one.peak),
        "host_gib": gib(one.host),
        "seconds": one.seconds,
        "states_gib": gib(one.states),
        "late": one.late,
    }

"""`MemoryPlan`: the result of `plan_memory`, as a table, a chart, Python to paste, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from lowtide.head.options import HeadOptions
from lowtide.measure.text import folded, table
from lowtide.measure.units import gib
from lowtide.memory.policy import ActivationPolicy, word_of
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCost
from lowtide.plan.search import Candidate, Search
from lowtide.plan.shapes import ModelShape
from lowtide.plan.sharding import Exchange, ranks_of, sharding_lines
from lowtide.plan.step_costs import PARTS, Phase

CHART_WIDTH, CHART_HEIGHT = 60, 12
LEAST_CHART, BESIDE_CHART = 30, 12  # letters: the narrowest chart, and what stands left of one
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
        policies: One `ActivationPolicy` for each layer, as `lowtide.memory.apply_policy` takes them.
        peak_bytes: The most that tensors take on the GPU at once.
        seconds: Step time.
        tokens_per_second: Of training, of all GPUs.
        phase: When the peak is reached, and by what.
        phases: The moments that were compared.
        exchanged: What a GPU receives from the others in a step, in bytes.
        host_bytes: Pinned host memory that offloaded layers and optimizer states take.
        budget_bytes: GPU memory that tensors may take.
        requested_bytes: The requested budget: more than that where the GPU's allocator needs the rest.
        host_budget_bytes: Pinned host memory that may be taken.
        front: The mixtures that no other beats in both memory and time, from the leanest to the fastest.
        ladder: What each policy stores and takes, for one layer.
        job: The step: the model's shape, the GPU, dtype and optimizer.
        chosen: The mixture behind ``policies``; its ``states`` are the bytes of optimizer states that are offloaded.
        notes: What the figures assume.
    """

    policies: tuple[ActivationPolicy, ...]
    peak_bytes: int
    seconds: float
    tokens_per_second: float
    phase: Phase
    phases: tuple[Phase, ...]
    exchanged: Exchange
    host_bytes: int
    budget_bytes: int
    requested_bytes: int
    host_budget_bytes: int
    front: tuple[Candidate, ...]
    ladder: tuple[LayerCost, ...]
    job: Job
    chosen: Candidate
    notes: tuple[str, ...]

    def _search(self) -> Search:
        return Search(self.job)

    @cached_property
    def longest_sequence(self) -> int:
        """The longest that fits in the budget at this batch size, in steps of 256 tokens, and no shorter than planned.

        Searched for when it is first read: another search, in steps, while what was planned fits in any case.
        """
        return max(self._search().longest_sequence(self.budget_bytes), self.job.seq_len)

    @cached_property
    def largest_batch(self) -> int:
        """The largest that fits at this sequence length; searched for when it is first read."""
        return max(self._search().largest_batch(self.budget_bytes), self.job.batch_size)

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

    def chart(self, width: int = CHART_WIDTH) -> str:
        """Return the front as a plot in characters, so many across: step time against peak memory."""
        points = [(gib(one.peak), one.seconds) for one in self.front]
        least, most = points[0][0], max(points[-1][0], gib(self.budget_bytes))
        slow, fast = points[0][1], points[-1][1]

        def across(x: float) -> int:
            return round((x - least) / (most - least or 1) * (width - 1))

        grid = [[" "] * width for _ in range(CHART_HEIGHT)]
        if 0 <= (limit := across(gib(self.budget_bytes))) < width:
            for row in grid:
                row[limit] = ":"
        for mark, places in (("o", points), ("X", [(gib(self.chosen.peak), self.chosen.seconds)])):
            for x, y in places:
                grid[round((slow - y) / (slow - fast or 1) * (CHART_HEIGHT - 1))][across(x)] = mark
        left = [f"{slow:8.3f} s", *[" " * 10] * (CHART_HEIGHT - 2), f"{fast:8.3f} s"]
        rows = [f"{label} |{''.join(row)}".rstrip() for label, row in zip(left, grid, strict=True)]
        axis = f"{' ' * 10} +{'-' * width}"
        scale = f"{' ' * 11} {f'{least:.1f} GiB':<{width - 10}}{f'{most:.1f} GiB':>10}"
        return "\n".join([*rows, axis, scale, f"{' ' * 12}o the front, X the choice, : the budget"])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and texts, for JSON."""
        job = self.job
        flags = ("autocast", "attention_mask", "fused_mlp", "compile_layers", "keep_gradients")
        settings = ("seq_len", "batch_size", *flags, "optimizer")
        return {
            "model": _model(job.shape),
            "params": job.shape.params,
            "gpu": job.gpu.name,
            "dtype": str(job.dtype).removeprefix("torch."),
            **{name: getattr(job, name) for name in settings},
            "adapters": None if job.adapters is None else str(job.adapters),
            **self._several(),
            "budget_gib": gib(self.budget_bytes),
            "host_budget_gib": gib(self.host_budget_bytes),
            "choice": _candidate(self.chosen),
            "tokens_per_second": self.tokens_per_second,
            "peak_phase": str(self.phase),
            "peak_parts_gib": {name: gib(self.phase.parts()[name]) for name in self._parts},
            "phases_gib": {str(phase): gib(phase.bytes) for phase in self.phases},
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

    @property
    def _parts(self) -> dict[str, str]:
        """The parts of a phase, and how they are printed: nothing is gathered on one GPU."""
        return {name: label for name, label in PARTS.items() if name != "gathered" or self.job.gpus > 1}

    def _several(self) -> dict[str, Any]:
        """Return what a plan of several GPUs has besides."""
        job = self.job
        if job.gpus == 1:
            return {}
        hidden, waited = ranks_of(job).seconds(self.exchanged)
        exchange = {"gib": gib(self.exchanged.bytes), "hidden_s": hidden, "waited_s": waited}
        return {
            "gpus": job.gpus,
            "parallel": job.parallel,
            "link_gb_s": job.link_rate / 1e9,
            "tokens_per_second_per_gpu": self.tokens_per_second / job.gpus,
            "exchange": exchange,
            "held_gib": {name: gib(getattr(self.phases[-1], name)) for name in ("weights", "gradients", "optimizer")},
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return all of it, for a terminal of so many letters across; None: no line is folded, as for a file."""
        across = CHART_WIDTH if width is None else max(LEAST_CHART, min(CHART_WIDTH, width - BESIDE_CHART))
        limits = (
            f"longest sequence in this budget: {self.longest_sequence:,} tokens at batch {self.job.batch_size};"
            f" largest batch: {self.largest_batch} at {self.job.seq_len:,} tokens"
        )
        parts = [
            folded(self._headline(), width),
            self._phase_table(),
            f"{self._ladder_table()}\n{folded(RUNGS, width)}",
            folded(self._front_table(), width, indent=FRONT_INDENT),
            self.chart(across),
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
        dtype = "bfloat16 by autocast" if job.autocast else str(job.dtype).removeprefix("torch.")
        dtype += f", layers in {shape.four_bit}" * bool(shape.four_bit)
        gpu = f"{job.gpus} x {job.gpu.name} by {job.parallel}" if job.gpus > 1 else job.gpu.name
        how = f"{dtype}, {job.optimizer}{', layers compiled' if job.compile_layers else ''}, on {gpu}"
        each = " on each GPU" if job.gpus > 1 else ""
        return f"{model}; {job.batch_size} x {job.seq_len} tokens{each}, {how}"

    def _headline(self) -> str:
        gpu, lines = self.job.gpu, [self.title]
        budget, requested = f"{gib(self.budget_bytes):.2f}", f"{gib(self.requested_bytes):.2f}"
        if self.requested_bytes > self.budget_bytes and budget != requested:
            left = f"of the {gpu.memory_gib:.2f} GiB of the {gpu.name} its allocator needs 2% and at least 1 GiB"
            lines.append(f"budget {budget} GiB, not {requested}: {left}")
        host = f"{gib(self.host_bytes):.2f} of {gib(self.host_budget_bytes):.2f} GiB"
        pinned = f", pinned host memory {host}" if self.host_budget_bytes else ""
        n = self.job.gpus
        peak = f"peak {gib(self.peak_bytes):.2f} of {budget} GiB{' on each GPU' if n > 1 else ''}{pinned}"
        speed = f"{self.seconds:.3f} s per step, {self.tokens_per_second / n:,.0f} tokens/s"
        speed += f" per GPU, {self.tokens_per_second:,.0f} in all" if n > 1 else ""
        return "\n".join([*lines, f"policies {self.chosen}", f"{peak}; {speed}", *self._exchange_line()])

    def _exchange_line(self) -> list[str]:
        if self.job.gpus == 1:
            return []
        hidden, waited = ranks_of(self.job).seconds(self.exchanged)
        received = f"each GPU receives {gib(self.exchanged.bytes):.2f} GiB per step"
        return [f"{received}: {hidden:.3f} s beside the layers' work, {waited:.3f} s that it waits for them and copies"]

    def _phase_table(self) -> str:
        highest: dict[str, Phase] = {}
        for phase in self.phases:
            if phase.name not in highest or phase.bytes > highest[phase.name].bytes:
                highest[phase.name] = phase
        columns = [highest[name] for name in ("forward", "head", "backward", "embedding", "optimizer")]
        rows = self._parts.items()
        return table(
            [
                ["GiB", *(phase.name for phase in columns)],
                ["", *(f"layer {phase.layer}" if phase.layer >= 0 else "" for phase in columns)],
                *([label, *(f"{gib(phase.parts()[part]):.2f}" for phase in columns)] for part, label in rows),
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


def _constructor(value: Any, *always: str) -> str:
    """Return the Python that makes a dataclass: the fields that are not at their defaults, and those of ``always``."""
    every = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
    given = [f"{name}={now!r}" for name, now, default in every if name in always or now != default]
    return f"{type(value).__name__}({', '.join(given)})".replace("'", '"')


def _model(shape: ModelShape) -> dict[str, Any]:
    """Return a shape's fields, and not the whole config."""
    return {name: value for name, value in asdict(shape).items() if name != "config"}


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "keep": [{"policy": word_of(policy), "layers": n} for policy, n in one.groups],
        "peak_gib": gib(one.peak),
        "host_gib": gib(one.host),
        "seconds": one.seconds,
        "states_gib": gib(one.states),
        "late": one.late,
    }

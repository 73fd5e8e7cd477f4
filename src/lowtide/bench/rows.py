"""The rows of a shape: a peer on a problem, interleaved with the limit. A failed peer is a row with the reason."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.limit import bare_gemms, measure_limit
from lowtide.bench.peers import CannotError, Peer
from lowtide.bench.problem import Problem, Setting
from lowtide.bench.reference import Floor, Reference, reference, relative_error, rounding_floor
from lowtide.bench.shapes import Shape
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

REASON_LENGTH = 200
OUT_OF_MEMORY = "out of memory"  # the reason of a row that did not fit


@dataclass(kw_only=True)
class Row:
    """What was measured of one peer; None: not measured, ``failed`` says why where nothing else does.

    Attributes:
        name: the peer's.
        setting: the setting's name.
        tokens: N.
        ms: median time of forward and backward; ``limit_ms`` that of the bare GEMMs in the same rounds.
        share: ``limit_ms / ms``.
        spread: the slowest round over the fastest, less 1.
        peak_mib: most memory at once above the inputs, gradients included.
        loss_error: absolute difference of the loss (the mean one, of several).
        dx_error: relative error of the hidden states' gradient; ``dx_floor`` what the roundings alone cause.
        dw_error: the same of the weight's; ``dw_floor``.
        workspace_mib: lowtide's option, in a sweep.
        plan: what `plan_head` said of it.
        failed: why there are no figures.
    """

    name: str
    setting: str
    tokens: int
    ms: float | None = None
    limit_ms: float | None = None
    share: float | None = None
    spread: float | None = None
    peak_mib: float | None = None
    loss_error: float | None = None
    dx_error: float | None = None
    dx_floor: float | None = None
    dw_error: float | None = None
    dw_floor: float | None = None
    workspace_mib: float | None = None
    plan: HeadPlan | None = None
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is known."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(kw_only=True)
class ShapeResult:
    """Everything that was measured of one shape.

    Attributes:
        shape: which.
        dtype: of the products' operands.
        limits: by setting (and number of tokens, where it is not the shape's): milliseconds by rows of a chunk, the
            best of them, and its rate.
        gradients_mib: size of the two gradients, which is in every peak.
        table: the peers; ``sweep``, ``settings`` and ``tokens`` what the options of that name ask for.
    """

    shape: Shape
    dtype: str
    limits: list[dict[str, Any]] = field(default_factory=list)
    gradients_mib: float = 0.0
    table: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    settings: list[Row] = field(default_factory=list)
    tokens: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [*self.table, *self.sweep, *self.settings, *self.tokens]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        shape = self.shape
        told: dict[str, Any] = {"name": shape.name, "N": shape.N, "D": shape.D, "V": shape.V, "dtype": self.dtype}
        told |= {"limits": self.limits, "gradients_mib": self.gradients_mib}
        parts = {"table": self.table, "sweep": self.sweep, "settings": self.settings, "tokens": self.tokens}
        return told | {name: [row.to_json() for row in rows] for name, rows in parts.items() if rows}

    def row(self, name: str) -> Row | None:
        """Return a peer's row of the table."""
        return next((row for row in self.table if row.name == name), None)


@dataclass(kw_only=True)
class Bench:
    """A problem with its limit and its truth, on which peers are measured.

    Attributes:
        problem: the inputs.
        limit: milliseconds of the bare GEMMs by rows of a chunk.
        true: exact loss and gradients; None: errors are not measured.
        warm: rounds that do not count, and ``reps`` that do.
    """

    problem: Problem
    limit: dict[int, float]
    true: Reference | None
    warm: int
    reps: int
    _floors: dict[int | None, Floor] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, *, error: bool, warm: int, reps: int) -> Bench:
        """Return the bench of a problem: its limit is measured, and its truth computed if errors are wanted."""
        true = reference(problem) if error else None
        limit = measure_limit(problem, warm=warm, reps=reps)
        release(problem.device)
        return cls(problem=problem, limit=limit, true=true, warm=warm, reps=reps)

    def in_setting(self, setting: Setting) -> Bench:
        """Return the bench of the same numbers in another setting."""
        problem = self.problem.in_setting(setting)
        return Bench.of(problem, error=self.true is not None, warm=self.warm, reps=self.reps)

    @property
    def best_rows(self) -> int:
        """Rows of a chunk with which the bare GEMMs are fastest."""
        return min(self.limit, key=lambda rows: self.limit[rows])

    @property
    def limit_ms(self) -> float:
        """The least time of the bare GEMMs."""
        return self.limit[self.best_rows]

    @property
    def tflops(self) -> float:
        """The rate of the bare GEMMs, in 10**12 operations a second."""
        return self.problem.shape.flops(self.problem.setting.gemms) / self.limit_ms / 1e9

    @property
    def gradients_mib(self) -> float:
        """Size of the gradients that are returned."""
        leaves = (t for t in (self.problem.x, self.problem.w) if t.requires_grad)
        return mib(sum(t.numel() * t.element_size() for t in leaves))

    def measure(self, peer: Peer) -> Row:
        """Return a peer's row."""
        problem = self.problem
        row = Row(name=peer.name, setting=problem.setting.name, tokens=problem.shape.N)
        try:
            self._fill(row, peer)
        except CannotError as cannot:
            row.failed = str(cannot)
        except Exception as error:  # whatever a peer raises is its row
            row.failed = reason_of(error)
        problem.clear()
        if row.failed is None or answers(problem.device):
            release(problem.device)
        return row

    def _fill(self, row: Row, peer: Peer) -> None:
        problem = self.problem
        if peer.options is not None:
            row.plan = plan_of(peer, problem)
        loss = peer.build(problem)
        bare = bare_gemms(problem, self.best_rows)
        functions: dict[str, Callable[[], object]] = {"limit": bare, "peer": lambda: problem.step(loss)}
        timings = time_side_by_side(functions, problem.device, warm=self.warm, reps=self.reps)
        ms, limit_ms, spread = timings["peer"].median_ms, timings["limit"].median_ms, timings["peer"].spread
        problem.clear()
        value: list[Tensor] = []
        peak = peak_above(lambda: value.append(problem.step(loss)), problem.device)
        row.ms, row.limit_ms, row.share, row.spread = ms, limit_ms, limit_ms / ms, spread
        row.peak_mib = mib(peak)
        if self.true is not None:
            self._add_errors(row, value[0], self.true)

    def _add_errors(self, row: Row, value: Tensor, true: Reference) -> None:
        problem = self.problem
        expected = true.loss_N.double() if value.dim() else true.loss_N.double().mean()
        errors = {"loss_error": (value.double() - expected).abs().mean().item()}
        for name, leaf, exact in (("dx_error", problem.x, true.dx), ("dw_error", problem.w, true.dw)):
            if exact is not None:
                errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, exact)
        for name, error in errors.items():
            if math.isfinite(error):
                setattr(row, name, error)
            else:
                row.failed = f"{name} is not a number: the value is missing or not finite"
        if row.plan is not None and problem.dtype == torch.bfloat16:  # fp16 cannot hold the exponentials
            in_float32 = row.plan.accumulate == "float32" or row.plan.chunks <= 1
            floor = self._floor(None if in_float32 else row.plan.chunk_rows, true)
            row.dx_floor, row.dw_floor = floor.dx, floor.dw

    def _floor(self, chunk_rows: int | None, true: Reference) -> Floor:
        if chunk_rows not in self._floors:
            self._floors[chunk_rows] = rounding_floor(self.problem, true, chunk_rows)
        return self._floors[chunk_rows]


def answers(device: torch.device) -> bool:
    """Return whether a device still computes: after an illegal access by a kernel, a process has no GPU any more."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def release(device: torch.device) -> None:
    """Hand back the memory that nothing refers to, so that the next peer finds what the last one found."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def plan_of(peer: Peer, problem: Problem) -> HeadPlan:
    """Return what `plan_head` says of lowtide with the peer's options."""
    assert peer.options is not None
    shape, setting = problem.shape, problem.setting
    return plan_head(
        shape.N,
        shape.D,
        shape.V,
        problem.dtype,
        problem.device,
        peer.options(problem),
        weight_dtype=problem.w.dtype,
        reduction=setting.reduction,
        weight_frozen=not problem.w.requires_grad,
    )


def reason_of(error: Exception) -> str:
    """Return what an error says, in one line that is not too long."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"

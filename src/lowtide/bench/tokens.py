"""Functions with a value for each token: peers on the same tensors, interleaved with the bare GEMMs.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.limit import bare_gemms, time_by_rows
from lowtide.bench.peers import LOWTIDE, CannotError
from lowtide.bench.problem import ROWS, Problem, blocks
from lowtide.bench.reference import exact_products, relative_error
from lowtide.bench.rows import reason_of, release
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

Values = dict[str, Tensor]  # by name, [N] or [N, K], or 0-d: their mean
Function = Callable[[], Values]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every peer of one table computes.

    Attributes:
        head: hidden states, weight and targets; its setting says whether gradients are wanted, and which.
        names: of the values.
        upstream: the objective's gradient by each value, of its shape; empty where the setting has no gradients.
    """

    head: Problem
    names: tuple[str, ...]
    upstream: Values

    @property
    def name(self) -> str:
        """What is computed."""
        return self.head.setting.name

    @property
    def flops(self) -> int:
        """Operations of the products that it cannot do without."""
        return self.head.shape.flops(self.head.setting.gemms)

    def bare(self, rows: int) -> Callable[[], None]:
        """Return those products, over chunks of so many rows."""
        return bare_gemms(self.head, rows)

    def exact(self) -> Callable[[Tensor, slice], Values]:
        """Return what computes the values, differentiably, from logits in full of some rows and from which rows."""
        raise NotImplementedError

    def step(self, function: Function) -> Values:
        """Run a function once, with its backward pass where there is one, and return its values.

        A 0-d value is the tokens' mean; the upstream gradient of such a task is 1 / N for every token.
        """
        self.head.clear()
        with torch.set_grad_enabled(self.head.setting.grad):
            values = function()
        if self.head.setting.grad:
            self.backward(values)
        return {name: value.detach() for name, value in values.items()}

    def backward(self, values: Values, *, keep: bool = False) -> None:
        """Run the values' backward pass, and with ``keep`` leave their graph as it is."""
        upstream = self.upstream
        gradients = [upstream[name].to(v.dtype) if v.dim() else torch.ones_like(v) for name, v in values.items()]
        torch.autograd.backward(list(values.values()), gradients, retain_graph=keep)

    def run_of(self, function: Function) -> Callable[[], Values]:
        """Return what is measured of a function: `step`."""
        return lambda: self.step(function)


@dataclass(frozen=True)
class TokenPeer:
    """One way to a task's values.

    Attributes:
        name: of its row.
        about: what it is, in a few words.
        build: imports it and returns a function of no arguments; raises `CannotError` where it does not do the task.
        package: the distribution it comes in, for its version; empty where that is torch's or lowtide's.
    """

    name: str
    about: str
    build: Callable[[Any], Function]
    package: str = ""


def by_name(*peers: TokenPeer) -> dict[str, TokenPeer]:
    """Return the peers by name, in their order."""
    return {peer.name: peer for peer in peers}


@dataclass(frozen=True)
class Truth:
    """Each value in float64, and the two gradients [N, D] and [V, D] in float32; None where there are none."""

    values: Values
    dx: Tensor | None
    dw: Tensor | None


@torch.no_grad()
def truth(task: Task) -> Truth:
    """Return values and gradients from float32 products of float32 copies; all between the products is in float64."""
    head, setting = task.head, task.head.setting
    w, values_of = head.w.float(), task.exact()
    dx = torch.empty_like(head.x, dtype=torch.float32) if setting.grad else None
    dw = torch.zeros_like(w) if setting.grad else None
    found: dict[str, list[Tensor]] = {name: [] for name in task.names}
    with exact_products():
        for rows in blocks(head.shape.N, ROWS):
            x = head.x[rows].float()
            z = (x @ w.T).double().requires_grad_(setting.grad)
            with torch.set_grad_enabled(setting.grad):
                values = values_of(z, rows)
            for name, value in values.items():
                found[name].append(value.detach())
            if dx is not None and dw is not None:
                upstream = [task.upstream[name][rows].double() for name in values]
                dz = torch.autograd.grad(list(values.values()), z, upstream)[0].float()
                torch.mm(dz, w, out=dx[rows])
                dw.addmm_(dz.T, x)
    return Truth({name: torch.cat(parts) for name, parts in found.items()}, dx, dw)


@dataclass(kw_only=True)
class TokenRow:
    """What was measured of one peer; None: not measured, ``failed`` says why where nothing else does.

    Attributes:
        name: the peer's.
        ms: median time; ``limit_ms`` that of the bare GEMMs in the same rounds.
        share: ``limit_ms / ms``.
        spread: the slowest round over the fastest, less 1.
        peak_mib: most memory at once above the inputs, gradients included.
        errors: of each value by name, the absolute difference, its mean over the tokens; ``dx`` and ``dw``, the
            relative errors of the two gradients.
        failed: why there are no figures.
    """

    name: str
    ms: float | None = None
    limit_ms: float | None = None
    share: float | None = None
    spread: float | None = None
    peak_mib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failed: str | None = None

    @property
    def own(self) -> bool:
        """Whether it is lowtide's."""
        return self.name.startswith(LOWTIDE)

    def to_json(self) -> dict[str, Any]:
        """Return what is known."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, {})}


@dataclass(kw_only=True)
class TokenBench:
    """A task with its limit and its truth, on which peers are measured.

    Attributes:
        task: what is computed.
        limit: milliseconds of the bare GEMMs by rows of a chunk.
        true: exact values and gradients; None: errors are not measured.
        warm: rounds that do not count, and ``reps`` that do.
    """

    task: Task
    limit: dict[int, float]
    true: Truth | None
    warm: int
    reps: int

    @classmethod
    def of(cls, task: Task, *, error: bool, warm: int, reps: int) -> TokenBench:
        """Return the bench of a task: its limit is measured, and its truth computed if errors are wanted."""
        true = truth(task) if error else None
        release(task.head.device)
        limit = time_by_rows(task.head, task.bare, warm=warm, reps=reps)
        release(task.head.device)
        return cls(task=task, limit=limit, true=true, warm=warm, reps=reps)

    @property
    def best_rows(self) -> int:
        """Rows of a chunk with which the bare GEMMs are fastest."""
        return min(self.limit, key=lambda rows: self.limit[rows])

    @property
    def tflops(self) -> float:
        """The rate of the bare GEMMs, in 10**12 operations a second."""
        return self.task.flops / self.limit[self.best_rows] / 1e9

    @property
    def gradients_mib(self) -> float:
        """Size of the gradients that are returned."""
        leaves = (t for t in (self.task.head.x, self.task.head.w) if t.requires_grad)
        return mib(sum(t.numel() * t.element_size() for t in leaves))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's errors."""
        return (*self.task.names, "dx", "dw") if self.task.head.setting.grad else self.task.names

    def to_json(self) -> dict[str, Any]:
        """Return what is known before a peer runs."""
        return {
            "work": self.task.name,
            "limit_ms": self.limit[self.best_rows],
            "limit_rows": self.best_rows,
            "limit_ms_by_rows": {str(rows): ms for rows, ms in self.limit.items()},
            "tflops": self.tflops,
            "gradients_mib": self.gradients_mib,
        }

    def measure(self, peer: TokenPeer) -> TokenRow:
        """Return a peer's row."""
        row = TokenRow(name=peer.name)
        try:
            self._fill(row, peer)
        except CannotError as cannot:
            row.failed = str(cannot)
        except Exception as error:  # whatever a peer raises is its row
            row.failed = reason_of(error)
        self.task.head.clear()
        release(self.task.head.device)
        return row

    def _fill(self, row: TokenRow, peer: TokenPeer) -> None:
        task, device = self.task, self.task.head.device
        run = task.run_of(peer.build(task))
        turns: Mapping[str, Callable[[], object]] = {
            "limit": task.bare(self.best_rows), "peer": run
        }  # fmt: skip
        timings = time_side_by_side(turns, device, warm=self.warm, reps=self.reps)
        task.head.clear()
        got: list[Values] = []
        peak = peak_above(lambda: got.append(run()), device)
        ms, limit_ms = timings["peer"].median_ms, timings["limit"].median_ms
        row.ms, row.limit_ms, row.share, row.spread = ms, limit_ms, limit_ms / ms, timings["peer"].spread
        row.peak_mib = mib(peak)
        if self.true is not None:
            self._add_errors(row, got[0], self.true)

    def _add_errors(self, row: TokenRow, got: Values, true: Truth) -> None:
        head = self.task.head
        errors = {}
        for name, exact in true.values.items():
            value = got.get(name)
            expected = exact if value is None or value.dim() else exact.mean()
            errors[name] = math.nan if value is None else (value.double() - expected).abs().mean().item()
        for name, leaf, gradient in (("dx", head.x, true.dx), ("dw", head.w, true.dw)):
            if gradient is not None:
                errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, gradient)
        row.errors = {name: error for name, error in errors.items() if math.isfinite(error)}
        if missing := [name for name in errors if name not in row.errors]:
            row.failed = f"{', '.join(missing)}: missing or not finite"


_TITLES = {"dx": "dX err", "dw": "dW err", "mean_logit": "mean err", "sum_sq_prob": "sumsq err"}


def header(bench: TokenBench) -> str:
    """Return the shape, the work, the limit and the columns' names."""
    head = bench.task.head
    tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in bench.limit.items())
    errors = "".join(f"{_TITLES.get(name, f'{name} err'):>14}" for name in bench.columns)
    return (
        f"\n{head.shape} {str(head.dtype).removeprefix('torch.')}, {bench.task.name}: the bare GEMMs take {tried}"
        f" ({bench.tflops:.3g} TFLOP/s); gradients {bench.gradients_mib:.1f} MiB\n"
        f"{'':24}{'ms':>9}{'share':>8}{'MiB':>9}{errors}\n"
    )


def line(bench: TokenBench, row: TokenRow) -> str:
    """Return a row."""
    if row.ms is None:
        return f"{row.name:24}{row.failed}\n"
    text = f"{row.name:24}{row.ms:9.2f}{row.share or 0:8.3f}{row.peak_mib or 0:9.1f}"
    for name in bench.columns:
        text += f"{row.errors[name]:14.1e}" if name in row.errors else f"{'':14}"
    return f"{text}  {row.failed or ''}".rstrip() + "\n"

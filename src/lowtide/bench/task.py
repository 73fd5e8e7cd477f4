"""A task: values computed from hidden states and a head, its exact result, and peers measured on it beside the limit.

N tokens, D hidden size, V vocabulary, K values per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import Benchmark, Column, Peer, Row, Run, Table, matmul_precision, reason_in, release
from lowtide.bench.problem import ROWS, Problem, blocks
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

CHUNKS = (2048, 4096)  # rows; and all of them at once, where that fits
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried
BUSY_CYCLES = 20_000_000  # of a GPU's clock that it is kept busy with, about 10 ms: longer than a call's launches take


def limit_rows(N: int, row_bytes: int) -> tuple[int, ...]:
    """Return the rows per chunk that are tried: 2048, 4096 and N, but none above N or too large to hold."""
    rows = sorted({min(c, N) for c in (*CHUNKS, N)})
    return tuple(c for c in rows if c * row_bytes <= MOST_LOGITS or c == rows[0])


def bare_gemms(problem: Problem, rows: int) -> Callable[[], None]:
    """Return a function that runs the GEMMs a setting cannot do without, in chunks of so many rows.

    With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only), ``dX = z W``
    and, unless the head is frozen, ``dW += z^T x``. z takes the place of its gradient, which has the same shape. dW is
    summed in its own dtype, which is the least work.
    """
    setting = problem.setting
    x, w = problem.x.detach().to(problem.dtype), problem.w.detach().to(problem.dtype)
    dx_dtype, dw_dtype = problem.x.dtype, problem.w.dtype
    again = setting.reduction == "none"

    @torch.no_grad()
    def run() -> None:
        z_CV = torch.empty(min(rows, len(x)), len(w), device=x.device, dtype=x.dtype)
        if again:
            for chunk in blocks(len(x), rows):
                torch.mm(x[chunk], w.T, out=z_CV[: chunk.stop - chunk.start])
        dx = torch.empty_like(x, dtype=dx_dtype) if setting.grad else None
        dw = torch.empty_like(w, dtype=dw_dtype) if setting.grad and not setting.frozen else None
        for chunk in blocks(len(x), rows):
            z = z_CV[: chunk.stop - chunk.start]
            torch.mm(x[chunk], w.T, out=z)
            if dx is not None:
                _multiply(z, w, dx[chunk], add=False)
            if dw is not None:
                _multiply(z.T, x[chunk], dw, add=chunk.start > 0)

    return run


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write or add ``a @ b`` to ``out``, which may be float32 while the operands are narrow."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.device.type == "cuda":
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out += a @ b
    else:
        out.copy_(a @ b)


Values = dict[str, Tensor]  # by name, [N] or [N, K], or 0-d: their mean
Function = Callable[[], Values]
NAME = Column("", "name", "<24")
SHARE = (
    Column("idle ms", "ms", "9.2f"), Column("share", "share", "7.3f"),
    Column("busy ms", "busy_ms", "9.2f"), Column("share", "busy_share", "7.3f"),
    Column("MiB", "peak_mib", "9.1f"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every peer of one table computes.

    Attributes:
        head: hidden states, weight and targets; its setting has which gradients are computed, if any.
        names: of the values.
        upstream: the objective's gradient with respect to each value, of its shape; empty without gradients.
        values_of: returns the values, differentiably, from all logits [rows, V] of some rows.
        others: heads whose GEMMs it needs as well, such as a teacher's.
    """

    head: Problem
    names: tuple[str, ...]
    upstream: Values
    values_of: Callable[[Tensor, slice], Values]
    others: tuple[Problem, ...] = ()

    @property
    def gemms(self) -> int:
        """The number of GEMMs that it cannot do without."""
        return sum(head.setting.gemms for head in (self.head, *self.others))

    @property
    def flops(self) -> int:
        """Operations of those GEMMs."""
        return sum(head.shape.flops(head.setting.gemms) for head in (self.head, *self.others))

    def bare(self, rows: int) -> Callable[[], object]:
        """Return those GEMMs, in chunks of so many rows."""
        runs = [bare_gemms(head, rows) for head in (*self.others, self.head)]
        return lambda: [run() for run in runs]

    def step(self, function: Function) -> Values:
        """Run a function once, with its backward pass where there is one, and return its values.

        A 0-d value is the tokens' mean; the upstream gradient of such a task is 1 / N for every token.
        """
        head = self.head
        head.clear()
        with (
            torch.set_grad_enabled(head.setting.grad),
            torch.autocast(head.device.type, head.dtype, enabled=head.setting.wide),
        ):
            values = function()
        if head.setting.grad:
            self.backward(values)
        return {name: value.detach() for name, value in values.items()}

    def backward(self, values: Values, *, keep: bool = False) -> None:
        """Run the values' backward pass; ``keep`` retains their graph."""
        upstream = self.upstream
        gradients = [upstream[name].to(v.dtype) if v.dim() else torch.ones_like(v) for name, v in values.items()]
        torch.autograd.backward(list(values.values()), gradients, retain_graph=keep)

    def run_of(self, function: Function) -> Function:
        """Return what is measured of a function: `step`."""
        return lambda: self.step(function)


exact_gemms = partial(matmul_precision, "highest")  # float32 GEMMs in float32: no TF32, no bfloat16


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact GEMMs: float32 for narrow operands, and float64 where these are float32."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ``||got - true|| / ||true||`` of matrices or vectors, computed in blocks of rows."""
    got, true = got.reshape(len(got), -1), true.reshape(len(true), -1)
    error = norm = torch.zeros((), device=true.device, dtype=torch.float64)
    for rows in blocks(len(true), 2**24 // true.shape[1] + 1):
        block = true[rows].double()
        error = error + (got[rows].double() - block).square().sum()
        norm = norm + block.square().sum()
    return (error / norm).sqrt().item()


@dataclass(frozen=True)
class Truth:
    """Each value in float64, and gradients [N, D], [V, D] and [V] in the GEMMs' dtype; None where there are none."""

    values: Values
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


@torch.no_grad()
def truth(task: Task) -> Truth:
    """Return values and gradients from GEMMs in the next wider dtype; all between the GEMMs is in float64."""
    head, setting, dtype = task.head, task.head.setting, wider(task.head.dtype)
    w = head.w.detach().to(dtype)
    dx = torch.empty_like(head.x, dtype=dtype) if setting.grad else None
    dw = torch.zeros_like(w) if setting.grad and not setting.frozen else None
    b = None if head.b is None else head.b.detach().to(dtype)
    db = None if b is None else torch.zeros_like(b)
    found: dict[str, list[Tensor]] = {name: [] for name in task.names}
    with exact_gemms():
        for rows in blocks(head.shape.N, ROWS):
            x = head.x[rows].to(dtype)
            z = F.linear(x, w, b).double().requires_grad_(setting.grad)
            with torch.set_grad_enabled(setting.grad):
                values = task.values_of(z, rows)
            for name, value in values.items():
                found[name].append(value.detach())
            if dx is None:
                continue
            upstream = [task.upstream[name][rows].double() for name in values]
            dz = torch.autograd.grad(list(values.values()), z, upstream)[0].to(dtype)
            torch.mm(dz, w, out=dx[rows])
            if dw is not None:
                dw.addmm_(dz.T, x)
            if db is not None:
                db += dz.sum(0)
    return Truth({name: torch.cat(parts) for name, parts in found.items()}, dx, dw, db)


class Bench:
    """A task on which peers are measured, each interleaved with the bare GEMMs.

    A row has ``ms``, the median time, and ``limit_ms``, that of the bare GEMMs in the same rounds; ``share``, the
    second over the first; ``spread``, the slowest round over the fastest, less 1; on a GPU the same four with ``busy_``
    before them; ``peak_mib``, the most memory at once above the inputs, gradients included; and ``errors``: of each
    value by name, the absolute difference, its mean over the tokens; ``dx`` and ``dw``, the relative errors of the two
    gradients.

    The first reading is of an idle GPU, which waits for the host's launches; in the busy one the GPU has other work
    while the host launches, as in training.

    Attributes:
        limit: milliseconds of the bare GEMMs by rows of a chunk; empty without ``limited``, and then a row has neither.
        best_rows: of a chunk with which they are fastest.
        limit_ms: the least time of the bare GEMMs.
        true: exact values and gradients; None without ``error``, and then a row has no errors.
        values: what the last peer returned.
    """

    def __init__(self, task: Task, *, error: bool, warm: int, reps: int, limited: bool = True) -> None:
        self.task, self.problem, self.warm, self.reps = task, task.head, warm, reps
        device = self.problem.device
        self.values: Values = {}
        self.true = truth(task) if error else None
        release(device)
        rows = limit_rows(self.problem.shape.N, self.problem.shape.V * self.problem.dtype.itemsize) if limited else ()
        timings = time_side_by_side({str(c): task.bare(c) for c in rows}, device, warm=warm, reps=reps)
        self.limit = {int(c): timing.median_ms for c, timing in timings.items()}
        self.best_rows, self.limit_ms = min(self.limit.items(), key=lambda limit: limit[1], default=(0, 0.0))
        release(device)

    @property
    def tflops(self) -> float:
        """The rate of the bare GEMMs, in 10**12 operations a second."""
        return self.task.flops / self.limit_ms / 1e9

    @property
    def gradients_mib(self) -> float:
        """Size of the gradients that are returned, which is in every peak."""
        return mib(sum(t.nbytes for t in self.problem.leaves if t.requires_grad))

    def limits(self, prefix: str = "") -> Row:
        """Return the limit as a result has it; the prefix begins the keys of times and rows."""
        by_rows = {str(rows): ms for rows, ms in self.limit.items()}
        best = {f"{prefix}ms": self.limit_ms, f"{prefix}rows": self.best_rows, f"{prefix}ms_by_rows": by_rows}
        return best | {"tflops": self.tflops}

    def title(self) -> str:
        """Return the shape, the setting and the limit."""
        problem, dtype = self.problem, str(self.problem.dtype).removeprefix("torch.")
        tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in self.limit.items())
        return (
            f"\n{problem.shape} {dtype}, {problem.setting.name}: {self.task.gemms} bare GEMMs"
            f" take {tried} ({self.tflops:.3g} TFLOP/s); gradients {self.gradients_mib:.1f} MiB\n"
        )

    def measure(self, peer: Peer) -> Row:
        """Return a peer's row, with the reason where it fails."""
        row: Row = {"name": peer.name}
        with reason_in(row):
            self._fill(row, self.task.run_of(peer.built(self.task)))
        self.problem.clear()
        with suppress(RuntimeError):  # an illegal access by a kernel takes the GPU from a process
            release(self.problem.device)
        return row

    def _fill(self, row: Row, run: Function) -> None:
        device, self.values = self.problem.device, {}
        functions: dict[str, Callable[[], object]] = {"peer": run}
        if self.limit:
            functions = {"limit": self.task.bare(self.best_rows), **functions}
        readings: dict[str, Callable[[], object] | None] = {"": None}
        if device.type == "cuda":
            readings["busy_"] = partial(torch.cuda._sleep, BUSY_CYCLES)
        for prefix, behind in readings.items():
            timings = time_side_by_side(functions, device, warm=self.warm, reps=self.reps, behind=behind)
            ms = row[f"{prefix}ms"] = timings["peer"].median_ms
            row[f"{prefix}spread"] = timings["peer"].spread
            if self.limit:
                row[f"{prefix}limit_ms"] = timings["limit"].median_ms
                row[f"{prefix}share"] = row[f"{prefix}limit_ms"] / ms
        self.problem.clear()
        row["peak_mib"] = mib(peak_above(lambda: self.values.update(run()), device))
        if self.true is not None:
            errors = self._errors(self.values, self.true)
            if found := {name: error for name, error in errors.items() if math.isfinite(error)}:
                row["errors"] = found
            if missing := errors.keys() - found.keys():
                row["failed"] = f"{', '.join(name for name in errors if name in missing)}: missing or not finite"

    def _errors(self, got: Values, true: Truth) -> dict[str, float]:
        """Return the errors of what a peer has returned and of its gradients, by name; NaN for what is missing."""
        errors = {}
        for name, exact in true.values.items():
            value = got.get(name)
            expected = exact if value is None or value.dim() else exact.mean()
            errors[name] = math.nan if value is None else (value.double() - expected).abs().mean().item()
        leaves = zip(("dx", "dw", "db"), self.problem.leaves, (true.dx, true.dw, true.db), strict=False)
        for name, leaf, gradient in leaves:
            if gradient is not None:
                errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, gradient)
        return errors


_TITLES = {"dx": "dX err", "dw": "dW err", "mean_logit": "mean err", "sum_sq_prob": "sumsq err"}


def table_of(task: Task) -> Table:
    """Return how a task's rows are printed: with a column for each error."""
    names = (*task.names, "dx", "dw") if task.head.setting.grad else task.names
    columns = [
        Column(_TITLES.get(name, f"{name} err"), partial(lambda of, row: row.get("errors", {}).get(of), name), "14.1e")
        for name in names
    ]
    return Table((NAME,), (*SHARE, *columns))


def token_benchmark(tasks: Callable[[Run[Any], Any], Iterator[Task]], peers: Mapping[str, Peer]) -> Benchmark[Any]:
    """Return the benchmark of a run's ``tasks`` for each shape, by these peers."""

    def measure(run: Run[TokenBenchConfig]) -> None:
        config, shapes = run.config, run.result.setdefault("shapes", [])
        run.result |= {"warm": config.warm, "reps": config.reps}
        for shape in config.shapes:
            tables: list[dict[str, Any]] = []
            shapes.append({**vars(shape), "dtype": run.dtype_name, "tables": tables})
            for task in tasks(run, shape):
                bench = Bench(task, error=config.error, warm=config.warm, reps=config.reps)
                table = table_of(task)
                rows: list[Row] = []
                about = {"work": task.head.setting.name, "gradients_mib": bench.gradients_mib, "rows": rows}
                tables.append(bench.limits("limit_") | about)
                run.say(bench.title() + table.header)
                for name in config.peers:
                    run.add(bench.measure(peers[name]), rows, table)
                del bench, task  # its truth, before the next is computed
            release(run.device)

    return Benchmark(measure=measure, peers=peers)

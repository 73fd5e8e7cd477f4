"""What the hardware allows: the bare GEMMs of a head, and peers interleaved with them. C rows of a chunk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.harness import Column, Peer, Row, answers, reason_in, release
from lowtide.bench.problem import Problem, blocks
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

CHUNKS = (2048, 4096)  # rows; and all of them at once, where that fits
NAME = Column("", "name", "<24")
SHARE = (Column("ms", "ms", "9.2f"), Column("share", "share", "8.3f"), Column("MiB", "peak_mib", "9.1f"))
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried


def limit_rows(N: int, row_bytes: int) -> tuple[int, ...]:
    """Return the numbers of rows a chunk is tried with: 2048, 4096 and N, but none above N or too large to hold."""
    rows = sorted({min(c, N) for c in (*CHUNKS, N)})
    return tuple(c for c in rows if c * row_bytes <= MOST_LOGITS or c == rows[0])


def bare_gemms(problem: Problem, rows: int) -> Callable[[], None]:
    """Return a function that runs the products a setting cannot do without, over chunks of so many rows.

    With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only), ``dX = z W``
    and, unless the head is frozen, ``dW += z^T x``. z stands for its own gradient: it has the same shape. The weight's
    gradient is summed in its own dtype, which is the least work.
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


def measure_limit(
    problem: Problem, bare: Callable[[int], Callable[[], None]], *, warm: int, reps: int
) -> dict[int, float]:
    """Return the milliseconds of ``bare(rows)()`` by rows of a chunk of the logits; the least is the limit."""
    row_bytes = problem.shape.V * problem.dtype.itemsize
    runs = {str(rows): bare(rows) for rows in limit_rows(problem.shape.N, row_bytes)}
    timings = time_side_by_side(runs, problem.device, warm=warm, reps=reps)
    return {int(rows): timing.median_ms for rows, timing in timings.items()}


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


class Bench(ABC):
    """A case on which peers are measured, each interleaved with the bare GEMMs.

    A row has ``ms``, the median time, and ``limit_ms``, that of the bare GEMMs in the same rounds; ``share``, the
    second over the first; ``spread``, the slowest round over the fastest, less 1; ``peak_mib``, the most memory at once
    above the inputs, gradients included; and the errors against the truth.

    Args:
        problem: the inputs.
        error: whether errors are measured.
        warm: rounds that do not count.
        reps: rounds that do.

    Attributes:
        limit: milliseconds of the bare GEMMs by rows of a chunk.
        true: exact values and gradients; None: errors are not measured.
    """

    def __init__(self, problem: Problem, *, error: bool, warm: int, reps: int) -> None:
        self.problem, self.warm, self.reps = problem, warm, reps
        self.true: Any = self.truth() if error else None
        release(problem.device)
        self.limit = measure_limit(problem, self.bare, warm=warm, reps=reps)
        release(problem.device)

    @abstractmethod
    def truth(self) -> Any:
        """Return the exact values and gradients."""

    @abstractmethod
    def prepare(self, peer: Any, row: Row) -> Callable[[], Any]:
        """Return what is measured of a peer, and add to its row what is known before it runs."""

    @abstractmethod
    def errors(self, got: Any, row: Row) -> Mapping[str, float]:
        """Return the errors of what a peer has returned and of its gradients, by name; NaN for what is missing."""

    def add_errors(self, errors: dict[str, float], row: Row) -> None:
        """Add the errors that are numbers to a row."""
        row.update(errors)

    def bare(self, rows: int) -> Callable[[], None]:
        """Return the products that the case cannot do without, over chunks of so many rows."""
        return bare_gemms(self.problem, rows)

    @property
    def flops(self) -> int:
        """Operations of these products."""
        return self.problem.shape.flops(self.problem.setting.gemms)

    @property
    def products(self) -> str:
        """These products in words."""
        return f"{self.problem.setting.gemms} bare GEMMs"

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
        return self.flops / self.limit_ms / 1e9

    @property
    def gradients_mib(self) -> float:
        """Size of the gradients that are returned, which is in every peak."""
        leaves = (t for t in (self.problem.x, self.problem.w) if t.requires_grad)
        return mib(sum(t.numel() * t.element_size() for t in leaves))

    def title(self) -> str:
        """Return the shape, the setting and the limit."""
        problem, dtype = self.problem, str(self.problem.dtype).removeprefix("torch.")
        tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in self.limit.items())
        return (
            f"\n{problem.shape} {dtype}, {problem.setting.name}: {self.products} take {tried}"
            f" ({self.tflops:.3g} TFLOP/s); gradients {self.gradients_mib:.1f} MiB\n"
        )

    def measure(self, peer: Peer) -> Row:
        """Return a peer's row; one that fails says why."""
        row: Row = {"name": peer.name}
        with reason_in(row):
            self._fill(row, self.prepare(peer, row))
        self.problem.clear()
        if "failed" not in row or answers(self.problem.device):
            release(self.problem.device)
        return row

    def _fill(self, row: Row, run: Callable[[], Any]) -> None:
        device = self.problem.device
        functions = {"limit": self.bare(self.best_rows), "peer": run}
        timings = time_side_by_side(functions, device, warm=self.warm, reps=self.reps)
        self.problem.clear()
        got: list[Any] = []
        peak = peak_above(lambda: got.append(run()), device)
        ms, limit_ms = timings["peer"].median_ms, timings["limit"].median_ms
        row |= {"ms": ms, "limit_ms": limit_ms, "share": limit_ms / ms, "spread": timings["peer"].spread}
        row |= {"peak_mib": mib(peak)}
        if self.true is not None:
            errors = self.errors(got[0], row)
            self.add_errors({name: error for name, error in errors.items() if math.isfinite(error)}, row)
            if missing := [name for name, error in errors.items() if not math.isfinite(error)]:
                row["failed"] = f"{', '.join(missing)}: missing or not finite"

"""A case: values computed from hidden states and a head, their exact result, and peers measured beside the limit.

N tokens, D hidden size, V vocabulary, K values per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import Peer, Row, Run, Table, reason_in, release
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

ROWS = 1024  # tokens per chunk wherever wide logits are needed
LOGIT_STD = 3.0  # of the logits: the softmax is peaked, as a trained model's is
CHUNKS = (2048, 4096)  # rows of the limit's chunks; and all of them at once, where that fits
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried
BUSY_CYCLES = 20_000_000  # of a GPU's clock that it is kept busy with, about 10 ms: longer than a call's launches take

Values = tuple[Tensor, ...]  # each [N] or [N, K], or 0-d: their mean
Function = Callable[..., Any]  # of a case's arguments: returns its values, one alone or several as a tuple


def values_in(found: Any) -> Values:
    """Return what a function has returned as a tuple."""
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every peer of one table computes: the mean cross entropy; subclasses have other values."""

    shape: Any
    name: str = "mean"  # of the table
    gemms: int = 3  # of 2NDV operations, that it cannot do without; 4: the logits are computed twice
    x: Tensor  # hidden states [N, D]
    w: Tensor  # [V, D]
    y: Tensor  # targets [N]
    names: tuple[str, ...] = ("loss",)  # of the values
    upstream: Values = ()  # the objective's gradient with respect to each value, of its shape; empty: no gradients

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a peer's function gets."""
        return self.x, self.w, self.y

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient: hidden states and weight; a subclass may have a bias behind them."""
        return self.x, self.w

    @property
    def flops(self) -> int:
        """Operations of the GEMMs that it cannot do without."""
        return self.gemms * 2 * self.x.numel() * len(self.w)

    def values_of(self, z: Tensor, rows: slice) -> Values:
        """Return the values, differentiably, from all logits [rows, V] of some rows."""
        return (F.cross_entropy(z, self.y[rows], reduction="none"),)

    @torch.no_grad()
    def bare(self, rows: int) -> None:
        """Run those GEMMs, in chunks of so many rows.

        With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only),
        ``dX = z W`` and ``dW += z^T x``. z takes the place of its gradient, which has the same shape. dW is summed in
        its own dtype, which is the least work.
        """
        x, w = self.x.detach(), self.w.detach()
        logits_CV = x.new_empty(min(rows, len(x)), len(w))
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for chunk in blocks(len(x), rows):
            z = logits_CV[: chunk.stop - chunk.start]
            for _ in range(2 if self.gemms == 4 else 1):
                torch.mm(x[chunk], w.T, out=z)
            if self.upstream:
                torch.mm(z, w, out=dx[chunk])
                torch.addmm(dw, z.T, x[chunk], beta=float(chunk.start > 0), out=dw)

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def run_of(self, function: Function) -> Callable[[], Values]:
        """Return what is measured of a function, forward and, where there are gradients, backward: it returns the
        values. A mean's upstream gradient is 1.
        """

        def run() -> Values:
            self.clear()
            with torch.set_grad_enabled(bool(self.upstream)):
                values = values_in(function(*self.arguments))
            if self.upstream:
                ups = [up.to(v.dtype) if v.dim() else None for up, v in zip(self.upstream, values, strict=True)]
                torch.autograd.backward(values, ups)
            return tuple(value.detach() for value in values)

        return run

    def exact(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return each value in float64, from GEMMs in the next wider dtype, and the leaves' gradients in that dtype,
        if there are gradients.
        """
        leaves = [leaf.detach().to(wider(leaf.dtype)).requires_grad_(bool(self.upstream)) for leaf in self.leaves]
        parts: list[list[Tensor]] = []
        for rows in blocks(len(self.x), ROWS):
            values = self.values_of(F.linear(leaves[0][rows], *leaves[1:]).double(), rows)
            parts.append([value.detach() for value in values])
            if self.upstream:
                torch.autograd.backward(values, [up[rows].double() for up in self.upstream])
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [torch.cat(value) for value in zip(*parts, strict=True)], gradients


def make_case(shape: Any, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0) -> Case:
    """Return the mean loss of random hidden states and weights, and of targets drawn from the model's own softmax.

    With targets drawn at random the target's own term would be nearly all of the gradient, and an implementation that
    drops or rounds the others would look exact.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, w = (torch.randn(n, shape.D, device=device, generator=generator) for n in (shape.N, shape.V))
    x, w = x.to(dtype), w.mul_(LOGIT_STD / shape.D**0.5).to(dtype)
    softmaxes = ((x[rows] @ w.T).float().softmax(1) for rows in blocks(shape.N, ROWS))
    y = torch.cat([softmax.multinomial(1, generator=generator)[:, 0] for softmax in softmaxes])
    return loss_case(shape, x, w, y)


def loss_case(shape: Any, x: Tensor, w: Tensor, y: Tensor) -> Case:
    """Return the case of the mean loss and both gradients."""
    upstream = torch.full((len(x),), 1 / len(x), device=x.device)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return Case(shape=shape, x=x, w=w, y=y, upstream=(upstream,))


def blocks(N: int, rows: int) -> Iterator[slice]:
    """Yield slices that cover N rows, each of so many."""
    for start in range(0, N, rows):
        yield slice(start, min(start + rows, N))


def limit_rows(N: int, row_bytes: int) -> tuple[int, ...]:
    """Return the rows per chunk that are tried: 2048, 4096 and N, but none above N or too large to hold."""
    rows = sorted({min(c, N) for c in (*CHUNKS, N)})
    return tuple(c for c in rows if c * row_bytes <= MOST_LOGITS or c == rows[0])


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact GEMMs: float32 for narrow operands, and float64 where these are float32."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ``||got - true|| / ||true||``, of a difference in the dtype of ``true``."""
    difference, norm = got.to(true.dtype) - true, partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(difference) / norm(true))


class Bench:
    """A case on which peers are measured, each interleaved with the bare GEMMs.

    A row has ``ms``, the median time, and ``limit_ms``, that of the bare GEMMs in the same rounds; ``share``, the
    second over the first; ``spread``, the slowest round over the fastest, less 1; on a GPU the same four with ``busy_``
    before them; ``peak_mib``, the most memory at once above the inputs, gradients included; and ``errors``: of each
    value by name, the absolute difference, its mean over the tokens; ``dx``, ``dw`` and ``db``, the relative errors of
    the gradients.

    The first reading is of an idle GPU, which waits for the host's launches; in the busy one the GPU has other work
    while the host launches, as in training.

    Attributes:
        limit: milliseconds of the bare GEMMs by rows of a chunk, of which ``best_rows`` takes the least, ``limit_ms``.
        gradients_mib: size of the gradients that are returned, which is in every peak.
    """

    def __init__(self, case: Case, *, warm: int, reps: int) -> None:
        self.case, self.device = case, case.x.device
        self.times = partial(time_side_by_side, device=self.device, warm=warm, reps=reps)
        self.exact, self.exact_gradients = case.exact()
        self.gradients_mib = mib(sum(leaf.nbytes for leaf in case.leaves if case.upstream))
        release(self.device)
        rows = limit_rows(len(case.x), len(case.w) * case.x.itemsize)
        timings = self.times({str(c): partial(case.bare, c) for c in rows})
        self.limit = {int(c): timing.median_ms for c, timing in timings.items()}
        self.best_rows, self.limit_ms = min(self.limit.items(), key=lambda limit: limit[1])
        self.tflops = case.flops / self.limit_ms / 1e9

    def limits(self, prefix: str = "") -> Row:
        """Return the limit as a result has it; the prefix begins the keys of times and rows."""
        limits = {"ms": self.limit_ms, "rows": self.best_rows, "ms_by_rows": self.limit}
        return {f"{prefix}{key}": value for key, value in limits.items()} | {"tflops": self.tflops}

    def title(self) -> str:
        """Return the shape, the setting and the limit."""
        tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in self.limit.items())
        return (
            f"\n{self.case.shape} {self.case.x.dtype}, {self.case.name}: the bare GEMMs take {tried}"
            f" ({self.tflops:.3g} TFLOP/s); gradients {self.gradients_mib:.1f} MiB\n"
        )

    def measure(self, peer: Peer) -> Row:
        """Return a peer's row, with the reason where it fails."""
        row: Row = {"name": peer.name}
        with reason_in(row, package=peer.package):
            self._fill(row, self.case.run_of(peer.build(self.case)))
        self.case.clear()
        with suppress(RuntimeError):  # an illegal access by a kernel takes the GPU from a process
            release(self.device)
        return row

    def _fill(self, row: Row, run: Callable[[], Values]) -> None:
        functions: dict[str, Callable[[], object]] = {"limit": partial(self.case.bare, self.best_rows), "peer": run}
        busy = {"busy_": partial(torch.cuda._sleep, BUSY_CYCLES)} if self.device.type == "cuda" else {}
        for prefix, behind in {"": None, **busy}.items():
            timings = self.times(functions, behind=behind)
            ms, limit_ms = timings["peer"].median_ms, timings["limit"].median_ms
            reading = {"ms": ms, "spread": timings["peer"].spread, "limit_ms": limit_ms, "share": limit_ms / ms}
            row |= {f"{prefix}{key}": value for key, value in reading.items()}
        self.case.clear()
        values: list[Tensor] = []
        row["peak_mib"] = mib(peak_above(lambda: values.extend(run()), self.device))
        errors = self._errors(values)
        row["errors"] = {name: error for name, error in errors.items() if math.isfinite(error)}
        if missing := [name for name in errors if name not in row["errors"]]:
            row["failed"] = f"{', '.join(missing)}: missing or not finite"

    def _errors(self, values: list[Tensor]) -> dict[str, float]:
        """Return the errors of a peer's values and gradients, by name; NaN for a gradient that is missing."""
        errors = {
            name: (value.double() - (true if value.dim() else true.mean())).abs().mean().item()
            for name, value, true in zip(self.case.names, values, self.exact, strict=True)
        }
        for name, leaf, true in zip(("dx", "dw", "db"), self.case.leaves, self.exact_gradients, strict=False):
            errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, true)
        return errors


TABLE = Table(
    {"name": "<24", "ms": "9.2f", "share": "7.3f", "busy_ms": "9.2f", "busy_share": "11.3f", "peak_mib": "10.1f"},
    lambda row: [f"{name} off by {error:.1e}" for name, error in row.get("errors", {}).items()],
)


def measure_cases(run: Run, cases: Callable[[Run, Any], Iterator[Case]]) -> None:
    """Measure a run's ``cases`` of each shape by its peers."""
    shapes = run.result["shapes"] = []
    run.result |= run.rounds
    for shape in run.config.shapes:
        tables: list[Row] = []
        shapes.append({**vars(shape), "dtype": run.dtype_name, "tables": tables})
        for case in cases(run, shape):
            bench, rows = Bench(case, **run.rounds), list[Row]()
            about = {"work": case.name, "gradients_mib": bench.gradients_mib, "rows": rows}
            tables.append(bench.limits("limit_") | about)
            run.fill(rows, bench.title(), TABLE, bench.measure)
            del bench, case  # its exact values, before the next are computed
        release(run.device)

"""A case: values computed from hidden states and a head, their exact result, and peers measured beside the limit.

N tokens, D hidden size, V vocabulary, K values per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import Benchmark, Peer, Row, Run, Table, matmul_precision, reason_in, release
from lowtide.bench.settings import ErrorSettings, TokenSettings
from lowtide.bench.shapes import Shape
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

ROWS = 1024  # tokens per chunk wherever wide logits are needed
LOGIT_STD = 3.0  # of the logits: the softmax is peaked, as a trained model's is
CHUNKS = (2048, 4096)  # rows of the limit's chunks; and all of them at once, where that fits
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried
BUSY_CYCLES = 20_000_000  # of a GPU's clock that it is kept busy with, about 10 ms: longer than a call's launches take

Values = dict[str, Tensor]  # by name, [N] or [N, K], or 0-d: their mean
Function = Callable[[], Values]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every peer of one table computes: each token's cross entropy, or their mean; subclasses have other values.

    Attributes:
        shape: the sizes.
        name: of the table.
        gemms: GEMMs of 2NDV operations that it cannot do without; 4: the logits are computed twice.
        per_token: whether the loss is one of each token; else it is their mean.
        x: hidden states [N, D].
        w: weight [V, D].
        y: targets [N].
        b: bias [V]; None: there is none.
        names: of the values.
        upstream: the objective's gradient with respect to each value, of its shape; empty without gradients.
    """

    shape: Shape
    name: str = "mean"
    gemms: int = 3
    per_token: bool = False
    x: Tensor
    w: Tensor
    y: Tensor
    b: Tensor | None = None
    names: tuple[str, ...] = ("loss",)
    upstream: Values = field(default_factory=dict)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Hidden states, weight and bias."""
        return (self.x, self.w) if self.b is None else (self.x, self.w, self.b)

    @property
    def heads(self) -> tuple[Case, ...]:
        """The cases whose GEMMs it cannot do without."""
        return (self,)

    @property
    def flops(self) -> int:
        """Operations of those GEMMs."""
        return sum(head.shape.flops(head.gemms) for head in self.heads)

    def values_of(self, z: Tensor, rows: slice) -> Values:
        """Return the values, differentiably, from all logits [rows, V] of some rows."""
        return {"loss": F.cross_entropy(z, self.y[rows], reduction="none")}

    def bare(self, rows: int) -> Callable[[], object]:
        """Return a function that runs the bare GEMMs, in chunks of so many rows."""
        runs = [bare_gemms(head, rows) for head in self.heads]
        return lambda: [run() for run in runs]

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def run_of(self, function: Function) -> Function:
        """Return what is measured of a function: `step`."""
        return lambda: self.step(function)

    def step(self, function: Function) -> Values:
        """Run a function once, with its backward pass where there is one, and return its values."""
        self.clear()
        with torch.set_grad_enabled(bool(self.upstream)):
            values = function()
        if self.upstream:
            self.backward(values)
        return {name: value.detach() for name, value in values.items()}

    def backward(self, values: Values, *, keep: bool = False) -> None:
        """Run the values' backward pass, with a gradient of 1 of a mean; ``keep`` retains their graph."""
        upstream = [self.upstream[name].to(v.dtype) if v.dim() else torch.ones_like(v) for name, v in values.items()]
        torch.autograd.backward(list(values.values()), upstream, retain_graph=keep)


def loss_case(shape: Shape, x: Tensor, w: Tensor, y: Tensor, *, per_token: bool = False) -> Case:
    """Return the case of the mean loss, or of each token's with an upstream gradient for each, and both gradients."""
    x, w, g = x.detach().requires_grad_(), w.detach().requires_grad_(), torch.ones((), device=x.device).expand(shape.N)
    more: dict[str, Any] = {}
    if per_token:
        g = torch.rand(shape.N, device=x.device, generator=torch.Generator(x.device).manual_seed(1)) + 0.5
        more = {"name": "reduction none", "gemms": 4, "per_token": True}
    return Case(shape=shape, x=x, w=w, y=y, upstream={"loss": g / shape.N}, **more)


def make_case(shape: Shape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0) -> Case:
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


def blocks(N: int, rows: int) -> Iterator[slice]:
    """Yield slices that cover N rows, each of so many."""
    for start in range(0, N, rows):
        yield slice(start, min(start + rows, N))


def limit_rows(N: int, row_bytes: int) -> tuple[int, ...]:
    """Return the rows per chunk that are tried: 2048, 4096 and N, but none above N or too large to hold."""
    rows = sorted({min(c, N) for c in (*CHUNKS, N)})
    return tuple(c for c in rows if c * row_bytes <= MOST_LOGITS or c == rows[0])


def bare_gemms(case: Case, rows: int) -> Callable[[], None]:
    """Return a function that runs the GEMMs a case cannot do without, in chunks of so many rows.

    With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only), ``dX = z W``
    and ``dW += z^T x``. z takes the place of its gradient, which has the same shape. dW is summed in its own dtype,
    which is the least work.
    """
    x, w = case.x.detach(), case.w.detach()

    @torch.no_grad()
    def run() -> None:
        logits_CV = x.new_empty(min(rows, len(x)), len(w))
        dx, dw = (torch.empty_like(x), torch.empty_like(w)) if case.upstream else (None, None)
        for chunk in blocks(len(x), rows):
            z = logits_CV[: chunk.stop - chunk.start]
            for _ in range(2 if case.gemms == 4 else 1):
                torch.mm(x[chunk], w.T, out=z)
            if dx is not None and dw is not None:
                torch.mm(z, w, out=dx[chunk])
                torch.addmm(dw, z.T, x[chunk], beta=float(chunk.start > 0), out=dw)

    return run


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact GEMMs: float32 for narrow operands, and float64 where these are float32."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ``||got - true|| / ||true||``, of a difference in the dtype of ``true``."""
    difference, norm = got.to(true.dtype) - true, partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(difference) / norm(true))


@dataclass(frozen=True)
class Exact:
    """Each value in float64, and the gradients of the leaves in a wider dtype; none without gradients."""

    values: Values
    gradients: tuple[Tensor, ...]


def exact(case: Case) -> Exact:
    """Return values and gradients from GEMMs in the next wider dtype; all between the GEMMs is in float64."""
    dtype, parts = wider(case.x.dtype), list[Values]()
    leaves = [leaf.detach().to(dtype).requires_grad_(bool(case.upstream)) for leaf in case.leaves]
    with matmul_precision("highest"):
        for rows in blocks(case.shape.N, ROWS):
            values = case.values_of(F.linear(leaves[0][rows], *leaves[1:]).double(), rows)
            parts.append({name: value.detach() for name, value in values.items()})
            if case.upstream:
                upstream = [case.upstream[name][rows].double() for name in values]
                torch.autograd.backward(list(values.values()), upstream)
    gradients = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
    return Exact({name: torch.cat([values[name] for values in parts]) for name in case.names}, gradients)


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
        limit: milliseconds of the bare GEMMs by rows of a chunk; empty without ``limited``, and then a row has neither.
        best_rows: of a chunk with which they are fastest.
        limit_ms: the least time of the bare GEMMs.
        exact: values and gradients; None without errors, and then a row has none.
    """

    def __init__(self, case: Case, *, error: bool, warm: int, reps: int, limited: bool = True) -> None:
        self.case, self.device = case, case.x.device
        self.times = partial(time_side_by_side, device=self.device, warm=warm, reps=reps)
        self.exact = exact(case) if error else None
        release(self.device)
        rows = limit_rows(case.shape.N, case.shape.V * case.x.itemsize) if limited else ()
        timings = self.times({str(c): case.bare(c) for c in rows})
        self.limit = {int(c): timing.median_ms for c, timing in timings.items()}
        self.best_rows, self.limit_ms = min(self.limit.items(), key=lambda limit: limit[1], default=(0, 0.0))

    @classmethod
    def of(cls, case: Case, config: ErrorSettings) -> Bench:
        """Return the bench of a case with a config's rounds."""
        return cls(case, error=config.error, warm=config.warm, reps=config.reps)

    @property
    def gradients_mib(self) -> float:
        """Size of the gradients that are returned, which is in every peak."""
        return mib(sum(leaf.nbytes for leaf in self.case.leaves if self.case.upstream))

    def limits(self, prefix: str = "") -> Row:
        """Return the limit as a result has it; the prefix begins the keys of times and rows."""
        by_rows = {str(rows): ms for rows, ms in self.limit.items()}
        best = {f"{prefix}ms": self.limit_ms, f"{prefix}rows": self.best_rows, f"{prefix}ms_by_rows": by_rows}
        return best | {"tflops": self.case.flops / self.limit_ms / 1e9}

    def title(self) -> str:
        """Return the shape, the setting and the limit."""
        case, dtype = self.case, str(self.case.x.dtype).removeprefix("torch.")
        tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in self.limit.items())
        return (
            f"\n{case.shape} {dtype}, {case.name}: {sum(head.gemms for head in case.heads)} bare GEMMs take {tried}"
            f" ({self.limits()['tflops']:.3g} TFLOP/s); gradients {self.gradients_mib:.1f} MiB\n"
        )

    def measure(self, peer: Peer) -> Row:
        """Return a peer's row, with the reason where it fails."""
        row: Row = {"name": peer.name}
        with reason_in(row):
            self._fill(row, self.case.run_of(peer.built(self.case)))
        self.case.clear()
        with suppress(RuntimeError):  # an illegal access by a kernel takes the GPU from a process
            release(self.device)
        return row

    def _fill(self, row: Row, run: Function) -> None:
        functions: dict[str, Callable[[], object]] = {"peer": run}
        if self.limit:
            functions = {"limit": self.case.bare(self.best_rows), **functions}
        readings: dict[str, Callable[[], object] | None] = {"": None}
        if self.device.type == "cuda":
            readings["busy_"] = partial(torch.cuda._sleep, BUSY_CYCLES)
        for prefix, behind in readings.items():
            timings = self.times(functions, behind=behind)
            ms = row[f"{prefix}ms"] = timings["peer"].median_ms
            row[f"{prefix}spread"] = timings["peer"].spread
            if self.limit:
                row[f"{prefix}limit_ms"] = timings["limit"].median_ms
                row[f"{prefix}share"] = row[f"{prefix}limit_ms"] / ms
        self.case.clear()
        values: Values = {}
        row["peak_mib"] = mib(peak_above(lambda: values.update(run()), self.device))
        if self.exact is not None:
            errors = self._errors(values, self.exact)
            row["errors"] = {name: error for name, error in errors.items() if math.isfinite(error)}
            if missing := [name for name in errors if name not in row["errors"]]:
                row["failed"] = f"{', '.join(missing)}: missing or not finite"

    def _errors(self, got: Values, true: Exact) -> dict[str, float]:
        """Return the errors of what a peer has returned and of its gradients, by name; NaN for what is missing."""
        errors = {}
        for name, expected in true.values.items():
            value = got.get(name, torch.tensor(math.nan))
            errors[name] = (value.double() - (expected if value.dim() else expected.mean())).abs().mean().item()
        for name, leaf, gradient in zip(("dx", "dw", "db"), self.case.leaves, true.gradients, strict=False):
            errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, gradient)
        return errors


TABLE = Table(
    {"name": "<24"},
    {"ms": "9.2f", "share": "7.3f", "busy_ms": "9.2f", "busy_share": "11.3f", "peak_mib": "10.1f"},
    lambda row: [f"{name} off by {error:.1e}" for name, error in row.get("errors", {}).items()],
)


def token_benchmark(cases: Callable[[Run[Any], Any], Iterator[Case]], peers: Mapping[str, Peer]) -> Benchmark[Any]:
    """Return the benchmark of a run's ``cases`` of each shape, by these peers."""

    def measure(run: Run[TokenSettings]) -> None:
        config, shapes = run.config, run.result.setdefault("shapes", [])
        run.result |= {"warm": config.warm, "reps": config.reps}
        for shape in config.shapes:
            tables: list[Row] = []
            shapes.append({**vars(shape), "dtype": run.dtype_name, "tables": tables})
            for case in cases(run, shape):
                bench, rows = Bench.of(case, config), list[Row]()
                about = {"work": case.name, "gradients_mib": bench.gradients_mib, "rows": rows}
                tables.append(bench.limits("limit_") | about)
                run.fill(rows, bench.title(), TABLE, peers, bench.measure)
                del bench, case  # its exact values, before the next are computed
            release(run.device)

    return Benchmark(measure=measure, peers=peers)

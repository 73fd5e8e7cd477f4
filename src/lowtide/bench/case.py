"""A case: what every peer of a table computes, measured beside the limit, its bare GEMMs, and compared with its exact
result. One path for all kinds: the cases of each shape, a table for each, rows measured interleaved.

N tokens, D hidden size, V vocabulary, K values per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import Peer, Row, Run, Table, reason_in, release
from lowtide.head.options import Reduction
from lowtide.measure.timing import Timing, kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib

ROWS = 1024  # tokens per chunk wherever wide logits are needed
LOGIT_STD = 3.0  # of the logits: the softmax is peaked, as a trained model's is
CHUNKS = (2048, 4096)  # rows of the limit's chunks; and all of them at once, where that fits
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried
BUSY_CYCLES = 20_000_000  # of a GPU's clock that it is kept busy with, about 10 ms: longer than a call's launches take

Values = tuple[Tensor, ...]  # each [N] or [N, K], or 0-d: their mean
Exact = tuple[list[Tensor], list[Tensor]]  # the values, and the gradients of the leaves; none: they are not compared
Function = Callable[..., Any]  # what a peer builds for a case: returns its values, one alone or several as a tuple


def values_in(found: Any) -> Values:
    """Return what a function has returned as a tuple."""
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every peer of one table computes from hidden states, a weight [V, D] and targets: the mean cross entropy, or
    per token what has a name. Subclasses compute other values, or are modules.
    """

    shape: Any
    name: str = "mean"  # of the table
    names: tuple[Any, ...] = ("loss",)  # of the values; empty: a module's output, which is not compared
    gemms: int = 3  # of a weight, that it cannot do without; 4: the logits are computed twice
    leaves: tuple[Tensor, ...]  # what gets a gradient: hidden states, the weight, and what a subclass has
    y: Any = None  # targets [N] or [N, K]
    upstream: Values = ()  # the objective's gradient with respect to each value, of its shape; empty: no gradients

    @property
    def x(self) -> Tensor:
        """The hidden states [N, D]."""
        return self.leaves[0]

    @property
    def w(self) -> Tensor:
        """The weight [V, D]."""
        return self.leaves[1]

    @property
    def reduction(self) -> Reduction:
        """Of the values over the tokens: the loss is a mean, all else per token."""
        return "mean" if self.names == ("loss",) else "none"

    @property
    def flops(self) -> int:
        """Operations of the GEMMs that it cannot do without."""
        return self.gemms * 2 * len(self.x) * sum(leaf.numel() for leaf in self.leaves[1:] if leaf.dim() > 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What `bare` is tried with: rows of a chunk, 2048, 4096 and all, but not what is too large to hold."""
        N, row_bytes = len(self.x), len(self.w) * self.x.itemsize
        fit = tuple(rows for rows in (*CHUNKS, N) if rows <= N and rows * row_bytes <= MOST_LOGITS)
        return fit or (min(CHUNKS[0], N),)

    def call(self, function: Function) -> Values:
        """Return what a peer's function computes, of a loss per token the mean."""
        values = values_in(function(self.x, self.w, self.y))
        return tuple(v.mean() if v.dim() and self.reduction == "mean" else v for v in values)

    def values_of(self, z: Tensor, rows: slice) -> Values:
        """Return the values, differentiably, from all logits [rows, V] of some rows."""
        return values_of_logits(z, self.y[rows], self.names)

    @torch.no_grad()
    def bare(self, size: int) -> None:
        """Run the GEMMs, in chunks of so many rows.

        With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only),
        ``dX = z W`` and ``dW += z^T x``. z takes the place of its gradient, which has the same shape. dW is summed in
        its own dtype, which is the least work.
        """
        x, w = self.x, self.w
        logits_CV = x.new_empty(min(size, len(x)), len(w))
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for chunk in blocks(len(x), size):
            z = logits_CV[: len(x[chunk])]
            for _ in range(2 if self.gemms == 4 else 1):
                torch.mm(x[chunk], w.T, out=z)
            if self.upstream:
                torch.mm(z, w, out=dx[chunk])
                torch.addmm(dw, z.T, x[chunk], beta=float(chunk.start > 0), out=dw)

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def forward(self, function: Function) -> Values:
        """Run a peer's function, with a graph where there are gradients."""
        with torch.set_grad_enabled(bool(self.upstream)):
            return self.call(function)

    def step(self, function: Function) -> Values:
        """Run forward and, where there are gradients, backward; return the values. A mean's upstream gradient is 1."""
        self.clear()
        values = self.forward(function)
        if self.upstream:
            ups = [up.to(v.dtype) if v.dim() else None for up, v in zip(self.upstream, values, strict=True)]
            torch.autograd.backward(values, ups)
        return tuple(value.detach() for value in values)

    def exact(self) -> Exact:
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


def values_of_logits(z: Tensor, y: Tensor, names: tuple[str, ...]) -> Values:
    """Return the loss, or the log-probability and perhaps the entropy, from all logits [N, V] and targets [N] or
    [N, K].
    """
    if "loss" in names:
        return (F.cross_entropy(z, y, reduction="none"),)
    logprobs = z.log_softmax(-1)
    values: Values = (logprobs.gather(-1, y.view(len(y), -1)).view_as(y),)
    if "entropy" in names:
        values += (-(logprobs.exp() * logprobs).sum(-1),)
    return values


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
    return Case(shape=shape, leaves=tuple(t.detach().requires_grad_() for t in (x, w)), y=y, upstream=(upstream,))


def blocks(N: int, rows: int) -> list[slice]:
    """Return slices that cover N rows, each of so many."""
    return [slice(start, start + rows) for start in range(0, N, rows)]


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact GEMMs: float32 for narrow operands, and float64 where these are float32."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ``||got - true|| / ||true||``, of a difference in the dtype of ``true``."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(got.to(true.dtype) - true) / norm(true))


TABLE = Table(
    {
        "name": "<24", "forward_ms": "11.2f", "ms": "9.2f", "share": "7.3f", "busy_ms": "9.2f", "busy_share": "11.3f",
        "kept_mib": "10.1f", "peak_mib": "10.1f",
    },
    lambda row: [f"{key.removesuffix('_error')} off by {row[key]:.1e}" for key in row if key.endswith("_error")],
)  # fmt: skip
Times = Callable[..., dict[str, Timing]]  # `time_side_by_side` of some functions


def limit_of(case: Case, times: Times) -> Row:
    """Return the milliseconds of the bare GEMMs by size (``rows`` of a chunk), the size of the least, and its rate."""
    timings = times({str(size): partial(case.bare, size) for size in case.sizes})
    by_size = {int(size): timing.median_ms for size, timing in timings.items()}
    best = min(by_size, key=by_size.__getitem__)
    return {"ms": by_size[best], "rows": best, "ms_by_rows": by_size, "tflops": case.flops / by_size[best] / 1e9}


def row_of(case: Case, peer: Peer, size: int, exact: Exact, times: Times) -> Row:
    """Return a peer's row, measured interleaved with the bare GEMMs of that size, or the reason where it fails.

    A row has ``ms``, the median time, and ``limit_ms``, that of the bare GEMMs in the same rounds; ``share``, the
    second over the first; ``spread``, the slowest round over the fastest, less 1; ``tflops``, the rate of the work that
    the GEMMs need, whatever a peer computes besides; ``forward_ms``; on a GPU the same with ``busy_`` before them;
    ``kept_mib``, what is alive after forward, hidden states included, weights and values not; ``peak_mib``, the most
    memory at once above the inputs, gradients included; for each value ``<name>_error``, the absolute difference, its
    mean over the tokens; ``dx_error``, ``dw_error`` and ``db_error``, the relative errors of the gradients; and what
    the peer says of the case.

    The first reading is of an idle GPU, which waits for the host's launches; in the busy one the GPU has other work
    while the host launches, as in training.
    """
    row: Row = {"name": peer.name, **({"gemms": peer.gemms} if peer.gemms else {}), **peer.about(case)}
    with reason_in(row, peer.package):
        function = peer.build(case)
        forward, step = partial(case.forward, function), partial(case.step, function)
        # PyTorch's own tests keep a GPU busy so
        busy = {"busy_": partial(torch.cuda._sleep, BUSY_CYCLES)} if case.x.is_cuda else {}
        for prefix, behind in {"": None, **busy}.items():
            timings = times({"limit_": partial(case.bare, size), "forward_": forward, "": step}, behind=behind)
            reading = {f"{of}ms": timing.median_ms for of, timing in timings.items()}
            ms, limit_ms = reading["ms"], reading["limit_ms"]
            reading |= {"spread": timings[""].spread, "share": limit_ms / ms, "tflops": case.flops / ms / 1e9}
            row |= {f"{prefix}{key}": value for key, value in reading.items()}
        case.clear()
        outputs = sum(value.nbytes for value in case.upstream)
        row["kept_mib"] = mib(kept_above(forward, case.x.device) + case.x.nbytes - outputs)
        values: list[Tensor] = []
        row["peak_mib"] = mib(peak_above(lambda: values.extend(step()), case.x.device))
        errors = {
            name: (value.double() - (true if value.dim() else true.mean())).abs().mean().item()
            for name, value, true in zip(case.names, values, exact[0], strict=bool(case.names))
        }
        for name, leaf, true in zip(("dx", "dw", "db"), case.leaves, exact[1], strict=False):
            errors[name] = math.nan if leaf.grad is None else relative_error(leaf.grad, true)
        row |= {f"{name}_error": error for name, error in errors.items() if math.isfinite(error)}
        if missing := [name for name, error in errors.items() if not math.isfinite(error)]:
            row["failed"] = f"{', '.join(missing)}: missing or not finite"
    case.clear()
    with suppress(RuntimeError):  # an illegal access by a kernel takes the GPU from a process
        release(case.x.device)
    return row


def measure_cases(
    run: Run, cases: Callable[[Run, Any], Iterable[Case]], *, table: Table = TABLE,
    peers: Callable[[Any], Iterable[Peer]] | None = None,
) -> None:  # fmt: skip
    """Measure each case of each shape, and print a table for each: a row for each of the run's peers, or of the case's.

    The result has an entry in ``tables`` for each: its shape, what the limit takes (``limit_ms``), ``gradients_mib``,
    the size of the gradients that are returned, which is in every peak, and the ``rows``.
    """
    times = partial(time_side_by_side, device=run.device, warm=run.config.warm, reps=run.config.reps)
    tables = run.result["tables"] = list[Row]()
    for shape in run.config.shapes:
        for case in cases(run, shape):
            exact, gradients_mib = case.exact(), mib(sum(leaf.nbytes for leaf in case.leaves if case.upstream))
            release(run.device)
            limit, rows = limit_of(case, times), list[Row]()
            entry = {**vars(shape), "dtype": run.dtype_name, "work": case.name, "tokens": len(case.x)}
            entry |= {f"limit_{key}": value for key, value in limit.items()}
            tables.append({**entry, "gradients_mib": gradients_mib, "rows": rows})
            about = f"{limit['ms']:.2f} ms, {limit['tflops']:.3g} TFLOP/s; gradients {gradients_mib:.1f} MiB"
            sizes = ", ".join(f"{key} {value}" for key, value in vars(shape).items())
            run.say(f"\n{sizes}: {case.name} in {run.dtype_name}; the bare GEMMs take {about}\n{table.header}")
            for peer in run.chosen if peers is None else peers(case):
                run.add(row_of(case, peer, peer.gemms or limit["rows"], exact, times), rows, table)

"""Tile sizes of the exponential GEMM for a GPU without an entry in the table: the fastest correct candidate.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowtide.bench.config import TuneConfig
from lowtide.bench.harness import Column, Row, Say, Table, reason_in, repeated
from lowtide.bench.problem import ROWS, blocks, make_problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import exact_gemms
from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import why_not_exp
from lowtide.head.kernels import configs
from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.lengths import padded
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.timing import Timing, time_side_by_side

CALLS = 4  # of a timed run
NO_TIME = "not tried: no time left"
SUM_ERROR = 1e-3  # relative, of a row's sum: float32 sums in another order are within 2e-5
E_ERROR = 2**-7  # relative, of each element: rounding to bfloat16 is within 2**-9

CANDIDATES = (
    GemmConfig(rows=128, columns=256, stages=4, warps=8, pieces=2, group=8),
    GemmConfig(rows=128, columns=256, stages=3, warps=8, pieces=1, group=8),
    GemmConfig(rows=256, columns=128, stages=4, warps=8, pieces=2, group=8),
    GemmConfig(rows=128, columns=128, stages=3, warps=4, pieces=2, group=8, per_multiprocessor=2),
    GemmConfig(rows=128, columns=128, stages=4, warps=8, pieces=1, group=8),
    GemmConfig(rows=128, columns=128, stages=2, warps=8, pieces=2, group=8),  # fits in 99 KiB of shared memory
    GemmConfig(rows=128, columns=256, stages=4, warps=8, pieces=2, group=16),
    GemmConfig(rows=128, columns=256, stages=4, warps=8, pieces=2, group=4),
    GemmConfig(rows=256, columns=128, stages=3, warps=8, pieces=1, group=8),
    GemmConfig(rows=256, columns=128, stages=4, warps=8, pieces=2, group=4),
    GemmConfig(rows=128, columns=128, stages=3, warps=8, pieces=2, group=8, per_multiprocessor=2),
    GemmConfig(rows=128, columns=256, stages=3, warps=8, pieces=2, group=8),
    GemmConfig(rows=128, columns=128, stages=3, warps=4, pieces=2, group=16, per_multiprocessor=2),
)
"""Those that differ most come first, for runs that are cut short; all of depth 64, whose rows fill TMA's swizzle."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What each candidate computes: E = exp(x W^T - reference), 0 at the targets, and its row sums.

    Attributes:
        x_CD: hidden states.
        w_VD: weight.
        y_C: int32 targets.
        reference_C: float32 logits of the targets.
        true_e_CV: E in float32, from float32 GEMMs.
        e_CV: a candidate's output E, in the operands' dtype.
        z_CV: the output of `torch.mm`.
    """

    x_CD: Tensor
    w_VD: Tensor
    y_C: Tensor
    reference_C: Tensor
    true_e_CV: Tensor
    e_CV: Tensor
    z_CV: Tensor

    @classmethod
    @torch.no_grad()
    def random(cls, shape: Shape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0) -> Chunk:
        """Return a chunk of that shape, its logits as peaked as a trained model's."""
        problem = make_problem(shape, dtype, device, seed=seed)
        x_CD, w_VD, y = problem.x.detach(), problem.w.detach(), problem.y[:, None]
        true_e_CV = torch.empty(shape.N, shape.V, device=device)
        reference_C = torch.empty(shape.N, device=device)
        w = w_VD.float()
        with exact_gemms():
            for rows in blocks(shape.N, ROWS):
                z = torch.mm(x_CD[rows].float(), w.T, out=true_e_CV[rows])
                t = z.gather(1, y[rows])
                reference_C[rows] = t[:, 0]
                z.sub_(t).exp_().scatter_(1, y[rows], 0.0)
        e_CV, z_CV = (x_CD.new_empty(shape.N, padded(shape.V))[:, : shape.V] for _ in range(2))
        return cls(
            x_CD=x_CD, w_VD=w_VD, y_C=problem.y.int(), reference_C=reference_C, true_e_CV=true_e_CV, e_CV=e_CV,
            z_CV=z_CV,
        )  # fmt: skip

    def multiply(self) -> Tensor:
        """Run `torch.mm` at this shape: what a candidate is measured by."""
        return torch.mm(self.x_CD, self.w_VD.T, out=self.z_CV)

    def why_wrong(self, sum_CP: Tensor) -> str | None:
        """Return what is wrong in ``e_CV`` and in the row sums by tile, or None."""
        for rows in blocks(len(self.e_CV), ROWS):
            true_e = self.true_e_CV[rows]
            true_sum = true_e.sum(1)
            error = (sum_CP[rows].sum(1) - true_sum).abs()
            if not (error <= true_sum * SUM_ERROR).all():  # NaN is wrong too
                return f"wrong: a row's sum is off by {float((error / true_sum).max()):.1e} of it"
            near = (self.e_CV[rows].float() - true_e).abs_() <= true_e * E_ERROR
            if not near.all():
                return f"wrong: {int((~near).sum())} exponentials differ from those of float32 GEMMs"
        return None


Build = Callable[[Chunk, GemmConfig], tuple[Callable[[], object], Tensor]]
"""Makes of a candidate what runs it, and the tensor [C, P] in which that leaves the row sums."""

Timer = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, Timing]]
"""`time_side_by_side`, its device and its rounds decided."""

TABLE = Table(
    (
        Column("rows x cols x depth", lambda row: _tile(row["config"]), "<19"),
        Column("stages", lambda row: row["config"].stages, "7"),
        Column("warps", lambda row: row["config"].warps, "6"),
        Column("pieces", lambda row: row["config"].pieces, "7"),
        Column("per_SM", lambda row: row["config"].per_multiprocessor, "7"),
        Column("group", lambda row: row["config"].group, "6"),
    ),
    (Column("ms", "ms", "9.3f"), Column("of mm", "share", "7.3f")),
)


def _tile(config: GemmConfig) -> str:
    return f"{config.rows:>4} x {config.columns:<3} x {config.depth:<3}"


def run(config: TuneConfig, say: Say, clock: Callable[[], float] = time.monotonic) -> GemmConfig | None:
    """Try the candidates on the current GPU, write the fastest one unless ``config.dry_run``, and return it.

    None: no candidate could be used. ``clock`` returns seconds.

    Raises:
        UnsupportedError: the GPU cannot run the kernel at this shape, or its memory cannot hold it.
    """
    end = clock() + config.seconds
    shape = config.chunk
    device = suitable_device(shape)
    name = torch.cuda.get_device_name(device)
    now = configs.lookup(name)
    try:
        chunk = Chunk.random(shape, torch.bfloat16, device, seed=config.seed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UnsupportedError(message("shape", "one that this GPU's memory can hold", repr(shape.name))) from None
    timer = partial(time_side_by_side, device=device, warm=config.warm, reps=config.reps)
    say(f"{name}, {shape} bfloat16; first what is in use now\n{TABLE.header}")
    rows = []
    for row in tune(in_order(now), chunk, build_kernel, timer, end=end, clock=clock):
        rows.append(row)
        say(TABLE.line(row))
    best = fastest(rows)
    if best is None:
        say("no candidate could be used: nothing is written\n")
        return None
    found = f"fastest: {best['share']:.3f} of torch.mm"
    if "share" in rows[0]:
        found += f", {best['share'] / rows[0]['share']:.3f} times the speed of what was in use"
    say(f"{found}\n")
    say("not written: --dry-run\n" if config.dry_run else f"written: {configs.remember(name, best['config'])}\n")
    chosen: GemmConfig = best["config"]
    return chosen


def suitable_device(shape: Shape) -> torch.device:
    """Return the current GPU; `UnsupportedError`: there is none that can run the exponential path at this shape."""
    if not torch.cuda.is_available():
        raise UnsupportedError(message("device", "a GPU that PyTorch can use", "none", "There is nothing to tune."))
    device = torch.device("cuda", torch.cuda.current_device())
    against = why_not_exp(device, torch.bfloat16, shape.D, shape.V)
    if against:
        got = f"{torch.cuda.get_device_name(device)} and {shape}"
        expected = "a GPU and a shape that the exponential path can take"
        raise UnsupportedError(message("device, shape", expected, got, f"{against[0].upper()}{against[1:]}."))
    return device


def in_order(now: GemmConfig) -> tuple[GemmConfig, ...]:
    """Return the candidates, each once: first the one in use, so that however short the run it is compared with it."""
    return tuple(dict.fromkeys((now, *CANDIDATES)))


def tune(
    candidates: Sequence[GemmConfig],
    chunk: Chunk,
    build: Build,
    timer: Timer,
    *,
    end: float,
    clock: Callable[[], float],
) -> Iterator[Row]:
    """Yield each candidate's row: its ``config``, ``ms``, ``mm_ms`` of `torch.mm` in the same rounds, and ``share``.

    One that fails, or is wrong, or for which there is no time until ``end`` by the ``clock``, has ``failed`` instead. A
    candidate is started if one that takes as long as the longest yet would end in time. The first always is.
    """
    longest = 0.0
    for i, candidate in enumerate(candidates):
        row: Row = {"config": candidate}
        start = clock()
        if i and start + longest > end:
            row["failed"] = NO_TIME
        else:
            with reason_in(row):  # out of shared memory or registers, or whatever the compiler raises
                row |= _measured(candidate, chunk, build, timer)
            longest = max(longest, clock() - start)
        yield row


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the largest share of `torch.mm`'s speed, which heat changes less than the time."""
    return max((row for row in rows if "share" in row), key=lambda row: row["share"], default=None)


def build_kernel(chunk: Chunk, config: GemmConfig) -> tuple[Callable[[], object], Tensor]:
    """Return what runs the exponential GEMM with these tile sizes, and where it leaves the row sums."""
    from lowtide.head.kernels.exp_logits import ExpRows, exp_tile
    from lowtide.head.kernels.gemm import PLAIN, gemm_tiles, tiles_across

    sum_CP = torch.empty(len(chunk.x_CD), tiles_across(len(chunk.w_VD), config), device=chunk.x_CD.device)
    rows = ExpRows.of(chunk.reference_C, chunk.y_C, sum_CP)
    return partial(gemm_tiles, exp_tile, chunk.x_CD, chunk.w_VD, chunk.e_CV, rows, PLAIN, config), sum_CP


def _measured(config: GemmConfig, chunk: Chunk, build: Build, timer: Timer) -> Row:
    kernel, sum_CP = build(chunk, config)
    for buffer in (chunk.e_CV, sum_CP):  # what another candidate left there would be right
        buffer.fill_(torch.nan)
    kernel()
    wrong = chunk.why_wrong(sum_CP)
    if wrong is None:
        timings = timer({"mm": repeated(chunk.multiply, CALLS), "kernel": repeated(kernel, CALLS)})
        wrong = chunk.why_wrong(sum_CP)  # a race shows in some runs only
    if wrong is not None:
        return {"failed": wrong}
    ms, mm_ms = (timings[name].median_ms / CALLS for name in ("kernel", "mm"))
    return {"ms": ms, "mm_ms": mm_ms, "share": mm_ms / ms}

"""The head's benchmark: for each shape a table of peers, a sweep of memory, other settings, other numbers of tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import HeadBenchConfig
from lowtide.bench.harness import Benchmark, Column, Peer, Row, Run, Table, reason_in, release
from lowtide.bench.loss_peers import LOWTIDE_AT_LIGERS, PEERS, lowtide_peer
from lowtide.bench.problem import PLAIN, ROWS, SETTINGS, Problem, Setting, blocks, make_problem
from lowtide.bench.results import Files
from lowtide.bench.shapes import Shape
from lowtide.bench.task import NAME, SHARE, Bench, Task, Truth, Values, exact_gemms, relative_error
from lowtide.bench.way import LOWTIDE
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.head.planner import MIB
from lowtide.measure.plots import Point, draw_front, require_matplotlib


@torch.no_grad()
def rounding_floor(problem: Problem, true: Truth, chunk_rows: int | None) -> dict[str, float]:
    """Return the gradients' relative errors, ``dx`` and ``dw``, when nothing is wrong but the exponentials' roundings.

    With t a token's target logit and r the sum of ``E = exp(z - t)`` over the other classes, ``s = g / (1 + r)``,

        dX = diag(s) (E W - r w_y)        dW = E^T (diag(s) X)        with E_y = -r in dW

    Rounded to the operands' dtype are E, ``diag(s) X``, and, in dW alone, E_y; then the outputs to their own dtype.
    In dX the target's coefficient is exact, which an implementation gets by adding the part that rounding lost.

    Args:
        problem: whose gradients.
        true: its exact gradients.
        chunk_rows: dW is rounded to its own dtype after every so many tokens; None: summed in float32, rounded once.
    """
    if true.dx is None:
        return {}
    N, narrow = problem.shape.N, problem.dtype
    w = problem.w.float()
    dx_error = dx_norm = torch.zeros((), device=problem.device, dtype=torch.float64)
    total = None if true.dw is None else torch.zeros_like(problem.w.detach())  # in dW's own dtype
    chunk_sum = None if total is None else torch.zeros_like(w)
    with exact_gemms():
        for chunk in blocks(N, chunk_rows or N):
            for rows in blocks(chunk.stop - chunk.start, ROWS):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                x, y = problem.x[at].float(), problem.y[at, None]
                E = x @ w.T
                E.sub_(E.gather(1, y)).exp_().scatter_(1, y, 0.0)
                r = E.sum(1, keepdim=True)
                s = problem.g[at, None] / (1 + r)
                E = E.to(narrow).float()
                dx = (s * (E @ w - r * w[y[:, 0]])).to(problem.x.dtype).double()
                dx_error = dx_error + (dx - true.dx[at]).square().sum()
                dx_norm = dx_norm + true.dx[at].double().square().sum()
                if chunk_sum is not None:
                    E.scatter_(1, y, (-r).to(narrow).float())
                    chunk_sum.addmm_(E.T, (s * x).to(narrow).float())
                del E
            if total is not None and chunk_sum is not None:
                total.copy_(chunk_sum.add_(total))  # rounds
                chunk_sum.zero_()
    floor = {"dx": (dx_error / dx_norm).sqrt().item()}
    return floor if total is None or true.dw is None else {**floor, "dw": relative_error(total, true.dw)}


SWEEP_POINTS = 7
SETTING_PEERS = (LOWTIDE, "compile", "liger-large", "cce-exact")


def _notes(row: Row) -> Iterator[str]:
    """Yield how many times the roundings' own errors lowtide's are, and its plan."""
    errors = {"dX": "dx", "dW": "dw"}
    floors = [
        f"{title} {row[f'{name}_error'] / row[f'{name}_floor']:.3f}"
        for title, name in errors.items()
        if f"{name}_error" in row and row.get(f"{name}_floor")
    ]
    if floors:
        yield f"of the floor: {', '.join(floors)}"
    if plan := row.get("plan"):
        yield f"{plan['backend']}, {plan['chunks']} x {plan['chunk_rows']} rows"


TABLE = Table(
    (NAME,),
    (*SHARE, *(Column(f"{of} err", f"{of.lower()}_error", "10.1e") for of in ("loss", "dX", "dW"))),
    _notes,
)


def loss_task(problem: Problem) -> Task:
    """Return each token's cross entropy, or the tokens' mean, in a problem's setting."""

    def values_of(z: Tensor, rows: slice) -> Values:
        return {"loss": F.cross_entropy(problem.setting.cap(z), problem.y[rows], reduction="none")}

    return Task(head=problem, names=("loss",), upstream={"loss": problem.g}, values_of=values_of)


class LossBench(Bench):
    """A problem on which peers' losses are measured.

    Their rows have ``setting`` and ``tokens``; ``loss_error``, the absolute difference of the loss (the mean one, of
    several); ``dx_error``, the relative error of the hidden states' gradient, and the same of the weight's. lowtide's
    have the ``plan`` of `plan_head`, and in bfloat16 without a soft cap ``dx_floor`` and ``dw_floor``, the errors that
    the roundings alone cause (float16 cannot hold the exponentials).
    """

    def __init__(self, problem: Problem, *, error: bool, warm: int, reps: int) -> None:
        super().__init__(loss_task(problem), error=error, warm=warm, reps=reps)
        if self.true is not None:
            self._floor = cache(partial(rounding_floor, problem, self.true))

    def in_setting(self, setting: Setting) -> LossBench:
        """Return the bench of the same numbers in another setting."""
        problem = self.problem.in_setting(setting)
        return LossBench(problem, error=self.true is not None, warm=self.warm, reps=self.reps)

    def measure(self, peer: Peer) -> Row:
        """See `Bench`."""
        problem = self.problem
        row = super().measure(peer) | {"setting": problem.setting.name, "tokens": problem.shape.N}
        row |= {f"{name}_error": error for name, error in row.pop("errors", {}).items()}
        if peer.options is not None:
            plan = plan_of(peer, problem)
            row["plan"] = dataclasses.asdict(plan)
            rounds = problem.dtype == torch.bfloat16 and problem.setting.softcap is None
            if self.true is not None and "ms" in row and rounds:
                with reason_in(row):  # it needs memory of its own
                    row |= self.floor_of(plan)
                release(problem.device)
        return row

    def floor_of(self, plan: HeadPlan) -> dict[str, float]:
        """Return the floors of a plan's errors."""
        in_float32 = plan.accumulate == "float32" or plan.chunks <= 1
        floor = self._floor(None if in_float32 else plan.chunk_rows)
        return {f"{name}_floor": value for name, value in floor.items()}


def bench_of(run: Run[Any], shape: Shape, *, error: bool) -> LossBench:
    """Return the bench of a shape's random inputs."""
    release(run.device)
    problem, config = make_problem(shape, run.dtype, run.device, seed=run.config.seed), run.config
    return LossBench(problem, error=error, warm=config.warm, reps=config.reps)


def measure(run: Run[HeadBenchConfig]) -> None:
    """Measure each shape with all that the options request.

    A shape's result has ``limits`` by setting (and number of tokens, where it is not the shape's): milliseconds by rows
    of a chunk, the best of them, and its rate; ``gradients_mib``; the rows of ``table``, the peers, and of ``sweep``,
    ``settings`` and ``tokens``, those of the options of that name.
    """
    config, shapes = run.config, run.result.setdefault("shapes", [])
    run.result |= {"warm": config.warm, "reps": config.reps}
    for shape in config.shapes:
        result: dict[str, Any] = {**vars(shape), "dtype": run.dtype_name, "limits": [], "gradients_mib": 0.0}
        shapes.append(result)
        _measure_shape(run, shape, result)
        if config.sweep:
            run.say(f"drawn: {draw(result, run.files, run.result['machine'])}\n")


def _measure_shape(run: Run[HeadBenchConfig], shape: Shape, result: dict[str, Any]) -> None:
    config = run.config

    def begin(bench: LossBench) -> None:
        limit = {"setting": bench.problem.setting.name, "tokens": bench.problem.shape.N, **bench.limits()}
        result["limits"].append(limit)
        run.say(bench.title() + TABLE.header)

    def add(part: str, bench: LossBench, peer: Peer, **more: float) -> None:
        run.add(bench.measure(peer) | more, result.setdefault(part, []), TABLE)

    if config.table or config.sweep or config.settings:
        bench = bench_of(run, shape, error=config.error)
        result["gradients_mib"] = bench.gradients_mib
        if config.table or config.sweep:
            begin(bench)
        if config.table:
            for name in config.peers:
                add("table", bench, PEERS[name])
        if config.sweep:
            for value, peer in _sweep_peers(sorted(config.sweep_mib) or default_sweep(shape, run.dtype), bench.problem):
                add("sweep", bench, peer, workspace_mib=value)
        for setting in SETTINGS if config.settings else ():
            if setting.wide and run.dtype == torch.float32:
                continue  # nothing is cast
            other = bench.in_setting(setting)
            begin(other)
            for name in config.peers:
                # an option of lowtide's alone leaves peers as they are
                applies = setting.accumulate == PLAIN.accumulate or PEERS[name].options
                if applies and (config.only or name in SETTING_PEERS):
                    add("settings", other, PEERS[name])
            del other
        del bench
    for N in config.token_counts:
        bench = bench_of(run, dataclasses.replace(shape, N=N), error=False)
        begin(bench)
        for name in config.peers:
            if name == LOWTIDE or config.only:
                add("tokens", bench, PEERS[name])
        del bench
    release(run.device)


def _sweep_peers(values: Iterable[float], problem: Problem) -> Iterator[tuple[float, Peer]]:
    """Yield lowtide with each workspace in MiB, ascending; of those that have the same plan, the smallest alone."""
    seen: list[object] = []
    for value in values:
        peer = lowtide_peer(f"{LOWTIDE} {value:g} MiB", lambda _, value=value: value)  # type: ignore[misc]
        plan = plan_of(peer, problem)
        key = (plan.backend, plan.gradient, plan.accumulate, plan.chunk_rows)
        if key not in seen:
            yield value, peer
        seen.append(key)


def default_sweep(shape: Shape, dtype: torch.dtype) -> tuple[float, ...]:
    """Return powers of two in MiB: from all logits of the shape down to a 64th of them."""
    top = math.ceil(math.log2(shape.N * shape.V * dtype.itemsize / MIB))
    return tuple(2.0**k for k in range(top - SWEEP_POINTS + 1, top + 1))


def plan_of(peer: Peer, problem: Problem) -> HeadPlan:
    """Return the `plan_head` of lowtide with the peer's options."""
    assert peer.options is not None
    shape, w = problem.shape, problem.w
    sizes = (shape.N, shape.D, shape.V, problem.dtype, problem.device, peer.options(problem))
    frozen = not w.requires_grad
    return plan_head(*sizes, weight_dtype=w.dtype, reduction=problem.setting.reduction, weight_frozen=frozen)


def draw(result: Mapping[str, Any], files: Files, machine: Mapping[str, Any]) -> Path:
    """Draw a shape's sweep, time against memory, with the peers of the table."""
    name, N, D, V = (result[key] for key in ("name", "N", "D", "V"))

    def points(part: str, label: Callable[[Row], str]) -> list[Point]:
        rows = (row for row in result.get(part, ()) if "ms" in row and row["name"] != LOWTIDE_AT_LIGERS)
        return [Point(label(row), row["peak_mib"], row["ms"], own=row["name"] == LOWTIDE) for row in rows]

    front, peers = points("sweep", lambda row: f"{row['workspace_mib']:g}"), points("table", lambda row: row["name"])
    limit = next(limit["ms"] for limit in result["limits"] if limit["tokens"] == N)
    title = f"Linear + cross entropy, forward and backward: N={N}, D={D}, V={V}\n"
    title += f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result['dtype']}"
    least = result["gradients_mib"]
    draw_all = partial(draw_front, front=front, front_name=LOWTIDE, points=peers, limit=limit, least=least)
    return files.plot(name, lambda at: draw_all(at, title))


HEAD = Benchmark(
    measure=measure,
    peers=PEERS,
    check=lambda config: require_matplotlib("sweep") if config.sweep else None,
)

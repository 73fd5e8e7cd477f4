"""The head's benchmark: for each shape a table of peers, and a sweep of memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.bench.case import TABLE, Bench, Case, make_case
from lowtide.bench.config import HeadBenchConfig
from lowtide.bench.harness import Benchmark, Peer, Row, Run, Table, release
from lowtide.bench.loss_peers import PEERS, lowtide_peer
from lowtide.bench.shapes import Shape
from lowtide.bench.variant import LOWTIDE
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.head.planner import MIB
from lowtide.measure.plots import Point, draw_front, require_matplotlib

SWEEP_POINTS = 7
LOSS_TABLE = Table(
    TABLE.heads,
    {**TABLE.figures, **dict.fromkeys(("loss_error", "dx_error", "dw_error"), "12.1e")},
    lambda row: ["{backend}, {chunks} x {chunk_rows} rows".format(**row["plan"])] if "plan" in row else [],
)


def loss_row(bench: Bench, peer: Peer) -> Row:
    """Return a peer's row of the loss, with ``loss_error``, the absolute difference, ``dx_error`` and ``dw_error``, the
    gradients' relative errors; lowtide's with the ``plan`` of `plan_head`.
    """
    row = bench.measure(peer) | {"setting": bench.case.name, "tokens": bench.case.shape.N}
    row |= {f"{name}_error": error for name, error in row.pop("errors", {}).items()}
    return row if peer.options is None else row | {"plan": dataclasses.asdict(plan_of(peer.options, bench.case))}


def plan_of(options: HeadOptions, case: Case, *, function: bool = False) -> HeadPlan:
    """Return the `plan_head` of a case with these options."""
    shape, x = case.shape, case.x
    more: dict[str, Any] = {"function": True} if function else {"reduction": "none" if case.per_token else "mean"}
    return plan_head(shape.N, shape.D, shape.V, x.dtype, x.device, options, **more)


def bench_of(run: Run[Any], shape: Shape) -> Bench:
    """Return the bench of a shape's random inputs."""
    release(run.device)
    return Bench.of(make_case(shape, run.dtype, run.device, seed=run.config.seed), run.config)


def measure(run: Run[HeadBenchConfig]) -> None:
    """Measure each shape with all that the options request.

    A shape's result has ``limits``: milliseconds by rows of a chunk, the best of them, and its rate; ``gradients_mib``;
    the rows of ``table``, the peers, and of ``sweep``.
    """
    config, shapes = run.config, run.result.setdefault("shapes", [])
    run.result |= {"warm": config.warm, "reps": config.reps}
    for shape in config.shapes:
        bench, table, sweep = bench_of(run, shape), list[Row](), list[Row]()
        limit = {"setting": bench.case.name, "tokens": shape.N, **bench.limits()}
        sizes = {**vars(shape), "dtype": run.dtype_name, "limits": [limit], "gradients_mib": bench.gradients_mib}
        shapes.append({**sizes, "table": table, "sweep": sweep})
        run.fill(table, bench.title(), LOSS_TABLE, PEERS, partial(loss_row, bench))
        if config.sweep:
            for value, peer in _sweep_peers(config.workspace_mib, bench.case):
                run.add(loss_row(bench, peer) | {"workspace_mib": value}, sweep, LOSS_TABLE)
            run.say(f"drawn: {draw(shapes[-1], run)}\n")


def _sweep_peers(values: tuple[float, ...], case: Case) -> Iterator[tuple[float, Peer]]:
    """Yield lowtide with each workspace in MiB, ascending; of those that have the same plan, the smallest alone.

    Without values: powers of two, from all logits down to a 64th of them.
    """
    top = math.ceil(math.log2(case.shape.N * case.shape.V * case.x.itemsize / MIB))
    seen: list[object] = []
    for value in sorted(values) or (2.0**k for k in range(top - SWEEP_POINTS + 1, top + 1)):
        options = HeadOptions(workspace_mib=value)
        plan = plan_of(options, case)
        key = (plan.backend, plan.gradient, plan.accumulate, plan.chunk_rows)
        if key not in seen:
            yield value, lowtide_peer(f"{LOWTIDE} {value:g} MiB", options)
        seen.append(key)


def draw(result: Mapping[str, Any], run: Run[Any]) -> Path:
    """Draw a shape's sweep, time against memory, with the peers of the table."""

    def points(part: str, label: Callable[[Row], str]) -> list[Point]:
        rows = (row for row in result[part] if "ms" in row)
        return [Point(label(row), row["peak_mib"], row["ms"], own=row["name"] == LOWTIDE) for row in rows]

    front = points("sweep", lambda row: f"{row['workspace_mib']:g}")
    limit, least = result["limits"][0]["ms"], result["gradients_mib"]
    title = "Linear + cross entropy, forward and backward: N={N}, D={D}, V={V}\n".format(**result) + run.where()
    peers = points("table", lambda row: row["name"])
    return run.files.plot(
        result["name"],
        lambda at: draw_front(at, title, front=front, front_name=LOWTIDE, points=peers, limit=limit, least=least),
    )


HEAD = Benchmark(
    measure=measure,
    peers=PEERS,
    check=lambda config: require_matplotlib("sweep") if config.sweep else None,
)

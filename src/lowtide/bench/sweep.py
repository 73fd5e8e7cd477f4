"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

The plots are those requested for PyTorch's own function (pytorch/pytorch issue 124480): the rate, the peak of memory
and the errors over each of the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.bench.case import Bench
from lowtide.bench.config import AXES, SweepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Peer, Row, Run, fails_otherwise
from lowtide.bench.head import LOSS_TABLE, bench_of, loss_row
from lowtide.bench.loss_peers import PEERS
from lowtide.bench.variant import LOWTIDE
from lowtide.measure.plots import Line, Panel, draw_panels, require_matplotlib

_LETTERS = {"N": "tokens N", "D": "hidden size D", "V": "vocabulary V"}


def measure(run: Run[SweepBenchConfig]) -> None:
    """Measure every shape, and draw what is known at the end."""
    run.result |= {"dtype": run.dtype_name, "asked": run.config.recorded(), "points": []}
    try:
        for shape in run.config.shapes:
            bench, rows = bench_of(run, shape), list[Row]()
            limits = {"limit_ms": bench.limit_ms, "limit_tflops": bench.limits()["tflops"]}
            sizes = {"N": shape.N, "D": shape.D, "V": shape.V, "gradients_mib": bench.gradients_mib}
            run.result["points"].append({**sizes, **limits, "rows": rows})
            run.fill(rows, bench.title(), LOSS_TABLE, PEERS, partial(rated_row, bench))
    finally:  # also after Ctrl-C
        if run.result["points"]:
            run.say(f"drawn: {draw_sweep(run)}\n")


def rated_row(bench: Bench, peer: Peer) -> Row:
    """Return a peer's row with its rate: of the work that the GEMMs need, 6NDV, whatever a peer computes besides."""
    row = loss_row(bench, peer)
    times = {prefix: row[f"{prefix}ms"] for prefix in ("", "busy_") if f"{prefix}ms" in row}
    return row | {f"{prefix}tflops": bench.case.flops / ms / 1e9 for prefix, ms in times.items()}


def draw_sweep(run: Run[SweepBenchConfig]) -> Path:
    """Draw a run, finished or not, and return the file: a column for each line of shapes.

    The rows are the rate, the peak of memory above the inputs, and the errors: of the gradients (relative, the larger
    of the two) as lines, of the loss (absolute) as dots.
    """
    points, center = run.result["points"], run.config.center
    names = dict.fromkeys(row["name"] for point in points for row in point["rows"])
    panels: dict[str, list[Panel]] = {}
    columns = []
    for letter in AXES.values():
        others = [other for other in AXES.values() if other != letter]
        shapes = [point for point in points if all(point[other] == getattr(center, other) for other in others)]
        shapes.sort(key=lambda point: point[letter])
        if len(shapes) < 2:
            continue
        columns.append(_LETTERS[letter])

        def lines(*keys: str, at: str = letter, shapes: Any = shapes, dotted: bool = False) -> Iterator[Line]:
            for name in names:
                yield Line(name, _values(shapes, at, name, keys), own=name == LOWTIDE, dotted=dotted)

        def reference(name: str, key: str, at: str = letter, shapes: Any = shapes) -> Line:
            return Line(name, [(point[at], point[key]) for point in shapes], quiet=True)

        rates = [*lines("tflops"), reference("bare GEMMs", "limit_tflops")]
        panels.setdefault("TFLOP/s: 6NDV / time", []).append(Panel(rates))
        peaks = [*lines("peak_mib"), reference("gradients alone", "gradients_mib")]
        panels.setdefault("peak above the inputs, MiB", []).append(Panel(peaks, log=True))
        if run.config.error:
            errors = [*lines("dx_error", "dw_error"), *lines("loss_error", dotted=True)]
            panels.setdefault("error: gradients (lines), loss (dots)", []).append(Panel(errors, log=True))
    title = (
        "Linear + cross entropy, forward and backward, each size with the others held at "
        f"N={center.N}, D={center.D}, V={center.V}\n{run.where()}"
    )
    full = sorted({row["name"] for p in points for row in p["rows"] if row.get("failed") == OUT_OF_MEMORY})
    title += f"; lines end where memory does ({', '.join(full)})" if full else ""
    return run.files.plot("lines", lambda file: draw_panels(file, title, panels, columns=columns))


def _values(shapes: list[Row], at: str, name: str, keys: Iterable[str]) -> list[tuple[float, float]]:
    """Return the size and a peer's value of each shape: the largest under these keys, where it has one."""
    rows = [(shape[at], row) for shape in shapes for row in shape["rows"] if row["name"] == name]
    return [(size, max(row[key] for key in keys if key in row)) for size, row in rows if not {*keys}.isdisjoint(row)]


SWEEP = Benchmark(measure=measure, failed=fails_otherwise, peers=PEERS, check=lambda _: require_matplotlib("sweep"))

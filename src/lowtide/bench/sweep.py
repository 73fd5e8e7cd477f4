"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

The plots are those requested for PyTorch's own function (pytorch/pytorch issue 124480): the rate, the peak of memory
and the errors over each of the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.bench.config import AXES, SweepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Row, Run, own_failure
from lowtide.bench.head import TABLE, bench_of
from lowtide.bench.loss_peers import PEERS
from lowtide.bench.problem import PLAIN
from lowtide.bench.results import Files
from lowtide.bench.shapes import HEADS, Shape
from lowtide.bench.way import LOWTIDE
from lowtide.measure.plots import Line, Panel, draw_panels, require_matplotlib

_LETTERS = {"N": "tokens N", "D": "hidden size D", "V": "vocabulary V"}


def measure(run: Run[SweepBenchConfig]) -> None:
    """Measure every shape, and draw what is known at the end."""
    run.result |= {"dtype": run.dtype_name, "asked": run.config.recorded(), "points": []}
    try:
        for i, shape in enumerate(run.config.shapes, 1):
            run.say(f"\nshape {i} of {len(run.config.shapes)}")
            _measure_shape(run, shape)
    finally:  # also after Ctrl-C
        if run.result["points"]:
            run.say(f"drawn: {draw_sweep(run.result, run.files)}\n")


def _measure_shape(run: Run[SweepBenchConfig], shape: Shape) -> None:
    bench, rows = bench_of(run, shape, error=run.config.error), list[Row]()
    point = {"N": shape.N, "D": shape.D, "V": shape.V, "limit_ms": bench.limit_ms, "limit_tflops": bench.tflops}
    run.result["points"].append(point | {"gradients_mib": bench.gradients_mib, "rows": rows})
    run.say(bench.title() + TABLE.header)
    for name in run.config.peers:
        row = bench.measure(PEERS[name])
        for prefix in ("", "busy_"):  # of the work that the GEMMs need, 6NDV, whatever a peer computes besides
            if f"{prefix}ms" in row:
                row[f"{prefix}tflops"] = shape.flops(PLAIN.gemms) / row[f"{prefix}ms"] / 1e9
        run.add(row, rows, TABLE)


def draw_sweep(result: Mapping[str, Any], files: Files) -> Path:
    """Draw a result of `lowtide.bench.sweep`, finished or not, and return the file: a column for each line of shapes.

    The rows are the rate, the peak of memory above the inputs, and the errors: of the gradients (relative, the larger
    of the two) as lines, of the loss (absolute) as dots.
    """
    config, points = result["asked"], result["points"]
    names = list(dict.fromkeys(row["name"] for point in points for row in point["rows"]))
    shape = HEADS.one(config["shape"])
    center = {"N": shape.N, "D": shape.D, "V": shape.V}
    rows: dict[str, list[Panel]] = {}
    columns = []
    for letter in AXES.values():
        line = [p for p in points if all(p[other] == center[other] for other in "NDV" if other != letter)]
        line.sort(key=lambda point: point[letter])
        if len(line) < 2:
            continue
        columns.append(_LETTERS[letter])

        def lines(*keys: str, line: Any = line, letter: str = letter, **style: Any) -> list[Line]:
            return [
                Line(name, _values(line, letter, name, *keys), own=name.startswith(LOWTIDE), **style) for name in names
            ]

        def limit(name: str, key: str, line: Any = line, letter: str = letter) -> Line:
            return Line(name, [(point[letter], point[key]) for point in line], quiet=True)

        rates = [*lines("tflops"), limit("bare GEMMs", "limit_tflops")]
        peaks = [*lines("peak_mib"), limit("gradients alone", "gradients_mib")]
        rows.setdefault("TFLOP/s: 6NDV / time", []).append(Panel(rates))
        rows.setdefault("peak above the inputs, MiB", []).append(Panel(peaks, log=True))
        if config["error"]:
            floors = _values(line, letter, LOWTIDE, "dx_floor", "dw_floor")
            floor = Line("bfloat16's roundings alone", floors, quiet=True)
            errors = [*lines("dx_error", "dw_error"), *lines("loss_error", dotted=True), floor]
            rows.setdefault("error: gradients (lines), loss (dots)", []).append(Panel(errors, log=True))
    machine = result["machine"]
    title = (
        "Linear + cross entropy, forward and backward, each size with the others held at "
        f"N={center['N']}, D={center['D']}, V={center['V']}\n"
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result['dtype']}"
    )
    out = sorted({row["name"] for p in points for row in p["rows"] if row.get("failed") == OUT_OF_MEMORY})
    if out:
        title += f"; lines end where memory does ({', '.join(out)})"
    return files.plot("lines", lambda at: draw_panels(at, title, rows, columns=columns))


def _values(points: list[Mapping[str, Any]], letter: str, name: str, *keys: str) -> list[tuple[float, float]]:
    """Return the size and a peer's value of each point: the largest under these keys, where it has one."""
    rows = [(point[letter], row) for point in points for row in point["rows"] if row["name"] == name]
    return [
        (size, max(row[key] for key in keys if key in row)) for size, row in rows if not row.keys().isdisjoint(keys)
    ]


SWEEP = Benchmark(
    measure=measure,
    failed=lambda row: own_failure(row) and row["failed"] != OUT_OF_MEMORY,
    peers=PEERS,
    check=lambda _: require_matplotlib("sweep"),
)

"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

The plots are those requested for PyTorch's own function (pytorch/pytorch issue 124480): the rate, the peak of memory
and the errors over each of the three.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.config import AXES, NONE, SweepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Run, answers, own_failure
from lowtide.bench.head import TABLE, bench_of, loss_task
from lowtide.bench.loss_peers import PEERS
from lowtide.bench.problem import PLAIN, make_problem
from lowtide.bench.results import Files
from lowtide.bench.shapes import HEADS, Shape
from lowtide.bench.task import exact_gemms, wider
from lowtide.bench.way import LOWTIDE
from lowtide.errors import UnsupportedError, message
from lowtide.measure.plots import Line, Panel, draw_panels, require_matplotlib
from lowtide.measure.timing import time_side_by_side

PACE = 2.0  # times the limit that a peer takes, about: from 1.1 to 4.7
FIRST = 1.0  # seconds that a peer takes to compile for a new shape, about: from 0 to 5
DRAWING = 3.0  # seconds that are left for the plot
_LETTERS = {"N": "tokens N", "D": "hidden size D", "V": "vocabulary V"}
_PROBE = {"cuda": (4096, 4096, 32768), "cpu": (512, 512, 2048)}  # the most of N, D and V that the rate is measured with


def measure(run: Run[SweepBenchConfig]) -> None:
    """Measure every shape, as far as the time goes, and draw them at the end.

    An unfinished result of the same sweep (settings, machine, commit) is continued. `UnsupportedError` where the GPU no
    longer answers after a peer.
    """
    start, config = time.monotonic(), run.config
    settings = json.loads(json.dumps(config.continued_by))
    run.result |= {"dtype": run.dtype_name, "asked": settings, "finished": False, "points": []}
    if not config.fresh and (found := _unfinished(Path(config.output), run.result)) is not None:
        run.files, run.result = found
        points = run.result["points"]
        run.rows += [row for point in points for row in point["rows"]]
        run.say(f"continuing {run.files.json}, which has {len(points)} of {len(config.shapes)} shapes\n")
    try:
        _measure_shapes(run, start)
    finally:  # what is known is drawn, also after Ctrl-C
        if run.result["points"]:
            run.say(f"drawn: {draw_sweep(run.result, run.files)}\n")


def _unfinished(folder: Path, result: dict[str, Any]) -> tuple[Files, dict[str, Any]] | None:
    """Return the newest unfinished result of the same sweep, and its files."""
    same = ("asked", "dtype", "machine", "commit", "finished")
    for file in sorted(folder.glob("*-sweep-*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(file.read_text())
            if all(found[key] == json.loads(json.dumps(result[key], default=str)) for key in same):
                return Files(file), found
    return None


def _measure_shapes(run: Run[SweepBenchConfig], start: float) -> None:
    """Measure every shape that has no rows yet, as far as the time goes."""
    config = run.config
    left = [shape for shape in config.shapes if _missing(run, shape)]
    rates = rates_of(config.center, run.dtype, run.device, error=config.error)
    able = _able(run) if left else set()
    readings = 2 if run.device.type == "cuda" else 1  # idle and busy
    guesses = {
        shape: estimate(config, shape, able.intersection(_missing(run, shape)), rates, readings) for shape in left
    }
    run.say(f"{len(left)} shapes, about {sum(guesses.values()):.0f} s\n")
    spent = guessed = 0.0
    factor = 1.0  # by which the estimates were wrong so far
    for i, shape in enumerate(left):
        begun = time.monotonic()
        ends = begun - start + factor * guesses[shape] + DRAWING
        if config.seconds is not None and ends > config.seconds:
            run.say(f"\n{len(left) - i} shapes are left: the next would end after {ends:.0f} s\n")
            return
        _measure_shape(run, shape)
        spent, guessed = spent + time.monotonic() - begun, guessed + guesses[shape]
        # The first shapes compile kernels: the time beyond their estimate does not predict that of later shapes.
        factor = min(max(spent / guessed, 0.5), 2.0)
        if rest := factor * sum(guesses[other] for other in left[i + 1 :]):
            run.say(f"{i + 1} of {len(left)} shapes; about {rest:.0f} s to go\n")
    run.result["finished"] = True
    run.save()


def _able(run: Run[SweepBenchConfig]) -> set[str]:
    """Return the peers that can be imported and run here."""
    tiny = loss_task(make_problem(Shape("", 8, 8, 16), run.dtype, run.device))
    found = set()
    for name in run.config.peers:
        with contextlib.suppress(Exception):  # its rows have the reason
            PEERS[name].built(tiny)
            found.add(name)
    return found


def _point(run: Run[SweepBenchConfig], shape: Shape) -> dict[str, Any] | None:
    """Return the result of a shape, None where it was not started."""
    sizes = (shape.N, shape.D, shape.V)
    return next((point for point in run.result["points"] if (point["N"], point["D"], point["V"]) == sizes), None)


def _missing(run: Run[SweepBenchConfig], shape: Shape) -> list[str]:
    """Return the peers without a row."""
    point = _point(run, shape)
    have = {row["name"] for row in point["rows"]} if point else set()
    return [name for name in run.config.peers if name not in have]


def _measure_shape(run: Run[SweepBenchConfig], shape: Shape) -> None:
    """Measure a shape's missing rows; `UnsupportedError` where a peer has left the GPU unusable."""
    bench, missing, point = bench_of(run, shape, error=run.config.error), _missing(run, shape), _point(run, shape)
    if point is None:
        point = {"N": shape.N, "D": shape.D, "V": shape.V, "limit_ms": bench.limit_ms, "limit_tflops": bench.tflops}
        point |= {"gradients_mib": bench.gradients_mib, "rows": []}
        run.result["points"].append(point)
    run.say(bench.title() + TABLE.header)
    for name in missing:
        row = bench.measure(PEERS[name])
        if "ms" in row:  # of the work that the GEMMs need, 6NDV, whatever a peer computes besides
            for prefix in ("", "busy_"):
                if f"{prefix}ms" in row:
                    row[f"{prefix}tflops"] = shape.flops(PLAIN.gemms) / row[f"{prefix}ms"] / 1e9
        run.add(row, point["rows"], TABLE)
        if "failed" in row and not answers(run.device):
            hint = "The same command continues with the next peer, in a new process."
            raise UnsupportedError(message("device", "a GPU that answers", f"none, after {name}", hint))


def rates_of(shape: Shape, dtype: torch.dtype, device: torch.device, *, error: bool) -> tuple[float, float]:
    """Return the measured operations per second of GEMMs in a dtype, and of those of the truth."""
    N, D, V = (min(size, most) for size, most in zip((shape.N, shape.D, shape.V), _PROBE[device.type], strict=True))
    found = []
    for kind in (dtype, wider(dtype)) if error else (dtype,):
        x, w = (torch.randn(rows, D, device=device, dtype=torch.float32).to(kind) for rows in (N, V))
        with exact_gemms():
            ms = time_side_by_side({"mm": lambda x=x, w=w: x @ w.T}, device, warm=1, reps=2)["mm"].median_ms  # type: ignore[misc]
        found.append(2e3 * N * D * V / ms)
    return found[0], found[-1]


def estimate(
    config: SweepBenchConfig, shape: Shape, peers: Collection[str], rates: tuple[float, float], readings: int
) -> float:
    """Return about how many seconds a shape will take by these peers, at the rates of `rates_of`, each so often."""
    once, rounds = shape.flops(PLAIN.gemms), config.warm + config.reps
    seconds = once / rates[0] * (2 * rounds + 1)  # the limit, by several numbers of rows, and the inputs
    seconds += len(peers) * (FIRST + once / rates[0] * (readings * rounds * (1 + PACE) + PACE))
    if config.error:
        seconds += once / rates[1] * 2  # the truth, and the roundings' own error
    return seconds


def draw_sweep(result: Mapping[str, Any], files: Files) -> Path:
    """Draw a result of `lowtide.bench.sweep`, finished or not, and return the file: a column for each line of shapes.

    The rows are the rate, the peak of memory above the inputs, and the errors: of the gradients (relative, the larger
    of the two) as lines, of the loss (absolute) as dots.
    """
    config, points = result["asked"], result["points"]
    names = list(dict.fromkeys(row["name"] for point in points for row in point["rows"]))
    shape = HEADS.one(config["shape"])
    center = {"N": shape.N, "D": shape.D, "V": shape.V}
    columns = [letter for axis, letter in AXES.items() if NONE not in config[axis]]

    def along(letter: str) -> list[Mapping[str, Any]]:
        on_line = (p for p in points if all(p[other] == center[other] for other in "NDV" if other != letter))
        return sorted(on_line, key=lambda point: point[letter])

    def lines(letter: str, *keys: str, **style: Any) -> list[Line]:
        return [
            Line(name, _values(along(letter), letter, name, *keys), own=name.startswith(LOWTIDE), **style)
            for name in names
        ]

    def quiet(letter: str, name: str, key: str) -> Line:
        return Line(name, [(point[letter], point[key]) for point in along(letter)], quiet=True)

    rows: dict[str, list[Panel]] = {}

    def add(row: str, lines: list[Line], *, log: bool = True) -> None:
        rows.setdefault(row, []).append(Panel(lines, log=log))

    for letter in columns:
        add("TFLOP/s: 6NDV / time", [*lines(letter, "tflops"), quiet(letter, "bare GEMMs", "limit_tflops")], log=False)
        gradients = quiet(letter, "gradients alone", "gradients_mib")
        add("peak above the inputs, MiB", [*lines(letter, "peak_mib"), gradients])
        if config["error"]:
            floors = _values(along(letter), letter, LOWTIDE, "dx_floor", "dw_floor")
            floor = Line("bfloat16's roundings alone", floors, quiet=True)
            errors = [*lines(letter, "dx_error", "dw_error"), *lines(letter, "loss_error", dotted=True), floor]
            add("error: gradients (lines), loss (dots)", errors)
    machine = result["machine"]
    title = (
        "Linear + cross entropy, forward and backward, each size with the others held at "
        f"N={center['N']}, D={center['D']}, V={center['V']}\n"
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result['dtype']}"
    )
    out = sorted({row["name"] for p in points for row in p["rows"] if row.get("failed") == OUT_OF_MEMORY})
    if out:
        title += f"; lines end where memory does ({', '.join(out)})"
    titles = [_LETTERS[letter] for letter in columns]
    return files.plot("lines", lambda at: draw_panels(at, title, rows, columns=titles))


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

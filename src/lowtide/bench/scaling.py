"""Weak scaling of ``lowtide train``: a step of each rank on its own sequences, on more and more GPUs, beside peers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.pictures import require_matplotlib
from lowtide.bench.results import Files, begin, replace
from lowtide.bench.ways import LIGER, LOWTIDE, STOCK, Way
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.child import ALLOCATOR, run_command
from lowtide.measure.plots import Line, Panel, draw_panels

WAYS = (LOWTIDE, LIGER, STOCK)
_LOOK_SECONDS = 0.5  # between looks for rows that are there
_COLUMNS = f"{'':18}{'GPUs':>6}  {'model':16}{'s':>9}{'tokens/s/GPU':>14}{'of one GPU':>12}{'GiB/GPU':>9}{'loss':>9}\n"


def run(
    *,
    ranks: Sequence[int],
    models: Sequence[str],
    ways: Sequence[str],
    settings: Mapping[str, Any],
    output: str,
    command: str,
    say: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Measure each way on each number of ranks, tell each row as it is known, and return the rows.

    Args:
        ranks: processes, one for each GPU.
        models: whose shapes, as in ``lowtide train --model``.
        ways: names out of `WAYS`, with a policy behind a colon or without: see `Way.named`.
        settings: of `lowtide.bench.scaling_way.measure`.
        output: folder for the result (json) and the pictures (png).
        command: what was asked.
        say: gets the text.

    Raises:
        ArgumentValueError: an unknown way, or more ranks than GPUs.
        UnsupportedError: a way's package, or matplotlib, is not installed.
    """
    require_matplotlib("output")
    gpus = torch.cuda.device_count()
    if gpus and max(ranks) > gpus:
        raise ArgumentValueError(message("ranks", f"at most {gpus}, the GPUs there are", max(ranks)))
    for way in ways:
        if way.partition(":")[0] not in WAYS:
            raise ArgumentValueError(message("ways", f"names out of {', '.join(WAYS)}", repr(way)))
        Way.named(way).check_installed()
    packages = ["accelerate", *(["liger-kernel"] if any(map(_is_liger, ways)) else [])]
    files, about = begin(output, "scaling", command, torch.device("cuda" if gpus else "cpu"), packages)
    rows: list[dict[str, Any]] = []
    told = {**about, "ranks": list(ranks), **settings, "rows": rows}
    say(_COLUMNS)
    for number in ranks:
        for row in _measured(number, _cases(ways, models), settings):
            rows.append({"ranks": number, **row})
            say(line(rows[-1], rows))
            files.write_json(told)
    for model in models:
        _draw(model, told, files)
    say(f"written: {files.json}\n")
    return rows


def _cases(ways: Sequence[str], models: Sequence[str]) -> list[tuple[str, str]]:
    """Return each way with each model; Liger's last, which changes the classes that all later models are made of."""
    return [(way, model) for way in sorted(ways, key=_is_liger) for model in models]


def _is_liger(way: str) -> bool:
    return Way.named(way).impl == LIGER


def _measured(ranks: int, cases: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each case as it is known; after one that failed, the others are measured by new processes."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder, ThreadPoolExecutor(1) as beside:
            file = Path(folder) / "rows.jsonl"
            said = json.dumps({**settings, "file": str(file), "cases": left})
            # one process needs no launcher, under which DDP would wrap the model and hold its gradients twice
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (ranks > 1)
            command = [sys.executable, *launch, "-m", "lowtide.bench.scaling_way", said]
            running = beside.submit(run_command, command, env=ALLOCATOR)
            begun, over = len(left), False
            while not over:
                over = bool(wait([running], timeout=_LOOK_SECONDS).done)
                for row in _rows(file)[begun - len(left) :]:
                    way, model = left.pop(0)
                    yield {"way": way, "model": model, **row}
            if left:
                ended = running.result()
                why = [path.read_text() for path in sorted(file.parent.glob("*.failed*"))]
                last = ended.stderr.strip().splitlines()[-1:] or [f"the processes ended with {ended.returncode}"]
                way, model = left.pop(0)
                yield {"way": way, "model": model, "failed": (why or last)[0]}


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows that the first rank has written so far, whole lines alone."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row as text; its speed beside that of the same way on the fewest ranks among ``rows``."""
    head = f"{row['way']:18}{row['ranks']:6}  {row['model']:16}"
    if "failed" in row:
        return f"{head}  {row['failed']}\n"
    speed = "tokens_per_s_per_gpu"
    same = [r for r in rows if (r["way"], r["model"]) == (row["way"], row["model"]) and r["ranks"] == 1 and speed in r]
    share = f"{row[speed] / same[0][speed]:12.3f}" if same else f"{'-':>12}"
    return f"{head}{row['seconds']:9.4f}{row[speed]:14,.0f}{share}{row['peak_gib']:9.2f}{row['losses'][-1]:9.4f}\n"


def _draw(model: str, told: Mapping[str, Any], files: Files) -> None:
    """Draw a model's speed and peak over the number of GPUs."""
    found = [row for row in told["rows"] if row["model"] == model and "failed" not in row]

    def panel(key: str) -> Panel:
        ways = dict.fromkeys(row["way"] for row in found)
        points = {way: [(row["ranks"], row[key]) for row in found if row["way"] == way] for way in ways}
        return Panel([Line(way, values, own=Way.named(way).impl == LOWTIDE) for way, values in points.items()])

    if not found:
        return
    machine = told["machine"]
    title = (
        f"{model}: a step of {told['batch']} x {told['tokens']} tokens a GPU\n{told['parallel']}, {told['weights']}, "
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}"
    )
    rows = {"tokens/s per GPU": [panel("tokens_per_s_per_gpu")], "peak GiB per GPU": [panel("peak_gib")]}
    replace(files.picture(model), lambda at: draw_panels(at, title, rows, columns=["GPUs"]))

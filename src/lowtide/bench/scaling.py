"""Weak scaling of ``lowtide train``: a step of each rank on its own sequences, on more and more GPUs, beside peers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lowtide.bench.harness import Benchmark, Column, Row, Run, Table
from lowtide.bench.pictures import require_matplotlib
from lowtide.bench.results import Files, replace
from lowtide.bench.settings import ScriptSettings, number, setting
from lowtide.bench.way import LIGER, LOWTIDE, STOCK, Way
from lowtide.measure.child import ALLOCATOR, run_command
from lowtide.measure.plots import Line, Panel, draw_panels

WAYS = (LOWTIDE, LIGER, STOCK)
_LOOK_SECONDS = 0.5  # between looks for rows that are there
SPEED = "tokens_per_s_per_gpu"


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(ScriptSettings):
    """What is measured; each field is the option of ``python benchmarks/scaling.py`` of that name.

    Raises:
        ArgumentValueError: a value that no run could use, or more ranks than GPUs.
    """

    benchmark = "scaling"

    ranks: tuple[str, ...] = setting(("1", "2", "4", "8"), "processes, one for each GPU", metavar="N")
    model: tuple[str, ...] = setting(
        ("llama-3.2-1b", "llama-3-8b"), "whose shapes, as in lowtide train --model", metavar="NAME"
    )
    way: tuple[str, ...] = setting((LOWTIDE, LIGER), f"{', '.join(WAYS)}, or one:policy", metavar="WAY")
    parallel: str = setting("fsdp2", "the engine, as in lowtide train --parallel", metavar="ENGINE")
    tokens: int = setting(8192, "of a sequence", least=2)
    batch: int = setting(1, "sequences of a GPU", least=1)
    steps: int = setting(5, "that count", least=1)
    weights: Literal["bfloat16", "float32"] = setting("bfloat16", "dtype of weights, gradients and optimizer states")
    seed: int = setting(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus = torch.cuda.device_count()
        self._require("ranks", min(self.worlds) > 0, "whole numbers above 0")
        self._require("ranks", not gpus or max(self.worlds) <= gpus, f"at most {gpus}, the GPUs there are")
        self._require(
            "way", {way.partition(":")[0] for way in self.way} <= set(WAYS), f"names out of {', '.join(WAYS)}"
        )

    @property
    def worlds(self) -> tuple[int, ...]:
        """The numbers of ranks."""
        return tuple(number("ranks", text, int) for text in self.ranks)

    @property
    def of_a_rank(self) -> dict[str, Any]:
        """The arguments of `lowtide.bench.scaling_way.measure`."""
        return {name: getattr(self, name) for name in ("parallel", "tokens", "batch", "steps", "weights", "seed")}


def measure(run: Run[ScalingConfig]) -> None:
    """Measure each way on each number of ranks, and draw."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {"ranks": config.worlds, **config.of_a_rank}

    def of_one(row: Row) -> float | str:
        """Return the speed over that of the same way on one rank."""
        same = [r for r in rows if (r["way"], r["model"], r["ranks"]) == (row["way"], row["model"], 1) and SPEED in r]
        return f"{row[SPEED] / same[0][SPEED]:.3f}" if same else "-"

    heads = (
        Column("", "way", "<18"),
        Column("GPUs", "ranks", "6"),
        Column("  model", lambda row: f"  {row['model']}", "<18"),
    )
    figures = (
        Column("s", "seconds", "9.4f"),
        Column("tokens/s/GPU", SPEED, "14,.0f"),
        Column("of one GPU", of_one, ">12"),
        Column("GiB/GPU", "peak_gib", "9.2f"),
        Column("loss", lambda row: row["losses"][-1], "9.4f"),
    )
    table = Table(heads, figures)
    run.say(table.header)
    for ranks in config.worlds:
        for row in _measured(ranks, _cases(config.way, config.model), config.of_a_rank):
            run.add({"ranks": ranks, **row}, rows, table)
    for model in config.model:
        _draw(model, run.result, run.files)


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


def _check(config: ScalingConfig) -> None:
    require_matplotlib("output")
    for way in config.way:
        Way.named(way).check_installed()


SCALING = Benchmark(
    name="scaling",
    measure=measure,
    failed=lambda _: False,
    packages=["accelerate", "liger-kernel"],
    check=_check,
)

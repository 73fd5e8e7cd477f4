"""Compare plans with real steps: predicted and measured peak and time, of models by size, length and budget.

    python benchmarks/plan.py [--only TEXT ...] [--output DIR]

Full fine-tuning of models with random weights in bfloat16, one sequence a step. Every case is planned from the GPU's
table, built, run once to warm up, and measured. Llama-3-8B does not fit an 80 GiB GPU with AdamW: it runs with 8 of its
32 layers, and whole with SGD.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from script import main

from lowtide.bench.harness import Run, Table
from lowtide.bench.plan_check import check_plan
from lowtide.bench.settings import Settings, setting
from lowtide.errors import LowtideError
from lowtide.measure.units import gib
from lowtide.plan import plan_memory
from lowtide.plan.config import read_settings
from lowtide.plan.gpus import find_gpu
from lowtide.train.shapes import SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    layers: int | None
    seq_len: int
    budget_gib: float | None
    host_gib: float = 0
    optimizer: str = "adamw"

    def __str__(self) -> str:
        size = f"{self.model}{f', {self.layers} layers' if self.layers else ''}, {self.optimizer}, {self.seq_len}"
        budget = "whole GPU" if self.budget_gib is None else f"{self.budget_gib:g} GiB"
        return f"{size}, {budget}{f' + {self.host_gib:g} GiB host' if self.host_gib else ''}"


CASES = [
    Case("llama-3.2-1b", None, 2048, None),
    Case("llama-3.2-1b", None, 4096, 9.9),
    Case("qwen3-0.6b", None, 2048, None),
    Case("llama-3.2-1b", None, 8192, None),
    Case("llama-3.2-1b", None, 8192, 10.5),
    Case("llama-3.2-1b", None, 32768, None),
    Case("llama-3.2-1b", None, 32768, 16),
    Case("llama-3.2-1b", None, 32768, 12.5, 16),
    Case("llama-3.2-1b", None, 8192, 9.9, 64),
    Case("llama-3.2-1b", None, 32768, 16, 64),
    Case("llama-3.2-1b", None, 65536, 17.1, 64),
    Case("llama-3.2-1b", None, 131072, 16, 64),
    Case("llama-3.2-1b", None, 65536, 40),
    Case("llama-3.2-1b", None, 65536, 17),
    Case("llama-3.2-1b", None, 65536, 16, 32),
    Case("llama-3-8b", 8, 8192, None),
    Case("llama-3-8b", 8, 32768, 40),
    Case("llama-3-8b", 8, 65536, 50),
    Case("llama-3-8b", None, 8192, None, 0, "sgd"),
    Case("llama-3-8b", None, 32768, 60, 0, "sgd"),
    Case("qwen3-0.6b", None, 8192, None),
    Case("qwen3-0.6b", None, 32768, 16),
]


def row_of(case: Case, device: Any) -> dict[str, Any]:
    settings = read_settings(SHAPES[case.model])
    if case.layers is not None:
        settings["num_hidden_layers"] = case.layers
        if isinstance(settings.get("layer_types"), list):
            settings["layer_types"] = settings["layer_types"][: case.layers]
    plan = plan_memory(
        settings, case.seq_len, 1, case.budget_gib, case.host_gib, device, optimizer=case.optimizer, dtype="bfloat16"
    )
    checked = check_plan(settings, plan, warm=1, steps=1 if case.seq_len > 40000 else 2)
    measured = {key: value for key, value in checked.items() if key != "machine"}
    return {
        "keep": str(plan.chosen),
        "peak_phase": str(plan.phase),
        "host_gib": gib(plan.chosen.host),
        "peak_off": checked["predicted_gib"] / checked["peak_gib"] - 1,
        "seconds_off": checked["predicted_seconds"] / checked["seconds"] - 1,
        **measured,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Settings):
    benchmark = "plan"

    only: tuple[str, ...] = setting((), "cases whose text holds one of these", metavar="TEXT")


TABLE = Table(
    {
        "case": "<52", "predicted_gib": "14.2f", "peak_gib": "9.2f", "peak_off": "+9.1%", "predicted_seconds": "18.3f",
        "seconds": "8.3f", "seconds_off": "+12.1%",
    },
    lambda row: [row["keep"]],
)  # fmt: skip


def measure(run: Run) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    gpu = find_gpu("cuda")
    run.result |= {"gpu": dataclasses.asdict(gpu)}
    run.say(TABLE.header)
    for case in CASES:
        if config.only and not any(text in str(case) for text in config.only):
            continue
        row = {"case": str(case), **dataclasses.asdict(case)}
        try:
            row |= row_of(case, gpu)
        except LowtideError as error:
            row["failed"], run.status = str(error), 1
        run.add(row, rows, TABLE)


if __name__ == "__main__":
    sys.exit(main(measure, PlanConfig, __doc__))

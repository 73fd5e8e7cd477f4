"""Compare plans with real steps: predicted and measured peak and time, of models by size, length and budget.

    python benchmarks/plan.py [--only TEXT ...] [--measure] [--output DIR]

Full fine-tuning of models with random weights in bfloat16, one sequence a step. Every case is planned from the GPU's
table (with --measure from rates measured first), built, run once to warm up, and measured. Llama-3-8B does not fit an
80 GiB GPU with AdamW: it runs with 8 of its 32 layers, and whole with SGD.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import shlex
import sys
from pathlib import Path
from typing import Any

from lowtide.bench.plan import check_plan
from lowtide.bench.results import Files
from lowtide.errors import LowtideError
from lowtide.measure.machine import describe_machine, source_commit
from lowtide.measure.units import gib
from lowtide.memory import plan_memory
from lowtide.memory.planner.at_hand import find_gpu
from lowtide.memory.planner.shapes import read_settings
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


def run(case: Case, device: Any) -> dict[str, Any]:
    settings = read_settings(SHAPES[case.model])
    if case.layers is not None:
        settings["num_hidden_layers"] = case.layers
        if isinstance(settings.get("layer_types"), list):
            settings["layer_types"] = settings["layer_types"][: case.layers]
    plan = plan_memory(settings, case.seq_len, 1, case.budget_gib, case.host_gib, device, optimizer=case.optimizer)
    checked = check_plan(settings, plan, warm=1, steps=1 if case.seq_len > 40000 else 2)
    told = checked.to_dict()
    del told["machine"]
    return {
        "keep": str(plan.chosen),
        "peak_phase": str(plan.phase),
        "host_gib": gib(plan.host_bytes),
        "peak_off": checked.predicted_bytes / checked.peak_bytes - 1,
        "seconds_off": checked.predicted_seconds / checked.seconds - 1,
        **told,
    }


def _asked(arguments: argparse.Namespace) -> list[str]:
    """Return the options that bear on the figures."""
    only = ["--only", *arguments.only] if any(arguments.only) else []
    return only + ["--measure"] * arguments.measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=[""], nargs="+", metavar="TEXT", help="cases whose text holds one of these")
    parser.add_argument("--measure", action="store_true", help="plan with rates measured on this GPU first")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results"), help="where the result file goes")
    arguments = parser.parse_args()
    machine = describe_machine()
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    files = Files.prepare(arguments.output, f"{today}-plan", machine["gpu"])
    gpu = find_gpu("cuda" if arguments.measure else None)
    rows: list[dict[str, Any]] = []
    told = {
        "command": shlex.join(["python", "benchmarks/plan.py", *_asked(arguments)]),
        "date": today,
        "commit": source_commit(),
        "machine": machine,
        "gpu": dataclasses.asdict(gpu),
        "rows": rows,
    }
    print(f"{'':52}{'peak GiB':>18}{'off by':>8}{'seconds':>18}{'off by':>8}")
    for case in CASES:
        if not any(text in str(case) for text in arguments.only):
            continue
        try:
            row = run(case, gpu)
        except LowtideError as error:
            rows.append({"case": str(case), **dataclasses.asdict(case), "failed": str(error)})
            print(f"{case!s:52}{error}", flush=True)
            files.write_json(told)
            continue
        rows.append({"case": str(case), **dataclasses.asdict(case), **row})
        print(
            f"{case!s:52}{row['predicted_gib']:9.2f}{row['peak_gib']:9.2f}{row['peak_off']:+8.1%}"
            f"{row['predicted_seconds']:9.3f}{row['seconds']:9.3f}{row['seconds_off']:+8.1%}  {row['keep']}",
            flush=True,
        )
        files.write_json(told)
    print(files.json)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

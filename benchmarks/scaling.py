"""Measure how `lowtide train`'s step scales with the number of GPUs, beside Liger's and stock models.

Weak scaling: each GPU has ``--batch`` sequences of its own. With ``--strong`` all GPUs together have as many.

    python benchmarks/scaling.py --ranks 1 2 4 8
    python benchmarks/scaling.py --ranks 1 2 --model lowtide-small --way lowtide stock --tokens 64 --weights float32
    python benchmarks/scaling.py --ranks 1 2 --way lowtide:all lowtide liger
    python benchmarks/scaling.py --ranks 1 2 4 --strong --batch 4 --parallel fsdp2 zero3

Layers are checkpointed, except in ways with a policy, such as lowtide:all or lowtide:attention. One GPU holds the whole
model; several shard it by each engine of ``--parallel``, as `lowtide train` does. The column "of one GPU" has a GPU's
tokens per second over those of one GPU alone: 1 where the time is ideal, weak or strong.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import default_data_collator
from transformers.trainer_callback import PrinterCallback

from lowtide.bench.harness import (
    Benchmark,
    Column,
    Row,
    Run,
    Table,
    reason_of,
)
from lowtide.bench.results import Files, replace
from lowtide.bench.settings import ScriptSettings, numbers, setting
from lowtide.bench.way import CHECKPOINT, LIGER, LOWTIDE, STOCK, Way
from lowtide.bench.ways import LEARNING_RATE, build_way
from lowtide.measure.child import ALLOCATOR, ChildResult, run_command
from lowtide.measure.plots import Line, Panel, draw_panels, require_matplotlib
from lowtide.measure.units import gib
from lowtide.train.config import TrainConfig
from lowtide.train.monitor import Monitor, StepMetrics
from lowtide.train.parallel import (
    AUTO,
    built_whole,
    engine_of,
    in_group,
    launched_ranks,
)
from lowtide.train.quiet import quiet_transformers
from lowtide.train.result import WARM_STEPS
from lowtide.train.settings import trainer_settings
from lowtide.train.trainers import PreTrainer

WAYS = (LOWTIDE, LIGER, STOCK, CHECKPOINT)
RANK = "--rank"  # begins the arguments of a rank's process
SPEED = "tokens_per_s_per_gpu"
RECORDED = ("parallel", "tokens", "batch", "strong", "steps", "weights", "seed")  # settings in the result


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(ScriptSettings):
    benchmark = "scaling"

    ranks: tuple[str, ...] = setting(("1", "2", "4", "8"), "processes, one for each GPU", metavar="N")
    model: tuple[str, ...] = setting(
        ("llama-3.2-1b", "llama-3-8b"), "whose shapes, as in lowtide train --model", metavar="NAME"
    )
    way: tuple[str, ...] = setting((LOWTIDE, LIGER), f"{', '.join(WAYS)}, or one:policy", metavar="WAY")
    parallel: tuple[str, ...] = setting(
        ("fsdp2",), "engines, as in lowtide train --parallel, on several GPUs", metavar="ENGINE"
    )
    tokens: int = setting(8192, "of a sequence", least=2)
    batch: int = setting(1, "sequences of a GPU; with --strong of all together", least=1)
    strong: bool = setting(False, "strong scaling: the same --batch sequences, whatever the number of GPUs")
    steps: int = setting(5, "that count", least=1)
    weights: Literal["bfloat16", "float32"] = setting("bfloat16", "dtype of weights, gradients and optimizer states")
    seed: int = setting(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus = torch.cuda.device_count()
        self._require("ranks", min(self.worlds) > 0, "whole numbers above 0")
        self._require("ranks", not gpus or max(self.worlds) <= gpus, f"at most {gpus}, the GPUs there are")
        shared = not (self.strong and any(self.batch % ranks for ranks in self.worlds))
        self._require("batch", shared, f"a multiple of each of --ranks {' '.join(self.ranks)} with --strong")
        for engine in self.parallel:
            TrainConfig(parallel=engine)
        self._require(
            "way", {way.partition(":")[0] for way in self.way} <= set(WAYS), f"names out of {', '.join(WAYS)}"
        )

    @property
    def worlds(self) -> tuple[int, ...]:
        return numbers("ranks", self.ranks, int)


def measure(run: Run[ScalingConfig]) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {name: getattr(config, name) for name in RECORDED} | {"ranks": config.worlds}

    def of_one(row: Row) -> float | str:
        """Return the speed over that of the same way on one rank."""
        same = [r for r in rows if (r["way"], r["model"], r["ranks"]) == (row["way"], row["model"], 1) and SPEED in r]
        return f"{row[SPEED] / same[0][SPEED]:.3f}" if same else "-"

    heads = (
        Column("", "way", "<18"),
        Column("GPUs", "ranks", "6"),
        Column("engine", "parallel", ">13"),
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
        for engine in config.parallel if ranks > 1 else (None,):
            _measure_ranks(ranks, engine, config, partial(run.add, rows=rows, table=table))
    for model in config.model:
        _draw(model, run.result, run.files)


def _measure_ranks(ranks: int, engine: str | None, config: ScalingConfig, add: Callable[[Row], object]) -> None:
    """Add a row for each way and model as soon as it is measured, in processes of its own.

    Liger changes classes that later models would be made of, and DeepSpeed's engines stay until the process ends.
    """
    settings = {**vars(config), "parallel": [engine or AUTO]}
    # one process needs no launcher, under which DDP would wrap the model and hold its gradients twice
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (ranks > 1)
    for way, model in product(config.way, config.model):
        with tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
            file = Path(folder) / "row.json"
            job = json.dumps({"settings": settings, "file": str(file), "way": way, "model": model})
            ended = run_command([sys.executable, *launch, __file__, RANK, job], env=ALLOCATOR)
            row = json.loads(file.read_text()) if file.exists() else {"failed": _reason(file, ended)}
        add({"ranks": ranks, "parallel": engine, "way": way, "model": model, **row})


def _reason(file: Path, ended: ChildResult) -> str:
    """Return why ranks that were to write a row ended without one."""
    why = [path.read_text() for path in sorted(file.parent.glob("*.failed*"))]
    last = ended.stderr.strip().splitlines()[-1:] or [f"the processes ended with {ended.returncode}"]
    return (why or last)[0]


def _draw(model: str, result: Mapping[str, Any], files: Files) -> None:
    """Draw a model's speed and peak over the number of GPUs."""
    found = [row for row in result["rows"] if row["model"] == model and "failed" not in row]

    def panel(key: str, engine: str) -> Panel:
        shown = [row for row in found if row["parallel"] in (None, engine)]
        ways = dict.fromkeys(row["way"] for row in shown)
        points = {way: [(row["ranks"], row[key]) for row in shown if row["way"] == way] for way in ways}
        return Panel([Line(way, values, own=Way.named(way).impl == LOWTIDE) for way, values in points.items()])

    if not found:
        return
    machine, where = result["machine"], "in all" if result["strong"] else "per GPU"
    title = (
        f"{model}: a step of {result['batch']} x {result['tokens']} tokens {where}\n"
        f"{result['weights']}, {machine['gpu'] or machine['cpu']}, torch {machine['torch']}"
    )
    keys = {"tokens/s per GPU": SPEED, "peak GiB per GPU": "peak_gib"}
    engines = list(dict.fromkeys(row["parallel"] for row in found if row["parallel"])) or [AUTO]
    rows = {label: [panel(key, engine) for engine in engines] for label, key in keys.items()}
    files.plot(model, lambda at: draw_panels(at, title, rows, columns=[f"GPUs, {engine}" for engine in engines]))


def _check(config: ScalingConfig) -> None:
    require_matplotlib("output")
    for way in config.way:
        Way.named(way).check_installed()


SCALING = Benchmark(
    measure=measure,
    failed=lambda _: False,
    packages=["accelerate", "liger-kernel"],
    check=_check,
)


def measure_rank(way: str, model: str, settings: ScalingConfig) -> dict[str, Any]:
    """Return seconds, tokens per second and GPU, and peak of this rank's training step, after `WARM_STEPS` others.

    Float32 weights are multiplied in bfloat16 on a GPU.
    """
    tokens, weights = settings.tokens, settings.weights
    batch = settings.batch // (launched_ranks() if settings.strong else 1)
    options = {"dtype": weights, "per_device_train_batch_size": batch}
    options |= {"max_steps": WARM_STEPS + 1 + settings.steps, "learning_rate": LEARNING_RATE}
    config = TrainConfig(parallel=settings.parallel[0], options=options)
    with engine_of(config), tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # each rank builds the model on its GPU
        run = trainer_settings(config, Path(folder), save=False)
        args = run.args
        with built_whole(args):
            built = build_way(Way.named(way), model, getattr(torch, weights), args.device, seed=settings.seed)
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (args.max_steps * batch * args.world_size, tokens)
        ids = torch.randint(0, built.config.vocab_size, shape, generator=generator)
        metrics = StepMetrics()
        trainer: Any = PreTrainer(
            metrics=metrics,
            model=built,
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            data_collator=default_data_collator,
            callbacks=[Monitor(metrics)],
        )
        trainer.remove_callback(PrinterCallback)
        parameters = sum(p.numel() for p in built.parameters())
        trainer.train()
        times = metrics.step_seconds[WARM_STEPS + 1 :]  # the step after the warm ones resets the peak: left out
        seconds = statistics.median(times)
        peak = torch.tensor(metrics.peak_bytes, device=args.device)
        if in_group():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return {
            "parameters": parameters,
            "seconds": seconds,
            "times": [round(each, 5) for each in times],
            "tokens_per_s_per_gpu": batch * tokens / seconds,
            "peak_gib": gib(int(peak.item())),
            "losses": list(metrics.losses.values()),
        }


def run_rank(job: dict[str, Any]) -> None:
    """Measure a way and a model as one rank, started by torchrun."""
    file = Path(job["file"])
    quiet_transformers()
    try:
        row = measure_rank(job["way"], job["model"], ScalingConfig.read(job["settings"]))
    except Exception as error:  # whatever it is, it is the row; the launcher ends the other ranks
        file.with_suffix(f".failed{os.environ.get('RANK', 0)}").write_text(reason_of(error))
        raise
    if os.environ.get("RANK", "0") == "0":
        replace(file, lambda at: at.write_text(json.dumps(row)))
    if in_group():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
    else:
        from script import main

        sys.exit(main(SCALING, ScalingConfig, __doc__))

"""Measure how `lowtide train`'s step scales with the number of GPUs, beside Liger's and stock models.

Weak scaling: each GPU has ``--batch`` sequences of its own. With ``--strong`` all GPUs together have as many.

    python benchmarks/scaling.py --ranks 1 2 4 8
    python benchmarks/scaling.py --ranks 1 2 --model lowtide-small --way lowtide stock --tokens 64 --weights float32
    python benchmarks/scaling.py --ranks 1 2 --way lowtide:all lowtide liger
    python benchmarks/scaling.py --ranks 1 2 4 --strong --batch 4 --parallel fsdp2 zero3
    python benchmarks/scaling.py --ranks 1 2 4 --tensor-parallel 1 2 4
    python benchmarks/scaling.py --ranks 1 2 --model llama-3.2-1b --way lowtide --fsdp-layers 1 4

Layers are checkpointed, except in ways with a policy, such as lowtide:all or lowtide:attention. One GPU holds the whole
model; several shard it by each engine of ``--parallel``, as `lowtide train` does. fsdp2 is also measured with each
``--tensor-parallel`` that divides the number of GPUs: N GPUs share each layer, and have the sequences of N. lowtide's
layers are gathered so many together as ``--fsdp-layers`` says, those of others, which transformers checkpoints, one by
one. The column "of one GPU" has a GPU's tokens per second over those of one GPU alone: 1 where the time is ideal, weak
or strong.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    FSDP2,
    all_read,
    built_whole,
    engine_of,
    in_group,
    launched_rank,
    launched_ranks,
)
from lowtide.train.quiet import quiet_transformers
from lowtide.train.result import WARM_STEPS
from lowtide.train.settings import trainer_settings
from lowtide.train.tensor_parallel import shard_layers
from lowtide.train.trainers import PreTrainer

WAYS = (LOWTIDE, LIGER, STOCK, CHECKPOINT)
RANK = "--rank"  # begins the arguments of a rank's process
SPEED = "tokens_per_s_per_gpu"
RECORDED = (  # settings in the result
    "parallel", "tensor_parallel", "fsdp_layers", "tokens", "batch", "strong", "steps", "weights", "seed",
)  # fmt: skip


class Engine(NamedTuple):
    """How ranks share a model: an engine, how many share each layer, and how many layers are gathered together."""

    name: str | None = None  # one rank has none
    group: int = 1
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.name} x tp{self.group}" if self.group > 1 else f"{self.name}"

    def measures(self, way: str, first: Engine) -> bool:
        """Return whether a way is measured by it: another's layers are gathered one by one, once."""
        return Way.named(way).impl == LOWTIDE or self.layers == first.layers


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
    tensor_parallel: tuple[str, ...] = setting(
        ("1",), "GPUs that share each layer under fsdp2, as in lowtide train --tensor-parallel", metavar="N"
    )
    fsdp_layers: tuple[str, ...] = setting(
        ("1",), "layers that FSDP2 gathers together, as in lowtide train --fsdp-layers", metavar="N"
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
        self._require("tensor_parallel", min(self.groups) > 0, "whole numbers above 0")
        self._require("fsdp_layers", min(self.units) > 0, "whole numbers above 0")
        shares = max(self.groups) > 1
        self._require("tensor_parallel", not shares or FSDP2 in self.parallel, "fsdp2 among --parallel beside it")
        whole = f"{CHECKPOINT} left out beside --tensor-parallel, which gathers no weight"
        self._require("way", not (shares and CHECKPOINT in self.way), whole)
        self._require(
            "way", {way.partition(":")[0] for way in self.way} <= set(WAYS), f"names out of {', '.join(WAYS)}"
        )

    @property
    def worlds(self) -> tuple[int, ...]:
        return numbers("ranks", self.ranks, int)

    @property
    def groups(self) -> tuple[int, ...]:
        return numbers("tensor_parallel", self.tensor_parallel, int)

    @property
    def units(self) -> tuple[int, ...]:
        return numbers("fsdp_layers", self.fsdp_layers, int)

    def engines(self, ranks: int) -> list[Engine]:
        """Return the engines that so many ranks are measured with."""
        if ranks == 1:
            return [Engine()]
        sizes = [size for size in self.groups if ranks % size == 0]
        found = [(engine, size) for engine in self.parallel for size in sizes if size == 1 or engine == FSDP2]
        return [
            Engine(engine, size, unit)
            for engine, size in found
            for unit in (self.units if engine.startswith(FSDP2) else (1,))
        ]


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
        Column("layers", lambda row: row.get("fsdp_layers", "-"), ">7"),
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
        engines = config.engines(ranks)
        for engine in engines:
            ways = [way for way in config.way if engine.measures(way, engines[0])]
            _measure_ranks(
                ranks, engine, dataclasses.replace(config, way=tuple(ways)), partial(run.add, rows=rows, table=table)
            )
    for model in config.model:
        _draw(model, run.result, run.files)


def _measure_ranks(ranks: int, engine: Engine, config: ScalingConfig, add: Callable[[Row], object]) -> None:
    """Add a row for each way and model as soon as it is measured, in processes of its own.

    Liger changes classes that later models would be made of, and DeepSpeed's engines stay until the process ends.
    """
    size = engine.group
    settings = {**vars(config), "parallel": [engine.name or AUTO], "tensor_parallel": [str(size)]}
    settings["fsdp_layers"] = [str(engine.layers)]
    # one process needs no launcher, under which DDP would wrap the model and hold its gradients twice
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (ranks > 1)
    named = None if engine.name is None else str(engine)
    for way, model in product(config.way, config.model):
        with tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
            file = Path(folder) / "row.json"
            job = json.dumps({"settings": settings, "file": str(file), "way": way, "model": model})
            ended = run_command([sys.executable, *launch, __file__, RANK, job], env=ALLOCATOR)
            row = json.loads(file.read_text()) if file.exists() else {"failed": _reason(file, ended)}
        add({"ranks": ranks, "parallel": named, "tensor_parallel": size, "way": way, "model": model, **row})


def _reason(file: Path, ended: ChildResult) -> str:
    """Return why ranks that were to write a row ended without one."""
    why = [path.read_text() for path in sorted(file.parent.glob("*.failed*"))]
    last = ended.stderr.strip().splitlines()[-1:] or [f"the processes ended with {ended.returncode}"]
    return (why or last)[0]


def _draw(model: str, result: Mapping[str, Any], files: Files) -> None:
    """Draw a model's speed and peak over the number of GPUs."""
    found = [row for row in result["rows"] if row["model"] == model and "failed" not in row]

    def named(row: Row) -> str | None:
        layers = row.get("fsdp_layers", 1)
        return f"{row['parallel']}, {layers} layers" if layers > 1 else row["parallel"]

    def panel(key: str, engine: str) -> Panel:
        shown = [row for row in found if named(row) in (None, engine)]
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
    engines = list(dict.fromkeys(filter(None, map(named, found)))) or [AUTO]
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
    size = settings.groups[0]
    batch = settings.batch * size // (launched_ranks() if settings.strong else 1)  # of a group
    options = {"dtype": weights, "per_device_train_batch_size": batch}
    options |= {"max_steps": WARM_STEPS + 1 + settings.steps, "learning_rate": LEARNING_RATE}
    own = Way.named(way).impl == LOWTIDE
    unit = settings.units[0] if own and launched_ranks() > 1 else 1
    config = TrainConfig(parallel=settings.parallel[0], tensor_parallel=size, fsdp_layers=unit, options=options)
    with engine_of(config), tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
        all_read()  # nothing is on the host: each builds the model on its GPU
        run = trainer_settings(config, Path(folder), save=False)
        args = run.args
        with built_whole():
            built = build_way(Way.named(way), model, getattr(torch, weights), args.device, seed=settings.seed)
            if run.sizes is not None:
                shard_layers(built, run.sizes, args.device.type)
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (args.max_steps * batch * run.readers, tokens)
        ids = torch.randint(0, built.config.vocab_size, shape, generator=generator)
        metrics = StepMetrics()
        trainer: Any = PreTrainer(
            metrics=metrics,
            sizes=run.sizes,
            fsdp_layers=config.unit_layers,
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
            "fsdp_layers": config.unit_layers,
            "seconds": seconds,
            "times": [round(each, 5) for each in times],
            "tokens_per_s_per_gpu": batch * tokens / seconds / size,
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
        file.with_suffix(f".failed{launched_rank()}").write_text(reason_of(error))
        raise
    if launched_rank() == 0:
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

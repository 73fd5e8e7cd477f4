"""Measure how a training step under FSDP2 or ZeRO-3 scales with the number of GPUs, beside Liger's and stock models.

    python benchmarks/scaling.py --ranks 1 2 4 8
    python benchmarks/scaling.py --ranks 1 2 --model lowtide-small --way lowtide stock --tokens 64 --weights float32

Weak scaling: each GPU has ``--batch`` sequences of its own; with ``--strong`` all together have as many. Layers are
checkpointed, except in ways with a policy, such as lowtide:all. One GPU holds the whole model; several shard it, under
FSDP2 a unit for each layer. "of_one" has a GPU's tokens per second over those of one GPU alone: ideally 1, weak or
strong.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lowtide.bench.harness import Row, Run, Table, reason_of
from lowtide.bench.models import build_model, make_optimizer
from lowtide.bench.settings import Settings, setting
from lowtide.bench.variant import Variant
from lowtide.measure.child import allocator
from lowtide.measure.resident import reset_cuda_peak
from lowtide.measure.units import gib
from lowtide.memory.stack import find_stack
from lowtide.train.shapes import model_config

RANK = "--rank"  # begins the arguments of a rank's process
WARM = 2  # steps before those that count
SPEED = "tokens_per_s_per_gpu"
TABLE = Table(
    {
        "way": "<18", "ranks": "6", "model": ">18", "seconds": "9.4f", SPEED: "22,.0f", "of_one": "8.3f",
        "peak_gib": "10.2f", "last_loss": "11.4f",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Settings):
    benchmark, packages = "scaling", ("liger-kernel", "deepspeed")
    ranks: tuple[int, ...] = setting((1, 2, 4, 8), "processes, one for each GPU", metavar="N", least=1)
    model: tuple[str, ...] = setting(("llama-3.2-1b", "llama-3-8b"), "whose shapes", metavar="NAME")
    way: tuple[str, ...] = setting(("lowtide", "liger"), "implementations, or one:policy", metavar="WAY")
    tokens: int = setting(8192, "of a sequence", least=2)
    batch: int = setting(1, "sequences of a GPU; with --strong of all together", least=1)
    strong: bool = setting(False, "strong scaling: the same --batch sequences, whatever the number of GPUs")
    steps: int = setting(5, "that count", least=1)
    engine: Literal["fsdp2", "zero3"] = setting(
        "fsdp2", "what shards the model; zero3: DeepSpeed's, with float32 states"
    )
    weights: Literal["bfloat16", "float32"] = setting("bfloat16", "dtype of weights, gradients and optimizer states")

    def __post_init__(self) -> None:
        super().__post_init__()
        shared = not (self.strong and any(self.batch % ranks for ranks in self.ranks))
        self.require("batch", shared, f"a multiple of each of --ranks {' '.join(map(str, self.ranks))} with --strong")
        for way in self.way:
            Variant.named(way)


def measure(run: Run) -> None:
    one: dict[tuple[str, str], float] = {}  # a way's and model's speed on one GPU
    config, rows = run.config, run.result.setdefault("rows", [])
    run.say(TABLE.header)
    for ranks, way, model in product(config.ranks, config.way, config.model):
        row = {"ranks": ranks, "way": way, "model": model, **in_processes(ranks, way, model, config)}
        if SPEED in row and ranks == 1:
            one[way, model] = row[SPEED]
        if SPEED in row and (way, model) in one:
            row["of_one"] = row[SPEED] / one[way, model]
        run.add(row, rows, TABLE)


def in_processes(ranks: int, way: str, model: str, config: ScalingConfig) -> Row:
    """Return a row, measured in processes of its own: Liger changes classes that later models would be made of."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch *= ranks > 1 or config.engine == "zero3"
    with tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
        file = Path(folder) / "row.json"
        job = json.dumps({"settings": vars(config), "file": str(file), "way": way, "model": model})
        command, env = [sys.executable, *launch, __file__, RANK, job], {**os.environ, **allocator()}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
        if file.exists():
            return dict(json.loads(file.read_text()))
        why = [path.read_text() for path in sorted(file.parent.glob("*.failed*"))]
    return {"failed": [*why, *ended.stderr.strip().splitlines()[-1:], f"ended with {ended.returncode}"][0]}


def measure_rank(way: str, model: str, config: ScalingConfig) -> Row:
    """Return seconds, tokens per second and GPU, and peak of this rank's training step."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    built = build_model(Variant.named(way), model_config(model), getattr(torch, config.weights), device)
    batch = config.batch // (ranks if config.strong else 1)
    model, end_step = in_engine(built, batch, ranks, config)
    torch.manual_seed(0)
    steps = torch.randint(0, built.config.vocab_size, (WARM + config.steps, ranks, batch, config.tokens))
    times, losses = list[float](), list[float]()
    for each in steps.to(device)[:, rank]:
        if len(times) == WARM:
            reset_cuda_peak()
        start = time.perf_counter()
        end_step(loss := model(input_ids=each, labels=each).loss)
        if ranks > 1:
            dist.all_reduce(loss.detach_().div_(ranks))
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM:])
    peak = torch.tensor(gib(torch.cuda.max_memory_allocated()), device=device)
    if ranks > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    speed = {"seconds": seconds, "times": times[WARM:], SPEED: batch * config.tokens / seconds}
    return {**speed, "peak_gib": peak.item(), "losses": losses, "last_loss": losses[-1]}


def in_engine(built: Any, batch: int, ranks: int, config: ScalingConfig) -> tuple[Any, Callable[[Any], None]]:
    """Return what is called for a loss, and what ends the step of that loss."""
    if config.engine == "zero3":
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": 3},
            "bf16": {"enabled": config.weights == "bfloat16"}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        optimizer = make_optimizer("adamw", list(built.parameters()))
        engine, *_ = deepspeed.initialize(model=built, optimizer=optimizer, config=settings)

        def end_engine(loss: Any) -> None:
            engine.backward(loss)
            engine.step()

        return engine, end_engine

    for module in (*find_stack(built).layers.values(), built) if ranks > 1 else ():
        fully_shard(module)
    optimizer = make_optimizer("adamw", list(built.parameters()))

    def end(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return built, end


def run_rank(job: dict[str, Any]) -> None:
    """Measure as one rank, started by torchrun."""
    file, rank = Path(job["file"]), os.environ.get("RANK", "0")
    try:
        row = measure_rank(job["way"], job["model"], ScalingConfig(**job["settings"]))
    except Exception as error:  # whatever it is, it is the row; the launcher ends the other ranks
        file.with_suffix(f".failed{rank}").write_text(reason_of(error))
        raise
    if rank == "0":
        file.write_text(json.dumps(row))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
    else:
        from script import main

        sys.exit(main(measure, ScalingConfig, __doc__))

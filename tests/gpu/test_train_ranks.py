"""`lowtide train` on several GPUs under torchrun, with NCCL: its steps are those of one, which can resume them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed.train_ranks import python_path
from distributed.train_runs import SEQUENCES, Runs, history

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Float32 products of other batches add up in another order, on tensor cores' accumulators or not; in bfloat16 FSDP2
# rounds also what autocast leaves in float32, such as the weights of norms (2.1e-3 on a CPU).
NEAR = {"float32": 1e-4, "bfloat16": 5e-3}


def run(ranks: int, *arguments: object) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    rows = ["--per_device_train_batch_size", str(SEQUENCES // ranks)]
    command = [sys.executable, *launch, "-m", "lowtide", *map(str, arguments), *rows]
    env = {**os.environ, "PYTHONPATH": python_path(), "NCCL_NVLS_ENABLE": "0"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def curve(folder: Path) -> list[float]:
    return [value for values in history(folder).values() for value in values]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def arguments(made: Runs, kind: str, dtype: str) -> list[str]:
    return [*made.arguments(kind), "--bf16", str(dtype == "bfloat16").lower()]


@pytest.fixture(scope="module")
def alone(made: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[float]]:
    """The losses and gradient norms of one GPU."""

    @cache
    def of(kind: str, dtype: str) -> list[float]:
        output = tmp_path_factory.mktemp("alone") / "run"
        run(1, *arguments(made, kind, dtype), "--output", output)
        return curve(output)

    return of


# Each start of a process takes a while: what a CPU cannot show, and no more (tests/distributed/test_train_ranks.py).
CASES = [
    ("pretrain", 2, "fsdp2", "float32"),
    ("tune", 2, "ddp", "float32"),
    ("tune", 2, "fsdp2", "bfloat16"),
    ("tune", 4, "fsdp2", "float32"),
]


@pytest.mark.parametrize(("kind", "ranks", "engine", "dtype"), CASES)
def test_is_one_gpu_and_resumes_on_it(
    kind: str, ranks: int, engine: str, dtype: str, made: Runs, alone: Callable[[str, str], list[float]], tmp_path: Path
) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    output = tmp_path / "run"
    out = run(ranks, *arguments(made, kind, dtype), "--parallel", engine, "--output", output)
    assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
    assert out.count("held-out loss") == 1, "one rank prints"
    got = curve(output)
    assert got == pytest.approx(alone(kind, dtype), rel=NEAR[dtype])
    if (kind, ranks, engine, dtype) == CASES[0]:
        shutil.rmtree(output / "checkpoint-4")
        run(1, "train", "--resume_from_checkpoint", "true", "--parallel", "ddp", "--output", output)
        assert curve(output) == pytest.approx(got, rel=NEAR[dtype])


@pytest.mark.skipif(GPUS < 2, reason="runs on 2 GPUs")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("dtype", NEAR)
def test_zero3_is_ddp(dtype: str, made: Runs, tmp_path: Path) -> None:
    """The model of ZeRO-3, which no GPU ever has as a whole, is DDP's to rounding."""
    curves = []
    for engine in ("zero3", "ddp"):
        out = run(2, *arguments(made, "tune", dtype), "--parallel", engine, "--output", tmp_path / engine)
        assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
        curves.append(curve(tmp_path / engine))
    # DeepSpeed's weights are bfloat16 where its products are, and those of DDP are rounded at each product
    assert curves[0] == pytest.approx(curves[1], rel={"float32": 1e-4, "bfloat16": 2e-2}[dtype])

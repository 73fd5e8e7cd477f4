"""`lowtide train` on several GPUs under torchrun, with NCCL: its steps are those of one, which can go on with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.train.checkpoints import log_history
from train.conftest import tiny_arguments

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Float32 products of other batches add up in another order, on tensor cores' accumulators or not.
FLOAT32, BFLOAT16 = 1e-4, 5e-3


def run(ranks: int, *arguments: object) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parents[1]), "NCCL_NVLS_ENABLE": "0"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "lowtide.cli", *map(str, arguments)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def curve(folder: Path) -> list[float]:
    logs = log_history(folder / "checkpoint-6")
    return [entry[name] for entry in logs for name in ("loss", "grad_norm", "eval_loss") if name in entry]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_is_one_gpu_and_goes_on_on_it(ranks: int, engine: str, dtype: str, tmp_path: Path) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    if ranks == 4 and (engine, dtype) != ("fsdp2", "float32"):
        pytest.skip("on two GPUs")
    arguments = [*tiny_arguments(tmp_path), "--dtype", dtype, "--keep", "5"]
    alone, output = tmp_path / "alone", tmp_path / "run"
    run(1, *arguments, "--batch-size", 2 * ranks, "--output", alone)
    out = run(ranks, *arguments, "--parallel", engine, "--output", output)
    assert "0 with" in out
    assert out.count("held-out loss") == 1, "one rank speaks"
    near = FLOAT32 if dtype == "float32" else BFLOAT16
    got = curve(output)
    assert got == pytest.approx(curve(alone), rel=near)
    shutil.rmtree(output / "checkpoint-6")
    run(1, "train", "--resume", "--output", output)
    assert curve(output) == pytest.approx(got, rel=near)

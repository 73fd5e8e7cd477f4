"""`lowtide train` on several GPUs under torchrun, with NCCL: its steps are those of one, which can go on with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import lowtide
from train.conftest import tiny_arguments

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Float32 products of other batches add up in another order, on tensor cores' accumulators or not; in bfloat16 FSDP2
# rounds also what autocast leaves in float32, such as the weights of norms (2.1e-3 on a CPU).
NEAR = {"float32": 1e-4, "bfloat16": 5e-3}


def run(ranks: int, *arguments: object) -> str:
    path = [str(Path(lowtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "NCCL_NVLS_ENABLE": "0"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "lowtide", *map(str, arguments)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def curve(folder: Path) -> list[float]:
    logs = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in logs for name in ("loss", "grad_norm", "eval_loss") if name in entry]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_arguments(tmp_path_factory.mktemp("tiny")), "--save_total_limit", "5"]


@pytest.fixture(scope="module")
def alone(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[float]]:
    """The losses of one GPU on so many sequences a step."""

    @cache
    def of(sequences: int, dtype: str) -> list[float]:
        output = tmp_path_factory.mktemp("alone") / "run"
        run(1, *arguments, "--dtype", dtype, "--per_device_train_batch_size", sequences, "--output", output)
        return curve(output)

    return of


# Each start of a process takes a while: what a CPU cannot show, and no more (tests/distributed/test_train_ranks.py).
CASES = [(2, "fsdp2", "float32"), (2, "ddp", "float32"), (2, "fsdp2", "bfloat16"), (4, "fsdp2", "float32")]


@pytest.mark.parametrize(("ranks", "engine", "dtype"), CASES)
def test_is_one_gpu_and_goes_on_on_it(
    ranks: int, engine: str, dtype: str, arguments: list[str], alone: Callable[[int, str], list[float]], tmp_path: Path
) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    output = tmp_path / "run"
    out = run(ranks, *arguments, "--dtype", dtype, "--parallel", engine, "--output", output)
    assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
    assert out.count("held-out loss") == 1, "one rank speaks"
    got = curve(output)
    assert got == pytest.approx(alone(2 * ranks, dtype), rel=NEAR[dtype])
    if (ranks, engine, dtype) == CASES[0]:
        shutil.rmtree(output / "checkpoint-6")
        run(1, "train", "--resume_from_checkpoint", "true", "--output", output)
        assert curve(output) == pytest.approx(got, rel=NEAR[dtype])

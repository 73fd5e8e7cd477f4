"""`lowtide train` on several GPUs under torchrun, with NCCL: its steps are those of one, which can resume them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed.train_ranks import python_path
from distributed.train_runs import SEQUENCES, Runs, history, sharing
from lowtide.train.checkpoints import checkpoints

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Float32 products of other batches add up in another order, on tensor cores' accumulators or not; in bfloat16 FSDP2
# rounds also what autocast leaves in float32, such as the weights of norms (2.1e-3 on a CPU).
NEAR = {"float32": 1e-4, "bfloat16": 5e-3}


def run(ranks: int, *arguments: object, engine: str = "ddp") -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    rows = ["--per_device_train_batch_size", str(SEQUENCES // ranks), *map(str, sharing(engine))]
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
RESUMED = {("pretrain", 2, "fsdp2", "float32")}


@pytest.mark.parametrize(("kind", "ranks", "engine", "dtype"), CASES)
def test_is_one_gpu_and_resumes(
    kind: str, ranks: int, engine: str, dtype: str, made: Runs, alone: Callable[[str, str], list[float]], tmp_path: Path
) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    output = tmp_path / "run"
    out = run(ranks, *arguments(made, kind, dtype), "--output", output, engine=engine)
    assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
    assert out.count("held-out loss") == 1, "one rank prints"
    got = curve(output)
    assert got == pytest.approx(alone(kind, dtype), rel=NEAR[dtype])
    if (kind, ranks, engine, dtype) in RESUMED:
        shutil.rmtree(output / "checkpoint-4")
        run(ranks, "train", "--resume_from_checkpoint", "true", "--output", output, engine=engine)
        assert curve(output) == pytest.approx(got, rel=NEAR[dtype])


FAULTY = """
import os, sys
from distributed.train_faults import cause
from lowtide.cli import main
cause(os.environ["FAULT"])
sys.exit(main(sys.argv[1:]))
"""
TIMEOUT = 15  # seconds that NCCL waits for a rank, which does not learn otherwise that another is gone
LOST = "lowtide train: another process has ended or does not answer ("


def faulty(fault: str, *arguments: object) -> list[tuple[int, str]]:
    """Run two ranks without a launcher that would end the other one; return their statuses and errors."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    given = ["--per_device_train_batch_size", SEQUENCES // 2, "--ddp_timeout", TIMEOUT]
    command = [sys.executable, "-c", FAULTY, *map(str, [*arguments, *given])]
    env = {**os.environ, "PYTHONPATH": python_path(), "NCCL_NVLS_ENABLE": "0", "FAULT": fault}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, err) for rank, err in zip(ranks, errors, strict=True)]


@pytest.mark.skipif(GPUS < 2, reason="runs on 2 GPUs")
@pytest.mark.parametrize("fault", ["kill 1 3", "full 1 4", "nan 1 3"])
def test_a_fault_of_one_rank(fault: str, made: Runs, alone: Callable[[str, str], list[float]], tmp_path: Path) -> None:
    """Nobody waits longer than the timeout, the last checkpoint is whole, and two GPUs go on from it."""
    output = tmp_path / "run"
    given = [*arguments(made, "pretrain", "float32"), "--parallel", "fsdp2", "--output", output]
    (status, err), (own_status, own_err) = faulty(fault, *given)
    if fault.startswith("nan"):
        expected = "lowtide train: lr: expected a training loss that stays finite, got nan at step 3 on rank 1 of 2"
        assert (status, own_status) == (2, 2), (err, own_err)
        assert err.startswith(expected), err
    else:
        assert own_status == (-signal.SIGKILL if fault.startswith("kill") else 2), own_err
        assert (status == 2 and err.startswith(LOST)) or status == -signal.SIGABRT, err  # by NCCL's own watchdog
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    run(2, "train", "--resume_from_checkpoint", "true", "--output", output, engine="fsdp2")
    assert curve(output) == pytest.approx(alone("pretrain", "float32"), rel=NEAR["float32"])


@pytest.mark.skipif(GPUS < 2, reason="runs on 2 GPUs")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("dtype", NEAR)
def test_zero3_is_ddp(dtype: str, made: Runs, tmp_path: Path) -> None:
    """The model of ZeRO-3, which no GPU ever has as a whole, is DDP's to rounding."""
    curves = []
    for engine in ("zero3", "ddp"):
        out = run(2, *arguments(made, "tune", dtype), "--output", tmp_path / engine, engine=engine)
        assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
        curves.append(curve(tmp_path / engine))
    # DeepSpeed's weights are bfloat16 where its products are, and those of DDP are rounded at each product
    assert curves[0] == pytest.approx(curves[1], rel={"float32": 1e-4, "bfloat16": 2e-2}[dtype])

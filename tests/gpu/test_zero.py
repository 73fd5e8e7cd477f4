"""DeepSpeed's ZeRO on two GPUs with NCCL: the cases that gloo runs on CPUs."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed import launch
from distributed.train_runs import Runs
from gpu.test_train_ranks import arguments, curve, run

FILE = Path(__file__).parents[1] / "distributed" / "zero_cases.py"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason="runs on 2 GPUs"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@pytest.mark.parametrize("case", launch.cases_of(FILE))
def test_cases_of_the_cpu(case: str) -> None:
    launch.check(FILE, 2, case, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train(dtype: str, tmp_path: Path) -> None:
    """`lowtide train --parallel zero3`, whose model no GPU ever has as a whole, is `ddp`'s to rounding."""
    made, curves = Runs(tmp_path), []
    for engine in ("zero3", "ddp"):
        out = run(2, *arguments(made, "tune", dtype), "--parallel", engine, "--output", tmp_path / engine)
        assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
        curves.append(curve(tmp_path / engine))
    # DeepSpeed's weights are bfloat16 where its products are, and those of DDP are rounded at each product
    assert curves[0] == pytest.approx(curves[1], rel={"float32": 1e-4, "bfloat16": 2e-2}[dtype])

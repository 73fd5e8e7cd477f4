"""DeepSpeed's ZeRO on two GPUs with NCCL: the cases that gloo runs on CPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed import launch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
FILE = Path(__file__).parents[1] / "distributed" / "zero_cases.py"
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason="runs on 2 GPUs"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@pytest.mark.parametrize(
    "case",
    [
        "patched_models",
        "memory",
        "functional_head",
        "offloaded",
        "checkpointed_layers",
        "kinds_of_model",
        "patched_inside",
        "logits_read",
        "wrapped",
        "built_in_parts",
    ],
)
def test_cases_of_the_cpu(case: str) -> None:
    launch.check(FILE, 2, case, device="cuda")

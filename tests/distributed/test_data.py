"""Ranks with tokens of their own, with gloo: see data_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("data_cases.py")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


def test_on_three_ranks() -> None:
    cases = ["ddp", "no_tokens", "sequence_in_parts", "parts_without_positions", "pipeline"]
    launch.check_all(FILE, 3, cases)

"""The benchmark of several ranks, with gloo: see bench_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


def test_on_two_ranks() -> None:
    launch.check_all(Path(__file__).with_name("bench_cases.py"), 2, ["a_rank_that_fails_alone", "which_of_ligers"])

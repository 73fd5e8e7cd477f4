"""A mesh of two axes on four ranks: see mesh_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch


@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")
def test_fsdp2_times_vocabulary_parallel() -> None:
    launch.check(Path(__file__).with_name("mesh_cases.py"), 4, "two_axes")

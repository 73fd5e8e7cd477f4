"""FSDP2 on one axis of ranks and the vocabulary, or all of a model, on the other, with gloo: see `*_cases.py`."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("mesh_cases.py")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


def test_on_four_ranks() -> None:
    launch.check_all(FILE, 4, ["fsdp_and_vocabulary", "hybrid_sharding", "two_axes_at_once_are_refused"])


def test_tensor_parallel_layers_too() -> None:
    launch.check_all(FILE.with_name("tensor_parallel_cases.py"), 4, ["two_axes", "patched"])

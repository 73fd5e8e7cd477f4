"""FSDP2 with gloo on several ranks: see fsdp_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("fsdp_cases.py")
CASES = [
    "patched_models",
    "functional_head",
    "a_sharded_weight_is_refused",
    "mixed_precision",
    "accumulation",
    "policies",
    "a_loss_that_never_comes",
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


def test_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    launch.check_all(FILE, 2, CASES)


def test_on_three_ranks() -> None:
    """A vocabulary of 97 and layers of 16 do not divide by 3."""
    pytest.importorskip("transformers")
    launch.check(FILE, 3, "functional_head", only=("functional_head",))

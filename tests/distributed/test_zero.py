"""DeepSpeed's ZeRO on two ranks, where DeepSpeed is installed: see zero_cases.py, which is what the ranks run."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("zero_cases.py")
CASES = [
    "patched_models",
    "memory",
    "functional_head",
    "offloaded",
    "checkpointed_layers",
    "kinds_of_model",
    "patched_inside",
    "evaluation_between",
    "logits_read",
    "wrapped",
    "adapters",
    "built_in_parts",
]
pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo"),
]


def test_on_two_ranks() -> None:
    launch.check_all(FILE, 2, CASES)

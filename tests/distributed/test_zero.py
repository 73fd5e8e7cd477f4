"""DeepSpeed's ZeRO on two ranks, where DeepSpeed is installed: see zero_cases.py, which is what the ranks run."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo"),
]


@pytest.mark.parametrize("case", ["patched_models", "functional_head"])
def test_on_two_ranks(case: str) -> None:
    launch.check(Path(__file__).with_name("zero_cases.py"), 2, case)

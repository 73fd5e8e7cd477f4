"""ZeRO on ranks, with gloo: the engine of DeepSpeed that divides a model's states. See zero_cases."""

import pytest
import torch.distributed as dist

from distributed.launch import check_part
from promises import promise

pytestmark = [
    promise("ranks", "patched", "memory"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]


@pytest.mark.parametrize("part", [0, 1, 4, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
def test_on_two_ranks(part: int) -> None:
    check_part("zero", 2, part, 5, "deepspeed")

"""Context parallelism, and Megatron's tensor parallelism, on ranks with gloo. See the files of cases."""

import pytest
import torch.distributed as dist

from distributed.launch import check_part
from promises import promise

pytestmark = [
    promise("ranks", "patched", "memory"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel(ranks: int) -> None:
    check_part("context_parallel", ranks, 0, 1)


def test_megatron() -> None:
    check_part("megatron", 2, 0, 1, "megatron.core")

"""Engines that divide a model's states or its batch on ranks, with gloo: FSDP2, DDP. See the files of cases."""

import pytest
import torch.distributed as dist

from distributed.launch import check_part
from promises import promise

pytestmark = [
    promise("ranks", "patched", "memory"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]
RUNS = [  # a file of cases, ranks, and the part that runs of how many
    *(("data", 3, part, 3) for part in range(3)), ("plan", 2, 0, 1), *(("fsdp", 2, part, 4) for part in (0, 1, 3)),
    *(pytest.param("fsdp", ranks, part, 4, marks=pytest.mark.slow) for ranks, part in ((2, 2), (3, 3), (4, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "ranks", "part", "parts"), RUNS)
def test_on_ranks(cases: str, ranks: int, part: int, parts: int) -> None:
    check_part(cases, ranks, part, parts)

"""Engines on ranks, with gloo: FSDP2, ZeRO, DDP, pipelines, tensor and context parallelism. See the files of cases."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed import launch
from promises import promise

pytestmark = [
    promise("ranks", "patched", "memory"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]
FILES = {  # of cases, in how many parts they run, on how many ranks, and the package that they need
    "megatron": (1, 2, "megatron.core"),
    "context_parallel": (1, 2, "transformers"),
    "data": (1, 3, "transformers"),
    "plan": (1, 2, "transformers"),
    "tensor_parallel": (4, 2, "transformers"),
    "fsdp": (3, 2, "transformers"),
    "zero": (5, 2, "deepspeed"),
}
RUNS: list[Any] = [
    (name, ranks, part, needed) for name, (parts, ranks, needed) in FILES.items() for part in range(parts)
]
SLOW = [("fsdp", 3, 0), ("fsdp", 4, 1), ("context_parallel", 4, 0)]
RUNS += [pytest.param(*run, "transformers", marks=pytest.mark.slow) for run in SLOW]


@pytest.mark.parametrize(("cases", "ranks", "part", "needed"), RUNS)
def test_on_ranks(cases: str, ranks: int, part: int, needed: str) -> None:
    if find_spec(needed.partition(".")[0]) is None or find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    file = Path(__file__).parent / f"{cases}_cases.py"
    launch.check_all(file, ranks, tuple(launch.cases_of(file)[part :: FILES[cases][0]]))

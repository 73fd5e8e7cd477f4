"""A head whose vocabulary, or whose keys, several ranks share, with gloo: see the files of cases, which they run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import launch
from promises import promise

pytestmark = [
    promise("ranks", "options", "errors", "memory"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]
FOLDER = Path(__file__).parent
CASES = [*(("option", part, 4) for part in range(4)), ("head", 0, 1), ("apply", 0, 1), ("contrastive", 0, 1)]


@pytest.mark.parametrize(("cases", "part", "parts"), CASES)
def test_on_three_ranks(cases: str, part: int, parts: int) -> None:
    """One has no class, in the way of plain tensors; nothing divides by three."""
    file = FOLDER / f"{cases}_cases.py"
    launch.check_all(file, 3, tuple(launch.cases_of(file)[part::parts]))


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["option", "head", "contrastive"])
def test_on_two_ranks(cases: str) -> None:
    launch.check_all(FOLDER / f"{cases}_cases.py", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs tests/gpu runs this path")
def test_kernels() -> None:
    launch.check_all(FOLDER / "kernel_cases.py", 2)

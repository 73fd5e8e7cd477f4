"""A head whose vocabulary, or whose keys, several ranks share, with gloo: see the files of cases, which they run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import launch
from promises import promise

pytestmark = [
    promise("ranks"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo"),
]
CASES = {
    "option": promise("options"),
    "head": promise("errors", "memory"),
    "apply": (),
    "kernel": promise("kernels"),
    "contrastive": (),
}


@pytest.mark.parametrize("cases", [pytest.param(name, marks=marks) for name, marks in CASES.items()])
def test_on_three_ranks(cases: str) -> None:
    """One has no class, in the way of plain tensors; nothing divides by three."""
    if cases == "kernel" and torch.cuda.is_available():
        pytest.skip("on GPUs tests/gpu runs this path")
    launch.check_all(Path(__file__).parent / f"{cases}_cases.py", 3)


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["option", "head"])
def test_on_two_ranks(cases: str) -> None:
    launch.check_all(Path(__file__).parent / f"{cases}_cases.py", 2)

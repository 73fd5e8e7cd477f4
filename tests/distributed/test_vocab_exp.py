"""The exponential path with the vocabulary sharded over ranks: see exp_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("exp_cases.py")
CASES = [
    "values_and_gradients",
    "edges",
    "statistics",
    "trained_on_one_rank",
    "sums_beside_products",
    "plans_of_what_is_fetched_ahead",
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs tests/gpu runs this path")
def test_on_three_ranks() -> None:
    pytest.importorskip("triton")
    launch.check_all(FILE, 3, CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs tests/gpu runs this path")
def test_divergences_on_three_ranks() -> None:
    pytest.importorskip("triton")
    launch.check_all(FILE.with_name("pair_cases.py"), 3, ["values_and_gradients"])

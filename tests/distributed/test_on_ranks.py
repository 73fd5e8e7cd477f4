"""Every file of cases on its ranks, with gloo: see `*_cases.py`, which is what the ranks run."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import launch

FOLDER = Path(__file__).parent
RUNS = [  # a file's cases, how many ranks, and the package that they need; what takes long comes first
    ("zero", 2, "deepspeed"),
    ("option", 3, "torch"),
    ("tensor_parallel_models", 2, "transformers"),
    ("vocab", 3, "torch"),
    ("context_parallel", 2, "transformers"),
    ("kernel", 3, "triton"),
    ("fsdp", 2, "transformers"),
    ("data", 3, "transformers"),
    ("plan", 2, "transformers"),
    ("ulysses", 2, "deepspeed"),
    ("apply", 3, "torch"),
    ("megatron", 2, "megatron.core"),
    ("sets", 3, "torch"),
    ("term", 3, "torch"),
    ("contrastive", 3, "torch"),
]
SLOW = [  # more ranks, and where a vocabulary of 97 and layers of 16 do not divide by their number
    ("context_parallel", 4, "transformers"),
    ("mesh", 4, "transformers"),
    ("option", 2, "torch"),
    ("vocab", 2, "torch"),
    ("fsdp", 3, "transformers"),
    ("contrastive", 2, "torch"),
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")


@pytest.mark.parametrize(
    ("cases", "ranks", "needed"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)]
)
def test_on_ranks(cases: str, ranks: int, needed: str) -> None:
    if find_spec(needed.partition(".")[0]) is None or find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if needed == "triton" and torch.cuda.is_available():
        pytest.skip("on GPUs tests/gpu runs this path")
    launch.check_all(FOLDER / f"{cases}_cases.py", ranks)


def test_no_file_of_cases_is_left_out() -> None:
    assert {f"{cases}_cases.py" for cases, _, _ in RUNS + SLOW} == {path.name for path in FOLDER.glob("*_cases.py")}

"""Any function of a sharded vocabulary's logits, with gloo: see apply_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("apply_cases.py")
CASES = [
    "every_option",
    "random_numbers",
    "few_tokens",
    "results_of_any_kind",
    "checkpointed_and_compiled",
    "the_same_exchanges_whatever_the_numbers",
    "memory",
    "errors",
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(ranks: int) -> None:
    launch.check_all(FILE, ranks, CASES)

"""A vocabulary sharded over ranks, with gloo: see vocab_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("vocab_cases.py")
CASES = [
    "losses",
    "token_stats",
    "divergences",
    "edges",
    "uses_of_autograd",
    "trained_on_one_rank",
    "unlike_grad_modes",
    "unlike_scales",
    "nothing_to_differentiate",
    "checkpointed",
    "compiled",
    "the_same_on_every_rank",
    "what_is_exchanged",
    "memory",
    "unlike_gpus",
    "kinds_of_devices",
    "errors",
    "a_rank_that_never_comes",
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(ranks: int) -> None:
    launch.check_all(FILE, ranks, CASES)

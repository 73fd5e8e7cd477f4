"""A term of one's own with the vocabulary sharded: see term_cases.py, which is what the ranks run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch


@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")
def test_the_term_of_the_page_on_three_ranks() -> None:
    launch.check(Path(__file__).with_name("term_cases.py"), 3, "the_term_of_the_page")

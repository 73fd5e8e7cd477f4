"""Patched models whose head is in parts over ranks, with gloo: see tensor_parallel_models_cases.py."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import launch

FILE = Path(__file__).with_name("tensor_parallel_models_cases.py")
CASES = [
    "kinds_of_heads",
    "with_loss_parallel",
    "tokens_in_parts",
    "sequence_parallel_layers",
    "losses_of_ones_own",
    "labels_and_counts",
    "embeddings_that_are_tied",
    "plan_of_transformers",
    "wrapped_by_transformers_later",
    "what_is_left_alone",
    "changed_on_one_rank",
    "an_error_inside",
    "mlps_in_parts",
    "parts_of_layers",
    "looked_at_on_one_rank",
    "memory",
]
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")


def test_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    launch.check_all(FILE, 2, CASES)

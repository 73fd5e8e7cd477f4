"""Several GPUs of one host, with NCCL: the cases that gloo runs on CPUs, and the exponential path in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import launch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CASES = Path(__file__).parents[1] / "distributed"
ON_A_CPU = ("what_is_left_alone", "an_error_inside", "memory")  # would show the same on a GPU
FOR_ALL = {  # of each file, what speaks to other ranks in a way of its own: each file starts torch once for all of its
    "option_cases": ["every_option", "few_tokens", "few_classes", "all_ignored", "trained_on_one_rank"],
    "vocab_cases": ["uses_of_autograd", "the_same_on_every_rank", "what_is_exchanged"],
    "kernel_cases": ["every_option"],
    "fsdp_cases": ["patched_models", "functional_head", "mixed_precision", "accumulation"],
    "data_cases": ["ddp", "no_tokens", "sequence_in_parts", "parts_without_positions", "pipeline"],
    "mesh_cases": ["fsdp_and_vocabulary", "patched", "hybrid_sharding"],
    "tensor_parallel_models_cases": [
        case for case in launch.cases_of(CASES / "tensor_parallel_models_cases.py") if case not in ON_A_CPU
    ],
}
EXPONENTIAL = ("bfloat16", "edges", "no_host_waits", "float16_and_others")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", EXPONENTIAL)
def test_vocabulary_in_parts(case: str, ranks: int) -> None:
    if ranks > GPUS or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"needs {ranks} GPUs of compute capability 9.0")
    launch.check(Path(__file__).with_name("rank_cases.py"), ranks, case, EXPONENTIAL, device="cuda")


@pytest.mark.parametrize("ranks", [pytest.param(2), pytest.param(4)])
@pytest.mark.parametrize(("file", "case"), [(file, case) for file, cases in FOR_ALL.items() for case in cases])
def test_cases_of_the_cpu(file: str, case: str, ranks: int) -> None:
    needed = 4 if file == "mesh_cases" else ranks  # its meshes are two by two
    if needed > GPUS or ranks < needed:
        pytest.skip(f"runs on {needed} GPUs")
    launch.check(CASES / f"{file}.py", ranks, case, tuple(FOR_ALL[file]), device="cuda")

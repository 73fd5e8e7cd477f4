"""Several GPUs of one host, with NCCL: the cases that gloo runs on CPUs, and the exponential path in bfloat16."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed import launch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CASES = Path(__file__).parents[1] / "distributed"
ON_A_CPU = ("what_is_left_alone", "an_error_inside", "memory")  # would show the same on a GPU
PARALLEL, ZERO = (launch.cases_of(CASES / f"{name}_cases.py") for name in ("tensor_parallel_models", "zero"))
# Of each file the cases that communicate in a way of their own, and on how many GPUs: each file starts torch once for
# all of its cases.
FOR_ALL: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "option": (
        (2, 4), ["every_option", "few_tokens", "few_classes", "all_ignored", "uses_of_autograd", "trained_on_one_rank"],
    ),
    "vocab": ((2, 4), ["the_same_on_every_rank", "what_is_exchanged"]),
    "kernel": ((2, 4), ["every_option"]),
    "fsdp": ((2, 4), ["patched_models", "functional_head", "mixed_precision", "accumulation"]),
    "data": ((2, 4), ["ddp", "no_tokens", "sequence_in_parts", "parts_without_positions", "pipeline"]),
    "mesh": ((4,), ["fsdp_and_vocabulary", "patched", "hybrid_sharding"]),
    "tensor_parallel_models": ((2, 4), [case for case in PARALLEL if case not in ON_A_CPU]),
    "zero": ((2,), ZERO),
}  # fmt: skip
EXPONENTIAL = ("bfloat16", "edges", "no_host_waits", "float16_and_others")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", EXPONENTIAL)
def test_sharded_vocabulary(case: str, ranks: int) -> None:
    if ranks > GPUS or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"needs {ranks} GPUs of compute capability 9.0")
    launch.check(Path(__file__).with_name("rank_cases.py"), ranks, case, EXPONENTIAL, device="cuda")


ON_RANKS = [(file, case, n) for file, (ranks, cases) in FOR_ALL.items() for case in cases for n in ranks]


@pytest.mark.parametrize(("file", "case", "ranks"), ON_RANKS)
def test_cases_of_the_cpu(file: str, case: str, ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"runs on {ranks} GPUs")
    if file == "zero" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    launch.check(CASES / f"{file}_cases.py", ranks, case, tuple(FOR_ALL[file][1]), device="cuda")

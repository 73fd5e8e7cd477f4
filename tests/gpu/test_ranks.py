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
# Of each file the cases that communicate in a way of their own, and on how many GPUs.
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
ON_RANKS = [(CASES / f"{file}_cases.py", n, tuple(cases)) for file, (ranks, cases) in FOR_ALL.items() for n in ranks]
ON_RANKS += [(Path(__file__).with_name("rank_cases.py"), n, ()) for n in (1, 2, 4)]


@pytest.mark.parametrize(("file", "ranks", "cases"), ON_RANKS, ids=lambda value: getattr(value, "stem", str(value)))
def test_cases(file: Path, ranks: int, cases: tuple[str, ...]) -> None:
    if ranks > GPUS:
        pytest.skip(f"runs on {ranks} GPUs")
    if not cases and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs GPUs of compute capability 9.0")
    if cases == tuple(ZERO) and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    launch.check_all(file, ranks, cases, device="cuda")

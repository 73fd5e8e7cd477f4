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
OPTION, PARALLEL, ZERO, CONTEXT, ULYSSES = (
    launch.cases_of(CASES / f"{name}_cases.py")
    for name in ("option", "tensor_parallel_models", "zero", "context_parallel", "ulysses")
)
# Of each file the cases that communicate in a way of their own, and on how many GPUs.
FOR_ALL: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "option": ((2, 4), [case for case in OPTION if case != "unlike_grad_modes"]),
    "vocab": ((2, 4), ["the_same_on_every_rank", "what_is_exchanged"]),
    "kernel": ((2, 4), ["every_option"]),
    "fsdp": ((2, 4), ["patched_models", "functional_head", "mixed_precision", "accumulation"]),
    "data": ((2, 4), ["ddp", "no_tokens", "sequence_in_parts", "parts_without_positions", "pipeline"]),
    "mesh": ((4,), ["fsdp_and_vocabulary", "patched", "hybrid_sharding"]),
    "tensor_parallel_models": ((2, 4), [case for case in PARALLEL if case not in ON_A_CPU]),
    "contrastive": ((2, 4), ["every_option", "gradients_of_keys_alone", "what_is_exchanged"]),
    "zero": ((2,), ZERO),
    "context_parallel": ((2, 4), CONTEXT),
    "ulysses": ((2,), ULYSSES),
}
ON_RANKS = [("rank", n) for n in (1, 2, 4)] + [(file, n) for file, (ranks, _) in FOR_ALL.items() for n in ranks]


@pytest.mark.parametrize(("file", "ranks"), ON_RANKS)
def test_cases(file: str, ranks: int) -> None:
    """The exponential path in bfloat16 ("rank"), and the cases of the CPU."""
    if ranks > GPUS:
        pytest.skip(f"runs on {ranks} GPUs")
    if file == "rank" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs GPUs of compute capability 9.0")
    if file in ("zero", "ulysses") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    folder, cases = (Path(__file__).parent, []) if file == "rank" else (CASES, FOR_ALL[file][1])
    launch.check_all(folder / f"{file}_cases.py", ranks, tuple(cases), device="cuda")

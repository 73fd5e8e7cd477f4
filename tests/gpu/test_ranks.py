"""Several GPUs of one host, with NCCL: the cases that gloo runs on CPUs, the exponential path in bfloat16, trainers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distributed import launch
from distributed.forks import python_path
from distributed.train_runs import ENGINES, SEQUENCES, Runs, history
from promises import promise

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CASES = Path(__file__).parents[1] / "distributed"
OPTION, ZERO, CONTEXT = (launch.cases_of(CASES / f"{name}_cases.py") for name in ("option", "zero", "context_parallel"))
# Of each file the cases that communicate in a way of their own, and on how many GPUs.
FOR_ALL: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "option": ((2, 4), OPTION),
    "head": ((2, 4), ["the_same_on_every_rank", "what_is_exchanged"]),
    "kernel": ((2, 4), ["every_option"]),
    "fsdp": ((2, 4), ["patched_models", "functional_head", "mixed_precision", "accumulation", "two_axes"]),
    "data": ((2, 4), ["ddp", "no_tokens", "sequence_in_parts"]),
    "contrastive": ((2, 4), ["every_option", "gradients_of_keys_alone", "what_is_exchanged"]),
    "zero": ((2,), ZERO),
    "context_parallel": ((2, 4), CONTEXT),
}
ON_RANKS = [("rank", n) for n in (1, 2, 4)] + [(file, n) for file, (ranks, _) in FOR_ALL.items() for n in ranks]


@promise("ranks")
@pytest.mark.parametrize(("file", "ranks"), ON_RANKS)
def test_cases(file: str, ranks: int) -> None:
    """The exponential path in bfloat16 ("rank"), and the cases of the CPU."""
    if ranks > GPUS:
        pytest.skip(f"runs on {ranks} GPUs")
    if file == "rank" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs GPUs of compute capability 9.0")
    if file == "zero" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    folder, cases = (Path(__file__).parent, []) if file == "rank" else (CASES, FOR_ALL[file][1])
    launch.check_all(folder / f"{file}_cases.py", ranks, tuple(cases), device="cuda")


# Float32 products of other batches add up in another order, on tensor cores' accumulators or not; in bfloat16 FSDP2
# rounds also what autocast leaves in float32, such as the weights of norms (2.1e-3 on a CPU).
NEAR = {"float32": 1e-4, "bfloat16": 5e-3}


def run(ranks: int, *arguments: object, engine: str = "ddp") -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    rows = ["--per_device_train_batch_size", str(SEQUENCES // ranks)]
    command = [sys.executable, *launch, "-m", "lowtide", *map(str, arguments), *rows]
    env = {**os.environ, "PYTHONPATH": python_path(), "NCCL_NVLS_ENABLE": "0", **ENGINES[engine]}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def curve(folder: Path) -> list[float]:
    return [value for values in history(folder).values() for value in values]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def arguments(made: Runs, kind: str, dtype: str) -> list[str]:
    return [*made.arguments(kind), "--bf16", str(dtype == "bfloat16").lower()]


@pytest.fixture(scope="module")
def alone(made: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[float]]:
    """The losses and gradient norms of one GPU."""

    @cache
    def of(kind: str, dtype: str) -> list[float]:
        output = tmp_path_factory.mktemp("alone") / "run"
        run(1, *arguments(made, kind, dtype), "--output_dir", output, engine="one")
        return curve(output)

    return of


# Each start of a process takes a while: what a CPU cannot show, and no more (tests/distributed/test_train_ranks.py).
TRAINED = [
    ("pretrain", 2, "fsdp2", "float32"),
    ("tune", 2, "ddp", "float32"),
    ("tune", 2, "fsdp2", "bfloat16"),
    ("tune", 4, "fsdp2", "float32"),
]
RESUMED = {("pretrain", 2, "fsdp2", "float32")}


@promise("trainers", "resume")
@pytest.mark.parametrize(("kind", "ranks", "engine", "dtype"), TRAINED)
def test_is_one_gpu_and_resumes(
    kind: str, ranks: int, engine: str, dtype: str, made: Runs, alone: Callable[[str, str], list[float]], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    output = tmp_path / "run"
    given = [*arguments(made, kind, dtype), "--output_dir", output]
    out = run(ranks, *given, engine=engine)
    assert re.search(r"[1-9]\d* without logits, 0 with\b", out), out
    assert out.count("held out ") == 1, "one rank prints"
    got = curve(output)
    assert got == pytest.approx(alone(kind, dtype), rel=NEAR[dtype])
    if (kind, ranks, engine, dtype) in RESUMED:
        shutil.rmtree(output / "checkpoint-4")
        run(ranks, *given, "--resume_from_checkpoint", "auto", engine=engine)
        assert curve(output) == pytest.approx(got, rel=NEAR[dtype])

"""Several ranks for a file of cases: each rank runs every case in order, so that the start of torch is paid once.

A file of cases calls `main(vars())`, a test `check_all(file, ranks)`. What a case draws follows from its test's seed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interpreter
from distributed.forks import Ended, python_path, shared

DEVICE = os.environ.get("RANKS_DEVICE", "cpu")  # of the cases' tensors
PATIENCE = 300 if DEVICE == "cpu" else 120  # seconds that a rank waits for the others, which may compile kernels
THOROUGH = DEVICE != "cpu" or "THOROUGH" in os.environ  # with --slow: whole products of options, not pairs of them
SEED = int(os.environ.get("SEED", "0"))  # small: added to the seeds of models, batches and arguments
MODEL = ("accelerate.utils", "lowtide.models.patch", "lowtide.memory.apply", "transformers.models.llama.modeling_llama")
MODULES = {  # which take long to import: of files and of cases, before they are forked
    **dict.fromkeys(("fsdp", "context_parallel", "data", "plan"), MODEL),
    "zero": (*MODEL, "deepspeed.runtime.zero.muon.muon_optimizer"),
    "megatron": ("megatron.core.models.gpt.gpt_model",),
    "adapters": ("peft",),
    "parts_of_models": ("peft",),
    "trls_function": ("trl.trainer.utils",),
}
SECONDS = 1200.0  # until the ranks are killed, compiling kernels included, on a busy machine


def _forked(file: Path, ranks: int, arguments: list[str], env: dict[str, str]) -> Ended:
    """Run on the CPU to the end."""
    of = (file.stem.removesuffix("_cases"), *(arguments[1:] or cases_of(file)))
    modules = [name for one in of for name in MODULES.get(one, ())]
    return shared()(ranks, *arguments, script=file, seconds=SECONDS, modules=modules, **env)


def _started(file: Path, ranks: int, arguments: list[str], env: dict[str, str]) -> Ended:
    """As `_forked`, each rank a process of its own: one that uses CUDA cannot be forked."""
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), **env}
    started = [
        subprocess.Popen(
            [sys.executable, str(file), *arguments],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    until, errors = time.monotonic() + SECONDS, []
    for process in started:
        try:
            errors.append(process.communicate(timeout=max(1.0, until - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            errors.append(f"a rank did not end within {SECONDS} s")
            for other in started:
                other.kill()
    return Ended([process.wait() for process in started], [], errors)


def cases_of(file: Path) -> list[str]:
    """Return the names of a file's cases, its public functions of nothing that return nothing, in order."""
    found = [f for f in ast.parse(file.read_text()).body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
    return [f.name for f in found if ast.unparse(f.args) == "" and f.returns and ast.unparse(f.returns) == "None"]


def check_all(file: Path, ranks: int, only: tuple[str, ...] = (), device: str = "cpu") -> None:
    """Fail unless the cases of a file, all or ``only`` some, came out right: one test, which starts the ranks once.

    On "cpu" the ranks use gloo; on "cuda" each has a GPU, and they use NCCL.
    """
    assert only or cases_of(file), "nothing was run"
    with tempfile.TemporaryDirectory() as folder:
        run = _forked if device == "cpu" else _started
        env = {"WORLD": str(ranks), "RANKS_DEVICE": device, "SEED": str(torch.initial_seed() % 10**6)}
        ended = run(file, ranks, [folder, *only], env)
    assert not any(ended.statuses), ended


def check_part(name: str, ranks: int, part: int, parts: int, needed: str = "transformers") -> None:
    """Check the cases of one part of a file of so many, or skip them where the package that they need is missing."""
    import pytest  # not in the ranks, which import this file

    if find_spec(needed.partition(".")[0]) is None or find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    file = Path(__file__).parent / f"{name}_cases.py"
    check_all(file, ranks, tuple(cases_of(file)[part::parts]))


def slow(case: Callable[[], None]) -> Callable[[], None]:
    """Leave a case to `make slow` and to GPUs."""
    return case if THOROUGH else lambda: None


def main(names: dict[str, Any], only: Sequence[str] = tuple(sys.argv[2:])) -> None:
    """Be one of the ranks: run the cases among a file's names, or ``only`` some, up to the first that fails."""
    interpreter.speed_up()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ["WORLD"])
    backend, status = "gloo", 1
    if DEVICE == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, patience = f"file://{sys.argv[1]}/store", timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=patience)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=UserWarning, module=r"lowtide(\.|\Z)")
    try:
        for name in only or cases_of(Path(names["__file__"])):
            torch.manual_seed(SEED)
            names[name]()
            dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        sys.stderr.write(f"{name}, on rank {rank}: {traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may still let tensors go, which aborts an interpreter being torn down

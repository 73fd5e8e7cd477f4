"""Ranks without the start of torch for each: a process that has imported what they will forks them.

`Ranks` is for tests; run as a script, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import cpu_time
import lowtide
from interpreter import uncompiled

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """What became of a run: of each rank its exit status (-9 where it was killed), output and errors."""

    statuses: list[int]
    out: list[str]
    err: list[str]

    def __str__(self) -> str:
        return f"{self.statuses}\n" + "\n".join(self.err)


def python_path() -> str:
    """Return where ranks look for modules: the tests, this lowtide, and this process's own path."""
    own = [str(TESTS), str(Path(lowtide.__file__).parents[1])]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


class Ranks:
    """Runs the command line, or a script, on ranks as torchrun starts them; one is a process without a launcher."""

    def __init__(self, python: str = sys.executable) -> None:
        env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._cache = tempfile.TemporaryDirectory()  # of datasets, in place of the user's
        env |= {
            "HF_DATASETS_CACHE": self._cache.name,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "DS_ACCELERATOR": "cpu",
            "TRITON_INTERPRET": "1",
        }
        self._process = subprocess.Popen(
            [python, str(Path(__file__))], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        ranks: int,
        *arguments: object,
        script: Path | None = None,
        seconds: float = 1200,
        modules: Sequence[str] = (),
        **env: str,
    ) -> None:
        """Start; `end` gives the result. One at a time; after ``seconds`` it is killed.

        ``modules`` are what the ranks will import: the process that forks them does, once.
        """
        assert self._process.stdin is not None
        job = {"ranks": ranks, "argv": list(map(str, arguments)), "env": env, "seconds": seconds, "modules": modules}
        job["script"] = None if script is None else str(script)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def pids(self) -> list[int]:
        """Return the processes of the ranks that run now, in order."""
        children = psutil.Process(self._process.pid).children()
        return [child.pid for child in sorted(children, key=lambda child: (child.create_time(), child.pid))]

    def end(self) -> Ended:
        """Wait for what was started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks has died"
        found = json.loads(line)
        cpu_time.once.append(found.pop("imports"))
        return Ended(**found)

    def __call__(self, ranks: int, *arguments: object, **options: Any) -> Ended:
        """Run to the end."""
        self.start(ranks, *arguments, **options)
        return self.end()

    def close(self) -> None:
        """End the process that forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@cache
def shared() -> Ranks:
    """Return the one that all tests of this process may use; it ends with this process."""
    ranks = Ranks()
    atexit.register(ranks.close)
    return ranks


def _be(rank: int, job: dict[str, Any], port: int, folder: Path) -> None:
    """Be one of the ranks: never returns."""
    status = 1
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
        faulthandler.enable()  # a rank that a signal ends says where it was
        os.environ.update(job["env"])
        if job["ranks"] > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in (world | place).items()})
        if job["env"].get("ZERO") == "gloo":  # without DeepSpeed's own operator for the CPU, which it would compile
            importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
            gc.freeze()  # DeepSpeed collects garbage often, and would look through all of torch each time
        if fault := job["env"].get("FAULT"):
            importlib.import_module("distributed.train_faults").cause(fault)
        if job["ranks"] > 1 and job["argv"][:1] == ["train"] and "ACCELERATE_USE_FSDP" in job["env"]:
            importlib.import_module("distributed.train_faults").share_on_cpus()
        if script := job["script"]:
            sys.argv = [script, *job["argv"]]
            runpy.run_path(script, run_name="__main__")
            status = 0
        else:
            from lowtide import cli

            status = cli.main(job["argv"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # gloo's threads may still let tensors go, which aborts an interpreter being torn down


def _run(job: dict[str, Any]) -> Ended:
    with tempfile.TemporaryDirectory() as name, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the first rank alone can listen there
        held.bind(("127.0.0.1", 0))
        folder, pids = Path(name), list[int]()
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _be(rank, job, held.getsockname()[1], folder)
            pids.append(pid)
        until, statuses = time.monotonic() + job["seconds"], dict[int, int]()
        while len(statuses) < len(pids):
            for pid in pids:
                if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[pid] = os.waitstatus_to_exitcode(found[1])
            if time.monotonic() > until:
                for pid in set(pids) - set(statuses):
                    os.kill(pid, 9)
            time.sleep(0.02)
        texts = [[(folder / f"{kind}{rank}").read_text() for rank in range(job["ranks"])] for kind in ("out", "err")]
        return Ended([statuses[pid] for pid in pids], *texts)


# What ranks import on their way.
MODULES = (
    "contract.cases", "lowtide.head.kernels.exp_rows", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
)  # fmt: skip
OF_TRAIN = (  # of its first run
    "lowtide.cli", "lowtide.train.run", "trl", "lowtide.train.fine_tuning", "lowtide.train.scratch",
    "lowtide.train.comparison",
)  # fmt: skip


def _serve() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    _import(*MODULES)
    told = 0.0  # CPU seconds
    for line in sys.stdin:
        job = json.loads(line)
        _import(*job["modules"], *(OF_TRAIN if job["argv"][:1] == ["train"] else ()))
        imports, told = time.process_time() - told, time.process_time()  # the first job's have the start in them
        ended = _run(job)
        sys.stdout.write(json.dumps({**vars(ended), "imports": imports}) + "\n")
        sys.stdout.flush()
    os._exit(0)  # what is frozen would be called a leak


def _import(*names: str) -> None:
    """Import those that are installed."""
    if new := [name for name in names if name not in sys.modules]:
        with uncompiled():
            for name in new:
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(name)
        gc.freeze()  # else each rank's collector writes to what they share, and copies it by that


if __name__ == "__main__":
    _serve()

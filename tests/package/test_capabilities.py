"""What depends on a CPU's instructions, with fewer of them than this CPU has: PyTorch's kernels and oneDNN's GEMMs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.forks import python_path
from promises import promise

pytestmark = promise("values")
ROOT = Path(__file__).parents[2]
# What PyTorch's own kernels use, and oneDNN's, from few to many.
LEVELS = {"DEFAULT": ("default", "SSE41"), "AVX2": ("avx2", "AVX2"), "AVX512": ("avx512", "AVX512_CORE")}
DEPENDENT = ["tests/contract/test_values.py", "tests/mlp/test_memory.py"]


@pytest.mark.slow
def test_fewer_instructions_change_no_result() -> None:
    """In processes of their own: PyTorch reads both variables once. The own level is that of all other tests."""
    own, known = torch.backends.cpu.get_cpu_capability(), list(LEVELS)
    # oneDNN has more levels above the highest of these, of bfloat16, that PyTorch's own kernels do not tell apart.
    levels = known[: known.index(own) + (own == known[-1])] if own in known else []
    if not levels:
        pytest.skip(f"this CPU is tested as it is: {own}")
    env = {**os.environ, "PYTHONPATH": python_path()}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, __file__, *levels]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert ended.stdout.count(" passed") == len(levels)


class OncePerLevel:
    """Runs what was collected in a fork for each level: this process has computed nothing, nor asked for its level."""

    def __init__(self, levels: list[str]) -> None:
        self.levels = levels

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        for level in self.levels:
            if (child := os.fork()) == 0:
                os.environ |= dict(zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), LEVELS[level], strict=True))
                assert torch.backends.cpu.get_cpu_capability() == level
                return None  # the tests run
            session.testsfailed += os.waitpid(child, 0)[1] != 0
        return True


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # which the tests would import once a level
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *DEPENDENT], plugins=[OncePerLevel(sys.argv[1:])]))

"""What depends on a CPU's instructions, with fewer of them than this CPU has: PyTorch's kernels and oneDNN's GEMMs."""

from __future__ import annotations

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
@pytest.mark.parametrize("level", LEVELS)
def test_fewer_instructions_change_no_result(level: str) -> None:
    """In a process of its own: PyTorch reads both variables once. The own level is that of all other tests."""
    own, known = torch.backends.cpu.get_cpu_capability(), list(LEVELS)
    # oneDNN has more levels above the highest of these, of bfloat16, that PyTorch's own kernels do not tell apart.
    if level not in (known[: known.index(own) + (own == known[-1])] if own in known else []):
        pytest.skip(f"this CPU is tested as it is: {own}")
    env = {**os.environ, **dict(zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), LEVELS[level], strict=True))}
    env["PYTHONPATH"] = python_path()
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *DEPENDENT]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]

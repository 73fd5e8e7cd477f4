"""What depends on a CPU's instructions, with fewer of them than this CPU has: PyTorch's kernels and oneDNN's GEMMs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What PyTorch's own kernels use, and oneDNN's, from few to many.
LEVELS = {"DEFAULT": ("default", "SSE41"), "AVX2": ("avx2", "AVX2"), "AVX512": ("avx512", "AVX512_CORE")}
DEPENDENT = ["tests/head/test_cpu_work.py", "tests/mlp/test_swiglu_memory.py", "tests/head/test_plan.py"]


@pytest.mark.parametrize("level", LEVELS)
def test_fewer_instructions_change_no_result(level: str) -> None:
    """In a process of its own: PyTorch reads both variables once. The own level is that of all other tests."""
    own = torch.backends.cpu.get_cpu_capability()
    known = list(LEVELS)
    # oneDNN has more levels above the highest of these, of bfloat16, that PyTorch's own kernels do not tell apart.
    if own not in known or known.index(level) > known.index(own) or level == own != known[-1]:
        pytest.skip(f"this CPU is tested as it is: {own}")
    kernels, gemms = LEVELS[level]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "ONEDNN_MAX_CPU_ISA": gemms}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *DEPENDENT]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout

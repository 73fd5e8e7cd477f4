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
LEVELS = ["DEFAULT", "AVX2", "AVX512"]  # what PyTorch's own kernels use, from few to many; conftest.py has oneDNN's
DEPENDENT = ["tests/contract/test_values.py", "tests/mlp/test_memory.py"]
RUN = """
import pytest, sys, torch
assert torch.backends.cpu.get_cpu_capability() == sys.argv[1]
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_fewer_instructions_change_no_result(level: str) -> None:
    """In a process of its own: the level is read once. The own level is that of all other tests."""
    own = torch.backends.cpu.get_cpu_capability()
    # oneDNN has more levels above the highest of these, of bfloat16, that PyTorch's own kernels do not tell apart.
    if own not in LEVELS or level not in LEVELS[: LEVELS.index(own) + (own == LEVELS[-1])]:
        pytest.skip(f"this CPU is tested as it is: {own}")
    env = {**os.environ, "ATEN_CPU_CAPABILITY": level.lower(), "PYTHONPATH": python_path()}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-c", RUN, level, "-q", "-n0", "-p", "no:cacheprovider", *DEPENDENT]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]

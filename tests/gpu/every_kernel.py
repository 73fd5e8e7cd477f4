"""Every kernel of lowtide under a memory checker; fails if a kernel of the package was not launched.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src:tests \
        compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/every_kernel.py

Tools: memcheck, racecheck, synccheck, initcheck. Without PyTorch's caching each tensor is an allocation of its own, and
a read past its end is reported. NCCL asks for kernels of other architectures when it starts and handles that error
itself: hence no reports of API errors. The last line counts the kernels.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.kernel_launch import Launcher

TESTS = Path(__file__).parents[1]
SMALL = [  # tests at small, odd sizes
    "contract/test_values.py", "gpu/test_head.py", "gpu/test_head_edges.py::test_losses_of_thousands_of_nats",
    "gpu/test_skipped_tokens.py", "gpu/test_skip.py::test_softcap", "gpu/test_layers.py::test_norm",
    "gpu/test_mlp.py",
]  # fmt: skip


def kernels() -> dict[str, Launcher]:
    """Return each kernel that the package launches, by module and name."""
    found = {}
    for info in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
        if ".kernels" in info.name:
            module = importlib.import_module(info.name)
            found |= {f"{info.name}.{k}": v for k, v in vars(module).items() if isinstance(v, Launcher)}
    return found


def main() -> None:
    found, launched = kernels(), set[str]()
    launch = Launcher._launch

    def recorded(self: Launcher, *args: Any, **kwargs: Any) -> None:
        launched.update(name for name, kernel in found.items() if kernel is self)
        launch(self, *args, **kwargs)

    Launcher._launch = recorded  # type: ignore[method-assign]
    status = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--device", "cuda", *(str(TESTS / t) for t in SMALL)])
    missing = sorted(set(found) - launched)
    assert not missing, f"not launched: {missing}"
    sys.stdout.write(f"{len(found)} kernels launched\n")
    sys.exit(status)


if __name__ == "__main__":
    main()

from __future__ import annotations

import pytest
import torch

from lowtide.layers import norm, rope


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in Triton's interpreter (on the GPU where there is one, see tests/gpu)."""
    if torch.cuda.is_available():
        pytest.skip("compiled kernels take no tensors of a CPU")
    pytest.importorskip("triton")
    for module in (norm, rope):
        monkeypatch.setattr(module, "why_no_kernel", lambda *_: None)


@pytest.fixture(params=["torch", "kernel"])
def way(request: pytest.FixtureRequest) -> str:
    """Plain PyTorch, or the kernels."""
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    return str(request.param)

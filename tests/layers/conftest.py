from __future__ import annotations

import pytest
import torch

from lowtide.layers import norm, rope


@pytest.fixture(params=["torch", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain PyTorch, or the kernels in Triton's interpreter (on the GPU where there is one, see tests/gpu)."""
    if request.param == "kernel":
        if torch.cuda.is_available():
            pytest.skip("compiled kernels take no tensors of a CPU")
        pytest.importorskip("triton")
        for module in (norm, rope):
            monkeypatch.setattr(module, "why_no_kernel", lambda *_: None)
    return str(request.param)

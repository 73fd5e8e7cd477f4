"""Calls that skip tiles where there is no Hopper GPU."""

from typing import Any

import pytest
import torch

from head.kernel_plans import use_kernels

pytest.importorskip("triton")
from lowtide.head.kernels import gemm
from lowtide.head.terms import cross_entropy
from lowtide.skip import memory, seam
from lowtide.skip.kernels import gemms_hopper, lists
from skip import emulated

PROGRAMS = 5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls skip tiles as on Hopper, in float32."""
    use_kernels(monkeypatch)
    of_loss = cross_entropy.plan_cross_entropy

    def plan(*args: Any) -> Any:
        found = of_loss(*args)
        rows = 160
        object.__setattr__(found, "chunk_rows", rows)
        object.__setattr__(found, "product_rows", rows)
        object.__setattr__(found, "kept", args[0].remembered is not None)
        object.__setattr__(found, "chunks", -(-found.rows // rows))
        return found

    monkeypatch.setattr(cross_entropy, "plan_cross_entropy", plan)
    monkeypatch.setattr(gemm, "CONFIG", gemm.GemmConfig())
    monkeypatch.setattr(seam, "skips_ignored", lambda device: True)
    monkeypatch.setattr(seam, "OPERANDS", torch.float32)
    monkeypatch.setattr(gemms_hopper, "input_grad", emulated.input_grad)
    monkeypatch.setattr(gemms_hopper, "weight_grad", emulated.weight_grad)
    monkeypatch.setattr(lists, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(memory, "FIRST", 0.06)

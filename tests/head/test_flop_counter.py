"""PyTorch's own counter counts what the operators compute, by whatever they compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide.graph import undisturbed
from lowtide.head.matmul import matmul_into
from support import head

N, D, V = 12, 6, 31


def counted(run: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton where there is one

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_products_into_a_wider_dtype() -> None:
    """Where ranks share the vocabulary there is no operator: its products are PyTorch's, also with an out_dtype."""
    a, b, out = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 8), (8, 5), (4, 5)))

    def run() -> None:
        with undisturbed(torch.device("cpu")):
            for add in (False, True):
                matmul_into(a, b, out.float(), add=add)
                matmul_into(a, b, out, add=add)

    assert counted(run) == 4 * 2 * 4 * 8 * 5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run by Triton's interpreter")
@pytest.mark.parametrize("schedule", ["chunks", "blocks"])
def test_triton_kernels_count(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from head.kernel_plans import use_kernels

    used = use_kernels(monkeypatch, schedule)
    x, w, _, y = head(N, 8, V, bias=False)
    assert counted(lambda: lowtide.linear_cross_entropy(x, w, y).backward()) == 6 * N * 8 * V
    assert used == ["exp"]

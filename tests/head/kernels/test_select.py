"""The kernel that finds the tokens which count, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from lowtide.head.kernels.select import BLOCK, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 50


@pytest.mark.parametrize("N", [0, 1, 37, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("token_weights", [False, True])
@pytest.mark.parametrize("class_weights", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 3, 2**40])
def test_rows(N: int, token_weights: bool, class_weights: bool, ignore_index: int) -> None:
    target = torch.randint(0, V, (N,), device=DEVICE)
    target[::5] = ignore_index
    target[1::7] = V  # no class
    target[2::11] = -1
    weight = torch.rand(N, device=DEVICE) if token_weights else None
    q = torch.rand(V, device=DEVICE) if class_weights else None
    y, unit, counted = select(target, V, ignore_index, weight, q)

    kept = target != ignore_index
    is_class = (target >= 0) & (target < V)
    inside = target.where(is_class, 0)
    expected = torch.ones(N, device=DEVICE) if weight is None else weight
    assert y.dtype == torch.int32
    assert torch.equal(y.long(), inside.where(kept, -1))
    torch.testing.assert_close(unit, expected.where(is_class, torch.nan).where(kept, 0), rtol=0, atol=0, equal_nan=True)
    one_each = torch.ones(N, device=DEVICE) if q is None else q[inside]
    torch.testing.assert_close(counted.double().sum(), one_each.where(kept, 0).double().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("N", [0, 1, BLOCK + 13])
@pytest.mark.parametrize(("first", "width"), [(0, V), (0, 20), (20, 30), (50, 0)])
def test_rows_of_a_shard(N: int, first: int, width: int) -> None:
    target = torch.randint(0, V, (N,), device=DEVICE)
    target[::5] = -100
    target[1::7] = V  # no class: the first one stands in its place, on the rank that has it
    whole, unit, counted = select(target, V, -100, None, None)
    y, unit_here, counted_here = select(target, V, -100, None, None, (first, width, 999))
    here = (whole >= first) & (whole < first + width)
    assert torch.equal(y, (whole - first).where(here, 999).where(whole >= 0, -1).int())
    torch.testing.assert_close(unit_here, unit, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(counted_here, counted)

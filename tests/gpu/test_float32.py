"""Float32 heads on a CUDA device follow PyTorch's setting of the precision of float32 GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from gpu.conftest import ON_GPU
from lowtide import linear_cross_entropy
from support import doubled, on_gpu, relative_error

pytestmark = ON_GPU


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_errors_are_those_of_plain_pytorch(precision: str) -> None:
    """Read in each call."""
    x, w, b, y = on_gpu(513, 1000, 12345)
    copies = doubled(x, w, b)
    true = F.cross_entropy(F.linear(*copies), y)
    exact = [true, *torch.autograd.grad(true, copies)]
    for setting in ("highest", precision):
        torch.set_float32_matmul_precision(setting)
        losses = linear_cross_entropy(x, w, y, linear_bias=b), F.cross_entropy(F.linear(x, w, b), y)
        got, plain = ([loss, *torch.autograd.grad(loss, (x, w, b))] for loss in losses)
        for g, p, e in zip(got, plain, exact, strict=True):
            assert relative_error(g, e) <= 2 * relative_error(p, e) + 2.0**-20

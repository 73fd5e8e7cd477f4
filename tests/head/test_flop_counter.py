"""PyTorch's own counter of operations sees the head's products, where these are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import lowtide
from support import head


def entropy(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return lowtide.linear_token_stats(x, w, y, want=("entropy",)).entropy


@pytest.mark.parametrize(
    ("function", "products"), [(lowtide.linear_cross_entropy, 3), (lowtide.linear_logprobs, 4), (entropy, 4)]
)
def test_products_are_counted(function: Callable[..., Any], products: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton where there is one

    N, D, V = 12, 6, 31
    x, w, _, y = head(N, D, V, bias=False)
    with FlopCounterMode(display=False) as counter:
        function(x, w, y).sum().backward()
    assert counter.get_total_flops() == products * 2 * N * D * V

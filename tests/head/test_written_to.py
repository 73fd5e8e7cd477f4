"""Weights written to past autograd between forward and backward, where backward computes the logits anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide import HeadOptions, linear_apply, linear_cross_entropy, linear_divergence, linear_token_stats
from lowtide.errors import UnsupportedError

N, D, V = 6, 8, 50
Function = Callable[[Tensor, Tensor], Tensor]


def _mean(x: Tensor, w: Tensor) -> Tensor:
    return linear_cross_entropy(x, w, torch.arange(N), options=HeadOptions(gradient="recompute"))


def _each(x: Tensor, w: Tensor) -> Tensor:
    return linear_cross_entropy(x, w, torch.arange(N), reduction="none").sum()


def _entropy(x: Tensor, w: Tensor) -> Tensor:
    entropy = linear_token_stats(x, w, want=("entropy",)).entropy
    assert entropy is not None
    return entropy.sum()


def _divergence(x: Tensor, w: Tensor) -> Tensor:
    return linear_divergence(x, w, x.detach() + 1, w.detach().clone()).sum()


def _applied(x: Tensor, w: Tensor) -> Tensor:
    return linear_apply(lambda z: z.logsumexp(-1), x, w).sum()


@pytest.mark.parametrize("function", [_mean, _each, _entropy, _divergence, _applied])
@pytest.mark.parametrize("change", ["all", "row", "dtype"])
def test_weights_written_through_data_before_a_recompute(function: Function, change: str) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(D, V, bias=False), torch.randn(N, D, requires_grad=True)
    function(x, head.weight).backward()
    loss = function(x, head.weight)
    if change == "all":
        head.weight.data.mul_(1.01)
    elif change == "row":
        head.weight.data[7] = 0
    else:
        head.double()
    with pytest.raises(UnsupportedError, match="expected in backward the weights of its forward"):
        loss.backward()

"""Calls that no function computes: arguments of Liger's order, several gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import linear_cross_entropy, linear_logprobs, linear_token_stats, swiglu_mlp
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.layers import rms_norm
from support import head

X, W, _, Y = (t if t is None else t.detach() for t in head(4, 8, 11))


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, linear_logprobs, linear_token_stats], ids=lambda function: function.__name__
)
def test_ligers_order_of_arguments_is_seen(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentValueError, match=r"^target: .*hidden states come first.*Liger"):
        function(W, X, Y)
    with pytest.raises(ArgumentValueError, match=r"^linear_weight: .*hidden states come first.*Liger"):
        function(W, X.view(2, 2, 8), Y.view(2, 2))
    with pytest.raises(ArgumentValueError) as error:
        function(X, W, Y[:3])
    assert "Liger" not in str(error.value)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {  # the head's: contract/test_autograd.py
    "swiglu_mlp": lambda x: swiglu_mlp(x, W, W, W.T),
    "rms_norm": lambda x: rms_norm(x, torch.ones(8), 1e-5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_several_outputs_at_once(name: str) -> None:
    x = X.clone().requires_grad_()
    out = OTHERS[name](x)
    with pytest.raises(UnsupportedError, match="one gradient of its output at a time"):
        torch.autograd.grad(out, x, torch.randn(3, *out.shape), is_grads_batched=True)

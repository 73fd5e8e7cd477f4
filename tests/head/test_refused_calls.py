"""Calls that no function computes: arguments of Liger's order, several gradients at once, traces of TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import (
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    swiglu_mlp,
)
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.layers import rms_norm
from support import head

X, W, _, Y = (t if t is None else t.detach() for t in head(4, 8, 11))
ONE = torch.tensor(2.0)


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


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, W, Y),
    "linear_cross_entropy of each": lambda x: linear_cross_entropy(x, W, Y, reduction="none"),
    "recomputed": lambda x: linear_cross_entropy(x, W.clone().requires_grad_(), Y, reduction="none"),
    "linear_logprobs": lambda x: linear_logprobs(x, W, Y, logit_scale=ONE.clone().requires_grad_()),
    "linear_token_stats": lambda x: linear_token_stats(x, W, want=("entropy",)).entropy,
    "linear_divergence": lambda x: linear_divergence(x, W, X, W),
    "linear_divergence, one": lambda x: linear_divergence(x, W, X, W, reduction="mean"),
    "linear_apply": lambda x: linear_apply(lambda z: z.sum(-1), x, W),
    "linear_apply, one": lambda x: linear_apply(lambda z: z.sum(), x, W, out="sum"),
    "swiglu_mlp": lambda x: swiglu_mlp(x, W, W, W.T),
    "rms_norm": lambda x: rms_norm(x, torch.ones(8), 1e-5),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_several_outputs_at_once(name: str) -> None:
    x = X.clone().requires_grad_()
    out = DIFFERENTIABLE[name](x)
    upstream = torch.randn(3, *out.shape)
    with pytest.raises(UnsupportedError, match="one gradient of its output at a time"):
        torch.autograd.grad(out, x, upstream, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name.startswith("linear")])
def test_a_trace_of_torchscript_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^input: expected .* inside torch\.jit\.trace\. Use torch\.compile"):
        torch.jit.trace(DIFFERENTIABLE[name], (X,))

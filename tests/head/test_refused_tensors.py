"""Tensors that no function computes with: nested, sparse, quantised, float8, complex; and swapped arguments."""

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
    losses,
    swiglu_mlp,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.layers import add_rms_norm, rms_norm, rotary
from support import head

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
]

X, W, B, Y = (t if t is None else t.detach() for t in head(4, 8, 11))
assert B is not None
ONE, D_ONES, EACH, MASK = torch.tensor(2.0), torch.ones(8), torch.rand(4), Y > 2
HEADS, TABLE = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 8)


def by_topk(ids: Tensor, logprobs: Tensor, **kwargs: Any) -> Tensor:
    return linear_divergence(X, W, None, None, teacher_topk=(ids, logprobs), **kwargs)


def applied(input: Tensor, linear_weight: Tensor, token_args: Tensor, params: Tensor, **kwargs: Any) -> Tensor:
    return linear_apply(lambda z, a, p: z.sum(-1) + a * p, input, linear_weight, token_args, params=(params,), **kwargs)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear_cross_entropy": (
        linear_cross_entropy,
        {
            "input": X, "linear_weight": W, "target": Y, "linear_bias": B, "weight": B.abs(), "token_weight": EACH,
            "logit_scale": ONE, "num_items": ONE,
        },
    ),
    "linear_logprobs": (
        linear_logprobs, {"input": X, "linear_weight": W, "target": Y, "linear_bias": B, "logit_scale": ONE},
    ),
    "linear_token_stats": (
        linear_token_stats, {"input": X, "linear_weight": W, "target": Y, "linear_bias": B, "logit_scale": ONE},
    ),
    "linear_divergence": (
        linear_divergence,
        {
            "input": X, "linear_weight": W, "teacher_input": X, "teacher_weight": W, "linear_bias": B,
            "teacher_bias": B, "temperature": ONE, "num_items": ONE, "mask": MASK, "reduction": "mean",
        },
    ),
    "of a top k": (by_topk, {"ids": torch.zeros(4, 1, dtype=torch.long), "logprobs": -torch.rand(4, 1)}),
    "linear_apply": (
        applied,
        {
            "input": X, "linear_weight": W, "token_args": EACH, "params": ONE, "linear_bias": B, "mask": MASK,
            "logit_scale": ONE,
        },
    ),
    "swiglu_mlp": (
        swiglu_mlp,
        {
            "input": X, "gate_weight": W, "up_weight": W, "down_weight": W.T, "gate_bias": B, "up_bias": B,
            "down_bias": D_ONES,
        },
    ),
    "rms_norm": (rms_norm, {"input": X, "weight": D_ONES, "eps": 1e-5}),
    "add_rms_norm": (add_rms_norm, {"input": X, "residual": X, "weight": D_ONES, "eps": 1e-5}),
    "rotary": (rotary, {"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE}),
    "losses": (losses.sft_loss, {"logprob": -torch.rand(2, 4), "mask": torch.ones(2, 4, dtype=torch.bool)}),
}  # fmt: skip
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "jagged": lambda t: torch.nested.nested_tensor([t[:1], t[1:]], layout=torch.jagged),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "float8, wide range": lambda t: t.to(torch.float8_e5m2),
    "complex": lambda t: t.to(torch.complex64),
}
AS_THEY_ARE = {  # what fn gets, it gets as it is
    ("linear_apply", "token_args"): ("float8", "float8, wide range", "complex"),
    ("linear_apply", "params"): tuple(CHANGES),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_names_the_argument(name: str, change: str) -> None:
    function, kwargs = FUNCTIONS[name]
    for argument, value in kwargs.items():
        if not isinstance(value, Tensor) or change in AS_THEY_ARE.get((name, argument), ()):
            continue
        if "float8" in change and not value.is_floating_point():
            continue
        if (change == "sparse rows" and value.dim() < 2) or (change == "jagged" and value.dim() < 1):
            continue
        with pytest.raises(ArgumentTypeError, match=rf"^(teacher_topk\.)?{argument}(\[0\])?: expected"):
            function(**{**kwargs, argument: CHANGES[change](value)})


def test_what_is_refused_is_taken_otherwise() -> None:
    for function, kwargs in FUNCTIONS.values():
        function(**kwargs)
    counts = {"weight": torch.arange(11), "token_weight": MASK, "logit_scale": torch.tensor(2), "num_items": ONE.int()}
    linear_cross_entropy(X, W, Y, **counts)  # integers and booleans are real numbers


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
    "rms_norm": lambda x: rms_norm(x, D_ONES, 1e-5),
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

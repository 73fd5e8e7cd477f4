"""What an ignored token sends back: 0, whatever comes from upstream."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from lowtide import linear_apply, linear_cross_entropy
from lowtide.head.scaling import scaled
from support import head

summed = partial(torch.nn.functional.cross_entropy, reduction="sum")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, w, b, y = head((2, 5), 8, 33, dtype=dtype)
    assert b is not None
    return x, w, y, b, torch.tensor(1.5, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_num_items_of_0_beside_kept_tokens_is_stocks(dtype: torch.dtype) -> None:
    x, w, y, b, _ = leaves(dtype)
    y[0] = -100
    loss = linear_cross_entropy(x, w, y, linear_bias=b, num_items=torch.tensor(0.0))
    assert loss == math.inf
    grad_x, grad_w = torch.autograd.grad(loss, (x, w))
    assert not grad_x[1].isfinite().any()
    assert not grad_w.isfinite().any()
    assert torch.equal(grad_x[0], torch.zeros_like(grad_x[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, math.inf, -math.inf, math.nan])
def test_rows_that_fn_itself_leaves_out(dtype: torch.dtype, factor: float) -> None:
    """Stored gradients of a sum: what is 0 in them stays 0, whether all rows are ignored or some."""
    x, w, y, b, s = leaves(dtype)
    for ignored in (slice(None), (torch.tensor([0, 1, 1]), torch.tensor([1, 2, 3]))):
        y[:], kept = 3, torch.ones_like(y, dtype=torch.bool)
        y[ignored], kept[ignored] = -100, False
        loss = linear_apply(summed, x, w, y, linear_bias=b, logit_scale=s, out="sum")
        for retain in (True, False):
            grads = torch.autograd.grad(loss * factor, (x, w, b, s), retain_graph=retain)
            assert torch.equal(grads[0][~kept], torch.zeros_like(x[~kept]))
            for grad in (grads[0][kept], *grads[1:]):
                zero = not kept.any()
                assert (grad == 0).all() if zero else grad.isfinite().all() == (factor == 1)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_too(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x, w, y, b, s = leaves(dtype)
    y[0, 1] = y[1, 2:4] = -100

    def step(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, y, linear_bias=b, reduction="sum", logit_scale=s) * math.inf

    loss = torch.compile(step, backend="aot_eager")(x, w)
    grad_x, grad_s = torch.autograd.grad(loss, (x, s))
    assert torch.equal(grad_x[y == -100], torch.zeros_like(x[y == -100]))
    assert not grad_x[y != -100].isfinite().any()
    assert not grad_s.isfinite()


def test_rows_are_scaled_each_by_its_factor() -> None:
    grad = torch.arange(12.0).view(4, 3)
    grad[1] = 0
    kept = torch.tensor([True, False, True, True])
    for in_place in (False, True):
        for factor in (torch.tensor(2.0), torch.tensor(math.nan), torch.tensor([1.0, math.inf, 3.0, -1.0])):
            got = scaled(grad.clone(), factor, in_place, kept)
            want = (grad * (factor[:, None] if factor.dim() else factor)).where(kept[:, None], 0)
            torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
    zeros = scaled(grad, torch.tensor(math.inf), False, zeros_stay=True)
    assert torch.equal(zeros, torch.where(grad == 0, 0, torch.inf))

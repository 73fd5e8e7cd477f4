"""The edges of the exponential path and the row kernels: odd sizes, large losses, strides, NaN, many elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import EXPONENTIAL, ON_GPU
from lowtide import HeadOptions, linear_cross_entropy, plan_head
from promises import promise
from support import assert_same_gradients, every_pair, in_float64, on_gpu, oracle, relative_error

pytestmark = [*ON_GPU, EXPONENTIAL, promise("values", "kernels", "layouts")]
BACKENDS = pytest.mark.parametrize("backend", ["exp", "row"])


def bf16(N: int, D: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    x, w, _, y = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False)
    return x, w, y


def compare(x: Tensor, w: Tensor, y: Tensor, most: tuple[float, float, float], **kwargs: Any) -> None:
    """Loss, dX and dW against float64 autograd, as norms."""
    loss = linear_cross_entropy(x, w, y, **kwargs)
    truth = in_float64({**kwargs, "input": x, "linear_weight": w, "target": y})
    expected = oracle(**truth)
    got = torch.autograd.grad(loss.sum(), (x, w))
    want = torch.autograd.grad(expected.sum(), (truth["input"], truth["linear_weight"]))
    for g, e, bound in zip((loss, *got), (expected, *want), most, strict=True):
        assert relative_error(g, e) <= bound


@BACKENDS
@pytest.mark.parametrize("shape", [(1, 64, 2), (37, 896, 50257), (4097, 2880, 1003), (300, 64, 262145), (130, 8, 300)])
def test_odd_shapes(backend: Any, shape: tuple[int, int, int]) -> None:
    few = shape[0] < 300  # few roundings: their norm varies, up to twice the floor
    bounds = (1e-5, 3.4e-3, 5.8e-3) if few else (1e-5, 1.8e-3, 4.5e-3)
    compare(*bf16(*shape), bounds, options=HeadOptions(backend=backend))


@every_pair(
    factor=[10.0, 1e3], gradient=["forward", "recompute"], extra=[{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}]
)  # fmt: skip
def test_losses_of_thousands_of_nats(factor: float, gradient: Any, extra: dict[str, Any]) -> None:
    x, w, y = bf16(500, 128, 5003)
    with torch.no_grad():
        x[::3] *= factor
    y[::7] = -100
    compare(x, w, y, (1e-5, 3.4e-3, 3.4e-3), options=HeadOptions(backend="exp", gradient=gradient), **extra)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@BACKENDS
def test_a_device_that_is_not_the_current_one(backend: Any) -> None:
    x, w, y = (t.detach().to("cuda:1") for t in bf16(300, 64, 1003))
    x.requires_grad_()
    w.requires_grad_()
    compare(x, w, y, (1e-5, 1.8e-3, 4.5e-3), options=HeadOptions(backend=backend))
    assert torch.cuda.current_device() == 0


def test_a_z_loss_that_cancels_the_cross_entropy() -> None:
    for u in torch.linspace(-0.3106676, -0.3106673, 40).tolist():  # -1 / (2 log 5), and float32's steps around it
        x = torch.zeros(64, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w, b = torch.randn(5, 8, device="cuda").bfloat16(), torch.zeros(5, device="cuda", dtype=torch.bfloat16)
        y = torch.randint(0, 5, (64,), device="cuda")
        loss = linear_cross_entropy(x, w, y, linear_bias=b, z_loss=u, options=HeadOptions(backend="exp"))
        (dx,) = torch.autograd.grad(loss, x)
        truth = in_float64({"input": x, "linear_weight": w, "target": y, "linear_bias": b, "z_loss": u})
        (want,) = torch.autograd.grad(oracle(**truth), truth["input"])
        assert relative_error(dx, want) <= 1e-2


def test_more_elements_than_32_bits_count() -> None:
    N, D, V = 12288, 64, 2**19
    x, w, y = bf16(N, D, V)
    wide = HeadOptions(workspace_mib=14000)
    assert plan_head(N, D, V, torch.bfloat16, "cuda", wide).chunk_rows * V > 2**32
    whole = linear_cross_entropy(x, w, y, reduction="sum", options=wide)
    small = linear_cross_entropy(x, w, y, reduction="sum", options=HeadOptions(workspace_mib=64))
    torch.testing.assert_close(whole, small, rtol=1e-6, atol=0)
    assert_same_gradients(whole, small, (x, w), bound=5e-3)

"""What the CPU does in a call of the loss: few operators over long chunks, on CPUs with and without bf16 GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lowtide import linear_cross_entropy, linear_divergence, linear_token_stats, plan_head
from support import head

KIB = 2**10
VIEWS = {"aten::" + name for name in ("slice", "t", "transpose", "view", "as_strided", "detach", "select", "expand")}


def wide_operators(call: Callable[[], Tensor], elements: int) -> int:
    """Return how many operators of forward and backward read that many elements or more; views do no work."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        call().backward()

    def largest(shapes: list[Any]) -> int:
        return max((torch.Size(shape).numel() for shape in shapes if shape), default=0)

    return sum(
        event.name.startswith("aten::")
        and event.name not in VIEWS
        and not event.cpu_children
        and largest(event.input_shapes) >= elements
        for event in profiler.events()
    )


@pytest.mark.parametrize("kwargs", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"logit_scale": 0.5}])
def test_a_chunk_takes_about_as_many_operators_as_stock_takes_for_all(kwargs: dict[str, Any]) -> None:
    """Each wakes all threads and waits for the last: hundreds of short ones took three times stock's time."""
    N, D, V = 1024, 16, 4104
    x, w, _, y = head(N, D, V, bias=False)
    plan = plan_head(N, D, V, torch.float32, "cpu")
    assert plan.chunk_rows * V * 4 >= 8 * 2**20 - 4 * V
    stock = wide_operators(lambda: F.cross_entropy(F.linear(x, w), y), 512 * V)
    ours = wide_operators(lambda: linear_cross_entropy(x, w, y, **kwargs), 64 * KIB)  # the weight's, too
    assert ours <= plan.chunks * (stock + 5 + len(kwargs))


@pytest.mark.parametrize("shape", [(2048, 256, 8192), (1024, 1024, 32000), (256, 2048, 128256)])
def test_a_chunk_has_rows_enough_to_read_the_weight_for(shape: tuple[int, int, int]) -> None:
    assert plan_head(*shape, torch.float32, "cpu").chunk_rows >= min(512, shape[0])


def test_bf16_is_right_on_every_cpu(cpu_multiplies_bf16: bool) -> None:
    N, D, V = 96, 24, 515
    x, w, b, y = head(N, D, V, dtype=torch.bfloat16)
    assert plan_head(N, D, V, torch.bfloat16, "cpu").backward_gemm == ("narrow" if cpu_multiplies_bf16 else "blocks")
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]

    stats = linear_token_stats(x, w, y, linear_bias=b)
    value = (
        linear_cross_entropy(x, w, y, linear_bias=b, softcap=9.0, label_smoothing=0.1)
        + (stats.logprob + stats.entropy).mean()
        + linear_divergence(x, w, x.detach().flip(0), w.detach(), linear_bias=b).mean()
    )
    z = F.linear(*wide)
    logprob = z.log_softmax(-1)
    teacher = F.linear(wide[0].detach().flip(0), wide[1].detach()).log_softmax(-1)
    exact = F.cross_entropy(9 * torch.tanh(z / 9), y, label_smoothing=0.1) - F.nll_loss(logprob, y)
    exact = exact - (logprob.exp() * logprob).sum(-1).mean() + (teacher.exp() * (teacher - logprob)).sum(-1).mean()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    for got, expected in zip(torch.autograd.grad(value, (x, w, b)), torch.autograd.grad(exact, wide), strict=True):
        assert (got.double() - expected).norm() <= 1e-2 * expected.norm()

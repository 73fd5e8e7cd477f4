"""Chunks on CPUs, with and without bf16 GEMMs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowtide import linear_cross_entropy, linear_divergence, linear_token_stats, plan_head
from support import head


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

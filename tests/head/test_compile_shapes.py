"""Every public function inside `torch.compile`, at shapes that change: no plan is made in a trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import (
    HeadOptions,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    losses,
    swiglu_mlp,
)
from lowtide.layers import rms_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's
]
SHAPES = [(2, 6), (3, 5), (4, 9), (1, 7)]
V, D = 33, 16
W, W_2 = torch.randn(V, D, requires_grad=True), torch.randn(V, D)
B, S = torch.randn(V, requires_grad=True), torch.tensor(1.3, requires_grad=True)
GATE, UP, DOWN = torch.randn(40, D, requires_grad=True), torch.randn(40, D), torch.randn(D, 40)
SMALL = HeadOptions(workspace_mib=0.01)


def own(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def each(z: Tensor) -> Tensor:
    return z.logsumexp(-1)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear_cross_entropy": lambda x, y: linear_cross_entropy(x, W, y, linear_bias=B, shift=True, options=SMALL),
    "with a trained scale": lambda x, y: linear_cross_entropy(x, W, y, linear_bias=B, logit_scale=S),
    "linear_logprobs": lambda x, y: linear_logprobs(x, W, y, logit_scale=S).mean(),
    "linear_token_stats": lambda x, y: linear_token_stats(x, W, want=("entropy",), logit_scale=S).entropy.mean(),
    "linear_divergence": lambda x, y: linear_divergence(x, W, x.detach(), W_2, mask=y > 3, reduction="mean"),
    "linear_apply": lambda x, y: linear_apply(own, x, W, y, linear_bias=B, out="sum", options=SMALL),
    "linear_apply of each": lambda x, y: linear_apply(each, x, W, mask=y > 3, logit_scale=S).mean(),
    "swiglu_mlp": lambda x, y: swiglu_mlp(x, GATE, UP, DOWN, tile_tokens=7).mean() + 0 * y.sum(),
    "losses": lambda x, y: losses.grpo_loss(x[..., 0], x[..., 1].detach(), x[:, 0, 0].detach(), y > 3),
    "rms_norm": lambda x, y: rms_norm(x, W_2[0], 1e-5).square().mean() + 0 * y.sum(),
}


QUICK = ["with a trained scale", "linear_divergence", "swiglu_mlp", "linear_apply", "linear_apply of each"]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(pytest.param(name, True, marks=[] if name in QUICK else pytest.mark.slow) for name in FUNCTIONS),
        # what compiles anew for a second shape takes twice as long
        *(pytest.param(name, None, marks=[] if "apply" in name else pytest.mark.slow) for name in FUNCTIONS),
    ],
)
def test_other_shapes(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(lambda x, y: function(x * 2, y) * 3, backend="eager", dynamic=dynamic)
    for shape in SHAPES:
        x, y = torch.randn(*shape, D, requires_grad=True), torch.randint(V, shape)
        got, want = compiled(x, y), function(x * 2, y) * 3
        torch.testing.assert_close(got, want)
        for g, e in zip(torch.autograd.grad(got, (x,)), torch.autograd.grad(want, (x,)), strict=True):
            torch.testing.assert_close(g, e)

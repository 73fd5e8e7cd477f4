"""Functions beside the head inside `torch.compile`, at shapes that change: no plan is made in a trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide import losses, swiglu_mlp
from lowtide.layers import rms_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's
]
SHAPES = [(2, 6), (3, 5), (4, 9), (1, 7)]
D = 16
GATE, UP, DOWN, SCALE = torch.randn(40, D, requires_grad=True), torch.randn(40, D), torch.randn(D, 40), torch.randn(D)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu_mlp": lambda x, y: swiglu_mlp(x, GATE, UP, DOWN, tile_tokens=7).mean() + 0 * y.sum(),
    "losses": lambda x, y: losses.grpo_loss(x[..., 0], x[..., 1].detach(), x[:, 0, 0].detach(), y > 3),
    "rms_norm": lambda x, y: rms_norm(x, SCALE, 1e-5).square().mean() + 0 * y.sum(),
}


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.slow)])  # it compiles a second time
@pytest.mark.parametrize(
    "name", [n if n == "swiglu_mlp" else pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS]
)
def test_other_shapes(name: str, dynamic: bool | None) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(lambda x, y: function(x * 2, y) * 3, backend="eager", dynamic=dynamic)
    for shape in SHAPES:
        x, y = torch.randn(*shape, D, requires_grad=True), torch.randint(33, shape)
        got, want = compiled(x, y), function(x * 2, y) * 3
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x,)), torch.autograd.grad(want, (x,)))

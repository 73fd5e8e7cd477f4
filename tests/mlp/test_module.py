"""lowtide.nn.SwiGLU: a Llama's MLP by its state dict and its values, refusing what it would leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations

from lowtide import nn
from lowtide.errors import ArgumentValueError, UnsupportedError


def written_out(mlp: nn.SwiGLU, x: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


@pytest.mark.parametrize("level", [0, 1])
def test_it_is_a_llamas_mlp(level: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2)
    theirs, ours = LlamaMLP(config), nn.SwiGLU(16, 40, checkpoint_level=level)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 16, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    got, expected = (torch.autograd.grad(f(x).square().sum(), (x, *f.parameters())) for f in (ours, theirs))
    torch.testing.assert_close(got, expected)


def test_arguments() -> None:
    mlp = nn.SwiGLU(7, 11, device="meta", dtype=torch.bfloat16)
    assert mlp.checkpoint_level == 1
    assert [tuple(p.shape) for p in mlp.parameters()] == [(11, 7), (11, 7), (7, 11)]
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in mlp.parameters())
    with pytest.raises(ArgumentValueError, match="checkpoint_level"):
        nn.SwiGLU(7, 11, checkpoint_level=3)


class Scaled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _replace(make: Any) -> Any:
    return lambda mlp: setattr(mlp, "up_proj", make(mlp.up_proj))


def _hook(kind: str) -> Any:
    return lambda mlp: getattr(mlp.up_proj, f"register_{kind}_hook")(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replace(lambda _: Scaled(7, 11, bias=False)), "a Scaled with a forward"),
        (lambda mlp: setattr(mlp.up_proj, "forward", lambda x: x), "a forward of its own"),  # as accelerate's hooks do
        *((_hook(kind), "hooks") for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")),
    ],
)
def test_what_would_be_left_out_is_refused(change: Any, reason: str) -> None:
    mlp = nn.SwiGLU(7, 11)
    change(mlp)
    with pytest.raises(UnsupportedError, match=rf"up_proj: expected a plain torch.nn.Linear.*got.*{reason}"):
        mlp(torch.randn(3, 7))


def test_a_parametrised_weight_and_a_bias_are_taken() -> None:
    mlp = nn.SwiGLU(7, 11, dtype=torch.float64)
    parametrizations.weight_norm(mlp.gate_proj)
    mlp.down_proj = torch.nn.Linear(11, 7, dtype=torch.float64)
    x = torch.randn(3, 7, dtype=torch.float64)
    leaves = list(mlp.parameters())
    expected = written_out(mlp, x) + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(torch.autograd.grad(mlp(x).sum(), leaves), torch.autograd.grad(expected.sum(), leaves))

"""How many Python functions a call runs: what the host does while a GPU waits, where sequences are short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import nn, swiglu_mlp
from lowtide.layers import add_rms_norm, rms_norm, rotary


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _mlp(level: int) -> Tensor:
    gate, up, down = _leaf(7, 5), _leaf(7, 5), _leaf(5, 7)
    return swiglu_mlp(_leaf(3, 5), gate, up, down, checkpoint_level=level)


def _rotary() -> Tensor:
    q, k = rotary(_leaf(1, 2, 3, 6), _leaf(1, 2, 3, 6), torch.randn(1, 3, 6), torch.randn(1, 3, 6))
    return q + k


# What each took when this was written was about three quarters of its bounds, and before that about four thirds.
CASES: dict[str, tuple[Callable[[], Tensor], int, int]] = {
    "mlp, level 0": (lambda: _mlp(0), 200, 330),
    "mlp, level 1": (lambda: _mlp(1), 175, 310),
    "add_rms_norm": (lambda: add_rms_norm(_leaf(3, 5), _leaf(3, 5), _leaf(5), 1e-5)[0], 68, 134),
    "rms_norm": (lambda: rms_norm(_leaf(3, 5), _leaf(5), 1e-5), 62, 124),
    "rotary": (_rotary, 70, 140),
}


def _calls(function: Callable[[], Any]) -> tuple[int, Any]:
    count = 0

    def seen(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return count, result


@pytest.mark.parametrize("name", CASES)
def test_a_call_runs_few_functions(name: str) -> None:
    function, forward, both = CASES[name]
    function().sum().backward()  # what the first call alone does
    there, y = _calls(function)
    back, _ = _calls(y.sum().backward)
    assert there <= forward
    assert there + back <= both


def test_the_module_adds_little() -> None:
    mlp = nn.SwiGLU(5, 7)
    x = _leaf(3, 5)
    mlp(x)
    count, _ = _calls(lambda: mlp(x))
    assert count <= 200


def test_without_gradients_the_mlp_runs_fewer() -> None:
    tensors = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7, 5), torch.randn(5, 7)
    swiglu_mlp(*tensors)
    count, _ = _calls(lambda: swiglu_mlp(*tensors))
    assert count <= 110

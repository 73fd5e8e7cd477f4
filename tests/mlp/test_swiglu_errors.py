"""Every bad argument of swiglu_mlp gives one error that names it, what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide import swiglu_mlp
from lowtide.errors import LowtideError
from support import Sharded

X, GATE, UP, DOWN = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"input": [1.0]}, TypeError, r"input: expected a torch.Tensor, got list"),
        ({"input": X[:, :3]}, ValueError, r"input: expected shape \[..., 4\], as gate_weight .*, got \[3, 3\]"),
        ({"gate_weight": GATE[0]}, ValueError, r"gate_weight: expected shape \[F, D\], got \[4\]"),
        ({"up_weight": UP[:5]}, ValueError, r"up_weight: expected shape \[6, 4\], as gate_weight is .* got \[5, 4\]"),
        ({"down_weight": DOWN.T}, ValueError, r"down_weight: expected shape \[4, 6\].* got \[6, 4\]"),
        ({"gate_bias": torch.randn(4)}, ValueError, r"gate_bias: expected shape \[6\].* got \[4\]"),
        ({"up_bias": torch.randn(1, 6)}, ValueError, r"up_bias: expected shape \[6\].* got \[1, 6\]"),
        ({"down_bias": torch.randn(6)}, ValueError, r"down_bias: expected shape \[4\].* got \[6\]"),
        ({"up_weight": UP.to(torch.float8_e4m3fn)}, TypeError, r"up_weight: expected float64.*got torch.float8_e4m3fn"),
        ({"up_weight": UP.double()}, TypeError, r"up_weight: expected dtype torch.float32.*autocast"),
        ({"down_bias": torch.randn(4).half()}, TypeError, r"down_bias: expected dtype torch.float32, as input has"),
        ({"down_weight": DOWN.to("meta")}, ValueError, r"down_weight: expected a tensor on cpu.* got meta"),
        ({"gate_weight": GATE.as_subclass(Sharded)}, TypeError, r"gate_weight: expected a tensor that is whole.*FSDP2"),
        ({"activation": "gelu"}, ValueError, r"activation: expected 'silu' or 'gelu_tanh', got 'gelu'"),
        ({"checkpoint_level": 2}, ValueError, r"checkpoint_level: expected 0 .* or 1 .* got 2"),
        ({"checkpoint_level": True}, TypeError, r"checkpoint_level: expected an int, got True"),
        ({"tile_tokens": 0}, ValueError, r"tile_tokens: expected a whole number above 0, or None, got 0"),
    ],
)  # fmt: skip
def test_one_clear_error(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"input": X, "gate_weight": GATE, "up_weight": UP, "down_weight": DOWN, **change}
    with pytest.raises(LowtideError, match=words) as error:
        swiglu_mlp(**arguments)
    assert isinstance(error.value, kind)

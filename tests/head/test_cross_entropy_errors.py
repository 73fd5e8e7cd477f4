"""What cannot be computed is refused with one sentence: the argument, what was expected, what came, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide import HeadOptions, linear_cross_entropy
from lowtide.errors import LowtideError
from support import head

GOOD = dict(zip(("input", "linear_weight", "linear_bias", "target"), head((2, 3), 4, 7), strict=True))
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": [1.0]}, TypeError, r"input: expected a torch.Tensor, got list"),
    ({"input": torch.tensor(1.0)}, ValueError, r"input: expected shape \[..., 4\].*got \[\]"),
    ({"input": torch.rand(2, 3, 5)}, ValueError, r"input: expected shape \[..., 4\].*got \[2, 3, 5\]"),
    ({"input": torch.ones(2, 3, 4, dtype=torch.long)}, TypeError, "input: expected a floating-point dtype"),
    ({"input": torch.rand(2, 3, 4).bfloat16()}, TypeError, "linear_weight: expected dtype torch.bfloat16.*autocast"),
    ({"linear_weight": torch.rand(7)}, ValueError, r"linear_weight: expected shape \[V, D\], got \[7\]"),
    ({"linear_weight": torch.rand(7, 4).half()}, TypeError, "linear_weight: expected dtype torch.float32"),
    ({"linear_weight": torch.rand(7, 4, device="meta")}, ValueError, "linear_weight: expected a tensor on cpu"),
    ({"linear_bias": torch.rand(6)}, ValueError, r"linear_bias: expected shape \[7\].*got \[6\]"),
    ({"linear_bias": torch.rand(7).double()}, TypeError, "linear_bias: expected dtype torch.float32"),
    ({"target": torch.ones(2, 2, dtype=torch.long)}, ValueError, r"target: expected shape \[2, 3\].*got \[2, 2\]"),
    ({"target": torch.rand(2, 3, 7)}, TypeError, "target: expected class indices.*linear_apply.*linear_divergence"),
    ({"target": torch.rand(2, 3)}, TypeError, "target: expected class indices.*linear_apply.*linear_divergence"),
    ({"target": torch.ones(2, 3, dtype=torch.bool)}, TypeError, "target: expected class indices"),
    ({"target": torch.full((2, 3), 7)}, IndexError, r"target: expected class indices from 0 to 6.*got 7 at position 0"),
    ({"target": torch.full((2, 3), -1)}, IndexError, r"target:.*got -1 at position 0.*ignore_index"),
    ({"weight": torch.rand(6)}, ValueError, r"weight: expected one class weight for each of 7, got shape \[6\]"),
    ({"weight": [1.0] * 7}, TypeError, "weight: expected a torch.Tensor"),
    ({"weight": torch.rand(7, device="meta")}, ValueError, "weight: expected a tensor on cpu.*got meta"),
    ({"shift": "no"}, TypeError, "shift: expected True or False, got 'no'"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index: expected an int of 64 bits"),
    ({"softcap": float("inf")}, ValueError, "softcap: expected a finite number above 0, got inf"),
    ({"reduction": "avg"}, ValueError, "reduction: expected 'mean', 'sum' or 'none', got 'avg'"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got 1.5"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an int, got None"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a number from 0 to 1, got 1.5"),
    ({"label_smoothing": "a"}, TypeError, "label_smoothing: expected a number, got 'a'"),
    ({"z_loss": float("nan")}, ValueError, "z_loss: expected a finite number.*got nan"),
    ({"softcap": 0}, ValueError, "softcap: expected a finite number above 0, got 0"),
    ({"softcap": -3.0}, ValueError, "softcap: expected a finite number above 0, got -3.0"),
    ({"logit_scale": torch.rand(2)}, ValueError, r"logit_scale: expected a number or a 0-d tensor, got shape \[2\]"),
    ({"logit_scale": True}, TypeError, "logit_scale: expected a number or a 0-d tensor, got True"),
    ({"token_weight": torch.rand(3)}, ValueError, r"token_weight: expected shape \[2, 3\].*got \[3\]"),
    ({"num_items": 0}, ValueError, "num_items: expected a finite number above 0, got 0"),
    ({"num_items": "7"}, TypeError, "num_items: expected a number, got '7'"),
    ({"num_items": torch.ones(1)}, ValueError, "num_items: expected a number or a 0-d tensor"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None with reduction='sum', got 3"),
    ({"num_items": 3, "reduction": "none"}, ValueError, "num_items: expected None with reduction='none', got 3"),
    (
        {"input": torch.rand(4), "target": torch.tensor(1), "shift": True},
        ValueError,
        "input: expected at least two axes",
    ),
    ({"options": {"workspace_mib": 3}}, TypeError, "options: expected lowtide.HeadOptions or None, got dict"),
    ({"options": HeadOptions(backend="exp")}, RuntimeError, "backend: expected 'auto', 'row' or 'torch', got 'exp'"),
    ({"options": HeadOptions(backend="row")}, RuntimeError, "backend: expected 'auto', 'exp' or 'torch', got 'row'"),
    ({"options": HeadOptions(gradient="forward"), "reduction": "none"}, RuntimeError, "gradient: expected 'auto' or"),
]


@pytest.mark.parametrize(("change", "kind", "text"), BAD, ids=lambda value: None)
def test_bad_input(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        linear_cross_entropy(**{**GOOD, **change})
    assert isinstance(caught.value, LowtideError)
    assert "\n" not in str(caught.value)


def test_the_good_arguments_are_good() -> None:
    assert linear_cross_entropy(**GOOD).isfinite()


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_a_bad_target_is_named_by_value_and_place() -> None:
    x, w, _, y = head((2, 5), 4, 7)
    y[1, 2] = 99
    with pytest.raises(IndexError, match="got 99 at position 7"):
        linear_cross_entropy(x, w, y)
    with pytest.raises(IndexError, match="got 99"):
        torch.compile(lambda x: linear_cross_entropy(x, w, y), backend="eager")(x)
    y[1, 2] = -7
    assert linear_cross_entropy(x, w, y, ignore_index=-7).isfinite()


def test_a_shifted_away_target_is_not_looked_at() -> None:
    x, w, _, y = head((2, 5), 4, 7)
    y[:, 0] = 99
    assert linear_cross_entropy(x, w, y, shift=True).isfinite()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"workspace_mib": 0}, ValueError, "workspace_mib: expected a finite number above 0, or None, got 0"),
        ({"workspace_mib": -1.5}, ValueError, "workspace_mib"),
        ({"workspace_mib": float("inf")}, ValueError, "workspace_mib"),
        ({"workspace_mib": float("nan")}, ValueError, "workspace_mib"),
        ({"workspace_mib": "64"}, TypeError, "workspace_mib: expected a number of MiB or None, got '64'"),
        ({"workspace_mib": True}, TypeError, "workspace_mib"),
        ({"accumulate": "bf16"}, ValueError, "accumulate: expected one of 'auto', 'float32', 'input', got 'bf16'"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of 'auto', 'exp', 'row', 'torch', got 'cuda'"),
        ({"gradient": "backward"}, ValueError, "gradient: expected one of 'auto', 'forward', 'recompute'"),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        HeadOptions(**options)
    assert isinstance(caught.value, LowtideError)


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(AttributeError):
        HeadOptions().workspace_mib = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        HeadOptions(3)  # type: ignore[misc]


def test_every_error_is_a_lowtide_error_and_a_builtin() -> None:
    for name, kind in vars(lowtide.errors).items():
        if isinstance(kind, type) and kind is not LowtideError:
            assert issubclass(kind, LowtideError), name
            assert issubclass(kind, (ValueError, TypeError, IndexError, RuntimeError)), name

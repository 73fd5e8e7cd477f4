"""What linear_logprobs and linear_token_stats refuse, with one sentence each."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lowtide import HeadOptions, linear_logprobs, linear_token_stats
from lowtide.errors import LowtideError
from lowtide.head.backends import choose, why_not_exp_stats
from support import head

GOOD = dict(zip(("input", "linear_weight", "linear_bias", "target"), head((2, 3), 4, 7), strict=True))
BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": torch.rand(2, 3, 5)}, ValueError, r"input: expected shape \[..., 4\].*got \[2, 3, 5\]"),
    ({"linear_weight": torch.rand(7, 4).half()}, TypeError, "linear_weight: expected dtype torch.float32"),
    ({"linear_bias": torch.rand(6)}, ValueError, r"linear_bias: expected shape \[7\]"),
    ({"target": torch.ones(2, 2, dtype=torch.long)}, ValueError, r"target: expected shape \[2, 3\].*got \[2, 2\]"),
    ({"target": torch.ones(2, 4, 3, dtype=torch.long)}, ValueError, r"target: expected shape \[2, 3\] or \[2, 3, K\]"),
    ({"target": torch.ones(2, 3, 0, dtype=torch.long)}, ValueError, "with K above 0"),
    ({"target": torch.rand(2, 3)}, TypeError, "target: expected class indices"),
    ({"target": torch.ones(2, 3, dtype=torch.bool)}, TypeError, "target: expected class indices"),
    ({"target": torch.full((2, 3), 7)}, IndexError, "target: expected class indices from 0 to 6.*got 7 at position 0"),
    ({"target": torch.full((2, 3, 2), -1)}, IndexError, "target:.*got -1 at position 0.*ignore_index"),
    ({"softcap": 0}, ValueError, "softcap: expected a finite number above 0, got 0"),
    ({"logit_scale": torch.rand(2)}, ValueError, "logit_scale: expected a number or a 0-d tensor"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got 1.5"),
    ({"options": {"workspace_mib": 3}}, TypeError, "options: expected lowtide.HeadOptions or None, got dict"),
    ({"options": HeadOptions(backend="exp")}, RuntimeError, "backend: expected .*'torch', got 'exp'"),
    ({"options": HeadOptions(backend="row")}, RuntimeError, "backend: expected .*'torch', got 'row'"),
    ({"options": HeadOptions(gradient="forward")}, RuntimeError, "gradient: expected 'auto' or 'recompute' for values"),
]
STATS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"want": "entropy"}, TypeError, "want: expected a sequence of names among 'logprob', .*got 'entropy'"),
    ({"want": 3}, TypeError, "want: expected a sequence of names"),
    ({"want": ()}, ValueError, "want: expected names among .*got none"),
    ({"want": ("lse", "perplexity")}, ValueError, "want: expected names among .*got 'perplexity'"),
    ({"want": ("lse", "topk")}, ValueError, "topk: expected an int, as want names 'topk', got None"),
    ({"topk": 0}, ValueError, "topk: expected an int from 1 to 7, the vocabulary, got 0"),
    ({"topk": 8}, ValueError, "topk: expected an int from 1 to 7, the vocabulary, got 8"),
    ({"topk": 2.0}, TypeError, "topk: expected an int, got 2.0"),
    ({"target": None}, ValueError, "target: expected class indices, as want names 'logprob', got None"),
    ({"target": None, "want": ("is_top1",)}, ValueError, "target: expected class indices, as want names 'is_top1'"),
    (
        {"linear_weight": torch.rand(0, 4), "linear_bias": None, "want": ("lse",)},
        ValueError,
        "linear_weight: expected at least one class",
    ),
]


@pytest.mark.parametrize(
    ("function", "change", "kind", "text"),
    [(f, *bad) for bad in BOTH for f in (linear_logprobs, linear_token_stats)]
    + [(linear_token_stats, *bad) for bad in STATS],
    ids=lambda value: None,
)
def test_bad_input(function: Any, change: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        function(**{**GOOD, **change})
    assert isinstance(caught.value, LowtideError)
    assert "\n" not in str(caught.value)


def test_the_good_arguments_are_good() -> None:
    assert linear_logprobs(**GOOD).isfinite().all()
    assert linear_token_stats(**GOOD).entropy.isfinite().all()
    assert linear_token_stats(**{**GOOD, "target": None}, want=["lse", "entropy"]).lse.isfinite().all()


@pytest.mark.parametrize(
    ("targets", "topk", "against"),
    [(0, 0, None), (1, 1, None), (64, 64, None), (65, 0, "64 targets.*65"), (1, 65, "64 highest.*65")],
)
def test_what_the_exponential_path_takes(targets: int, topk: int, against: str | None) -> None:
    place: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "D": 64, "V": 1000}
    place |= {"targets": targets, "topk": topk}
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("a GPU for which it is not")
    exp = why_not_exp_stats(**place)
    backend, reason = choose("statistics", HeadOptions(), exp=exp)
    assert backend == ("torch" if against else "exp")
    with pytest.raises(LowtideError, match=against) if against else nullcontext():
        choose("statistics", HeadOptions(backend="exp"), exp=exp)
    assert against is None or re.search(against, reason)
    assert choose("statistics", HeadOptions(backend="torch"), exp=exp)[0] == "torch"


def test_gradients_in_forward_where_they_can_be_right() -> None:
    frozen = {**GOOD, "linear_weight": GOOD["linear_weight"].detach(), "linear_bias": None}
    options = HeadOptions(gradient="forward")
    assert linear_logprobs(**frozen, options=options).requires_grad
    with pytest.raises(LowtideError, match="gradient: expected"):
        linear_token_stats(**frozen, options=options)

"""What linear_divergence refuses, with one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide import HeadOptions, TeacherTopK, linear_divergence
from lowtide.errors import LowtideError
from support import head

x, w, b, _ = head((2, 3), 4, 7)
tx, tw, tb, _ = head((2, 3), 5, 7, seed=1)
GOOD = {"input": x, "linear_weight": w, "linear_bias": b, "teacher_input": tx, "teacher_weight": tw, "teacher_bias": tb}
ids, logprobs = torch.zeros(2, 3, 2, dtype=torch.long), torch.full((2, 3, 2), 0.3).log()
TOPK = {"teacher_input": None, "teacher_weight": None, "teacher_bias": None}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input": torch.rand(2, 3, 5)},
        ValueError,
        r"^input: expected shape \[..., 4\], as linear_weight.*got \[2, 3, 5\]",
    ),
    (
        {"teacher_input": torch.rand(2, 3, 4)},
        ValueError,
        r"teacher_input: expected shape \[..., 5\], as teacher_weight",
    ),
    ({"teacher_input": torch.rand(3, 2, 5)}, ValueError, r"teacher_input: expected shape \[2, 3, 5\], as input is"),
    ({"teacher_weight": torch.rand(7, 5).half()}, TypeError, "teacher_weight: .*torch.float32, as teacher_input has"),
    ({"teacher_bias": torch.rand(8)}, ValueError, r"teacher_bias: expected shape \[7\], as teacher_weight is \[7, 5\]"),
    ({"teacher_input": None}, ValueError, "teacher_input: expected a tensor, as teacher_topk is None, got None"),
    ({"teacher_weight": None}, ValueError, "teacher_weight: expected a tensor, as teacher_topk is None, got None"),
    ({"teacher_weight": torch.rand(7, 5, device="meta")}, ValueError, "teacher_weight: expected a tensor on cpu"),
    (
        {"teacher_input": tx.double(), "teacher_weight": tw.double(), "teacher_bias": None},
        TypeError,
        "teacher_input: expected float64 on both sides or on neither",
    ),
    (
        {"linear_weight": torch.rand(0, 4), "linear_bias": None},
        ValueError,
        "linear_weight: expected at least one class",
    ),
    ({"teacher_weight": torch.rand(0, 5), "teacher_bias": None}, ValueError, "teacher_weight: expected at least one"),
    ({"kind": "kl"}, ValueError, "kind: expected 'forward_kl', 'reverse_kl', 'jsd' or 'tv', got 'kl'"),
    ({"beta": 1.5}, ValueError, "beta: expected a number from 0 to 1, got 1.5"),
    ({"beta": "a"}, TypeError, "beta: expected a number, got 'a'"),
    ({"temperature": 0}, ValueError, "temperature: expected a finite number above 0, got 0"),
    ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number above 0, got nan"),
    ({"temperature": torch.ones(2)}, ValueError, "temperature: expected a number or a 0-d tensor"),
    ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "temperature: .*requires no gradient.*detach"),
    ({"mask": torch.ones(2, 3)}, TypeError, "mask: expected dtype torch.bool, True where computed, got torch.float32"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask: expected shape \[2, 3\]"),
    ({"mask": [True]}, TypeError, "mask: expected a torch.Tensor"),
    ({"teacher_topk": (ids, logprobs)}, ValueError, "teacher_input: expected None with teacher_topk, got a Tensor"),
    ({**TOPK, "teacher_topk": [ids, logprobs]}, TypeError, "teacher_topk: expected lowtide.TeacherTopK.*got list"),
    ({**TOPK, "teacher_topk": (ids,)}, TypeError, "teacher_topk: expected lowtide.TeacherTopK.*got a tuple of 1"),
    ({**TOPK, "teacher_topk": (ids, logprobs, "cut")}, ValueError, "teacher_topk.tail: expected 'bucket', .*got 'cut'"),
    (
        {**TOPK, "teacher_topk": (logprobs, ids)},
        TypeError,
        "teacher_topk.ids: expected an integer dtype, got torch.float",
    ),
    ({**TOPK, "teacher_topk": (ids, ids)}, TypeError, "teacher_topk.logprobs: expected a floating-point dtype"),
    ({**TOPK, "teacher_topk": (ids[0], logprobs)}, ValueError, r"teacher_topk.ids: expected shape \[2, 3, K\] with K"),
    (
        {**TOPK, "teacher_topk": (ids[..., :0], logprobs)},
        ValueError,
        r"teacher_topk.ids: .*with K above 0.*\[2, 3, 0\]",
    ),
    (
        {**TOPK, "teacher_topk": (ids, logprobs[..., :1])},
        ValueError,
        r"teacher_topk.logprobs: expected shape \[2, 3, 2\]",
    ),
    (
        {**TOPK, "teacher_topk": (ids - 1, logprobs)},
        IndexError,
        "teacher_topk: expected class indices of 0 or more, got -1",
    ),
    ({"options": {"workspace_mib": 3}}, TypeError, "options: expected lowtide.HeadOptions or None, got dict"),
    ({"options": HeadOptions(backend="exp")}, RuntimeError, "backend: expected 'auto', 'row' or 'torch', got 'exp'"),
    (
        {"options": HeadOptions(backend="row")},
        RuntimeError,
        "backend: expected 'auto' or 'torch', got 'row'.*NVIDIA",
    ),
    ({"options": HeadOptions(gradient="forward")}, RuntimeError, "gradient: expected 'auto' or 'recompute'"),
]


@pytest.mark.parametrize(("change", "kind", "text"), BAD, ids=lambda value: None)
def test_bad_input(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        linear_divergence(**{**GOOD, **change})
    assert isinstance(caught.value, LowtideError)
    assert "\n" not in str(caught.value)


def test_the_good_arguments_are_good() -> None:
    assert linear_divergence(**GOOD).isfinite().all()
    assert linear_divergence(**{**GOOD, **TOPK, "teacher_topk": TeacherTopK(ids, logprobs)}).isfinite().all()


def test_a_place_without_a_teacher_may_hold_any_id() -> None:
    unused = logprobs.clone()
    unused[..., 1] = -torch.inf
    other = ids.clone()
    other[..., 1] = -1
    first, second = (linear_divergence(**{**GOOD, **TOPK, "teacher_topk": (i, unused)}) for i in (ids, other))
    assert torch.equal(first, second)

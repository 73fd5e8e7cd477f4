"""linear_cross_entropy under torch.compile and as a registered operator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from lowtide import HeadOptions, linear_cross_entropy
from lowtide.head.call import CrossEntropyArgs, HeadCall, Wanted
from support import head

# torch.compile warns of what it does itself, when it follows an autograd.Function and when inductor first loads
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "everything": {
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 3.0,
        "num_items": 7,
        "shift": True,
        "weight": torch.rand(33) + 0.5,
        "token_weight": torch.rand(2, 6),
    },
    "none": {"reduction": "none"},
    "recompute": {"options": HeadOptions(gradient="recompute", workspace_mib=1e-6)},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "dtype", "case"),
    [
        *itertools.product(["eager"], [torch.float32], CASES),
        *itertools.product(["aot_eager"], [torch.float32, torch.bfloat16], CASES),
        *itertools.product(
            ["aot_eager"], [torch.float16], ["mean", "none"]
        ),  # fp16 stores its gradients in its own way
        *itertools.product(["inductor"], [torch.bfloat16], ["mean", "none"]),
    ],
)
def test_compiles_whole_and_agrees(case: str, backend: str, dtype: torch.dtype) -> None:
    x, w, b, y = head((2, 6), 8, 33, dtype=dtype)
    y[0, 1] = -100

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 3 * linear_cross_entropy(x * 2, w, y, linear_bias=b, **CASES[case]).sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    loss, expected = compiled(x, w, b), step(x, w, b)
    torch.testing.assert_close(loss, expected)
    for g, e in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b)), strict=True):
        torch.testing.assert_close(g, e)


def test_compiles_under_autocast() -> None:
    x, w, b, y = head(20, 8, 33)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(x, w, y, linear_bias=b)

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w), step(x, w)
    assert torch.equal(loss, expected)
    for g, e in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
        assert torch.equal(g, e)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_logit_scale_that_changes_compiles_no_third_time(kind: str) -> None:
    """The compiler takes a number for a constant until it sees it change, once; a tensor's value it never looks at."""
    x, w, _, y = head(20, 8, 33)
    compiled = torch.compile(
        lambda x, w, s: linear_cross_entropy(x, w, y, logit_scale=s), fullgraph=True, backend="aot_eager"
    )
    torch._dynamo.utils.counters.clear()
    for value in (0.5, 0.6, 0.7, 0.8, 0.9):
        scale = value if kind == "number" else torch.tensor(value)
        torch.testing.assert_close(compiled(x, w, scale), linear_cross_entropy(x, w, y, logit_scale=value))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if kind == "number" else 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused_inside_a_graph_too() -> None:
    x, w, _, y = head(9, 8, 33)
    x, w = x.detach(), w.detach()
    compiled = torch.compile(
        lambda x, w: torch.func.jvp(lambda w: linear_cross_entropy(x, w, y), (w,), (w,)), backend="aot_eager"
    )
    with pytest.raises(Exception, match="expected reverse-mode autograd"):
        compiled(x, w)


def test_a_step_on_fake_tensors() -> None:
    """What memory estimators run: shapes without numbers, eager, forward and backward."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.randn(9, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
        y = torch.randint(0, 33, (9,))
        for reduction in ("mean", "none"):
            (2 * linear_cross_entropy(x, w, y, reduction=reduction).sum()).backward()
    assert w.grad.shape == (33, 8)


def test_one_graph_for_any_number_of_tokens() -> None:
    _, w, _, _ = head(1, 8, 33)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x, y: linear_cross_entropy(x, w, y), fullgraph=True, dynamic=True, backend=counter)
    for N in (5, 20, 33, 100):
        x, _, _, y = head(N, 8, 33)
        torch.testing.assert_close(compiled(x, y), linear_cross_entropy(x, w, y))
    assert counter.frame_count == 1


def call(dtype: torch.dtype, reduction: str) -> tuple[Any, ...]:
    x, w, b, y = head((2, 6), 8, 33, dtype=dtype)
    y[0, 1] = -100
    call = HeadCall(
        input=x.detach(), linear_weight=w.detach(), linear_bias=None if b is None else b.detach(),
        logit_scale=torch.tensor(0.5), softcap=2.0, dtype=dtype, workspace_mib=None, accumulate="auto", backend="auto",
    )  # fmt: skip
    args = CrossEntropyArgs(
        target=y,
        weight=torch.rand(33),
        token_weight=torch.rand(2, 6),
        num_items=torch.tensor(5.0) if reduction == "mean" else None,
        reduction=reduction,
        ignore_index=-100,
        label_smoothing=0.1,
        z_loss=0.1,
    )
    return (*call, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_registered_operators_pass_opcheck(dtype: torch.dtype, reduction: str) -> None:
    asked = call(dtype, reduction)
    for wanted in (Wanted(True, True, True), Wanted(True, False, False), Wanted(False, False, False)):
        if reduction == "none" and wanted.weight:
            continue
        torch.library.opcheck(torch.ops.lowtide.cross_entropy.default, (*asked, *wanted, reduction == "none"))
    upstream = torch.rand(() if reduction == "mean" else (12,))
    known = torch.zeros(2, 12)
    torch.library.opcheck(
        torch.ops.lowtide.cross_entropy_backward.default, (*asked, True, True, True, upstream, *known, torch.empty(0))
    )

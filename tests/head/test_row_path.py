"""Cross entropy by the row kernel in float16, by Triton's interpreter: factors that leave float16's range on their way.

On a GPU `tests/gpu` runs the path as users do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from distributed.pair_cases import input_grad, weight_grad
from lowtide import HeadOptions, linear_cross_entropy, linear_logprobs
from lowtide.head.engine import Chunks
from lowtide.head.plan import HeadPlan
from lowtide.head.terms import cross_entropy as terms
from support import head, oracle, relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the CPU, in chunks of 7 rows, with products that the CPU has."""
    make = terms.plan_cross_entropy

    def plan(*args: Any) -> HeadPlan:
        gemms: dict[str, Any] = {"logits_gemm": "blocks", "backward_gemm": "narrow"}
        rows = {"chunk_rows": 7, "chunks": -(-args[2] // 7), "block_rows": 11}
        return replace(make(*args), backend="row", accumulate="float32", **rows, **gemms)

    monkeypatch.setattr(terms, "plan_cross_entropy", plan)
    monkeypatch.setattr(Chunks, "input_grad", input_grad)
    monkeypatch.setattr(Chunks, "weight_grad", weight_grad)


@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("factor", [2.0**-14, 1.0, 2.0**16])
@pytest.mark.parametrize("logit_scale", [1.0, 100.0])
def test_fp16_gradients_for_any_factor(gradient: Any, factor: float, logit_scale: float) -> None:
    x, w, _, y = head(20, 8, 33, dtype=torch.float16, bias=False)
    y[3] = -100
    with torch.no_grad():
        most = 1e3 / (factor * logit_scale)  # so that the gradients are within float16's range
        size = min(700.0, most)
        x *= size
        w *= min(most, 1 / (size * logit_scale))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    kwargs: dict[str, Any] = {"logit_scale": logit_scale, "reduction": "sum"}
    true = torch.autograd.grad(factor * oracle(*exact, y, **kwargs), exact)
    losses = [linear_cross_entropy(x, w, y, options=HeadOptions(gradient=gradient), **kwargs)]
    if gradient == "recompute":
        losses.append(-linear_logprobs(x, w, y, logit_scale=logit_scale).sum())
    for loss in losses:
        for g, t in zip(torch.autograd.grad(factor * loss, (x, w)), true, strict=True):
            assert relative_error(g, t) < 2e-3 + 2 * relative_error(t.half(), t)

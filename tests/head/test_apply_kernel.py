"""linear_apply where a kernel narrows the logits' gradient and sums the bias's, by Triton's interpreter.

On a GPU `tests/gpu` runs the path as users do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from lowtide import HeadOptions, linear_apply
from lowtide.head import apply as public
from lowtide.head.function import chunk
from support import head, relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the CPU, in chunks of 7 rows and pieces of 3, with products that the CPU has."""
    make = public.plan_head

    def plan(N: int, D: int, V: int, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        gemms = {} if dtype != torch.bfloat16 else {"logits_gemm": "blocks", "backward_gemm": "narrow"}
        rows = {"chunk_rows": 7, "chunks": -(-N // 7), "piece_rows": 3, "block_rows": 11}
        return replace(make(N, D, V, dtype, *args, **kwargs), **rows, **gemms)

    monkeypatch.setattr(public, "plan_head", plan)
    monkeypatch.setattr(chunk, "why_not_row", lambda *_: None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, 9.0)])
def test_values(dtype: torch.dtype, out: str, scale: float, softcap: float | None) -> None:
    x, w, b, y = head((2, 10), 8, 33, dtype=dtype)
    gamma = torch.tensor(1.7, requires_grad=True)

    def fn(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        z /= 1.25  # in place, so that the cap's slope cannot be taken from what is left
        loss = gamma * F.cross_entropy(z, y, reduction="none")
        return loss.sum() if out == "sum" else loss

    mask = torch.arange(20).view(2, 10) % 5 != 0
    got = linear_apply(fn, x, w, y, linear_bias=b, params=(gamma,), softcap=softcap, logit_scale=scale, mask=mask,
                       out=out, options=HeadOptions(accumulate="float32")).sum()  # fmt: skip
    exact = [t.detach().double().requires_grad_() for t in (x, w, b, gamma)]
    z = F.linear(exact[0][mask], exact[1], exact[2]) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    true = (exact[3] * F.cross_entropy(z / 1.25, y[mask], reduction="none")).sum()
    assert relative_error(got, true) < 1e-5
    for g, e in zip(torch.autograd.grad(got, (x, w, b, gamma)), torch.autograd.grad(true, exact), strict=True):
        assert relative_error(g, e) < TOLERANCE[dtype]

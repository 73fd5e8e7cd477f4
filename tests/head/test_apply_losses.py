"""The losses of docs/apply.md, run as they stand there and compared with float64 logits in full."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply, linear_cross_entropy
from support import assert_same_gradients, head, relative_error

DOCUMENT = Path(__file__).parents[2] / "docs" / "apply.md"


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """Run every example of the document that one process can, one after the other; return what they define."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = re.findall(r"(?<!two processes -->\n\n)```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(block, names)
    return names


def test_the_examples_give_gradients(documented: dict[str, Any]) -> None:
    for name in ("hidden", "weight", "gamma"):
        assert documented[name].grad.isfinite().all()
        assert documented[name].grad.abs().sum() > 0
    assert documented["found"]["ids"].shape == (4, 128, 5)
    assert 0 <= documented["accuracy"] <= 1


def logprob(z: Tensor, y: Tensor) -> Tensor:
    return (z - z.logsumexp(-1, keepdim=True)).gather(-1, y[..., None])[..., 0]


def naive_focal(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    p = logprob(z, y).exp()
    return -((1 - p) ** gamma) * p.log()


def naive_statistics(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    values, ids = torch.sort(z, dim=-1, descending=True)
    best = z.argmax(-1)
    return {"entropy": -(p * p.log()).sum(-1), "values": values[..., :5], "ids": ids[..., :5], "right": best == y}


def naive_kl(z: Tensor, prior: Tensor) -> Tensor:
    return (prior * (prior.log() - z + z.logsumexp(-1, keepdim=True))).sum(-1)


def naive_grpo(z: Tensor, y: Tensor, old: Tensor, ref: Tensor, advantage: Tensor, clip: float, beta: float) -> Tensor:
    logp = logprob(z, y)
    ratio = torch.exp(logp - old)
    clipped = torch.where(ratio > 1 + clip, 1 + clip, torch.where(ratio < 1 - clip, 1 - clip, ratio))
    gain = torch.where(ratio * advantage < clipped * advantage, ratio * advantage, clipped * advantage)
    return -gain + beta * (torch.exp(ref - logp) - (ref - logp) - 1)


def cases(V: int, leading: tuple[int, ...]) -> dict[str, tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]]:
    """Name each loss, with its naive twin, token arguments after the labels, and params."""
    old, ref, advantage = -3 * torch.rand(leading), -3 * torch.rand(leading), torch.randn(leading)
    return {
        "focal": (naive_focal, (), (torch.tensor(1.7),)),
        "statistics": (naive_statistics, (), ()),
        "kl_to": (naive_kl, (), (torch.randn(V).softmax(0),)),
        "grpo": (naive_grpo, (old, ref, advantage), (0.2, 0.04)),
    }


@pytest.mark.parametrize("name", ["focal", "statistics", "kl_to", "grpo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("workspace_mib", [None, 1e-6])
def test_documented_losses(
    documented: dict[str, Any], name: str, dtype: torch.dtype, workspace_mib: float | None
) -> None:
    leading, D, V = (3, 11), 7, 29
    x, w, b, y = head(leading, D, V, dtype=dtype)
    naive, args, params = cases(V, leading)[name]
    args = () if name == "kl_to" else (y, *args)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    params = tuple(p.to(dtype) if isinstance(p, Tensor) else p for p in params)
    if name == "focal":
        params[0].requires_grad_()
    got = linear_apply(
        documented[name], x, w, *args, linear_bias=b, params=params, options=HeadOptions(workspace_mib=workspace_mib)
    )
    full = [t.detach().double().requires_grad_() for t in (x, w, b)]
    wide = tuple(p.detach().double().requires_grad_(p.requires_grad) if isinstance(p, Tensor) else p for p in params)
    true = naive(F.linear(*full), *(a.double() if a.is_floating_point() else a for a in args), *wide)
    got, true = (t if isinstance(t, dict) else {"": t} for t in (got, true))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert got.keys() == true.keys()
    total = expected = torch.zeros((), dtype=torch.float64)
    for key in true:
        assert got[key].shape == true[key].shape
        if not got[key].is_floating_point():
            assert torch.equal(got[key], true[key])
            assert not got[key].requires_grad
            continue
        assert got[key].dtype == dtype
        assert relative_error(got[key], true[key]) < tolerance
        upstream = 0.5 + torch.rand_like(true[key])  # of one sign: a parameter's gradient is a sum over all tokens
        total = total + (got[key] * upstream).sum()
        expected = expected + (true[key] * upstream).sum()
    leaves = [x, w, b, *(p for p in params if isinstance(p, Tensor) and p.requires_grad)]
    truths = [*full, *(p for p in wide if isinstance(p, Tensor) and p.requires_grad)]
    assert_same_gradients(total, expected, leaves, truths, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", ["token", "sum"])
def test_cross_entropy_is_that_of_linear_cross_entropy(
    documented: dict[str, Any], dtype: torch.dtype, out: str
) -> None:
    x, w, b, y = head((5, 9), 16, 61, dtype=dtype)
    y[1, ::3] = -100
    if out == "token":
        loss = linear_apply(documented["cross_entropy"], x, w, y, linear_bias=b).sum()
    else:
        loss = linear_apply(documented["summed"], x, w, y, linear_bias=b, out="sum")["loss"]
    same = linear_cross_entropy(x, w, y, linear_bias=b, reduction="sum")
    assert loss.dtype == same.dtype
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}[dtype]
    assert relative_error(loss, same) < 1e-6
    assert_same_gradients(loss, same, (x, w, b), bound=tolerance)

"""verl's two fused heads, its own and lowtide's: values, gradients, and what goes to verl."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support import relative_error

pytest.importorskip("verl", reason="verl has other transformers than the rest of the tests: see docs/stacks.md")
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = "verl.utils.experimental.torch_functional"
TRITON = "verl.utils.kernel.linear_cross_entropy"


@pytest.fixture
def ours() -> Iterator[Any]:
    """Return the adapter; verl is as it came after the test."""
    modules = {name: dict(vars(importlib.import_module(name))) for name in (HEADS, TRITON)}
    yield importlib.reload(importlib.import_module("lowtide.stacks.verl"))
    for name, kept in modules.items():
        vars(importlib.import_module(name)).update(kept)


def inputs(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(*shape, 24, dtype=dtype).requires_grad_()
    weight = torch.randn(61, 24, dtype=dtype).mul(0.3).requires_grad_()
    return hidden, weight, torch.randint(61, shape, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(17,), (2, 9)])
@pytest.mark.parametrize("used", ["both", "logprob", "entropy"])
def test_its_module(shape: tuple[int, ...], used: str, ours: Any) -> None:
    """Nearer to float64 than verl's own, which rounds the weight's gradient and the entropy more often."""
    theirs = importlib.import_module(HEADS).FusedLinearForPPOFunction
    hidden, weight, ids = inputs(*shape, dtype=torch.float32)
    g, h = torch.randn(2, *shape)
    g, h = (g if used != "entropy" else 0 * g), (h if used != "logprob" else 0 * h)
    found = []
    for kind in ("float64", "verl", "lowtide"):
        x, w = (
            t.detach().to(torch.float64 if kind == "float64" else t.dtype).requires_grad_() for t in (hidden, weight)
        )
        if kind == "lowtide":
            assert importlib.import_module(HEADS).FusedLinearForPPO is ours.FusedLinearForPPO
            logprob, entropy = ours.FusedLinearForPPO(impl_backend="liger")(x, w, ids, temperature=0.7)
        else:
            logprob, entropy = theirs.apply(x, w, ids.long(), 0.7, 5)
        assert logprob.shape == entropy.shape == shape
        (g * logprob + h * entropy).sum().backward()
        found.append((logprob, entropy, x.grad, w.grad))
    for true, theirs_, mine in zip(*found, strict=True):
        assert relative_error(mine, true) < max(2 * relative_error(theirs_, true), 1e-6)


def test_its_function_and_what_stays_verls(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function = importlib.import_module(TRITON).linear_cross_entropy
    hidden, weight, ids = inputs(2, 9, dtype=torch.bfloat16)
    logprob, entropy = function(hidden, weight, ids, 0.7, "none")
    z = (hidden.double() @ weight.double().T / 0.7).flatten(0, 1).log_softmax(-1)
    assert relative_error(logprob, z.gather(1, ids.long().view(-1, 1))[:, 0]) < 1e-3
    assert relative_error(entropy, -(z.exp() * z).sum(-1)) < 1e-3
    calls = []
    monkeypatch.setattr(ours._TritonHead, "apply", lambda *args: calls.append(args))
    function(hidden, weight, ids, 0.7, "mean")
    assert len(calls) == 1

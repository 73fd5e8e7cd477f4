"""verl's two fused heads replaced by lowtide's: values, gradients, and what goes to verl.

Where verl is not installed, as beside the other tests' transformers, its two modules are stand-ins of these names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from promises import promise
from support import relative_error

pytestmark = [promise("values"), pytest.mark.filterwarnings("ignore")]
HEADS = "verl.utils.experimental.torch_functional"
TRITON = "verl.utils.kernel.linear_cross_entropy"


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the adapter; verl is as it came after the test."""
    if find_spec("verl") is None:
        for name in {part for full in (HEADS, TRITON) for part in _parents(full)}:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[TRITON])["LinearCrossEntropy"] = SimpleNamespace(apply=lambda *given: given)
        for name in (HEADS, TRITON):
            monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], sys.modules[name], False)
    kept = {name: dict(vars(importlib.import_module(name))) for name in (HEADS, TRITON)}
    yield importlib.reload(importlib.import_module("lowtide.stacks.verl"))
    for name, content in kept.items():
        vars(importlib.import_module(name)).update(content)
    sys.modules.pop("lowtide.stacks.verl")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


@pytest.mark.parametrize("shape", [(17,), (2, 9)])
@pytest.mark.parametrize("which", ["module", "function"])
def test_both_heads_against_float64(shape: tuple[int, ...], which: str, ours: Any) -> None:
    x = torch.randn(*shape, 24, requires_grad=True)
    w = torch.randn(61, 24).mul(0.3).requires_grad_()
    ids = torch.randint(61, shape, dtype=torch.int32)
    if which == "module":
        head = importlib.import_module(HEADS).FusedLinearForPPO
        assert head is ours.FusedLinearForPPO
        logprob, entropy = head(impl_backend="liger")(x, w, ids, temperature=0.7)
        assert logprob.shape == entropy.shape == shape
    else:
        logprob, entropy = importlib.import_module(TRITON).linear_cross_entropy(x, w, ids, 0.7, "none")
        assert logprob.shape == entropy.shape == ids.flatten().shape
    g, h = torch.randn(2, *logprob.shape)
    (g * logprob + h * entropy).sum().backward()
    true_x, true_w = (t.detach().double().requires_grad_() for t in (x, w))
    z = (true_x @ true_w.T / 0.7).log_softmax(-1)
    expected = z.gather(-1, ids.long()[..., None])[..., 0].view(logprob.shape)
    expected_entropy = -(z.exp() * z).sum(-1).view(logprob.shape)
    (g * expected + h * expected_entropy).sum().backward()
    for mine, true in ((logprob, expected), (entropy, expected_entropy), (x.grad, true_x.grad), (w.grad, true_w.grad)):
        assert relative_error(mine, true) < 1e-6


def test_a_reduction_goes_to_verl(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_TritonHead", SimpleNamespace(apply=lambda *given: given))
    found = importlib.import_module(TRITON).linear_cross_entropy(1, 2, 3, 0.7, "mean")
    assert found == (1, 2, 3, 0.7, "mean", None)

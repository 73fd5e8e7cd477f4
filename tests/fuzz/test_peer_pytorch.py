"""PyTorch's own samples of `linear_cross_entropy`, function and module: lowtide on every one that has class indices.

The samples come from the installed PyTorch (`torch.testing._internal`). Those with class probabilities as targets are
refused with lowtide's error, which a test of its own holds.
"""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's samples warn of what they leave out
PARTS = 48  # of the module's samples, of which one runs without --slow: those of 24 outputs take 24 losses each
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("this PyTorch has no linear_cross_entropy", allow_module_level=True)


@pytest.fixture(scope="module")
def infos() -> tuple[Any, Any]:
    """PyTorch's description of the function and of the module. It imports `expecttest`, of which it needs a name."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            vars(stand_in)["TestCase"] = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    (function,) = (op for op in op_db if op.name == "nn.functional.linear_cross_entropy" and not op.variant_test_name)
    (module,) = (m for m in module_db if m.name.endswith("LinearCrossEntropyLoss"))
    return function, module


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """A loss of a few tokens, and gradients of a few dozen entries: to some roundings of the dtype."""
    steps = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3 * torch.finfo(dtype).eps)
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    torch.testing.assert_close(
        got,
        want,
        rtol=steps,
        atol=steps * (1 + want.nan_to_num(0, 0, 0).abs().max().item() if want.numel() else 1),
        equal_nan=True,
    )


def compare(got: Tensor, leaves: list[Tensor], want: Tensor, exact: list[Tensor], dtype: torch.dtype) -> None:
    near(got, want, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
    g = torch.rand(want.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = torch.autograd.grad(got, leaves, g.to(got.dtype))
    theirs = torch.autograd.grad(want, exact, g)
    for a, b in zip(mine, theirs, strict=True):
        near(a, b.nan_to_num(0) if want.isnan().any() else b, dtype)


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, PARTS))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_the_module(infos: tuple[Any, Any], dtype: torch.dtype, part: int) -> None:
    """All 3,284 with class indices: shapes, reductions, class weights, ignored classes, outputs, chunks."""
    module, count = infos[1], 0
    torch.manual_seed(0)
    for sample in module.module_inputs_func(module, "cpu", dtype, True, True):
        args, kwargs = sample.constructor_input.args, dict(sample.constructor_input.kwargs)
        x, y = sample.forward_input.args
        if y.is_floating_point():
            continue
        count += 1
        if (count * 2654435761 >> 7) % PARTS != part:  # as good as drawn
            continue
        chunks = kwargs.pop("options", None)
        options = lowtide.HeadOptions(workspace_mib=1e-6) if getattr(chunks, "batch_chunk_size", None) else None
        stock = torch.nn.LinearCrossEntropyLoss(*args, **kwargs)
        ours = lowtide.nn.LinearCrossEntropyLoss(*args, **kwargs, options=options)
        ours.load_state_dict(stock.state_dict())
        exact = stock.double()
        x64 = x.detach().double().requires_grad_()
        compare(ours(x, y), [x, *ours.parameters()], exact(x64, y), [x64, *exact.parameters()], dtype)
    assert count == 821 or not torch.__version__.startswith("2.13")


def test_samples_of_the_function(infos: tuple[Any, Any]) -> None:
    count = 0
    for dtype in DTYPES:
        torch.manual_seed(0)
        for sample in infos[0].sample_inputs("cpu", dtype, requires_grad=True):
            x, (w, y), kwargs = sample.input, sample.args, dict(sample.kwargs)
            if y.is_floating_point() or w.dim() != 2:
                continue  # several outputs are the module's
            count += 1
            b = kwargs.pop("linear_bias", None)
            leaves = [t for t in (x, w, b) if t is not None]
            exact = [t.detach().double().requires_grad_() for t in leaves]
            got = lowtide.linear_cross_entropy(x, w, y, linear_bias=b, **kwargs)
            if kwargs.get("weight") is not None:
                kwargs["weight"] = kwargs["weight"].double()
            compare(got, leaves, F.cross_entropy(F.linear(exact[0], *exact[1:]), y, **kwargs), exact, dtype)
    assert count >= 100


def test_probabilities_as_targets_are_refused(infos: tuple[Any, Any]) -> None:
    for sample in infos[0].sample_inputs("cpu", torch.float32):
        if sample.args[1].is_floating_point() and sample.args[0].dim() == 2:
            with pytest.raises(lowtide.errors.ArgumentTypeError, match="linear_divergence"):
                lowtide.linear_cross_entropy(sample.input, *sample.args)

"""The kernels between the experts' GEMMs, in Triton's interpreter where there is no GPU, beside plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.mlp import experts
from lowtide.mlp.experts import Form, Inner, Pairs, inverse_of, sorted_by_expert
from mlp.experts import FORMS, GPT_OSS, by_pairs, fused, operands, with_gradients
from support import assert_near, every_pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# half a unit in the last place where the result is narrow; the interpreter cuts off
ROUNDING = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-7}
E = 4

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


@pytest.fixture(params=[8, 1024])
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "COLUMNS", request.param)


def by(kernels: bool, function: str, *args: Any) -> Any:
    """Run it by its kernel, or in plain PyTorch, which other tests compare with every pair on its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(experts, "has_kernels", lambda _: kernels)
        return getattr(experts, function)(*args)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def inner_of(S: int, F: int, dtype: torch.dtype, form: Form, bias: bool) -> Inner:
    expert = torch.arange(S, device=DEVICE, dtype=torch.int32).clamp(max=E)  # those from E on have none
    own = random(E, 2 * F, dtype=dtype, seed=1) if bias else None
    return Inner(random(S, 2 * F, dtype=dtype), own, expert, E, form)


@pytest.mark.usefixtures("_block")
@every_pair(dtype=DTYPES, form=FORMS, sizes=[(0, 5), (1, 1), (6, 37), (7, 20)], bias=[False, True])
def test_rows(dtype: torch.dtype, form: Form, sizes: tuple[int, int], bias: bool) -> None:
    S, F = sizes
    inner = inner_of(S, F, dtype, form, bias)
    got, want = (torch.full((S, F), torch.nan, device=DEVICE, dtype=dtype) for _ in range(2))
    by(True, "gated_rows", inner, got)
    by(False, "gated_rows", inner, want)
    torch.testing.assert_close(got, want, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.usefixtures("_block")
@every_pair(dtype=DTYPES, form=FORMS, bias=[False, True])
def test_gradients_over_what_they_are_made_of(dtype: torch.dtype, form: Form, bias: bool) -> None:
    S, F = 7, 19
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factors = random(S, dtype=torch.float32, seed=3)
    for flags in itertools.product((False, True), repeat=3):
        results = []
        for kernels in (True, False):
            inner, grad = inner_of(S, F, dtype, form, bias), random(S, F, dtype=dtype, seed=2)
            into = (inner.gate_up, grad, torch.full((S,), torch.nan, device=DEVICE, dtype=wide))
            wanted = tuple(t if flag else None for t, flag in zip(into, flags, strict=True))
            by(kernels, "gated_rows_backward", inner, grad, factors, wanted)
            results.append([t[:E] for t in into])  # other rows are nobody's
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=ROUNDING[dtype], atol=2e-6, equal_nan=True)


@pytest.mark.usefixtures("_block")
@every_pair(dtype=DTYPES, scaled=[False, True], bias=[False, True], sizes=[(0, 2, 8), (1, 1, 1), (9, 3, 21)])
def test_sums_over_a_tokens_experts(dtype: torch.dtype, scaled: bool, bias: bool, sizes: tuple[int, int, int]) -> None:
    T, K, D = sizes
    ids = torch.randint(0, E + 1, (T, K), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    order, ends = sorted_by_expert(ids, E)
    pairs = Pairs(inverse_of(order).view(T, K), ids, E)
    rows = random(T * K, D, dtype=dtype)
    rows[int(ends[-1]) :] = torch.nan  # no GEMM has written them
    factors = random(T, K, dtype=dtype, seed=1) if scaled else None
    own = random(E, D, dtype=dtype, seed=2) if bias else None
    got, want = (by(kernels, "combined", rows, pairs, factors, own, dtype) for kernels in (True, False))
    torch.testing.assert_close(got, want, rtol=ROUNDING[dtype], atol=1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("level", [0, 1])
def test_operands_of_other_strides(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "has_kernels", lambda _: True)
    leaves, ids = operands((5, 3, 4, 6, 7), device=DEVICE)
    expected = with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves)
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in leaves]
    got = with_gradients(fused(strided, ids.T.contiguous().T, GPT_OSS, checkpoint_level=level), strided)
    assert_near(got, expected, 1e-13)

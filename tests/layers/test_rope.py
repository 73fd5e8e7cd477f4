"""rotary: values and gradients against rotation matrices in float64, by PyTorch and by the kernel's interpreter."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.layers import rotary
from support import Sharded, every_pair, relative_error, rotary_oracle

# Plain PyTorch rounds both products and their sum; the interpreter cuts off.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}

PAIRS = [
    "halves", "interleaved", "repeated", "deinterleaved", "short", "short_interleaved", "trailing", "backwards",
]  # fmt: skip
SHORT = ("short", "short_interleaved", "trailing")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def heads(
    B: int, T: int, Hq: int, Hk: int, d: int, r: int, dtype: torch.dtype, *, cos_dtype: Any = None, tables: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as attention has them: [B, H, T, d] views of [B, T, H, d]; halves of the tables differ."""
    g = torch.Generator().manual_seed(B + T + Hq + d)
    q, k = (torch.randn(B, T, H, d, generator=g, dtype=torch.float64).to(dtype).transpose(1, 2) for H in (Hq, Hk))
    cos, sin = (torch.randn(tables, T, r, generator=g, dtype=torch.float64).to(cos_dtype or dtype) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), cos, sin


def as_wide(cos: Tensor, sin: Tensor, pairs: str) -> tuple[Tensor, Tensor]:
    """Return tables as wide as these pairs have them."""
    half = cos.shape[-1] // 2
    return (cos[..., :half].contiguous(), sin[..., half:].contiguous()) if pairs in SHORT else (cos, sin)


SIZES = [
    (2, 5, 3, 1, 8, 8),
    (1, 1, 1, 1, 64, 64),
    (1, 37, 2, 1, 2, 2),
    (2, 7, 4, 2, 12, 6),
    (1, 3, 14, 2, 20, 20),
    (3, 4, 2, 2, 16, 4),
]


@every_pair(dtype=TOLERANCE, sizes=SIZES, a_table_each=[False, True], pairs=PAIRS)
def test_values_and_gradients(way: str, dtype: torch.dtype, sizes: Any, a_table_each: bool, pairs: str) -> None:
    """One table for the batch, or one for each sequence."""
    if way == "kernel" and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    q, k, cos, sin = heads(*sizes, dtype, tables=sizes[0] if a_table_each else 1)
    cos, sin = as_wide(cos, sin, pairs)
    outs = rotary(q, k, cos, sin, pairs=pairs)
    true = [t.detach().double().requires_grad_() for t in (q, k)]
    expected = [rotary_oracle(t, cos.double(), sin.double(), pairs) for t in true]
    for out, e, x in zip(outs, expected, (q, k), strict=True):
        assert out.dtype == dtype
        assert out.stride() == x.stride()
        assert relative_error(out, e) < TOLERANCE[dtype]
    upstream = [torch.randn(e.shape, generator=torch.Generator().manual_seed(3)).to(dtype) for e in expected]
    got = torch.autograd.grad(outs, (q, k), upstream)
    want = torch.autograd.grad(expected, true, [u.double() for u in upstream])
    for g, e in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert relative_error(g, e) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(2, 5, 3, 1, 8, 6), (0, 5, 3, 1, 8, 8), (2, 0, 3, 1, 8, 8)])
@pytest.mark.parametrize("pairs", PAIRS)
def test_other_layouts_and_nothing(way: str, size: Any, pairs: str) -> None:
    turn = functools.partial(rotary, pairs=pairs)
    q, k, cos, sin = heads(*size, torch.float32)
    cos, sin = as_wide(cos, sin, pairs)
    wide = [torch.stack((t, t * torch.nan), -1)[..., 0] for t in (q, k)]  # values of a head not beside each other
    dense = [t.contiguous() for t in (q, k)]
    parts = torch.cat((q, q * torch.nan, k), 1)  # of one projection
    cut = [parts[:, : q.shape[1]], parts[:, 2 * q.shape[1] :]]
    expected = turn(q, k, cos, sin)
    for pair in (wide, dense, cut):
        torch.testing.assert_close(turn(*pair, cos, sin), expected)
    swapped = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for got, e in zip(swapped, expected, strict=True):
        torch.testing.assert_close(got.transpose(1, 2), e)
    apart = torch.stack((cos, cos), -1)[..., 0]
    if q.numel():
        g = torch.ones(()).expand(expected[0].shape)
        (dq,) = torch.autograd.grad(turn(q, k, apart, sin)[0], q, g)
        torch.testing.assert_close(dq, torch.autograd.grad(expected[0], q, g.contiguous())[0])


def test_no_angle_at_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "kernel":
        pytest.skip("has no columns to work on")
    q, k, cos, sin = heads(1, 3, 2, 2, 8, 0, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(rotary(q, k, cos, sin), (q, k), strict=True))


@pytest.mark.parametrize("dtypes", [*product((torch.float32, torch.bfloat16), repeat=2)])
@pytest.mark.parametrize(("stock", "promote"), [("llama", True), ("olmo2", False)])
def test_on_a_cpu_rounds_as_transformers_does_to_the_bit(stock: str, promote: bool, dtypes: Any) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = getattr(getattr(transformers.models, stock), f"modeling_{stock}")
    q, k, cos, sin = heads(2, 5, 3, 1, 8, 8, dtypes[0], cos_dtype=dtypes[1])
    for got, expected in zip(
        rotary(q, k, cos, sin, promote=promote), modeling.apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("promote", [True, False])
def test_tables_of_a_wider_dtype(way: str, promote: bool) -> None:
    q, k, cos, sin = heads(2, 5, 3, 1, 8, 4, torch.bfloat16, cos_dtype=torch.float32)
    outs = rotary(q, k, cos, sin, promote=promote)
    assert {out.dtype for out in outs} == {torch.float32 if promote else torch.bfloat16}
    true = [t.detach().double().requires_grad_() for t in (q, k)]
    expected = [rotary_oracle(t, cos.double(), sin.double()) for t in true]
    loose = 3e-7 if promote else TOLERANCE[torch.bfloat16]
    assert all(relative_error(out, e) < loose for out, e in zip(outs, expected, strict=True))
    got = torch.autograd.grad(outs, (q, k), [torch.ones_like(out) for out in outs])
    want = torch.autograd.grad(expected, true, [torch.ones_like(e) for e in expected])
    for g, e in zip(got, want, strict=True):
        assert g.dtype == torch.bfloat16
        assert relative_error(g, e) < TOLERANCE[torch.bfloat16]


def test_poison_stays_in_its_position(way: str) -> None:
    q, k, cos, sin = heads(2, 5, 3, 2, 8, 6, torch.float32)
    with torch.no_grad():
        q[0, 1, 2, 0] = torch.nan
    q_out, k_out = rotary(q, k, cos, sin)
    assert q_out.isnan().nonzero().tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert k_out.isfinite().all()


def test_kept_for_backward_are_the_tables(way: str) -> None:
    q, k, cos, sin = heads(2, 16, 3, 1, 8, 8, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        rotary(q, k, cos, sin)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": 1}, ArgumentTypeError, "q: expected a torch.Tensor"),
        ({"k": torch.ones(2, 1, 5, 8, dtype=torch.int64)}, ArgumentTypeError, "k: expected float64, float32"),
        ({"k": torch.ones(2, 1, 5, 8).as_subclass(Sharded)}, ArgumentTypeError, "k: expected .*whole.*got a DTensor"),
        ({"k": torch.ones(2, 1, 5, 8).double()}, ArgumentTypeError, "k: expected torch.float32"),
        ({"k": torch.ones(2, 1, 4, 8)}, ArgumentValueError, "k: expected q's sizes"),
        ({"q": torch.ones(2, 5, 8)}, ArgumentValueError, "q: expected 4 axes"),
        ({"cos": torch.ones(5, 8)}, ArgumentValueError, r"cos: expected shape \[2 or 1, 5, r\]"),
        ({"cos": torch.ones(1, 5, 7)}, ArgumentValueError, "cos: expected shape"),
        ({"cos": torch.ones(3, 5, 8)}, ArgumentValueError, "cos: expected shape"),
        ({"cos": torch.ones(1, 5, 10)}, ArgumentValueError, "cos: expected shape"),
        ({"sin": torch.ones(1, 5, 6)}, ArgumentValueError, "sin: expected shape"),
        ({"sin": torch.ones(1, 5, 8).half()}, ArgumentTypeError, "sin: expected torch.float32"),
        ({"sin": torch.ones(1, 5, 8, device="meta")}, ArgumentValueError, "sin: expected a tensor on cpu"),
        ({"cos": torch.ones(1, 5, 8, requires_grad=True)}, UnsupportedError, "cos: expected a table"),
        ({"unsqueeze_dim": 0}, ArgumentValueError, "unsqueeze_dim: expected 1 or 2"),
        ({"pairs": "short"}, ArgumentValueError, r"cos: expected shape \[2 or 1, 5, r / 2\]"),
        ({"pairs": "odd"}, ArgumentValueError, "pairs: expected 'halves', 'interleaved'.* or 'backwards'"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, cos, sin = heads(2, 5, 3, 1, 8, 8, torch.float32)
    with pytest.raises(error, match=text):
        rotary(**{"q": q, "k": k, "cos": cos, "sin": sin, **change})

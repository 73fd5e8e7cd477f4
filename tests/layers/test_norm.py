"""rms_norm and add_rms_norm: values and gradients against float64, by PyTorch and by the kernels' interpreter."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.layers import add_rms_norm, rms_norm
from support import Sharded, every_pair, relative_error, rms_norm_oracle

EPS = 1e-5
# One rounding of a value at random, and of the interpreter, which cuts off; float32's sums on top.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def leaves(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(shape))
    x, residual = (3 * torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(2))
    weight = 1 + torch.randn(shape[-1], generator=g, dtype=torch.float64)
    return [t.requires_grad_() for t in (x.to(dtype), residual.to(dtype), weight.to(weight_dtype or dtype))]


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def upstream_of(out: Tensor, kind: str) -> Tensor:
    g = torch.Generator().manual_seed(1)
    if kind == "expanded":
        return torch.tensor(0.7).to(out.dtype).expand_as(out)
    if kind == "rows apart":
        return torch.randn(*out.shape[:-1], 2 * out.shape[-1], generator=g).to(out.dtype)[..., : out.shape[-1]]
    if kind == "strided":
        return torch.randn(*out.shape[:-1], 2 * out.shape[-1], generator=g).to(out.dtype)[..., ::2]
    return torch.randn(out.shape, generator=g).to(out.dtype)


@every_pair(
    dtype=TOLERANCE,
    shape=[(7, 37), (1, 64), (2, 3, 5, 16), (3, 3), (0, 5), (131, 24)],
    offset=[0.0, 1.0],
    rounding=["before_weight", "after_weight"],
)
def test_values_and_gradients(way: str, dtype: torch.dtype, shape: Any, offset: float, rounding: Any) -> None:
    if way == "kernel" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    x, _, weight = leaves(shape, dtype)
    out = rms_norm(x, weight, EPS, offset=offset, rounding=rounding)
    true = doubled(x, weight)
    expected = rms_norm_oracle(*true, EPS, offset)
    loose = TOLERANCE[dtype] * (2 if rounding == "before_weight" or way == "kernel" else 1)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert relative_error(out, expected) < loose
    upstream = upstream_of(out, "dense")
    got = torch.autograd.grad(out, (x, weight), upstream)
    want = torch.autograd.grad(expected, true, upstream.double())
    for g, e, like in zip(got, want, (x, weight), strict=True):
        assert g.dtype == like.dtype
        assert relative_error(g, e) < 2 * loose


@every_pair(
    dtype=[torch.float32, torch.bfloat16],
    upstream=["dense", "expanded", "strided", "rows apart"],
    layout=["dense", "rows of a wider matrix", "columns apart", "heads"],
)
def test_strides(way: str, dtype: torch.dtype, upstream: str, layout: str) -> None:
    x, _, weight = leaves((4, 6, 24), dtype)
    with torch.no_grad():
        laid = {
            "dense": x,
            "rows of a wider matrix": torch.cat((x, x * torch.nan), -1)[..., :24],
            "columns apart": torch.stack((x, x * torch.nan), -1)[..., 0],
            "heads": x.transpose(0, 1).contiguous().transpose(0, 1),
        }[layout].requires_grad_()
    out = rms_norm(laid, weight, EPS)
    true = doubled(x, weight)
    expected = rms_norm_oracle(*true, EPS)
    g = upstream_of(out, upstream)
    got = torch.autograd.grad(out, (laid, weight), g)
    want = torch.autograd.grad(expected, true, g.double())
    loose = 4 * TOLERANCE[dtype]
    assert relative_error(out, expected) < loose
    assert all(relative_error(a, b) < loose for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("dtype", "needs"),
    [  # each of both with the other's plainest
        *((torch.float32, needs) for needs in product((False, True), repeat=3) if any(needs)),
        *((dtype, (True,) * 3) for dtype in TOLERANCE if dtype != torch.float32),
    ],
)
@pytest.mark.parametrize("use", ["both", "normed", "sum"])
def test_residual_sum(way: str, dtype: torch.dtype, needs: tuple[bool, ...], use: str) -> None:
    if way == "kernel" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    tensors = [t.detach().requires_grad_(need) for t, need in zip(leaves((3, 5, 20), dtype), needs, strict=True)]
    x, residual, weight = tensors
    normed, total = add_rms_norm(x, residual, weight, EPS, rounding="before_weight")
    assert torch.equal(total, x + residual) or way == "kernel"  # the interpreter cuts off
    true = doubled(*tensors)
    # the sum is rounded before it is normalised; its rounding is not differentiated
    exact = true[0] + true[1] + (total.double() - true[0] - true[1]).detach()
    expected = (rms_norm_oracle(exact, true[2], EPS), exact)
    loose = 2 * TOLERANCE[dtype] * (2 if way == "kernel" else 1)
    assert relative_error(normed, expected[0]) < loose
    outs, wants = ([normed], expected[:1]) if use == "normed" else ([total], expected[1:])
    if use == "both":
        outs, wants = [normed, total], expected
    if not any(needs[:2]):  # the sum depends on nothing that needs a gradient
        if use == "sum":
            return
        outs, wants = [normed], expected[:1]
    upstream = [upstream_of(out, "dense") for out in outs]
    inputs = [t for t in tensors if t.requires_grad]
    got = torch.autograd.grad(outs, inputs, upstream)
    want = torch.autograd.grad(
        wants, [t for t in true if t.requires_grad], [u.double() for u in upstream], materialize_grads=True
    )
    for g, e in zip(got, want, strict=True):
        assert relative_error(g, e) < 2 * loose


@pytest.mark.parametrize(
    ("stock", "rounding"), [("Llama", "before_weight"), ("Olmo2", "after_weight"), ("Gemma2", "after_weight")]
)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_on_a_cpu_rounds_as_transformers_does_to_the_bit(stock: str, rounding: Any, dtypes: Any) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = getattr(transformers.models, stock.lower())
    norm = getattr(getattr(modeling, f"modeling_{stock.lower()}"), f"{stock}RMSNorm")(33, eps=EPS)
    x, _, weight = leaves((9, 33), *dtypes)
    norm.weight.data = weight.detach()
    out = rms_norm(x, weight, EPS, offset=float(stock == "Gemma2"), rounding=rounding)
    expected = norm(x)
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)


def test_before_the_weight_it_is_rounded_to_the_inputs_dtype(way: str) -> None:
    x, _, _ = leaves((9, 33), torch.bfloat16)
    for rounding in ("before_weight", "after_weight"):
        out = rms_norm(x, torch.ones(33), EPS, rounding=rounding)
        assert torch.equal(out.bfloat16().to(out.dtype), out)
        assert out.dtype == (torch.float32 if rounding == "before_weight" else torch.bfloat16)
    wide = rms_norm(x.float(), torch.ones(33), EPS, rounding="before_weight")
    assert not torch.equal(wide.bfloat16().float(), wide)


def test_agrees_with_torchs_own_in_float32(way: str) -> None:
    x, _, weight = leaves((9, 33), torch.float32)
    torch.testing.assert_close(rms_norm(x, weight, EPS), F.rms_norm(x, (33,), weight, EPS))


def test_poison_stays_in_its_row(way: str) -> None:
    x, _, weight = leaves((6, 40), torch.float32)
    with torch.no_grad():
        x[2, 3], x[4, 0] = torch.nan, torch.inf
    out = rms_norm(x, weight, EPS)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    clean = torch.tensor([0, 1, 3, 5])
    assert out[clean].isfinite().all()
    assert dx[clean].isfinite().all()
    assert out[2].isnan().all()


def test_kept_for_backward_is_the_input_and_a_number_a_row(way: str) -> None:
    x, residual, weight = leaves((64, 128), torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        rms_norm(x, weight, EPS)
        own = [t for t in kept if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
        assert sum(t.nbytes for t in own) == 64 * 4
        kept.clear()
        _, total = add_rms_norm(x, residual, weight, EPS)
    own = [t for t in kept if t.data_ptr() not in (total.data_ptr(), weight.data_ptr())]
    assert sum(t.nbytes for t in own) == 64 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("offset", "rounding"), [*product((0.0, 1.0), ("before_weight", "after_weight"))])
def test_no_weight_is_one_of_ones(way: str, dtype: torch.dtype, offset: float, rounding: Any) -> None:
    x, residual, _ = leaves((7, 37), dtype)
    ones = torch.ones(37, dtype=dtype)
    results = []
    for weight in (None, ones):
        normed, total = add_rms_norm(x, residual, weight, EPS, offset=offset, rounding=rounding)
        alone = rms_norm(x, weight, EPS, offset=offset, rounding=rounding)
        loss = (normed * alone * total).float().sum()
        results.append((normed, alone, *torch.autograd.grad(loss, (x, residual))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][1].dtype == dtype


def test_checkpoint_and_autocast(way: str) -> None:
    x, residual, weight = leaves((6, 16), torch.float32)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        normed, total = add_rms_norm(x, residual, weight, EPS)
        return rms_norm(F.linear(normed, torch.eye(16)), weight, EPS, rounding="before_weight") + total

    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = block(x, residual), checkpoint(block, x, residual, use_reentrant=False)
    assert {out.dtype for out in outs} == {torch.float32}  # the weight is: as with transformers' own module
    got, recomputed = ((out, *torch.autograd.grad(out.sum(), (x, residual, weight))) for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(got, recomputed, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"input": [1.0]}, ArgumentTypeError, "input: expected a torch.Tensor"),
        ({"input": torch.ones(2, 8, dtype=torch.int64)}, ArgumentTypeError, "input: expected float64, float32"),
        ({"weight": torch.ones(8, dtype=torch.bool)}, ArgumentTypeError, "weight: expected float64, float32"),
        ({"weight": torch.ones(8).as_subclass(Sharded)}, ArgumentTypeError, "weight: expected .*whole.*got a DTensor"),
        ({"weight": torch.ones(7)}, ArgumentValueError, r"weight: expected shape \[D\]"),
        ({"weight": torch.ones(1, 8)}, ArgumentValueError, r"weight: expected shape \[D\]"),
        ({"weight": torch.ones(8, device="meta")}, ArgumentValueError, "weight: expected a tensor on cpu"),
        ({"eps": "small"}, ArgumentTypeError, "eps: expected a number"),
        ({"eps": torch.tensor(1e-5)}, ArgumentTypeError, r"eps: expected a number, got Tensor\. Pass float\(eps\)"),
        ({"eps": -1e-5}, ArgumentValueError, "eps: expected a finite number of at least 0, got -1e-05"),
        ({"eps": float("nan")}, ArgumentValueError, "eps: expected a finite number"),
        ({"offset": True}, ArgumentTypeError, "offset: expected a number"),
        ({"rounding": "never"}, ArgumentValueError, "rounding: expected 'before_weight' or 'after_weight'"),
        ({"residual": torch.ones(2, 8).double()}, ArgumentTypeError, "residual: expected torch.float32"),
        ({"residual": torch.ones(8)}, ArgumentValueError, r"residual: expected shape \[2, 8\]"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"input": torch.ones(2, 8), "weight": torch.ones(8), "eps": EPS, "residual": torch.ones(2, 8), **change}
    with pytest.raises(error, match=text):
        add_rms_norm(**arguments)
    if "residual" not in change:
        with pytest.raises(error, match=text):
            rms_norm(**{k: v for k, v in arguments.items() if k != "residual"})

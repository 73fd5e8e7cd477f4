"""Norms and rotations by the kernels' interpreter beside the contract's plain PyTorch, and what that does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contract.function import check
from contract.parts import FUNCTIONS
from lowtide.layers import add_rms_norm, rms_norm, rotary
from promises import promise
from support import in_float64, pairs, relative_error, rotary_oracle

EPS = 1e-5
NAMES = ["rms_norm", "add_rms_norm", "rotary"]
# Relative errors of values and of gradients: float32's sums, one rounding of the others, and the interpreter cuts off.
KERNELS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (2**-6, 2**-5), torch.float16: (2**-9, 2**-8)}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
every_name = pytest.mark.parametrize("name", NAMES)


def arguments(name: str, *leading: int, dtype: torch.dtype = torch.float32, **choice: Any) -> dict[str, Any]:
    return FUNCTIONS[name].arguments(dtype, leading=leading, **choice)


@promise("kernels")
@every_name
def test_kernels(name: str, kernels: None) -> None:
    """Every pair of options, also with sizes of no power of 2 and of several tiles of rows and programs."""
    sizes: dict[str, list[Any]] = {"D": [24, 37, 3, 64], "leading": [(2, 5), (), (1,), (131,), (0,), (2, 0)]}
    if name == "rotary":  # nothing is rotated by r = 0
        sizes = {"d": [8, 12, 64], "r": [None, 6, 4], "leading": [(2,), (), (0,)]}
    options = {**FUNCTIONS[name].options, **sizes, "dtype": KERNELS}
    for case in pairs({option: list(values) for option, values in options.items()}, seed=int(torch.randint(2**31, ()))):
        check(FUNCTIONS[name], case, case.pop("dtype"), tolerance=KERNELS)


def laid_out(t: Tensor, layout: str) -> Tensor:
    """Return the same numbers elsewhere in memory, in which NaN stands between them."""
    nothing = torch.full_like(t, torch.nan)
    return {
        "rows apart": torch.cat((t, nothing), -1)[..., : t.shape[-1]],
        "columns apart": torch.stack((t, nothing), -1)[..., 0],
        "heads": t.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": t[..., :1].contiguous().expand(t.shape),
    }[layout]


@promise("layouts", "kernels")
@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strides_of_inputs_and_upstream(way: str, name: str, dtype: torch.dtype) -> None:
    for layout, of_upstream in pairs_of_layouts():
        kwargs = arguments(name, *((2,) if name == "rotary" else (4, 6)), dtype=dtype)
        for key, t in kwargs.items():
            if isinstance(t, Tensor) and t.dim() > 1:
                kwargs[key] = laid_out(t.detach(), layout).requires_grad_(t.requires_grad)
        wide = in_float64(kwargs)
        trained = [key for key, t in kwargs.items() if isinstance(t, Tensor) and t.requires_grad]
        results = []
        for run, given in ((FUNCTIONS[name].run, kwargs), (FUNCTIONS[name].truth, wide)):
            outs = run(**given)
            outs = outs if isinstance(outs, tuple) else (outs,)
            g = torch.Generator().manual_seed(1)
            drawn = (torch.randn(out.shape, generator=g).to(dtype) for out in outs)
            ups = [laid_out(u, of_upstream).to(out.dtype) for u, out in zip(drawn, outs, strict=True)]
            results.append((*outs, *torch.autograd.grad(outs, [given[key] for key in trained], ups)))
        room = 2 if layout == of_upstream == "expanded" else 1  # all columns are one sum, which may cancel
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < room * KERNELS[dtype][1], (layout, of_upstream)


def pairs_of_layouts() -> list[tuple[str, str]]:
    names = ["rows apart", "columns apart", "heads", "expanded"]
    return [(one, other) for i, one in enumerate(names) for other in (names[i], names[i - 1])]


@promise("values")
@pytest.mark.parametrize(
    ("stock", "rounding"), [("Llama", "before_weight"), ("Olmo2", "after_weight"), ("Gemma2", "after_weight")]
)
def test_on_a_cpu_norms_round_as_transformers_to_the_bit(stock: str, rounding: Any) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = getattr(getattr(transformers.models, stock.lower()), f"modeling_{stock.lower()}")
    for x_dtype in (torch.float32, torch.bfloat16):
        for weight_dtype in (torch.float32, x_dtype):
            norm = getattr(modeling, f"{stock}RMSNorm")(33, eps=EPS)
            norm.weight.data = torch.randn(33).to(weight_dtype)
            x = 3 * torch.randn(9, 33).to(x_dtype)
            out = rms_norm(x, norm.weight, EPS, offset=float(stock == "Gemma2"), rounding=rounding)
            assert out.dtype == norm(x).dtype
            assert torch.equal(out, norm(x))


@promise("values")
@pytest.mark.parametrize(("stock", "promote"), [("llama", True), ("olmo2", False)])
def test_on_a_cpu_rotations_round_as_transformers_to_the_bit(stock: str, promote: bool) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = getattr(getattr(transformers.models, stock), f"modeling_{stock}")
    for dtype in (torch.float32, torch.bfloat16):
        for of_tables in (torch.float32, torch.bfloat16):
            q, k, cos, sin = (torch.randn(*s) for s in ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8)))
            given = (q.to(dtype), k.to(dtype), cos.to(of_tables), sin.to(of_tables))
            for got, expected in zip(
                rotary(*given, promote=promote), modeling.apply_rotary_pos_emb(*given), strict=True
            ):
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)


@promise("dtypes")
@pytest.mark.parametrize("promote", [True, False])
def test_tables_of_a_wider_dtype(way: str, promote: bool) -> None:
    kwargs = arguments("rotary", 2, dtype=torch.bfloat16, r=4)
    cos, sin = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    q, k = kwargs["q"], kwargs["k"]
    outs = rotary(q, k, cos, sin, promote=promote)
    assert {out.dtype for out in outs} == {torch.float32 if promote else torch.bfloat16}
    true = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = [rotary_oracle(x, cos.double(), sin.double()) for x in true]
    got, want = (
        torch.autograd.grad(sum(o.sum() for o in of), given) for of, given in ((outs, (q, k)), (expected, true))
    )
    for found, exact in zip(outs, expected, strict=True):
        assert relative_error(found, exact) < (3e-7 if promote else 2**-7)
    for found, exact in zip(got, want, strict=True):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, exact) < 2**-7


@promise("ignored")
def test_poison_stays_in_its_row(way: str) -> None:
    kwargs = arguments("rms_norm", 6)
    with torch.no_grad():
        kwargs["input"][2, 3], kwargs["input"][4, 0] = torch.nan, torch.inf
    out = rms_norm(**kwargs)
    (dx,) = torch.autograd.grad(out, kwargs["input"], torch.ones_like(out))
    clean = torch.tensor([0, 1, 3, 5])
    assert out[clean].isfinite().all()
    assert dx[clean].isfinite().all()
    assert out[2].isnan().all()
    kwargs = arguments("rotary", 2, r=6)
    with torch.no_grad():
        kwargs["q"][0, 1, 2, 0] = torch.nan
    q, k = rotary(**kwargs)
    assert q.isnan().nonzero().tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert k.isfinite().all()


@promise("memory")
@every_name
def test_kept_for_backward(way: str, name: str) -> None:
    """The input or the sum, and a number a row; of rotations the tables alone."""
    kwargs = arguments(name, 64, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        outs = FUNCTIONS[name].run(**kwargs)
    if name == "rotary":
        assert {t.data_ptr() for t in kept} == {kwargs["cos"].data_ptr(), kwargs["sin"].data_ptr()}
        return
    rows = kwargs["input"] if name == "rms_norm" else outs[1]
    own = [t for t in kept if t.data_ptr() not in (rows.data_ptr(), kwargs["weight"].data_ptr())]
    assert sum(t.nbytes for t in own) == 64 * 4


@promise("options")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_weight_is_one_of_ones(way: str, dtype: torch.dtype) -> None:
    for offset, rounding in ((0.0, "before_weight"), (1.0, "after_weight"), (1.0, "before_weight")):
        x, residual = (torch.randn(7, 37).to(dtype).requires_grad_() for _ in range(2))
        results = []
        for weight in (None, torch.ones(37, dtype=dtype)):
            normed, total = add_rms_norm(x, residual, weight, EPS, offset=offset, rounding=rounding)
            alone = rms_norm(x, weight, EPS, offset=offset, rounding=rounding)
            loss = (normed * alone * total).float().sum()
            results.append((normed, alone, *torch.autograd.grad(loss, (x, residual))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert results[0][1].dtype == dtype

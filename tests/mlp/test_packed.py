"""The fused MLP over bitsandbytes' 4-bit weights: values against float64, what is saved, how long a weight is dense."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from four_bit import four_bit_layer
from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise
from lowtide.mlp.call import JOINED
from lowtide.mlp.projection import Adapter, Packed, Projection
from lowtide.mlp.swiglu import adapted_mlp
from promises import promise
from support import relative_error

bnb = pytest.importorskip("bitsandbytes")

pytestmark = [
    promise("adapters"),
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),  # dynamo's
]
KINDS = {"nf4": {}, "nf4 nested": {"compress_statistics": True}, "fp4 in bf16": {"quant_storage": torch.bfloat16}}


@pytest.fixture(autouse=True)
def _eager(request: pytest.FixtureRequest) -> Iterator[None]:
    """bitsandbytes compiles its own functions of the CPU, for each shape and dtype anew."""
    if "compiled" in request.node.name:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def layer(
    rows: int, columns: int, dtype: torch.dtype, kind: str = "nf4", *, bias: bool = False, block: int = 64
) -> Any:
    """A Linear4bit of random weights that computes in ``dtype``; its scales are quantised for "nested"."""
    plain = torch.nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        plain.weight.normal_(std=columns**-0.5)
    if bias:
        plain.bias = torch.nn.Parameter(torch.randn(rows).to(dtype))
    return four_bit_layer(plain, dtype, quant_type=kind[:3], blocksize=block, **KINDS[kind])


def packed(linear: Any, dtype: torch.dtype) -> Packed:
    return Packed.of(linear.weight, linear.weight.quant_state, dtype)


def exact(linear: Any) -> Tensor:
    """The weight that 4 bits hold, in float64, by bitsandbytes itself."""
    state = linear.weight.quant_state
    assert state.dtype == torch.float32
    dense: Tensor = bnb.functional.dequantize_4bit(linear.weight.data, state)
    return dense.double()


def adapter(rows: int, columns: int, dtype: torch.dtype) -> Adapter:
    a, b = torch.randn(4, columns) * columns**-0.5, torch.randn(rows, 4)
    return Adapter(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), 0.75, 0.0)


class Packs:
    """An MLP of such layers: by lowtide, by bitsandbytes' own layers, and in float64."""

    def __init__(
        self, dtype: torch.dtype, lora: torch.dtype | None, joined: str = "", *, D: int = 34, F: int = 57,
        kind: str = "nf4", **of_layers: Any,
    ) -> None:  # fmt: skip
        shapes = [(2 * F, D), (D, F)] if joined else [(F, D), (F, D), (D, F)]
        self.dtype, self.joined = dtype, joined
        self.layers = [layer(*shape, dtype, kind, **of_layers) for shape in shapes]
        self.adapters = [None if lora is None else adapter(*shape, lora) for shape in shapes]
        self.sides = [side for one in self.adapters if one is not None for side in one[:2]]

    def fused(self, x: Tensor, **settings: Any) -> Tensor:
        pairs = zip(self.layers, self.adapters, strict=True)
        gate, *up, down = (Projection(packed(linear, self.dtype), linear.bias, one) for linear, one in pairs)
        settings = {"activation": "silu", "joined": self.joined, **settings}
        return adapted_mlp(x, gate, up[0] if up else None, down, **settings)

    def textbook(self, x: Tensor, activation: str = "silu", *, true: bool = False) -> Tensor:
        """The MLP in plain PyTorch: by bitsandbytes' layers, or if ``true`` in float64."""

        def project(i: int, z: Tensor) -> Tensor:
            linear, lora = self.layers[i], self.adapters[i]
            bias = None if linear.bias is None else linear.bias.double()
            y = F.linear(z, exact(linear), bias) if true else linear(z)
            if lora is None:
                return y
            a, b = (side.double() if true else side for side in (lora.a, lora.b))
            return y + lora.scale * F.linear(F.linear(z.to(a.dtype), a), b).to(y.dtype)

        if self.joined:
            both = project(0, x)
            gate, up = (both[..., rows] for rows in JOINED[self.joined](both.shape[-1] // 2))
        else:
            gate, up = project(0, x), project(1, x)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return project(len(self.layers) - 1, act * up)


@pytest.mark.parametrize(
    ("kind", "dtype", "lora", "joined", "tile", "bias", "block"),
    [
        ("nf4", torch.float32, None, "", None, True, 64),
        ("nf4 nested", torch.float32, torch.float32, "", 7, False, 128),
        ("fp4 in bf16", torch.float32, torch.float32, "interleaved", None, False, 64),
        ("nf4 nested", torch.bfloat16, torch.float32, "", None, True, 32),
        ("nf4", torch.bfloat16, torch.bfloat16, "gate first", 10, False, 64),
        ("fp4 in bf16", torch.float16, None, "up first", None, True, 64),
    ],
)
def test_no_further_from_float64_than_bitsandbytes(
    kind: str, dtype: torch.dtype, lora: Any, joined: str, tile: int | None, bias: bool, block: int
) -> None:
    ours, theirs = 0.0, 0.0
    for draw in range(8):
        level, activation = draw % 2, "gelu_tanh" if draw % 3 else "silu"
        width = 58 if "bf16" in kind else 57  # two values a byte, two bytes a bfloat16
        mlp = Packs(dtype, lora, joined, F=width, kind=kind, bias=bias, block=block)
        x, upstream = torch.randn(3, 7, 34).to(dtype).requires_grad_(), torch.randn(3, 7, 34).to(dtype)
        trained = [x, *mlp.sides, *(linear.bias for linear in mlp.layers if bias)]
        y = mlp.fused(x, activation=activation, checkpoint_level=level, tile_tokens=tile)
        assert y.dtype == dtype
        got = [y, *torch.autograd.grad(y, trained, upstream)]
        y = mlp.textbook(x, activation)
        stock = [y, *torch.autograd.grad(y, trained, upstream)]
        y = mlp.textbook(x.double(), activation, true=True)
        true = [y, *torch.autograd.grad(y, trained, upstream.double())]
        for g, s, t in zip(got, stock, true, strict=True):
            ours += relative_error(g, t) ** 2
            theirs += relative_error(s, t) ** 2
    assert 0 < ours <= 1.3**2 * theirs


@pytest.mark.parametrize(
    ("x_dtype", "compute"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)],
)
def test_the_output_has_the_dtype_of_the_input(x_dtype: torch.dtype, compute: torch.dtype) -> None:
    mlp = Packs(compute, None)
    bound = 1e-5 if {x_dtype, compute} == {torch.float32, torch.float64} else 1e-2
    for level, tile in ((0, 2), (1, None)):
        x = torch.randn(5, 34, dtype=x_dtype, requires_grad=True)
        y, stock = mlp.fused(x, checkpoint_level=level, tile_tokens=tile), mlp.textbook(x)
        assert y.dtype == stock.dtype == x_dtype
        (dx,), (dx_stock,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, stock))
        assert relative_error(y, stock) <= bound
        assert relative_error(dx, dx_stock) <= bound


N, D, FF = 2048, 64, 160


@promise("memory")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("compute", "x_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_what_stays_after_forward(compute: torch.dtype, x_dtype: torch.dtype, lora: bool) -> None:
    """Gate and up in the narrower dtype of the two: bitsandbytes' layers return them in that of x."""
    mlp = Packs(compute, compute if lora else None, D=D, F=FF, kind="nf4 nested")
    x = torch.randn(N, D).to(x_dtype).requires_grad_()
    for level, expected in ((0, 2 * FF * N * 2), (1, 0)):
        mlp.fused(x, checkpoint_level=level)
        gc.collect()
        with track_allocations() as seen:
            y = mlp.fused(x, checkpoint_level=level)
            gc.collect()
        stayed = seen.events[-1].total_bytes - y.numel() * y.element_size()
        assert stayed - expected in (0, 2, 4)  # one element stands for an input that is not saved
        del y
        gc.collect()


@promise("memory")
def test_peak_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above x's gradient: gate, up and the product's gradient, as with dense weights; and one dense weight."""
    monkeypatch.setattr(elementwise, "PIECE", 2**11)
    mlp = Packs(torch.bfloat16, None, D=D, F=FF, kind="nf4 nested")
    x, upstream = torch.randn(N, D).bfloat16().requires_grad_(), torch.ones(N, D, dtype=torch.bfloat16)
    torch.autograd.grad(mlp.fused(x, checkpoint_level=1), x, upstream)
    y = mlp.fused(x, checkpoint_level=1)
    gc.collect()
    with track_allocations() as seen:
        torch.autograd.grad(y, x, upstream)
    rows = (3 * FF + D) * N * 2
    # the CPU's dequantisation has its own scratch, and the elementwise pieces theirs
    assert rows <= max(event.total_bytes for event in seen.events) <= rows + FF * D * 2 + 2**17


@promise("again", "compile", "layouts")
@pytest.mark.parametrize(("dynamic", "level"), [(False, 1), (True, 0)])
def test_twice_compiled_and_without_tokens(dynamic: bool, level: int) -> None:
    mlp = Packs(torch.float32, torch.float32, D=D, F=FF, kind="nf4 nested")
    x = torch.randn(9, D, requires_grad=True)

    def run(z: Tensor) -> Tensor:
        return mlp.fused(z, checkpoint_level=level).square().sum()

    loss = run(x)
    expected = torch.autograd.grad(loss, [x, *mlp.sides], retain_graph=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for again in (loss, compiled(x)):
        torch.testing.assert_close(torch.autograd.grad(again, [x, *mlp.sides]), expected)
    nothing = torch.zeros(2, 0, D, requires_grad=True)
    y = mlp.fused(nothing, checkpoint_level=level)
    y.sum().backward()
    assert y.shape == nothing.grad.shape == (2, 0, D)
    assert all((side.grad == 0).all() for side in mlp.sides)

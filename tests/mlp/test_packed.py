"""The fused MLP over bitsandbytes' 4-bit weights: values against float64, what is saved, how long a weight is dense."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from four_bit import four_bit_layer
from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise
from lowtide.mlp.call import JOINED, Adapter, Projection
from lowtide.mlp.packed import Packed
from lowtide.mlp.swiglu import adapted_mlp
from support import every_pair, relative_error

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo's

KINDS = {"nf4": {}, "nf4 nested": {"compress_statistics": True}, "fp4 in bf16": {"quant_storage": torch.bfloat16}}


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


def projections(layers: Any, adapters: Any, dtype: torch.dtype) -> list[Projection]:
    pairs = zip(layers, adapters, strict=True)
    return [Projection(packed(linear, dtype), linear.bias, adapter) for linear, adapter in pairs]


def textbook(x: Tensor, layers: Any, adapters: Any, joined: str, activation: str, *, true: bool) -> Tensor:
    """The MLP in plain PyTorch: by bitsandbytes' layers, or if ``true`` in float64."""

    def project(i: int, z: Tensor) -> Tensor:
        linear, lora = layers[i], adapters[i]
        if true:
            y = F.linear(z, exact(linear), None if linear.bias is None else linear.bias.double())
        else:
            y = linear(z)
        if lora is None:
            return y
        a, b = (side.double() if true else side for side in (lora.a, lora.b))
        return y + lora.scale * F.linear(F.linear(z.to(a.dtype), a), b).to(y.dtype)

    if joined:
        both = project(0, x)
        gate, up = (both[..., rows] for rows in JOINED[joined](both.shape[-1] // 2))
    else:
        gate, up = project(0, x), project(1, x)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return project(len(layers) - 1, act * up)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "lora", "joined", "tile", "bias", "block"),
    [
        (torch.float32, None, "", None, True, 64),
        (torch.float32, torch.float32, "", 7, False, 128),
        (torch.float32, torch.float32, "interleaved", None, False, 64),
        (torch.bfloat16, torch.float32, "", None, True, 32),
        (torch.bfloat16, torch.bfloat16, "gate first", 10, False, 64),
        (torch.float16, None, "up first", None, True, 64),
    ],
)
def test_no_further_from_float64_than_bitsandbytes(
    dtype: torch.dtype, lora: Any, joined: str, tile: int | None, bias: bool, block: int, kind: str, level: int
) -> None:
    FF = 58 if "bf16" in kind else 57  # two values a byte, two bytes a bfloat16
    D, activation = 34, "silu" if level else "gelu_tanh"
    shapes = [(2 * FF, D), (D, FF)] if joined else [(FF, D), (FF, D), (D, FF)]
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        layers = [layer(*shape, dtype, kind, bias=bias, block=block) for shape in shapes]
        adapters = [None if lora is None else adapter(*shape, lora) for shape in shapes]
        x, upstream = torch.randn(3, 7, D).to(dtype).requires_grad_(), torch.randn(3, 7, D).to(dtype)
        sides = [side for one in adapters if one is not None for side in one[:2]]
        trained = [x, *sides, *(linear.bias for linear in layers if bias)]

        gate, *up, down = projections(layers, adapters, dtype)
        y = adapted_mlp(
            x, gate, up[0] if up else None, down, activation=activation, checkpoint_level=level, tile_tokens=tile,
            joined=joined,
        )  # fmt: skip
        assert y.dtype == dtype
        got = [y, *torch.autograd.grad(y, trained, upstream)]
        y = textbook(x, layers, adapters, joined, activation, true=False)
        stock = [y, *torch.autograd.grad(y, trained, upstream)]
        y = textbook(x.double(), layers, adapters, joined, activation, true=True)
        true = [y, *torch.autograd.grad(y, trained, upstream.double())]
        for g, s, t in zip(got, stock, true, strict=True):
            ours += relative_error(g, t) ** 2
            theirs += relative_error(s, t) ** 2
    assert 0 < ours <= 1.3**2 * theirs


@pytest.mark.parametrize(
    ("x_dtype", "compute"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)],
)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tile", [None, 2])
def test_the_output_has_the_dtype_of_the_input(
    x_dtype: torch.dtype, compute: torch.dtype, level: int, tile: int | None
) -> None:
    torch.manual_seed(0)
    layers = [layer(57, 34, compute), layer(57, 34, compute), layer(34, 57, compute)]
    x = torch.randn(5, 34, dtype=x_dtype, requires_grad=True)
    y = adapted_mlp(
        x, *projections(layers, [None] * 3, compute), activation="silu", checkpoint_level=level, tile_tokens=tile
    )
    stock = textbook(x, layers, [None] * 3, "", "silu", true=False)
    assert y.dtype == stock.dtype == x_dtype
    (dx,), (dx_stock,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, stock))
    bound = 1e-5 if {x_dtype, compute} == {torch.float32, torch.float64} else 1e-2
    assert relative_error(y, stock) <= bound
    assert relative_error(dx, dx_stock) <= bound


N, D, FF = 2048, 64, 160


def big(dtype: torch.dtype, lora: bool = True, x_dtype: torch.dtype | None = None) -> tuple[Tensor, list[Projection]]:
    torch.manual_seed(0)
    shapes = [(FF, D), (FF, D), (D, FF)]
    layers = [layer(*shape, dtype, "nf4 nested") for shape in shapes]
    adapters = [adapter(*shape, dtype) if lora else None for shape in shapes]
    return torch.randn(N, D).to(x_dtype or dtype).requires_grad_(), projections(layers, adapters, dtype)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("compute", "x_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_what_stays_after_forward(compute: torch.dtype, x_dtype: torch.dtype, lora: bool) -> None:
    """Gate and up in the narrower dtype of the two: bitsandbytes' layers return them in that of x."""
    x, (gate, up, down) = big(compute, lora, x_dtype)
    for level, expected in ((0, 2 * FF * N * 2), (1, 0)):
        run = lambda: adapted_mlp(x, gate, up, down, activation="silu", checkpoint_level=level)  # noqa: B023, E731
        run()
        gc.collect()
        with track_allocations() as seen:
            y = run()
            gc.collect()
        stayed = seen.events[-1].total_bytes - y.numel() * y.element_size()
        assert stayed - expected in (0, 2, 4)  # one element stands for an input that is not saved
        del y
        gc.collect()


def test_peak_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above x's gradient: gate, up and the product's gradient, as with dense weights; and one dense weight."""
    monkeypatch.setattr(elementwise, "PIECE", 2**11)
    x, (gate, up, down) = big(torch.bfloat16, lora=False)
    upstream = torch.ones(N, D, dtype=torch.bfloat16)

    def run() -> Any:
        return adapted_mlp(x, gate, up, down, activation="silu", checkpoint_level=1)

    torch.autograd.grad(run(), x, upstream)
    y = run()
    gc.collect()
    with track_allocations() as seen:
        torch.autograd.grad(y, x, upstream)
    peak = max(event.total_bytes for event in seen.events)
    rows = (3 * FF + D) * N * 2
    # the CPU's dequantisation has its own scratch, and the elementwise pieces theirs
    assert rows <= peak <= rows + FF * D * 2 + 2**17


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_twice_and_compiled(dynamic: bool, level: int) -> None:
    x, (gate, up, down) = big(torch.float32)
    trained = [x, *(side for one in (gate, up, down) for side in one.adapter[:2])]

    def run(z: Tensor) -> Tensor:
        return adapted_mlp(z, gate, up, down, activation="silu", checkpoint_level=level).square().sum()

    loss = run(x)
    expected = torch.autograd.grad(loss, trained, retain_graph=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for again in (loss, compiled(x)):
        torch.testing.assert_close(torch.autograd.grad(again, trained), expected)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    _, (gate, up, down) = big(torch.bfloat16)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    y = adapted_mlp(x, gate, up, down, activation="silu", checkpoint_level=1)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert (gate.adapter.a.grad == 0).all()


@every_pair(kind=KINDS, sizes=[(250, 34), (256, 32), (256, 64)], joined=[name for name in JOINED if name])
def test_rows_of_one_projection(kind: str, sizes: tuple[int, int], joined: str) -> None:
    """Whether or not one row shares a scale with the next."""
    linear = layer(2 * sizes[0], sizes[1], torch.float32, kind)
    whole, expected = packed(linear, torch.float32), exact(linear)
    for rows in JOINED[joined](sizes[0]):
        assert rows is not None
        torch.testing.assert_close(whole[rows].dense().double(), expected[rows], rtol=1e-6, atol=0)

"""The gated MLP, in 4 bits too, and experts on a CUDA device: values, what is kept, peaks, no waits, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from four_bit import four_bit_layer
from gpu.conftest import HOPPER, ON_GPU, no_waits
from lowtide.mlp.experts import Form
from lowtide.mlp.projection import Adapter, Packed, Projection
from lowtide.mlp.swiglu import adapted_mlp
from mlp.experts import FORMS, GPT_OSS, by_pairs, fused, operands, with_gradients
from promises import promise
from support import assert_near, doubled, every_pair, relative_error

pytestmark = [
    *ON_GPU,
    # autograd's thread has no context yet where its first operation is a GEMM, as it is after y.backward(upstream)
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, K, E, D, F: of whole 16 bytes and not, many experts without tokens, no token
EXPERTS = [(300, 3, 8, 64, 48), (77, 2, 5, 36, 20), (40, 2, 64, 128, 64), (0, 2, 4, 16, 8)]
FEW = 100  # tokens
# With few numbers, one at a limit decides an error: its gradient passes or not, as it was rounded.
RARELY_LIMITED = GPT_OSS._replace(limit=7.0)
LEVELS = pytest.mark.parametrize("level", [0, 1])


def gradients(y: Tensor, leaves: list[Any], upstream: Tensor, **kwargs: Any) -> list[Tensor]:
    trained = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, trained, upstream.to(y.dtype), **kwargs)]


@promise("values", "kernels")
@every_pair(sizes=EXPERTS, form=FORMS, transposed=[False, True], level=[0, 1], dtype=DTYPES)
def test_experts_err_no_more_than_plain_pytorch(
    sizes: Any, form: Form, transposed: bool, level: int, dtype: torch.dtype
) -> None:
    if sizes[0] < FEW and form == GPT_OSS:
        form = RARELY_LIMITED
    leaves, ids = operands(sizes, dtype=dtype, transposed=transposed, device="cuda")
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, form, transposed=transposed), true)
    plain = with_gradients(by_pairs(leaves, ids, form, transposed=transposed), leaves)
    y = fused(leaves, ids, form, transposed=transposed, checkpoint_level=level)
    twice = with_gradients(y, leaves, retain_graph=True)
    got = with_gradients(y, leaves)  # in place now
    # of few numbers plain PyTorch may be lucky with all
    slack = (2e-3 if sizes[0] < FEW else 0.0) if dtype == torch.bfloat16 else 8 * torch.finfo(dtype).eps
    for g, again, p, e in zip(got, twice, plain, expected, strict=True):
        assert torch.equal(g, again)
        assert relative_error(g, e) <= 1.3 * relative_error(p, e) + slack


@promise("kernels")
@LEVELS
def test_pairs_of_no_expert_add_nothing(level: int) -> None:
    """No GEMM writes their rows: memory of NaN shows where one is read."""
    leaves, ids = operands(EXPERTS[0], dtype=torch.bfloat16, device="cuda")
    ids[::3, 1], ids[7] = 8, 8
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, RARELY_LIMITED), true)
    for _ in range(2):
        room = torch.full((2**22,), torch.nan, device="cuda", dtype=torch.bfloat16)
        del room
        got = with_gradients(fused(leaves, ids, RARELY_LIMITED, checkpoint_level=level), leaves)
        assert_near(got, expected, 2e-2)
        assert not got[2][ids == 8].any()


@promise("host", "bitwise")
@HOPPER  # where PyTorch's grouped GEMM is
@LEVELS
def test_experts_do_not_wait_and_the_bits_are_the_same(level: int) -> None:
    leaves, ids = operands((512, 4, 16, 64, 48), dtype=torch.bfloat16, device="cuda")
    upstream = torch.randn_like(leaves[0])

    def step() -> list[Tensor]:
        return gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves, upstream)

    found = same_without_waits(step)
    torch.use_deterministic_algorithms(True)
    try:
        again = step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def same_without_waits(step: Callable[[], list[Tensor]]) -> list[Tensor]:
    found = []
    for waits in (nullcontext, no_waits):  # the first time compiles
        with waits():
            found.append(step())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return found[0]


def projections(dtype: torch.dtype, *, nested: bool, lora: bool) -> tuple[list[Any], list[Projection]]:
    """Layers of bitsandbytes, and the same as the fused MLP takes them."""
    D, FF = 256, 688
    layers, found = [], []
    for rows, columns in ((FF, D), (FF, D), (D, FF)):
        plain = torch.nn.Linear(columns, rows, bias=False, device="cuda")
        layers.append(four_bit_layer(plain, dtype, compress_statistics=nested))
        a, b = torch.randn(8, columns, device="cuda") * columns**-0.5, torch.randn(rows, 8, device="cuda")
        adapter = Adapter(a.requires_grad_(), b.requires_grad_(), 0.5, 0.0) if lora else None
        packed = Packed.of(layers[-1].weight, layers[-1].weight.quant_state, dtype)
        found.append(Projection(packed, None, adapter))
    return layers, found


def stock(x: Tensor, layers: list[Any], found: list[Projection], *, true: bool = False) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    def project(i: int, z: Tensor) -> Tensor:
        layer, adapter = layers[i], found[i].adapter
        if true:
            y = F.linear(z, dequantize_4bit(layer.weight.data, layer.weight.quant_state).double())
        else:
            y = layer(z)
        if adapter is not None:
            a, b = (side.to(torch.float64 if true else torch.float32) for side in (adapter.a, adapter.b))
            y = y + adapter.scale * (z.to(a.dtype) @ a.T @ b.T).to(y.dtype)
        return y

    return project(2, F.silu(project(0, x)) * project(1, x))


@promise("adapters", "kernels")
@pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")  # bitsandbytes' own, of an odd size
@every_pair(dtype=[torch.bfloat16, torch.float16], nested=[False, True], lora=[False, True], level=[0, 1])
def test_four_bits_err_no_more_than_bitsandbytes(dtype: torch.dtype, nested: bool, lora: bool, level: int) -> None:
    """With LoRA or without; the host does not wait, and the bits are the same."""
    pytest.importorskip("bitsandbytes")
    layers, found = projections(dtype, nested=nested, lora=lora)
    x = torch.randn(3, 413, 256, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 413, 256, device="cuda")
    trained = [x, *(side for one in found if one.adapter for side in one.adapter[:2])]

    def run() -> Tensor:
        return adapted_mlp(x, *found, activation="silu", checkpoint_level=level)

    def graded(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, trained, upstream.to(y.dtype))]

    got = same_without_waits(lambda: graded(run()))
    plain, true = graded(stock(x, layers, found)), graded(stock(x.double(), layers, found, true=True))
    for g, p, t in zip(got, plain, true, strict=True):
        assert relative_error(g, t) <= 1.3 * relative_error(p, t) + 1e-4

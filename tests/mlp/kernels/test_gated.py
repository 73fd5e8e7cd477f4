"""The kernels between the GEMMs, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from lowtide.mlp import elementwise
from lowtide.mlp.elementwise import BLOCK, gated, gated_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ACTIVATIONS = ["silu", "gelu_tanh"]
# half a unit in the last place where the result is narrow; the interpreter cuts off
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "has_kernels", lambda _: True)


def act(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def three(n: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return a room of NaN, and three tensors of n numbers in it."""
    room = torch.full((3, n + 24), torch.nan, device=DEVICE, dtype=dtype)
    room[:, 8 : n + 8] = torch.randn(3, n, dtype=torch.float64).to(DEVICE, dtype)
    return room, [row[8 : n + 8] for row in room]


def poisoned(room: Tensor, n: int) -> bool:
    return bool(room[:, :8].isnan().all() and room[:, n + 8 :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [0, 1, 37, BLOCK, BLOCK + 3])
def test_product(dtype: torch.dtype, activation: str, n: int) -> None:
    for over in (0, 1, 2):
        room, tensors = three(n, dtype)
        gate, up, _ = (t.clone() for t in tensors)
        gated(tensors[0], tensors[1], activation, tensors[over])
        exact = act(gate.double(), activation) * up.double()
        torch.testing.assert_close(tensors[over].double(), exact, rtol=ROUNDING[dtype], atol=1e-7)
        assert all(torch.equal(t, b) for t, b in zip(tensors[:2], (gate, up), strict=True) if t is not tensors[over])
        assert poisoned(room, n)


def test_a_wider_product() -> None:
    gate, up = torch.randn(2, 37, device=DEVICE).half()
    out = torch.full((37,), torch.nan, device=DEVICE)
    gated(gate, up, "silu", out)
    torch.testing.assert_close(out.double(), F.silu(gate.double()) * up.double(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [0, 1, 37, BLOCK + 3])
def test_gradients_over_what_they_are_made_of(dtype: torch.dtype, activation: str, n: int) -> None:
    for flags in itertools.product((False, True), repeat=3):
        room, tensors = three(n, dtype)
        before = [t.clone() for t in tensors]
        gate, up, grad = (t.double().requires_grad_() for t in before)
        p = act(gate, activation) * up
        exact = [*torch.autograd.grad(p, (gate, up), grad), p]
        into = [t if flag else None for t, flag in zip(tensors, flags, strict=True)]
        gated_backward(*tensors, activation, *into)
        for t, old, e, flag in zip(tensors, before, exact, flags, strict=True):
            if flag:
                torch.testing.assert_close(t.double(), e.detach(), rtol=ROUNDING[dtype], atol=1e-6)
            else:
                assert torch.equal(t, old)
        assert poisoned(room, n)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size(activation: str) -> None:
    a = torch.tensor([-3e38, -1e20, -1e4, -100.0, -64.0, -30.0, 0.0, 30.0, 64.0, 100.0, 1e4, 1e20, 3e38], device=DEVICE)
    one = torch.ones_like(a)
    gate, up, grad = a.clone(), one.clone(), one.clone()
    gated_backward(gate, up, grad, activation, gate, up, grad)
    far = a.clamp(min=0)
    torch.testing.assert_close(gate, (a > 0).float() + (a == 0) / 2, rtol=1e-6, atol=1e-11)
    torch.testing.assert_close(up, far, rtol=1e-6, atol=1e-11)
    torch.testing.assert_close(grad, far, rtol=1e-6, atol=1e-11)

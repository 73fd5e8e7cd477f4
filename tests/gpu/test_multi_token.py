"""Multi-token prediction on a CUDA device: values and gradients, no waits, the same bits, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions, losses
from support import relative_error

pytestmark = ON_GPU
B, T, D, V, K = 2, 301, 136, 1100, 3
NEAR = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-4, 3e-3), torch.bfloat16: (1e-3, 1.2e-2)}


def arguments(dtype: torch.dtype) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, T, D, generator=g).to(dtype) for _ in range(K)]
    labels = torch.randint(0, V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = -100
    documents = (torch.rand(B, T, generator=g) < 0.05).cumsum(-1)
    weight = (0.2 * torch.randn(V, D, generator=g)).to(dtype)
    return {"inputs": inputs, "weight": weight, "labels": labels, "documents": documents}


def computed(a: dict[str, Any], device: str, dtype: torch.dtype, **o: Any) -> tuple[Tensor, ...]:
    """The loss, its steps, and the gradients."""
    leaves = [x.to(device, dtype).requires_grad_() for x in (*a["inputs"], a["weight"])]
    found = losses.multi_token_loss(
        leaves[:K],
        leaves[K],
        a["labels"].to(device),
        weights=[1.0, 0.5, 0.25],
        documents=a["documents"].to(device),
        **o,
    )
    return (*found, *torch.autograd.grad(found.loss, leaves))


@pytest.mark.parametrize("dtype", NEAR)
def test_values_and_gradients(dtype: torch.dtype) -> None:
    a, (near, near_gradients) = arguments(dtype), NEAR[dtype]
    got, want = computed(a, "cuda", dtype), computed(a, "cpu", torch.float64)
    for i, (x, true) in enumerate(zip(got, want, strict=True)):
        assert relative_error(x.cpu(), true) < (near if i < 2 else near_gradients)


def test_no_host_waits_and_the_same_bits() -> None:
    a = arguments(torch.bfloat16)
    a = {name: [x.cuda() for x in v] if isinstance(v, list) else v.cuda() for name, v in a.items()}
    options = HeadOptions(ignored_tokens="skip")
    for _ in range(4):
        first = computed(a, "cuda", torch.bfloat16, options=options)
    with no_waits():
        again = computed(a, "cuda", torch.bfloat16, options=options)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_heads_of_one_weight_store_one_gradient_of_it() -> None:
    tokens, width, vocab = 8192, 1024, 65536

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5).requires_grad_()

    inputs, weight = [normal(1, tokens, width) for _ in range(K)], normal(vocab, width)
    labels = torch.randint(0, vocab, (1, tokens), device="cuda")
    options = HeadOptions(workspace_mib=256)
    peaks = []
    for weights in (weight, [weight] * K):

        def step(weights: Any = weights) -> None:
            losses.multi_token_loss(inputs, weights, labels, options=options).loss.backward()

        step()
        peaks.append(peak_beyond_gradients(step, *inputs, weight) / 2**20)
    joined = K * tokens * width * 2 / 2**20  # MiB: the hidden states of all heads, and their gradient
    assert peaks[0] < 256 + 2 * joined + 64
    assert peaks[1] > peaks[0] + 64

"""Layers in tiles along the sequence, on a GPU: as near to float32 as stock by each kernel, and the bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.measure.timing import peak_above
from lowtide.memory import ActivationPolicy, apply_policy
from support import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
transformers = pytest.importorskip("transformers")

VOCAB = 1009


def llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**sizes, **settings}, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).train()


def step(model: Any, ids: Tensor, kernel: SDPBackend = SDPBackend.FLASH_ATTENTION) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with sdpa_kernel(kernel):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_errors_are_those_of_stock(kernel: str, keep: Any, offload: bool, fused: bool) -> None:
    """Beside float32 weights of the same values; sizes that no tile divides, and heads that share keys."""
    backend = getattr(SDPBackend, kernel)
    ids = torch.randint(VOCAB, (2, 1501), device="cuda")
    model, stock = llama(), llama()
    true = copy.deepcopy(stock).float()
    if fused:
        lowtide.patch(model)
    apply_policy(model, ActivationPolicy(keep=keep, tile_tokens=400, offload=offload))
    _, right = step(true, ids, SDPBackend.MATH)
    for _ in range(2):  # the second step reads what the first one pinned
        (loss, got), (stock_loss, want) = step(model, ids, backend), step(stock, ids, backend)
        assert loss == pytest.approx(stock_loss, rel=2e-3)
        for name, value in got.items():
            error, stock_error = (relative_error(x.float(), right[name]) for x in (value, want[name]))
            assert error <= 1.3 * stock_error + 1e-3, name


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_kernels_that_are_planned_once_for_all_calls(kernel: str) -> None:
    """Of the same queries, keys and values, whatever outputs they have: each policy's, and a stock layer's."""
    backend, tokens = getattr(SDPBackend, kernel), 300
    ids = torch.randint(VOCAB, (3, 4 * tokens), device="cuda")
    stock = llama(num_hidden_layers=1)
    true = copy.deepcopy(stock).float()
    for keep in ("attention", None, "input", None, "attention"):
        model, given = copy.deepcopy(stock), ids if keep else ids[:, :tokens]
        if keep:
            apply_policy(model, ActivationPolicy(keep=keep, tile_tokens=tokens))
        (_, got), (_, right) = step(model, given, backend), step(true, given, SDPBackend.MATH)
        _, want = step(copy.deepcopy(stock), given)  # flash attention plans nothing
        for name, value in got.items():
            error, stock_error = (relative_error(x.float(), right[name]) for x in (value, want[name]))
            assert error <= 2 * stock_error + 1e-3, (keep, name)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_widths_of_heads(head_dim: int) -> None:
    ids = torch.randint(VOCAB, (1, 777), device="cuda")
    sizes = {"head_dim": head_dim, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    model, stock = llama(**sizes), llama(**sizes)
    apply_policy(model, ActivationPolicy(keep="attention", tile_tokens=256))
    _, right = step(copy.deepcopy(stock).float(), ids, SDPBackend.MATH)
    (_, got), (_, want) = step(model, ids), step(stock, ids)
    for name, value in got.items():
        error, stock_error = (relative_error(x.float(), right[name]) for x in (value, want[name]))
        assert error <= 1.3 * stock_error + 1e-3, name


def test_float32_is_refused() -> None:
    """Neither kernel takes it."""
    model = llama(torch.float32)
    apply_policy(model, ActivationPolicy(keep="input", tile_tokens=100))
    with pytest.raises(UnsupportedError, match=r"on cuda for torch\.float32"):
        model(input_ids=torch.randint(VOCAB, (1, 300), device="cuda"), use_cache=False)


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_bytes_of_backward(keep: Any, kernel: str) -> None:
    """By token of the sequence: the gradients of output and input, keys, values, their gradients in float32."""
    hidden, keys = 512, 2 * 128

    def peak(tokens: int) -> int:
        model = llama(num_hidden_layers=1).requires_grad_(False)
        layer = model.model.layers[0]
        apply_policy(model, ActivationPolicy(keep=keep, tile_tokens=2048))
        x, gradient = torch.randn(2, 1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
        positions = model.model.rotary_emb(x, torch.arange(tokens, device="cuda")[None])

        def backward() -> None:
            layer(x.detach().requires_grad_(), position_embeddings=positions).backward(gradient)

        with sdpa_kernel(getattr(SDPBackend, kernel)):
            backward()
            return peak_above(backward, "cuda")

    # beside these the layer's output, and attention's, which is there from forward on
    expected = 2 * hidden * 2 + keys * (2 + 4) + (2 * hidden + 4 * 8) * (keep == "attention")
    assert (peak(65536) - peak(32768)) / 32768 == pytest.approx(expected, rel=0.05)

"""What the tests of policies run in processes of their own, with a deterministic backward of attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.memory import ActivationPolicy, apply_policy
from memory.models import VOCAB, CountAttention, Plain, step

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # to be set before the first product of the process


def model_and_ids(layers: int, D: int, T: int, *, dropout: float = 0.0, batch: int = 1) -> tuple[Plain, Tensor]:
    """Return a bf16 model on the GPU, and tokens."""
    model = Plain(layers, D, heads=D // 64, dropout=dropout).cuda().bfloat16()
    return model, torch.randint(3, VOCAB, (batch, T), generator=torch.Generator().manual_seed(5)).cuda()


def differences(backend: str) -> dict[str, Any]:
    """Return, by policy, what differs from the stock model to the bit, and the calls of attention's kernel."""
    torch.use_deterministic_algorithms(mode=True)
    model, ids = model_and_ids(7, 128, 1531, dropout=0.2)
    for block in model.blocks:
        block.attend = _attend_with_dropout
    stock = copy.deepcopy(model)
    found = {}
    with sdpa_kernel(getattr(SDPBackend, backend)):
        want = step(stock, ids)
        again = step(stock, ids)
        assert _unlike(want, again) == [], "the stock model differs from itself"
        for keep, every in (("attention", 1), ("input", 1), ("input", 3)):
            for place in ("device", "host"):
                apply_policy(model, ActivationPolicy(keep=keep, every=every, offload=place == "host"))
                unlike: list[str] = []
                for _ in range(3):
                    with CountAttention() as counted:
                        got = step(model, ids)
                    unlike += _unlike(got, want)
                found[f"{keep} {every} {place}"] = [unlike, counted.calls]
    return found


def _attend_with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)


def _unlike(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> list[str]:
    unlike = [name for name, gradient in got[1].items() if not torch.equal(gradient, want[1][name])]
    return unlike + ([] if torch.equal(got[0], want[0]) else ["loss"])

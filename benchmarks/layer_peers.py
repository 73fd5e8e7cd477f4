"""Who computes what stands between a layer's GEMMs in `layers.py`: peers, imported when their turn comes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import compiled
from lowtide.layers import add_rms_norm, rms_norm, rotary

EPS = 1e-5
Function = Callable[..., Any]


def eager_norm(x: Tensor, w: Tensor) -> tuple[Tensor]:
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),)


def eager_add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return *eager_norm(r + x, w), r + x


def eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)

    return rotated(q), rotated(k)


def liger(module: str, function: str) -> Function:
    found: Function = getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), function)
    return found


PEERS: dict[str, dict[str, Callable[[], Function]]] = {  # by operation; a maker imports its peer
    "norm": {
        "lowtide": lambda: lambda x, w: (rms_norm(x, w, EPS, rounding="before_weight"),),
        "F.rms_norm": lambda: lambda x, w: (F.rms_norm(x, w.shape, w, EPS),),
        "liger": lambda: lambda x, w: (liger("functional", "liger_rms_norm")(x, w, EPS, 0.0, "llama", False),),
        "compile": lambda: compiled(eager_norm),
        "eager": lambda: eager_norm,
    },
    "add-norm": {
        "lowtide": lambda: lambda x, r, w: add_rms_norm(x, r, w, EPS, rounding="before_weight"),
        "liger": lambda: lambda *xs: liger("functional", "liger_fused_add_rms_norm")(*xs, EPS, 0.0, "llama", False),
        "compile": lambda: compiled(eager_add_norm),
        "eager": lambda: eager_add_norm,
    },
    "rotary": {
        "lowtide": lambda: rotary,
        "compile": lambda: compiled(eager_rotary),
        "eager": lambda: eager_rotary,
        "liger": lambda: liger("rope", "liger_rotary_pos_emb"),  # last: it rotates its inputs in place
    },
}
EXACT: dict[str, Function] = {"norm": eager_norm, "add-norm": eager_add_norm, "rotary": eager_rotary}

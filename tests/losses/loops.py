"""The losses' specification for the tests: float64 and plain loops over sequences and tokens, nothing of lowtide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BAD = (math.nan, math.inf, -math.inf)


@dataclass
class Batch:
    """Random log-probabilities and what goes with them; masked positions hold NaN and infinities."""

    logprob: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    mean_logit: Tensor
    lse: Tensor
    sum_sq_prob: Tensor
    divergence: Tensor
    token_advantage: Tensor
    advantage: Tensor
    mask: Tensor

    TOKENS = (
        "logprob", "old", "ref", "sampler", "entropy", "mean_logit", "lse", "sum_sq_prob", "divergence",
        "token_advantage",
    )  # fmt: skip

    def kept(self) -> list[list[int]]:
        """Return the kept positions of each sequence."""
        return [[t for t, m in enumerate(row) if m] for row in self.mask.tolist()]


def batch(
    seed: int, B: int = 5, T: int = 7, *, dtype: torch.dtype = torch.float64, empty: bool = True, spread: float = 0.3
) -> Batch:
    """Return a batch [B, T] whose second sequence is wholly masked where ``empty`` says so."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.rand(B, T, generator=g) < 0.7
    if T:
        mask[:, 0] = True
    if empty and B > 1:
        mask[1] = False
    old = -normal(B, T).abs() - 0.01
    values = {
        "logprob": (old + spread * normal(B, T)).clamp(max=-1e-3),
        "old": old,
        "ref": old + spread * normal(B, T),
        "sampler": old + spread * normal(B, T),
        "entropy": normal(B, T).abs(),
        "mean_logit": normal(B, T),
        "lse": 5 + normal(B, T),
        "sum_sq_prob": torch.rand(B, T, generator=g, dtype=torch.float64) * 0.9 + 0.05,
        "divergence": normal(B, T).abs(),
        "token_advantage": normal(B, T),
    }
    poison = torch.tensor(BAD, dtype=torch.float64)[torch.randint(0, 3, (B, T), generator=g)]
    tokens = {name: value.where(mask, poison).to(dtype) for name, value in values.items()}
    return Batch(advantage=normal(B).to(dtype), mask=mask, **tokens)


def each(of: Batch, f: Callable[[int, int], float]) -> Tensor:
    """Return f(i, t) at kept tokens and 0 elsewhere, as float64 [B, T]."""
    out = torch.zeros(of.mask.shape, dtype=torch.float64)
    for i, ts in enumerate(of.kept()):
        for t in ts:
            out[i, t] = f(i, t)
    return out


class NoHostSync(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, name
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "indexing with a bool mask"
        return func(*args, **(kwargs or {}))

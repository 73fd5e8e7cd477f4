"""What the tests of offloaded optimizer states share: optimizers, and a model that trains beside its twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.memory import offload_optimizer
from memory.models import VOCAB, Plain

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adam-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adamw-8bit": lambda p: pytest.importorskip("bitsandbytes").optim.AdamW8bit(p, lr=1e-2, min_8bit_size=100),
}


def adamw(model: nn.Module) -> Optimizer:
    return OPTIMIZERS["adamw-fused"](model.parameters())


def batch(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(seed))


def states(optimizer: Optimizer) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


def equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


class Pair:
    """A model that trains with offloaded states beside one without."""

    def __init__(
        self,
        make: str | Callable[[nn.Module], Optimizer] = "adamw-fused",
        model: nn.Module | None = None,
        before: Callable[[Pair], object] = lambda pair: None,
        **kwargs: Any,
    ) -> None:
        self.losses: list[Tensor] = []
        self.model = model or Plain()
        self.stock = copy.deepcopy(self.model)
        made = [
            OPTIMIZERS[make](m.parameters()) if isinstance(make, str) else make(m) for m in (self.model, self.stock)
        ]
        self.ours, self.theirs = made
        before(self)
        self.handle = offload_optimizer(self.ours, self.model, **kwargs)

    def both(self) -> list[tuple[Any, Optimizer]]:
        return [(self.model, self.ours), (self.stock, self.theirs)]

    def losses_of(self, seed: int) -> list[Tensor]:
        self.losses = [model(batch(seed)) for model in (self.model, self.stock)]
        return self.losses

    def backward(self, seed: int | None = None) -> None:
        """Of a batch, or of the last losses."""
        for loss in self.losses if seed is None else self.losses_of(seed):
            loss.backward()
        self.losses = []

    def zero_grad(self) -> None:
        for model in (self.model, self.stock):
            model.zero_grad()

    def step(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        self.same()

    def train(self, steps: int, seed: int = 0) -> None:
        for k in range(steps):
            self.backward(seed + k)
            self.step()

    def same(self) -> None:
        assert equal(self.model.parameters(), self.stock.parameters())
        assert equal(states(self.ours), states(self.theirs))

    def come_to(self, moment: str) -> None:
        """Have the states where ``moment`` says, once they exist."""
        self.train(2)
        if moment != "device":
            self.losses_of(3)
        if moment == "coming":
            self.backward()

    def where(self) -> set[str]:
        return {block.where for block in self.handle._blocks}

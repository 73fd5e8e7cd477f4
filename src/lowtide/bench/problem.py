"""One head's inputs, in the setting that is measured. N tokens, D hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.bench.shapes import Shape
from lowtide.head.options import Accumulate

ROWS = 1024  # tokens per chunk wherever wide logits are needed
LOGIT_STD = 3.0  # of the logits: the softmax is peaked, as a trained model's is


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the loss is used.

    Attributes:
        name: what the row is called.
        gemms: GEMMs of 2NDV operations that it cannot do without.
        reduction: ``"mean"``, or ``"none"`` with an upstream gradient for each token.
        wide: float32 hidden states and weights under bf16 autocast.
        frozen: the weight needs no gradient.
        grad: gradients are computed at all.
        accumulate: lowtide's option of that name.
        softcap: of the logits, c tanh(z / c); None: there is none.
    """

    name: str
    gemms: int = 3
    reduction: str = "mean"
    wide: bool = False
    frozen: bool = False
    grad: bool = True
    accumulate: Accumulate = "auto"
    softcap: float | None = None

    def cap(self, z: Tensor) -> Tensor:
        """Return the capped logits; without a cap the logits themselves."""
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


PLAIN = Setting(name="mean")
SETTINGS = (
    Setting(name="float32 sum of dW", accumulate="float32"),
    Setting(name="float32 weights, autocast", wide=True),
    Setting(name="reduction none", gemms=4, reduction="none"),
    Setting(name="frozen head", gemms=2, frozen=True),
    Setting(name="no gradient", gemms=1, grad=False),
    Setting(name="soft cap 15", softcap=15.0),  # nanochat's; modded-nanogpt's 30 sigmoid(z / 7.5) is this and 15
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Hidden states ``x`` [N, D], weight ``w`` [V, D] and targets ``y`` [N].

    ``dtype`` is that of the GEMMs' operands, also where autocast makes it differ from the tensors'. ``g`` [N] is the
    gradient of the objective by each token's loss: 1 / N of the mean. ``b`` [V]: the bias; None: there is none.
    """

    shape: Shape
    setting: Setting
    dtype: torch.dtype
    x: Tensor
    w: Tensor
    y: Tensor
    g: Tensor
    b: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Hidden states, weight and bias."""
        return (self.x, self.w) if self.b is None else (self.x, self.w, self.b)

    @property
    def device(self) -> torch.device:
        """Where it all is."""
        return self.x.device

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def in_setting(self, setting: Setting) -> Problem:
        """Return the same numbers in another setting; the tensors are shared where they can be."""
        x, w = self.x.detach(), self.w.detach()
        if setting.wide:
            x, w = x.float(), w.float()
        g = torch.ones((), device=self.device).expand(self.shape.N) / self.shape.N
        if setting.reduction == "none":
            generator = torch.Generator(self.device).manual_seed(1)
            g = (torch.rand(self.shape.N, device=self.device, generator=generator) + 0.5) / self.shape.N
        x.requires_grad_(setting.grad)
        w.requires_grad_(setting.grad and not setting.frozen)
        return replace(self, setting=setting, x=x, w=w, g=g)


def make_problem(shape: Shape, dtype: torch.dtype, device: str | torch.device, *, seed: int = 0) -> Problem:
    """Return random hidden states and weights, and targets drawn from the model's own softmax.

    With targets drawn at random the target's own term would be nearly all of the gradient, and an implementation that
    drops or rounds the others would look exact.
    """
    N, D, V = shape.N, shape.D, shape.V
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(N, D, device=device, generator=generator).to(dtype)
    w = torch.empty(V, D, device=device, dtype=dtype)
    for rows in blocks(V, 2**24 // D + 1):
        block = torch.randn(rows.stop - rows.start, D, device=device, generator=generator)
        w[rows] = block.mul_(LOGIT_STD / D**0.5).to(dtype)
    y = torch.empty(N, device=device, dtype=torch.int64)
    for rows in blocks(N, ROWS):
        softmax = (x[rows] @ w.T).float().softmax(1)
        # the largest of p / exponential is a draw from p (multinomial's own way, without its limit of 2**24 classes)
        y[rows] = (softmax / torch.empty_like(softmax).exponential_(generator=generator)).argmax(1)
    problem = Problem(shape=shape, setting=PLAIN, dtype=dtype, x=x, w=w, y=y, g=torch.empty(0))
    return problem.in_setting(PLAIN)


def blocks(N: int, rows: int) -> Iterator[slice]:
    """Yield slices that cover N rows, each of so many."""
    for start in range(0, N, rows):
        yield slice(start, min(start + rows, N))

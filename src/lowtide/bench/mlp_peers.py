"""What the gated MLP's benchmark measures: shapes, the stack of layers, and everyone's way through one layer.

N tokens (batch times sequence), D hidden size, F intermediate size, L layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import CannotError, Peer
from lowtide.bench.peers import LIGER, LOWTIDE
from lowtide.errors import ArgumentValueError, message
from lowtide.mlp.swiglu import swiglu_mlp

TILE = 8192  # tokens
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x [N, D], gate and up [F, D], down [D, F]


@dataclass(frozen=True)
class MlpShape:
    """Layers of one size, one after another."""

    name: str
    batch: int
    seq: int
    D: int
    F: int
    layers: int

    @property
    def N(self) -> int:
        """Tokens."""
        return self.batch * self.seq

    def flops(self, gemms: int) -> int:
        """Return the floating-point operations of so many products a layer, 2NDF each."""
        return gemms * self.layers * 2 * self.N * self.D * self.F

    def __str__(self) -> str:
        numbers = f"{self.batch},{self.seq},{self.D},{self.F},{self.layers}"
        return numbers if self.name == numbers else f"{self.name} ({numbers})"


PUBLISHED = tuple(
    MlpShape(f"published-{i}", *numbers)
    for i, numbers in enumerate(
        ((16, 128, 512, 2048, 2), (32, 128, 512, 2048, 2), (8, 512, 1024, 4096, 3), (16, 512, 1024, 4096, 3),
         (4, 1024, 4096, 16384, 5)), 1,
    )
)  # fmt: skip
MODELS = tuple(
    MlpShape(f"{name}-{tokens >> 10}k", 1, tokens, D, size, 1)
    for name, D, size in (("llama-8b", 4096, 14336), ("llama-70b", 8192, 28672))
    for tokens in (8192, 32768)
)
MLP_SHAPES = {shape.name: shape for shape in (*PUBLISHED, *MODELS)}
GROUPS = {"published": PUBLISHED, "models": MODELS, "all": (*PUBLISHED, *MODELS)}


def parse_mlp(text: str) -> tuple[MlpShape, ...]:
    """Return the shapes of that name, or the one of five numbers ``batch,seq,D,F,layers``.

    Raises:
        ArgumentValueError: It is neither.
    """
    if text in GROUPS:
        return GROUPS[text]
    if text in MLP_SHAPES:
        return (MLP_SHAPES[text],)
    numbers = text.split(",")
    if len(numbers) == 5 and all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers):
        return (MlpShape(text, *map(int, numbers)),)
    expected = f"{', '.join((*MLP_SHAPES, *GROUPS))} or five numbers above 0: batch,seq,hidden,intermediate,layers"
    raise ArgumentValueError(message("shape", expected, repr(text)))


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Hidden states [N, D], the weights of each layer, and the last output's gradient [N, D]."""

    shape: MlpShape
    x: Tensor
    weights: list[tuple[Tensor, Tensor, Tensor]]
    upstream: Tensor
    leaves: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", [self.x, *(w for layer in self.weights for w in layer)])

    @property
    def bytes(self) -> int:
        """Size of the leaves."""
        return sum(t.numel() * t.element_size() for t in self.leaves)

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def forward(self, layer: Layer) -> Tensor:
        """Return the last layer's output."""
        x = self.x
        for weights in self.weights:
            x = layer(x, *weights)
        return x

    def step(self, layer: Layer) -> None:
        """Run forward and backward, from no gradients."""
        self.clear()
        self.add(layer)

    def add(self, layer: Layer) -> None:
        """Run forward and backward, which adds to the gradients that are there."""
        self.forward(layer).backward(self.upstream)  # type: ignore[no-untyped-call]


def make_stack(shape: MlpShape, dtype: torch.dtype, device: torch.device, seed: int) -> Stack:
    """Return random hidden states and weights under which they keep their size from layer to layer."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(rows: int, columns: int, scale: float) -> Tensor:
        numbers = torch.randn(rows, columns, device=device, generator=generator)
        return numbers.mul_(scale).to(dtype).requires_grad_()

    D, size = shape.D, shape.F
    return Stack(
        shape=shape,
        x=random(shape.N, D, 1.0),
        weights=[
            (random(size, D, D**-0.5), random(size, D, D**-0.5), random(D, size, 1.7 * size**-0.5))
            for _ in range(shape.layers)
        ],
        upstream=random(shape.N, D, 1.0).detach(),
    )


def bare_products(stack: Stack, gemms: int) -> Callable[[], None]:
    """Return a function that runs the products that a step cannot do without: 9 a layer, or 11 with two of them twice.

    Gate and up stand for what is made of them, which has the same shapes. The input's gradient is two products, the
    second of which adds to the first.
    """
    x, dy = stack.x.detach(), stack.upstream
    weights = [tuple(w.detach() for w in layer) for layer in stack.weights]

    @torch.no_grad()
    def run() -> None:
        gate, up = (x.new_empty(len(x), len(weights[0][0])) for _ in range(2))
        y, dx = torch.empty_like(x), torch.empty_like(x)
        grads = [[torch.empty_like(w) for w in layer] for layer in weights]
        for (wg, wu, wd), (dg, du, dd) in zip(weights, grads, strict=True):
            for _ in range((gemms - 7) // 2):
                torch.mm(x, wg.T, out=gate)
                torch.mm(x, wu.T, out=up)
            torch.mm(gate, wd.T, out=y)
            torch.mm(dy, wd, out=gate)
            torch.mm(dy.T, up, out=dd)
            torch.mm(gate.T, x, out=dg)
            torch.mm(up.T, x, out=du)
            torch.mm(gate, wg, out=dx)
            torch.addmm(dx, up, wu, out=dx)

    return run


@dataclass(frozen=True)
class MlpPeer(Peer):
    """One way through a layer: ``build`` returns a `Layer` for a `Stack`.

    Attributes:
        gemms: products a layer that it cannot do without.
    """

    gemms: int = 9


def _lowtide(level: int, tile: int | None = None) -> Callable[[Stack], Layer]:
    def build(stack: Stack) -> Layer:
        if tile is not None and tile >= stack.shape.N:
            raise CannotError(f"{stack.shape.N} tokens are one tile")
        return lambda x, *weights: swiglu_mlp(x, *weights, checkpoint_level=level, tile_tokens=tile)

    return build


def _naive(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _compiled(_: Stack) -> Layer:
    torch.compiler.reset()  # else the second shape is compiled for any, which is slower
    layer: Layer = torch.compile(_naive, dynamic=False)
    return layer


def _liger(stack: Stack) -> Layer:
    if stack.x.device.type != "cuda":
        raise CannotError("runs on GPUs only")
    module: Any = importlib.import_module("liger_kernel.ops.swiglu")

    def layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        product: Tensor = module.LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up))
        return F.linear(product, down)

    return layer


MLP_PEERS = {
    peer.name: peer
    for peer in (
        MlpPeer(f"{LOWTIDE}-0", "checkpoint_level=0", _lowtide(0)),
        MlpPeer(f"{LOWTIDE}-1", "checkpoint_level=1", _lowtide(1), gemms=11),
        MlpPeer(f"{LOWTIDE}-1-tiled", f"and tile_tokens={TILE}", _lowtide(1, TILE), gemms=11),
        MlpPeer(LIGER, "LigerSiLUMulFunction between three linear layers", _liger, "liger-kernel"),
        MlpPeer("naive", "as Hugging Face's Llama writes it", lambda _: _naive),
        MlpPeer("compile", "torch.compile of that", _compiled),
    )
}

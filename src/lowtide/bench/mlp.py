"""The benchmark of `swiglu_mlp`: forward, backward, what is saved and the peak, beside peers and the bare GEMMs.

N tokens (batch times sequence), D hidden size, F intermediate size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import (
    Benchmark,
    CannotError,
    Column,
    Peer,
    Row,
    Run,
    Table,
    by_name,
    compiled,
    needs_cuda,
    reason_in,
    release,
)
from lowtide.bench.settings import ShapeSettings
from lowtide.bench.shapes import MlpShape
from lowtide.bench.way import LOWTIDE
from lowtide.measure.timing import kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib
from lowtide.mlp.swiglu import swiglu_mlp

TILE = 8192  # tokens
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x [N, D], gate and up [F, D], down [D, F]
TABLE = Table(
    (Column("", "name", "<18"),),
    (
        Column("forward ms", "forward_ms", "11.2f"), Column("backward ms", "backward_ms", "12.2f"),
        Column("both ms", "ms", "9.2f"), Column("limit ms", "limit_ms", "9.2f"), Column("over limit", "over", "12.1%"),
        Column("saved MiB", "kept_mib", "11.1f"), Column("peak MiB", "peak_mib", "10.1f"),
        Column("total GB", "all_gb", "10.2f"), Column("accumulating GB", "again_gb", "17.2f"),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A module's hidden states ``x`` [N, D] and the gradient [N, D] of its output; subclasses have the weights."""

    shape: Any
    x: Tensor
    upstream: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """What gets a gradient."""
        raise NotImplementedError

    def forward(self, layer: Any) -> Tensor:
        """Return the output."""
        raise NotImplementedError

    def bare(self, gemms: int) -> Callable[[], None]:
        """Return a function that runs the GEMMs that a step cannot do without."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, layer: Any) -> None:
        """Run forward and backward, from no gradients."""
        self.clear()
        self.add(layer)

    def add(self, layer: Any) -> None:
        """Run forward and backward, which adds to the gradients that are there."""
        self.forward(layer).backward(self.upstream)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Stack(Measured):
    """Gated MLPs, one after another, with the weights of each."""

    weights: list[tuple[Tensor, Tensor, Tensor]]

    @property
    def leaves(self) -> list[Tensor]:
        """The hidden states and each weight."""
        return [self.x, *(w for layer in self.weights for w in layer)]

    def forward(self, layer: Layer) -> Tensor:
        """Return the last layer's output."""
        x = self.x
        for weights in self.weights:
            x = layer(x, *weights)
        return x

    def bare(self, gemms: int) -> Callable[[], None]:
        """Return a function that runs the GEMMs that a step cannot do without: 9 per layer, or 11, two of them twice.

        Gate and up stand for what is made of them, which has the same shapes. The input's gradient is two GEMMs, the
        second of which adds to the first.
        """
        x, dy = self.x.detach(), self.upstream
        weights = [tuple(w.detach() for w in layer) for layer in self.weights]

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


def _lowtide(level: int, tile: int | None = None) -> Callable[[Stack], Layer]:
    def build(stack: Stack) -> Layer:
        if tile is not None and tile >= stack.shape.N:
            raise CannotError(f"{stack.shape.N} tokens are one tile")
        return lambda x, *weights: swiglu_mlp(x, *weights, checkpoint_level=level, tile_tokens=tile)

    return build


def _naive(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _liger(stack: Stack) -> Layer:
    needs_cuda(stack.x.device)
    module: Any = importlib.import_module("liger_kernel.ops.swiglu")

    def layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        product: Tensor = module.LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up))
        return F.linear(product, down)

    return layer


MLP_PEERS = by_name(
    Peer(f"{LOWTIDE}-0", _lowtide(0)),
    Peer(f"{LOWTIDE}-1", _lowtide(1), gemms=11),
    Peer(f"{LOWTIDE}-1-tiled", _lowtide(1, TILE), gemms=11),
    Peer("liger", _liger, "liger-kernel"),  # LigerSiLUMulFunction between three linear layers
    Peer("naive", lambda _: _naive),  # as Hugging Face's Llama writes it
    Peer("compile", lambda _: compiled(_naive)),
)


def row_of(peer: Peer, stack: Measured, config: ShapeSettings) -> Row:
    """Return a peer's row, measured interleaved with the bare GEMMs.

    A row has the peer's ``name`` and its ``gemms`` per layer, and ``limit_ms``, their time in the same rounds;
    ``forward_ms``, the median time of forward with a graph, ``ms``, that of forward and backward, and ``backward_ms``,
    the difference; ``over``, ``ms / limit_ms - 1``; ``spread``, the slowest round over the fastest, less 1;
    ``kept_mib``, what is saved for backward, the input included, weights and last output not, and ``kept_bytes``, the
    same in bytes per token and layer; ``peak_mib``, the most memory at once above input and weights, gradients
    included, and ``all_gb``, that with input and weights, in GB of 10**9 bytes; ``again_gb``, the same of a step that
    adds to the gradients of the one before, these included. Or ``cannot``, why it does not do the shape.
    """
    device, shape = stack.x.device, stack.shape
    row: Row = {"name": peer.name, "gemms": peer.gemms}
    with reason_in(row, cannot="cannot"):
        layer = peer.built(stack)
        functions: dict[str, Callable[[], object]] = {
            "limit": stack.bare(peer.gemms),
            "forward": lambda: stack.forward(layer),
            "step": lambda: stack.step(layer),
        }
        timings = time_side_by_side(functions, device, warm=config.warm, reps=config.reps)
        stack.clear()
        kept = kept_above(lambda: stack.forward(layer), device)
        kept += stack.x.nbytes - stack.upstream.nbytes  # the input, and not the output, which is of the same size
        peak = peak_above(lambda: stack.step(layer), device)
        again = peak_above(lambda: stack.add(layer), device)
        forward, both, limit = (timings[name].median_ms for name in ("forward", "step", "limit"))
        row |= {"forward_ms": forward, "backward_ms": both - forward, "ms": both, "limit_ms": limit}
        row |= {"over": both / limit - 1, "spread": timings["step"].spread}
        row |= {"kept_mib": mib(kept), "kept_bytes": kept / (shape.N * shape.layers), "peak_mib": mib(peak)}
        size = sum(t.nbytes for t in stack.leaves)
        row |= {"all_gb": (peak + size) / 1e9, "again_gb": (again + 2 * size) / 1e9}
    stack.clear()
    release(device)
    return row


def measure_on(make: Callable[..., Measured], peers: Mapping[str, Peer], run: Run[Any]) -> None:
    """Measure the peers on what ``make`` returns for each shape."""
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes:
        stack = make(shape, run.dtype, run.device, config.seed)
        rows: list[Row] = []
        run.result["shapes"].append({**vars(shape), "tokens": shape.N, "rows": rows})
        run.say(f"\n{shape} {run.dtype_name}\n{TABLE.header}")
        for peer in config.peers:
            run.add(row_of(peers[peer], stack, config), rows, TABLE)
        del stack
        release(run.device)


MLP = Benchmark(measure=partial(measure_on, make_stack, MLP_PEERS), peers=MLP_PEERS)

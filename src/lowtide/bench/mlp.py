"""The benchmark of `swiglu_mlp`: forward, backward, what is saved and the peak, beside peers and the bare GEMMs.

N tokens (batch times sequence), D hidden size, F intermediate size.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
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
from lowtide.bench.variant import LOWTIDE
from lowtide.measure.timing import kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib
from lowtide.mlp.swiglu import swiglu_mlp

TILE = 8192  # tokens
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x [N, D], gate and up [F, D], down [D, F]
TABLE = Table(
    {"name": "<18"},
    {
        "forward_ms": "11.2f", "backward_ms": "12.2f", "ms": "9.2f", "limit_ms": "9.2f", "over": "8.1%",
        "kept_mib": "10.1f", "peak_mib": "10.1f", "all_gb": "8.2f", "again_gb": "9.2f",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModuleCase(ABC):
    """A module's hidden states ``x`` [N, D] and the gradient [N, D] of its output; subclasses have the weights."""

    shape: Any
    x: Tensor
    upstream: Tensor

    @property
    @abstractmethod
    def leaves(self) -> list[Tensor]:
        """What gets a gradient."""

    @abstractmethod
    def forward(self, layer: Any) -> Tensor:
        """Return the output."""

    @abstractmethod
    def bare(self, gemms: int) -> Callable[[], None]:
        """Return a function that runs the GEMMs that a step cannot do without."""

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
class Stack(ModuleCase):
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
    sizes = ((size, D, D**-0.5), (size, D, D**-0.5), (D, size, 1.7 * size**-0.5))
    x, upstream = random(shape.N, D, 1.0), random(shape.N, D, 1.0).detach()
    weights: Any = [tuple(random(*each) for each in sizes) for _ in range(shape.layers)]
    return Stack(shape=shape, x=x, weights=weights, upstream=upstream)


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
    product: Any = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x, gate, up, down: F.linear(product(F.linear(x, gate), F.linear(x, up)), down)


MLP_PEERS = by_name(
    Peer(f"{LOWTIDE}-0", _lowtide(0)),
    Peer(f"{LOWTIDE}-1", _lowtide(1), gemms=11),
    Peer(f"{LOWTIDE}-1-tiled", _lowtide(1, TILE), gemms=11),
    Peer("liger", _liger, "liger-kernel"),  # LigerSiLUMulFunction between three linear layers
    Peer("naive", lambda _: _naive),  # as Hugging Face's Llama writes it
    Peer("compile", lambda _: compiled(_naive)),
)


def row_of(peer: Peer, case: ModuleCase, config: ShapeSettings) -> Row:
    """Return a peer's row, measured interleaved with the bare GEMMs.

    A row has the peer's ``name`` and its ``gemms`` per layer, and ``limit_ms``, their time in the same rounds;
    ``forward_ms``, the median time of forward with a graph, ``ms``, that of forward and backward, and ``backward_ms``,
    the difference; ``over``, ``ms / limit_ms - 1``; ``spread``, the slowest round over the fastest, less 1;
    ``kept_mib``, what is saved for backward, the input included, weights and last output not, and ``kept_bytes``, the
    same in bytes per token and layer; ``peak_mib``, the most memory at once above input and weights, gradients
    included, and ``all_gb``, that with input and weights, in GB of 10**9 bytes; ``again_gb``, the same of a step that
    adds to the gradients of the one before, these included. Or ``cannot``, why it does not do the shape.
    """
    device, shape = case.x.device, case.shape
    row: Row = {"name": peer.name, "gemms": peer.gemms}
    with reason_in(row, cannot="cannot"):
        layer = peer.built(case)
        functions: dict[str, Callable[[], object]] = {
            "limit": case.bare(peer.gemms),
            "forward": lambda: case.forward(layer),
            "step": lambda: case.step(layer),
        }
        timings = time_side_by_side(functions, device, warm=config.warm, reps=config.reps)
        case.clear()
        kept = kept_above(lambda: case.forward(layer), device)
        kept += case.x.nbytes - case.upstream.nbytes  # the input, and not the output, which is of the same size
        peak = peak_above(lambda: case.step(layer), device)
        again = peak_above(lambda: case.add(layer), device)
        forward, both, limit = (timings[name].median_ms for name in ("forward", "step", "limit"))
        size = sum(leaf.nbytes for leaf in case.leaves)
        row |= {"forward_ms": forward, "backward_ms": both - forward, "ms": both, "limit_ms": limit}
        row |= {"over": both / limit - 1, "spread": timings["step"].spread}
        row |= {"kept_mib": mib(kept), "kept_bytes": kept / (shape.N * shape.layers), "peak_mib": mib(peak)}
        row |= {"all_gb": (peak + size) / 1e9, "again_gb": (again + 2 * size) / 1e9}
    case.clear()
    release(device)
    return row


def measure_on(make: Callable[..., ModuleCase], peers: Mapping[str, Peer], run: Run[Any]) -> None:
    """Measure the peers on what ``make`` returns for each shape."""
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes:
        case, rows = make(shape, run.dtype, run.device, config.seed), list[Row]()
        run.result["shapes"].append({**vars(shape), "tokens": shape.N, "rows": rows})
        run.fill(rows, f"\n{shape} {run.dtype_name}\n", TABLE, peers, partial(row_of, case=case, config=config))
        del case
        release(run.device)


MLP = Benchmark(measure=partial(measure_on, make_stack, MLP_PEERS), peers=MLP_PEERS)

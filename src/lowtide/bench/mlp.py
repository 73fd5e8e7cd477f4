"""The benchmark of `swiglu_mlp`: forward, backward, what is saved and the peak, beside peers and the bare GEMMs.

N tokens (batch times sequence), D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.harness import Peer, Row, Run, Table, by_name, compiled, gpu_module, reason_in, release
from lowtide.bench.variant import LOWTIDE
from lowtide.errors import UnsupportedError
from lowtide.measure.timing import kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib
from lowtide.mlp.swiglu import swiglu_mlp

TILE = 8192  # tokens
Layer = Callable[..., Tensor]
TABLE = Table(
    {
        "name": "<18", "forward_ms": "11.2f", "backward_ms": "12.2f", "ms": "9.2f", "limit_ms": "9.2f", "over": "8.1%",
        "kept_mib": "10.1f", "peak_mib": "10.1f", "all_gb": "8.2f", "again_gb": "9.2f",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """A module's work: hidden states in, a gradient of its output back."""

    shape: Any
    x: Tensor  # [N, D]
    upstream: Tensor  # the gradient [N, D] of the output
    leaves: list[Tensor]  # what gets a gradient
    forward: Callable[[Layer], Tensor]  # returns the output that a peer's layer computes
    bare: Callable[[int], object]  # runs the GEMMs that a step cannot do without, so many per layer
    layers: int = 1  # one after another

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, layer: Layer) -> None:
        """Run forward and backward, from no gradients."""
        self.clear()
        self.add(layer)

    def add(self, layer: Layer) -> None:
        """Run forward and backward, which adds to the gradients that are there."""
        self.forward(layer).backward(self.upstream)  # type: ignore[no-untyped-call]


def make_mlps(shape: Any, dtype: torch.dtype, device: torch.device) -> ModuleCase:
    """Return gated MLPs, one after another, with random weights under which hidden states keep their size."""
    generator = torch.Generator(device).manual_seed(0)
    N, D, size = shape.batch * shape.seq, shape.D, shape.F

    def random(rows: int, columns: int, scale: float) -> Tensor:
        numbers = torch.randn(rows, columns, device=device, generator=generator)
        return numbers.mul_(scale).to(dtype).requires_grad_()

    x, upstream = random(N, D, 1.0), random(N, D, 1.0).detach()
    sizes = ((size, D, D**-0.5), (size, D, D**-0.5), (D, size, 1.7 * size**-0.5))
    weights = [[random(*each) for each in sizes] for _ in range(shape.layers)]

    def forward(layer: Layer) -> Tensor:
        y = x
        for layer_weights in weights:
            y = layer(y, *layer_weights)
        return y

    @torch.no_grad()
    def bare(gemms: int) -> None:
        """Run 9 GEMMs per layer, or 11, two of them twice.

        Gate and up stand for what is made of them, which has the same shapes. The input's gradient is two GEMMs, the
        second of which adds to the first.
        """
        for wg, wu, wd in weights:
            for _ in range((gemms - 7) // 2):
                gate, up = x @ wg.T, x @ wu.T
            products = gate @ wd.T, upstream @ wd, upstream.T @ up, gate.T @ x, up.T @ x
            del products
            torch.addmm(gate @ wg, up, wu)

    leaves = [x, *(w for layer in weights for w in layer)]
    return ModuleCase(
        shape=shape, x=x, upstream=upstream, leaves=leaves, forward=forward, bare=bare, layers=shape.layers
    )


def _lowtide(level: int, tile: int | None = None) -> Callable[[ModuleCase], Layer]:
    def build(case: ModuleCase) -> Layer:
        if tile is not None and tile >= len(case.x):
            raise UnsupportedError(f"{len(case.x)} tokens are one tile")
        return partial(swiglu_mlp, checkpoint_level=level, tile_tokens=tile)

    return build


def _naive(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _liger(case: ModuleCase) -> Layer:
    product = gpu_module(case, "liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x, gate, up, down: F.linear(product(F.linear(x, gate), F.linear(x, up)), down)


PEERS = by_name(
    Peer(f"{LOWTIDE}-0", _lowtide(0)),
    Peer(f"{LOWTIDE}-1", _lowtide(1), gemms=11),
    Peer(f"{LOWTIDE}-1-tiled", _lowtide(1, TILE), gemms=11),
    Peer("liger", _liger, "liger-kernel"),  # LigerSiLUMulFunction between three linear layers
    Peer("naive", lambda _: _naive),  # as Hugging Face's Llama writes it
    Peer("compile", lambda _: compiled(_naive)),
)


def row_of(peer: Peer, case: ModuleCase, rounds: dict[str, Any]) -> Row:
    """Return a peer's row, measured interleaved with the bare GEMMs.

    A row has the peer's ``name`` and its ``gemms`` per layer, and ``limit_ms``, their time in the same rounds;
    ``forward_ms``, the median time of forward with a graph, ``ms``, that of forward and backward, and ``backward_ms``,
    the difference; ``over``, ``ms / limit_ms - 1``; ``spread``, the slowest round over the fastest, less 1;
    ``kept_mib``, what is saved for backward, the input included, weights and last output not, and ``kept_bytes``, the
    same in bytes per token and layer; ``peak_mib``, the most memory at once above input and weights, gradients
    included, and ``all_gb``, that with input and weights, in GB of 10**9 bytes; ``again_gb``, the same of a step that
    adds to the gradients of the one before, these included. Or ``cannot``, why it does not do the shape.
    """
    device = case.x.device
    row: Row = {"name": peer.name, "gemms": peer.gemms}
    with reason_in(row, package=peer.package, cannot="cannot"):
        layer = peer.build(case)
        forward, step = partial(case.forward, layer), partial(case.step, layer)
        bare = partial(case.bare, peer.gemms)
        functions: dict[str, Callable[[], object]] = {"limit": bare, "forward": forward, "step": step}
        timings = time_side_by_side(functions, device, **rounds)
        forward_ms, ms, limit_ms = (timings[name].median_ms for name in ("forward", "step", "limit"))
        case.clear()
        kept = kept_above(forward, device) + case.x.nbytes - case.upstream.nbytes  # with the input, not the output
        peak, again = peak_above(step, device), peak_above(partial(case.add, layer), device)
        size = sum(leaf.nbytes for leaf in case.leaves)
        row |= {
            "forward_ms": forward_ms, "backward_ms": ms - forward_ms, "ms": ms, "limit_ms": limit_ms,
            "over": ms / limit_ms - 1, "spread": timings["step"].spread, "kept_mib": mib(kept),
            "kept_bytes": kept / (len(case.x) * case.layers), "peak_mib": mib(peak), "all_gb": (peak + size) / 1e9,
            "again_gb": (again + 2 * size) / 1e9,
        }  # fmt: skip
    case.clear()
    release(device)
    return row


def measure_modules(run: Run, make: Callable[..., ModuleCase]) -> None:
    """Measure what ``make`` returns for each shape by a run's peers."""
    shapes = run.result["shapes"] = []
    run.result |= {"dtype": run.dtype_name, **run.rounds}
    for shape in run.config.shapes:
        case, rows = make(shape, run.dtype, run.device), list[Row]()
        shapes.append({**vars(shape), "tokens": len(case.x), "rows": rows})
        run.fill(rows, f"\n{shape} {run.dtype_name}\n", TABLE, partial(row_of, case=case, rounds=run.rounds))
        del case
        release(run.device)


def measure(run: Run) -> None:
    """Measure each shape."""
    measure_modules(run, make_mlps)

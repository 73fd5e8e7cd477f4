"""The benchmark of `swiglu_mlp`: forward, backward, what is saved and the peak, beside peers and the bare GEMMs.

N tokens (batch times sequence), D hidden size, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.case import Case, Exact, Function, Values, measure_cases
from lowtide.bench.harness import Peer, by_name, compiled, gpu_module
from lowtide.bench.variant import LOWTIDE
from lowtide.mlp.swiglu import swiglu_mlp

TILE = 8192  # tokens


@dataclass(frozen=True, kw_only=True)
class ModuleCase(Case):
    """A module: hidden states in, a gradient of the output back. The leaves are its input and its weights."""

    names: tuple[str, ...] = ()

    def call(self, function: Function) -> Values:
        """Return the output."""
        return (function(*self.leaves),)

    def exact(self) -> Exact:
        """Nothing is compared."""
        return [], []


class MlpCase(ModuleCase):
    """A gated MLP."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """GEMMs: those that a step cannot do without, and with gate and up recomputed."""
        return 9, 11

    @torch.no_grad()
    def bare(self, size: int) -> None:
        """Run 9 GEMMs, or 11, two of them twice.

        Gate and up stand for what is made of them, which has the same shapes. The input's gradient is two GEMMs, the
        second of which adds to the first.
        """
        (x, wg, wu, wd), upstream = self.leaves, self.upstream[0]
        for _ in range((size - 7) // 2):
            gate, up = x @ wg.T, x @ wu.T
        products = gate @ wd.T, upstream @ wd, upstream.T @ up, gate.T @ x, up.T @ x
        del products
        torch.addmm(gate @ wg, up, wu)


def make_mlp(shape: Any, dtype: torch.dtype, device: torch.device) -> MlpCase:
    """Return a gated MLP with random weights under which hidden states keep their size."""
    generator = torch.Generator(device).manual_seed(0)
    N, D, size = shape.batch * shape.seq, shape.D, shape.F

    def random(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(rows, columns, device=device, generator=generator)
        return numbers.mul_(scale).to(dtype).requires_grad_()

    weights = random(size, D, D**-0.5), random(size, D, D**-0.5), random(D, size, 1.7 * size**-0.5)
    leaves, upstream = (random(N, D), *weights), random(N, D).detach()
    return MlpCase(shape=shape, name="the gated MLP", leaves=leaves, upstream=(upstream,))


def _naive(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _liger(case: Case) -> Function:
    product = gpu_module(case, "liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x, gate, up, down: F.linear(product(F.linear(x, gate), F.linear(x, up)), down)


PEERS = by_name(
    Peer(f"{LOWTIDE}-0", lambda _: partial(swiglu_mlp, checkpoint_level=0), gemms=9),
    Peer(f"{LOWTIDE}-1", lambda _: partial(swiglu_mlp, checkpoint_level=1), gemms=11),
    Peer(f"{LOWTIDE}-1-tiled", lambda _: partial(swiglu_mlp, tile_tokens=TILE), gemms=11),
    Peer("liger", _liger, "liger-kernel", gemms=9),  # LigerSiLUMulFunction between three linear layers
    Peer("naive", lambda _: _naive, gemms=9),  # as Hugging Face's Llama writes it
    Peer("compile", lambda _: compiled(_naive), gemms=9),
)
measure = partial(measure_cases, cases=lambda run, shape: [make_mlp(shape, run.dtype, run.device)])

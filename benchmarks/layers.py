"""Time and bandwidth of what stands between a decoder layer's GEMMs, forward and backward.

    python benchmarks/layers.py --hidden 4096 --head-dim 128

RMS normalisation, the same after a residual sum, and rotary embedding, by lowtide, PyTorch (eager, compiled, its own
fused operation) and Liger. GB/s counts the bytes that have to be read and written, whatever a peer moves. "saved" is
what autograd saves for backward beyond inputs and the residual stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from layer_peers import EXACT, PEERS, Function
from script import main
from torch import Tensor

from lowtide.bench.case import relative_error
from lowtide.bench.harness import Row, Run, Table, reason_in, release
from lowtide.bench.settings import RoundSettings, setting
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import mib

CALLS = 8  # of a timed run: all but the first are launched while the GPU is busy, as in training
TABLE = Table(
    {
        "peer": "<16", "forward_ms": "11.3f", "forward_gb_per_s": "17.0f", "ms": "9.3f", "gb_per_s": "10.0f",
        "kept_mib": "10.1f", "error": "9.1e",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayersConfig(RoundSettings):
    benchmark, packages = "layers", ("liger-kernel",)
    tokens: int = setting(65536, "N", least=64)
    hidden: int = setting(2048, "D, of the norms", least=1)
    heads: int = setting(32, "of the queries", least=1)
    kv_heads: int = setting(8, "of the keys", least=1)
    head_dim: int = setting(64, "of a head, even; all of it is rotated", least=2)


def rows_of(op: str, inputs: tuple[Tensor, ...], moved: tuple[int, int], run: Run) -> list[Row]:
    """Return a row for each peer of an operation, all interleaved; ``moved``: bytes of forward and of backward."""
    rows: list[Row] = []
    trained = [t for t in inputs if t.requires_grad]
    exact = EXACT[op](*(t.detach()[..., :64, :].double() if t.dim() > 1 else t.detach().double() for t in inputs))
    timed: dict[str, Callable[[], object]] = {}
    for peer, build in PEERS[op].items():
        row: Row = {"op": op, "peer": peer}
        rows.append(row)
        with reason_in(row):
            function, saved = build(), dict[int, int]()

            def see(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
                outs = function(*inputs)
            streams = {t.untyped_storage().data_ptr() for t in (*inputs, *outs[1:])}
            row["kept_mib"] = mib(sum(size for where, size in saved.items() if where not in streams))
            row["error"] = relative_error(outs[0][..., :64, :].double(), exact[0])
            upstream = [torch.randn_like(out) for out in outs]

            def forward(f: Function = function) -> object:
                return [f(*inputs) for _ in range(CALLS)]

            def both(f: Function = function, g: list[Tensor] = upstream) -> object:
                return [torch.autograd.grad(f(*inputs), trained, g) for _ in range(CALLS)]

            both()
            timed |= {f"{peer} forward": forward, peer: both}
        release(run.device)
    times = time_side_by_side(timed, run.device, warm=run.config.warm, reps=run.config.reps)
    for row in rows:
        if "failed" not in row:
            row["forward_ms"], row["ms"] = (times[row["peer"] + of].median_ms / CALLS for of in (" forward", ""))
            row["forward_gb_per_s"] = moved[0] / row["forward_ms"] / 1e6
            row["gb_per_s"] = sum(moved) / row["ms"] / 1e6
    return rows


def measure(run: Run) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    N, D, d = config.tokens, config.hidden, config.head_dim
    generator = torch.Generator(run.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=run.device).to(run.dtype).requires_grad_()

    x, r, w = random(N, D), random(N, D), random(D)
    q, k = (random(1, N, H, d).detach().transpose(1, 2).requires_grad_() for H in (config.heads, config.kv_heads))
    angles = torch.arange(N, device=run.device)[:, None] * 1e-2 ** torch.linspace(0, 2, d // 2, device=run.device)
    table = torch.cat((angles, angles), -1)[None]
    cos, sin = table.cos().to(run.dtype), table.sin().to(run.dtype)
    row, heads = x.nbytes, q.nbytes + k.nbytes
    for op, inputs, moved in (
        ("norm", (x, w), (2 * row, 3 * row)),
        ("add-norm", (x, r, w), (4 * row, 4 * row)),
        ("rotary", (q, k, cos, sin), (2 * heads, 2 * heads)),
    ):
        run.say(f"\n{op}, {run.dtype_name}\n{TABLE.header}")
        for measured in rows_of(op, inputs, moved, run):
            run.add(measured, rows, TABLE)


if __name__ == "__main__":
    sys.exit(main(measure, LayersConfig, __doc__))

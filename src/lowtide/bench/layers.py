"""The benchmark of what stands between the GEMMs: norm, norm with a residual sum, rotary embedding.

N tokens, D hidden size; Hq and Hk heads of d values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import LayersBenchConfig
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, compiled, reason_in, release, repeated
from lowtide.bench.task import relative_error
from lowtide.layers import add_rms_norm, rms_norm, rotary
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import mib

EPS = 1e-5
CALLS = 8  # of a timed run
Function = Callable[..., tuple[Tensor, ...]]
TABLE = Table(
    (Column("", "peer", "<16"),),
    (
        Column("forward ms", "forward_ms", "12.3f"), Column("GB/s", "forward_gb_per_s", "7.0f"),
        Column("both ms", "ms", "10.3f"), Column("GB/s", "gb_per_s", "7.0f"), Column("saved MiB", "kept_mib", "11.1f"),
        Column("error", "error", "9.1e"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One operation and its peers.

    Attributes:
        inputs: its tensors; those that require a gradient get one.
        exact: the first result, from inputs in float64.
        forward_bytes: that forward has to read and write.
        backward_bytes: the same of backward.
        peers: makers of the functions, by name; a maker imports its peer.
    """

    inputs: tuple[Tensor, ...]
    exact: Function
    forward_bytes: int
    backward_bytes: int
    peers: dict[str, Callable[[], Function]]


def _hf_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),)


def _hf_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return *_hf_norm(total, weight), total


def _hf_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def _torch_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.rms_norm(x, weight.shape, weight, EPS),)


def _plain(function: Function) -> dict[str, Callable[[], Function]]:
    """Return a function as Hugging Face writes it, compiled and eager, as peers."""
    return {"compile": lambda: compiled(function), "eager": lambda: function}


def _liger(module: str, function: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), function)


def _liger_norm() -> Function:
    norm = _liger("functional", "liger_rms_norm")()
    return lambda x, weight: (norm(x, weight, EPS, 0.0, "llama", False),)


def _liger_add_norm() -> Function:
    norm = _liger("functional", "liger_fused_add_rms_norm")()
    return lambda x, residual, weight: norm(x, residual, weight, EPS, 0.0, "llama", False)


def ops(config: LayersBenchConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Op]:
    """Return the operations, with random inputs."""
    N, D, d = config.tokens, config.hidden, config.head_dim
    g = torch.Generator(device).manual_seed(config.seed)

    def random(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.float32).to(dtype).requires_grad_(grad)

    def heads(H: int) -> Tensor:
        return random(1, N, H, d, grad=False).transpose(1, 2).requires_grad_()

    x, residual, weight = random(N, D), random(N, D), random(D)
    q, k = heads(config.heads), heads(config.kv_heads)
    angles = torch.arange(N, device=device)[:, None] * 1e-2 ** torch.linspace(0, 2, d // 2, device=device)
    table = torch.cat((angles, angles), -1)[None]
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    row, turned = x.nbytes, q.nbytes + k.nbytes
    norms: dict[str, Callable[[], Function]] = {
        "lowtide": lambda: lambda x, w: (rms_norm(x, w, EPS, rounding="before_weight"),),
        "F.rms_norm": lambda: _torch_norm,
        "liger": _liger_norm,
        **_plain(_hf_norm),
    }
    add_norms: dict[str, Callable[[], Function]] = {
        "lowtide": lambda: lambda x, r, w: add_rms_norm(x, r, w, EPS, rounding="before_weight"),
        "liger": _liger_add_norm,
        **_plain(_hf_add_norm),
    }
    rotaries: dict[str, Callable[[], Function]] = {
        "lowtide": lambda: rotary,
        **_plain(_hf_rotary),
        "liger": _liger("rope", "liger_rotary_pos_emb"),  # last: it turns its inputs in place
    }
    return {
        "norm": Op((x, weight), _torch_norm, 2 * row, 3 * row, norms),
        "add-norm": Op((x, residual, weight), lambda x, r, w: _torch_norm(x + r, w), 4 * row, 4 * row, add_norms),
        "rotary": Op((q, k, cos, sin), _hf_rotary, 2 * turned, 2 * turned, rotaries),
    }


def rows_of(name: str, op: Op, config: LayersBenchConfig, device: torch.device) -> list[Row]:
    """Return a row for each peer of an operation, all interleaved.

    A row has ``op`` and ``peer``; ``kept_mib``, what stays for backward beyond inputs and the residual stream; the
    relative ``error`` of the first result; the median times of a forward and of both passes, and the GB/s of each.
    """
    rows: list[Row] = []
    trained = [t for t in op.inputs if t.requires_grad]
    exact = [t.detach()[..., :64, :].double() if t.dim() > 1 else t.detach().double() for t in op.inputs]
    expected = op.exact(*exact)
    upstream: list[Tensor] | None = None
    timed: dict[str, Callable[[], object]] = {}
    for peer, build in op.peers.items():
        if config.only and peer not in config.only:
            continue
        row: Row = {"op": name, "peer": peer}
        rows.append(row)
        with reason_in(row):
            function = build()
            kept: dict[int, int] = {}

            def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                outs = function(*op.inputs)
            if upstream is None:
                upstream = [torch.randn_like(out) for out in outs]
            own = {t.untyped_storage().data_ptr() for t in (*op.inputs, *outs[1:])}  # the sum is the residual stream
            row["kept_mib"] = mib(sum(n for where, n in kept.items() if where not in own))
            row["error"] = relative_error(outs[0][..., :64, :].double(), expected[0])
            torch.autograd.grad(outs, trained, upstream)
            forward = partial(function, *op.inputs)
            timed[f"{peer} forward"] = repeated(forward, CALLS)
            timed[peer] = repeated(lambda f=forward, g=upstream: torch.autograd.grad(f(), trained, g), CALLS)  # type: ignore[misc]
        release(device)
    times = time_side_by_side(timed, device, warm=config.warm, reps=config.reps)
    for row in rows:
        if "failed" not in row:
            row["forward_ms"] = times[f"{row['peer']} forward"].median_ms / CALLS
            row["ms"] = times[row["peer"]].median_ms / CALLS
            row["forward_gb_per_s"] = op.forward_bytes / row["forward_ms"] / 1e6
            row["gb_per_s"] = (op.forward_bytes + op.backward_bytes) / row["ms"] / 1e6
    return rows


def measure(run: Run[LayersBenchConfig]) -> None:
    """Measure a table for each operation."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    found = ops(config, run.dtype, run.device)
    for name in config.chosen("ops"):
        shape = f"{config.tokens} x {config.hidden}"
        if name == "rotary":
            shape = f"{config.tokens} x ({config.heads} + {config.kv_heads}) x {config.head_dim}"
        run.say(f"\n{name}: {shape}, {run.dtype_name}\n{TABLE.header}")
        for row in rows_of(name, found[name], config, run.device):
            run.add(row, rows, TABLE)


LAYERS = Benchmark(measure=measure, packages=["liger-kernel"])

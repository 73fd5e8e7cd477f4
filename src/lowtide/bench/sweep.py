"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

The axes are those requested for PyTorch's own function (pytorch/pytorch issue 124480).
"""

from __future__ import annotations

from functools import partial

from lowtide.bench.case import Bench
from lowtide.bench.harness import Peer, Row, Run
from lowtide.bench.head import LOSS_TABLE, PEERS, bench_of, loss_row

__all__ = ["PEERS", "measure"]


def measure(run: Run) -> None:
    """Measure every shape."""
    points = run.result["points"] = []
    run.result |= {"dtype": run.dtype_name, "asked": run.config.recorded()}
    for shape in run.config.points:
        bench, rows = bench_of(run, shape), list[Row]()
        sizes = {"N": shape.N, "D": shape.D, "V": shape.V, "gradients_mib": bench.gradients_mib}
        points.append({**sizes, "limit_ms": bench.limit_ms, "limit_tflops": bench.tflops, "rows": rows})
        run.fill(rows, bench.title(), LOSS_TABLE, partial(rated_row, bench))


def rated_row(bench: Bench, peer: Peer) -> Row:
    """Return a peer's row with its rate: of the work that the GEMMs need, 6NDV, whatever a peer computes besides."""
    row = loss_row(bench, peer)
    times = {prefix: row[f"{prefix}ms"] for prefix in ("", "busy_") if f"{prefix}ms" in row}
    return row | {f"{prefix}tflops": bench.case.flops / ms / 1e9 for prefix, ms in times.items()}

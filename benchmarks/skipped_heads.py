"""A head's loss that skips tiles, beside the dense loss and the bare GEMMs: time, share, errors and peak memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from lowtide import HeadOptions, linear_cross_entropy, skip_report
from lowtide.bench.case import Case, Function, limit_of, loss_case, row_of
from lowtide.bench.harness import Peer, Row, Table
from lowtide.bench.settings import Shape
from lowtide.measure.timing import time_side_by_side

CALLS = 24  # before the first that counts: the threshold adapts
DENSE = "lowtide"

TABLE = Table(
    {
        "name": "<28", "ms": "8.2f", "busy_ms": "9.2f", "speed": "8.2f", "share": "8.3f", "logit_error": "13.2e",
        "dx_error": "12.2e", "dw_error": "12.2e", "mib": "7.0f",
    },
)  # fmt: skip


def loss_of(options: HeadOptions | None, calls: int, case: Case) -> Function:
    """Return a case's loss with these options, after so many steps."""

    function = partial(linear_cross_entropy, options=options)
    for _ in range(calls):
        case.step(function)
    return function


def measure_head(x: Tensor, w: Tensor, y: Tensor, accepted: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of one head: its limit, the dense loss, and each accepted error.

    ``speed`` is the limit's time, in the same rounds, over the row's: where the GPU is busy, on a GPU.
    """
    shape = Shape(name="", N=len(x), D=x.shape[1], V=len(w))
    peers = [Peer(DENSE, partial(loss_of, None, 0))]
    peers += [Peer(f"{DENSE} skip={text}", partial(loss_of, HeadOptions(skip=float(text)), CALLS)) for text in accepted]
    for peer in peers:
        case = loss_case(shape, x, w, y)  # a weight of its own: an order is remembered
        times = partial(time_side_by_side, device=x.device, warm=2, reps=6)
        limit = limit_of(case, times)
        row = row_of(case, peer, limit["rows"], case.exact(), times)
        if peer.name == DENSE:
            busy = {"busy_ms": row["busy_limit_ms"]} if "busy_limit_ms" in row else {}
            yield {"name": "three GEMMs", "ms": limit["ms"], **busy, "speed": 1.0}
        yield reported(row, case.w)


def reported(row: Row, w: Tensor) -> Row:
    """Return a row of `row_of` in this table's keys, with what the last call with the weight reports."""
    if "share" in row:
        share = row.pop("share")
        row["speed"] = row.pop("busy_share", share)
    if "peak_mib" in row:
        row["mib"] = row.pop("peak_mib")
    report = skip_report(w)
    if report is None:
        return row
    names = ("share", "dropped_mass", "logit_error", "threshold", "input_error", "weight_error")
    return row | {name: getattr(report, name) for name in names}

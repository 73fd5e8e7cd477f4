"""A head's loss that skips tiles, beside the dense loss and the bare GEMMs: time, share, errors and peak memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lowtide import HeadOptions, linear_cross_entropy, skip_report
from lowtide.bench.harness import CannotError, Column, Peer, Row, Table
from lowtide.bench.head import loss_task
from lowtide.bench.problem import PLAIN, SETTINGS, Problem
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Bench, Function, Task
from lowtide.errors import UnsupportedError

LIMITS = {3: "three GEMMs", 4: "four GEMMs"}
CALLS = 24  # before the first that counts: the threshold adapts
PER_TOKEN = next(setting for setting in SETTINGS if setting.reduction == "none")
ERRORS = {"loss": "loss_error", "dx": "input_error", "dw": "weight_error"}
DENSE = "lowtide"

TABLE = Table(
    heads=(Column("", "name", "<28"),),
    figures=(
        Column("ms", "ms", "8.2f"),
        Column("busy", "busy_ms", "8.2f"),
        Column("x limit", "speed", "9.2f"),
        Column("share", "share", "7.3f"),
        Column("logits", "logit_error", "10.2e"),
        Column("dX", "input_error", "10.2e"),
        Column("dW", "weight_error", "10.2e"),
        Column("MiB", "mib", "7.0f"),
    ),
)


def loss_of(options: HeadOptions | None, calls: int, task: Task) -> Function:
    """Return a task's loss with these options, after so many steps."""
    head = task.head
    reduction, cap = head.setting.reduction, head.setting.softcap

    def function() -> dict[str, Tensor]:
        loss = linear_cross_entropy(head.x, head.w, head.y, reduction=reduction, softcap=cap, options=options)
        return {"loss": loss}

    try:
        for _ in range(calls):
            task.step(function)
    except UnsupportedError as error:
        raise CannotError(str(error)) from error
    return function


def measure_head(x: Tensor, w: Tensor, y: Tensor, accepted: Sequence[str], *, per_token: bool = False) -> Iterator[Row]:
    """Yield the rows of one head: its limit, the dense loss, and each accepted error.

    ``speed`` is the limit's time, in the same rounds, over the row's: where the GPU is busy, on a GPU.
    """
    (N, D), V = x.shape, len(w)
    setting = PER_TOKEN if per_token else PLAIN
    problem = Problem(shape=Shape("", N, D, V), setting=setting, dtype=x.dtype, x=x, w=w, y=y, g=torch.empty(0))
    peers = [Peer(DENSE, partial(loss_of, None, 0))]
    peers += [Peer(f"{DENSE} skip={text}", partial(loss_of, HeadOptions(skip=float(text)), CALLS)) for text in accepted]
    for peer in peers:
        own = problem.in_setting(setting)  # with a tensor of its own as weight, of which an order is remembered
        bench = Bench(loss_task(own), error=True, warm=2, reps=6)
        row = bench.measure(peer)
        if peer.name == DENSE:
            busy = {"busy_ms": row["busy_limit_ms"]} if "busy_limit_ms" in row else {}
            yield {"name": LIMITS[setting.gemms], "ms": bench.limit_ms, **busy, "speed": 1.0}
        del bench  # its truth, before the next is computed
        yield reported(row, own.w)


def reported(row: Row, w: Tensor) -> Row:
    """Return a `Bench`'s row in this table's keys, with what the last call with the weight reports."""
    if row.pop("unsupported", False):
        return {"name": row["name"], "cannot": row["failed"], "unsupported": True}
    if "share" in row:
        share = row.pop("share")
        row["speed"] = row.pop("busy_share", share)
    if "peak_mib" in row:
        row["mib"] = row.pop("peak_mib")
    row |= {ERRORS[name]: error for name, error in row.pop("errors", {}).items()}
    report = skip_report(w)
    if report is None:
        return row
    about = {name: getattr(report, name) for name in ("share", "dropped_mass", "logit_error", "threshold")}
    return row | about | {f"reported_{name}": getattr(report, name) for name in ("input_error", "weight_error")}

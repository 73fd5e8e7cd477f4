"""How `ranks.py` measures: each way alone and queued behind the same GEMMs, on the slowest rank."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heads_of_ranks import Runs

from lowtide.measure.timing import peak_above, time_side_by_side

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from distributed.collectives import counted_collectives

PATIENCE = timedelta(seconds=60)  # a rank waits for the others, which compile the same kernels


def measure(
    rows: dict[str, dict[str, Any]],
    runs: Runs,
    bare: Runs,
    device: torch.device,
    warm: int,
    reps: int,
    *,
    notes: Mapping[str, Any] | None = None,
    save: Callable[[], object] = lambda: None,
) -> None:
    """Add a row for each of ``runs``: milliseconds, share of the limit, peak, collectives; or why it failed.

    A way that fails on one rank is measured on none. Ranks that wait for it in a collective fail after the process
    group's timeout; with NCCL their processes end. ``notes`` has more entries of some rows. ``save`` is called whenever
    ``rows`` has changed.
    """
    expected: float | None = None  # all ways have the same tokens: one with another loss is not measured
    reports = dist.new_group(backend="gloo", timeout=3 * PATIENCE)  # a failed way may leave the other group unusable
    for name in list(runs):
        failure: str | None = None
        row: dict[str, Any] = {}
        try:
            runs[name]()
            with counted_collectives() as collectives:
                loss = float(runs[name]())
            if not math.isclose(loss, expected := loss if expected is None else expected, rel_tol=2e-2):
                raise ValueError(f"its loss is {loss}, not {expected}")
            row = {"loss": loss, "peak_mib": peak_above(runs[name], device) / 2**20, "collectives": dict(collectives)}
        except Exception as error:
            failure = f"rank {dist.get_rank()}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        of_ranks: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, failure, group=reports)
        failures = [other for other in of_ranks if other is not None]
        if failures:
            rows[name] = {"failed": "; ".join(failures)}
            del runs[name]
        else:
            rows[name] = row | {"peak_mib": highest(row["peak_mib"], device)} | dict((notes or {}).get(name, {}))
        save()
    dist.destroy_process_group(reports)
    before, begun = next(iter({**bare, **runs}.values()), lambda: None), torch.zeros(1, device=device)

    def heat() -> None:
        before()
        before()
        dist.all_reduce(begun)  # ranks start together

    kinds = {"": None, "queued_": heat}
    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in kinds for name in (*runs, *bare)}
    for round_ in range(warm + reps):
        for kind, behind in kinds.items():
            for name, run in {**runs, **bare}.items():
                heat()
                dist.barrier()  # else a rank's time includes its wait for a late one
                taken = time_side_by_side({name: run}, device, warm=0, reps=1, behind=behind)[name].median_ms
                if round_ >= warm:
                    times[kind, name].append(taken)
    for kind in kinds:
        ms = {name: highest(statistics.median(times[kind, name]), device) for name in (*runs, *bare)}
        limit = min((ms[name] for name in bare), default=None)
        for name in runs:
            rows[name] |= {f"{kind}ms": ms[name]}
            rows[name] |= {} if limit is None else {f"{kind}share_of_limit": limit / ms[name]}
        for name in bare:
            rows.setdefault(name, {})[f"{kind}ms"] = ms[name]
    save()


def highest(value: float, device: torch.device) -> float:
    """Return the highest of the ranks' values."""
    most = torch.tensor(value, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return round(most.item(), 3)

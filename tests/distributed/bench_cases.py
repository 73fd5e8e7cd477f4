"""The benchmark of several ranks, where one of them fails by itself."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from distributed.launch import main

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def a_rank_that_fails_alone() -> None:
    """Its row says so on every rank, and what is measured next is right."""
    import ranks as benchmark

    patient = dist.new_group()
    _set_pg_timeout(timedelta(seconds=0.2), patient)

    def good() -> Any:
        total = torch.ones(())
        dist.all_reduce(total)
        return total

    def bad() -> Any:
        if dist.get_rank() == 1:
            raise KeyError("of this rank alone")
        total = torch.ones(())
        dist.all_reduce(total, group=patient)
        return total

    def alone() -> Any:
        return torch.full((), float(dist.get_world_size() + 5 * (dist.get_rank() == 1)))

    runs = {"good": good, "bad": bad, "alone": alone, "again": good}
    rows: dict[str, Any] = {}
    known: list[list[str]] = []
    benchmark.measure(
        rows, runs, {}, torch.device("cpu"), warm=0, reps=2, notes={"again": {"note": 1}},
        save=lambda: known.append(list(rows)),
    )  # fmt: skip
    assert known == [list(rows)[:n] for n in (1, 2, 3, 4, 4)], "each row is saved at once"
    assert list(rows) == ["good", "bad", "alone", "again"]
    assert "rank 1: KeyError: 'of this rank alone'" in rows["bad"]["failed"]
    assert "rank 1: ValueError: its loss is" in rows["alone"]["failed"]
    assert all(rows[name]["loss"] == dist.get_world_size() and rows[name]["ms"] > 0 for name in ("good", "again"))
    assert rows["again"]["note"] == 1


class LooksLikeNativeTPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream * 2


def which_of_ligers() -> None:
    """What ran is read from autograd's graph."""
    import peers_of_ranks

    x = torch.ones(3, requires_grad=True)
    native: Any = LooksLikeNativeTPFunction.apply(x)  # type: ignore[no-untyped-call]
    assert peers_of_ranks.liger_implementation(native.exp()) == "native"
    assert peers_of_ranks.liger_implementation(x.exp().exp()) == "fallback"


if __name__ == "__main__":
    main(vars())

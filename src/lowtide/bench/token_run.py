"""``lowtide bench stats`` and ``lowtide bench divergence``: a table for each shape and each work."""

from __future__ import annotations

from lowtide.bench.config import DivergenceBenchConfig, StatsBenchConfig
from lowtide.bench.divergence import divergence_tasks
from lowtide.bench.harness import Benchmark, Row, Run
from lowtide.bench.peers import LOWTIDE
from lowtide.bench.stats import stats_tasks
from lowtide.bench.tokens import measure_tables


def _measure_stats(run: Run[StatsBenchConfig]) -> None:
    measure_tables(run, stats_tasks)


def _measure_divergence(run: Run[DivergenceBenchConfig]) -> None:
    measure_tables(run, divergence_tasks)


def _failed(row: Row) -> bool:
    return "failed" in row and str(row["name"]).startswith(LOWTIDE)


STATS = Benchmark(name="stats", measure=_measure_stats, failed=_failed, peers=StatsBenchConfig.known_peers)
DIVERGENCE = Benchmark(
    name="divergence", measure=_measure_divergence, failed=_failed, peers=DivergenceBenchConfig.known_peers
)

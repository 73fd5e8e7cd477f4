from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.head import divergences, plan, schedules, statistics
from support import forget_plans


@pytest.fixture(params=[False, True], ids=["no bf16 GEMMs", "bf16 GEMMs"])
def cpu_multiplies_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What is run on a CPU with and on one without instructions for bf16, whichever this one is."""
    monkeypatch.setattr(plan, "cpu_multiplies_bf16", lambda: request.param)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.fixture(params=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways with tokens that count for nothing, on the CPU: dropped as there, or computed as on other devices."""
    if request.param != "dropped":

        def select_rows(job: schedules.CrossEntropyJob) -> schedules.Rows:
            is_class = (job.target_N >= 0) & (job.target_N < job.shape[2])
            kept = job.target_N != job.ignore_index
            return schedules._weigh(job, None, kept, job.target_N.where(is_class, 0), is_class)

        monkeypatch.setattr(schedules, "select_rows", select_rows)
        for module in (divergences.rows, statistics.rows):
            monkeypatch.setattr(module, "drops_rows", lambda device: False)
    return request.param

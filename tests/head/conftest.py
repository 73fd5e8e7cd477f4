from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from lowtide.head import planner
from lowtide.head.call import Head
from support import forget_plans


@pytest.fixture(params=[False, True], ids=["no bf16 GEMMs", "bf16 GEMMs"])
def cpu_multiplies_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What is run on a CPU with and on one without instructions for bf16, whichever this one is."""
    monkeypatch.setattr(planner, "cpu_multiplies_bf16", lambda: request.param)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.fixture
def keep_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have tokens that count for nothing dropped, as on the CPU, or computed as zeros, as on other devices."""
    modules = [module for name, module in sys.modules.items() if name.startswith("lowtide.head")]
    modules = [module for module in modules if hasattr(module, "looks_at_numbers")]

    def keep(kept: bool) -> None:
        monkeypatch.setattr(Head, "drops_tokens", not kept)
        for module in modules:
            monkeypatch.setattr(module, "looks_at_numbers", lambda device: not kept)

    return keep


@pytest.fixture(params=[False, True], ids=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, keep_rows: Callable[[bool], None]) -> None:
    """Both ways with them."""
    keep_rows(request.param)

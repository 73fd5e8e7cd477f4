from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from lowtide.head import planner
from support import forget_plans


@pytest.fixture(params=[False, True], ids=["no bf16 GEMMs", "bf16 GEMMs"])
def cpu_multiplies_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What is run on a CPU with and on one without instructions for bf16, whichever this one is."""
    monkeypatch.setattr(planner, "cpu_multiplies_bf16", lambda: request.param)
    forget_plans()
    yield request.param
    forget_plans()


@pytest.fixture(params=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways with tokens that count for nothing, on the CPU: dropped as there, or computed as on other devices."""
    modules = [module for name, module in sys.modules.items() if name.startswith("lowtide.head")]
    for module in modules if request.param != "dropped" else []:
        if hasattr(module, "drops_rows"):
            monkeypatch.setattr(module, "drops_rows", lambda device: False)
    return request.param

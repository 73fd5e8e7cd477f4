from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.head import plan
from support import forget_plans


@pytest.fixture(params=[False, True], ids=["no bf16 GEMMs", "bf16 GEMMs"])
def cpu_multiplies_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What is run on a CPU with and on one without instructions for bf16, whichever this one is."""
    monkeypatch.setattr(plan, "cpu_multiplies_bf16", lambda: request.param)
    forget_plans()
    yield request.param
    forget_plans()

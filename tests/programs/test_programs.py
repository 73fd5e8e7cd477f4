"""Random programs around a model give with lowtide what they give without it, or an error that says what to do."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from programs.grammar import make
from programs.open_defects import which
from programs.run import as_script, shrunk, verdict

BATCH = 50
FIXED = 40  # batches: 2,000 programs
SLOW = int(os.environ.get("LOWTIDE_PROGRAMS", "100000")) // BATCH
FRESH = int(os.environ.get("LOWTIDE_PROGRAMS_SEED", random.SystemRandom().randrange(10**9)))


def check(first: int) -> None:
    """Run a batch of programs; fail with the first that is different, as small as it gets."""
    kinds: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        found = verdict(make(seed))
        kinds[found.kind] += 1
        if found.kind == "different":
            small = shrunk(make(seed))
            if which(small.text) is not None:
                continue
            pytest.fail(f"\n\n{as_script(small, verdict(small).why)}\n", pytrace=False)
    # most of them run to their end: the grammar tests something
    assert kinds["equal"] > 0.6 * BATCH, kinds
    assert kinds["refused"] < 0.2 * BATCH, kinds


@pytest.mark.parametrize("number", range(FIXED))
def test_fixed_programs(number):
    check(number * BATCH)


@pytest.mark.slow
def test_fresh_programs():
    """As many as ``LOWTIDE_PROGRAMS`` says, from ``LOWTIDE_PROGRAMS_SEED`` on, which a failure shows."""
    for number in range(SLOW):
        check(FRESH + number * BATCH)

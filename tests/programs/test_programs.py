"""Random programs around a model give with lowtide what they give without it, or an error that says what to do."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import torch

from programs.grammar import make
from programs.open_defects import which
from programs.run import as_script, shrunk, verdict

# PyTorch's, of the generator in a checkpoint whose recompute an error ended.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
BATCH, FIXED = 50, 12  # 600 programs
SLOW_BATCHES = 100
MOST_SHOWN = 10  # failures of a batch
SLOW = int(os.environ.get("LOWTIDE_PROGRAMS", "100000"))
SEED = os.environ.get("LOWTIDE_PROGRAMS_SEED")  # of the first slow batch; none: fresh ones


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(first: int, count: int) -> Counter[str]:
    """Run programs; fail with those that are different, as small as they get. Return how many came to what."""
    kinds: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        found = verdict(make(seed))
        if found.kind == "different":
            small = shrunk(make(seed))
            why = verdict(small).why
            defect = which(why, small.text)
            if defect is None:
                failures.append(as_script(small, why))
            found.kind = f"open: {defect}"
        kinds[found.kind] += 1
    if failures:
        pytest.fail("\n\n" + "\n\n".join(failures[:MOST_SHOWN]) + f"\n\n{len(failures)} of {count}", pytrace=False)
    # Most run to their end, or the grammar would test little.
    assert kinds["equal"] > 0.6 * count, kinds
    assert kinds["refused"] < 0.2 * count, kinds
    return kinds


@pytest.mark.parametrize("number", range(FIXED))
def test_fixed_programs(number):
    check(number * BATCH, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SLOW_BATCHES))
def test_fresh_programs(number, capsys, record_property):
    """As many as ``LOWTIDE_PROGRAMS`` says, of fresh seeds."""
    count = SLOW // SLOW_BATCHES
    first = random.SystemRandom().randrange(10**9) if SEED is None else int(SEED) + number * count
    kinds = check(first, count)
    for kind, programs in kinds.items():
        record_property(kind, programs)  # in the file of --junitxml: several processes print nowhere
    with capsys.disabled():
        print(f"\nprograms {first} to {first + count - 1}: {dict(kinds)}")  # noqa: T201

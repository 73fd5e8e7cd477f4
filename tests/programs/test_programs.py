"""Random programs around a model give with lowtide what they give without it, or an error that says what to do.

`make slow` runs 10,000 of fresh seeds; `LOWTIDE_PROGRAMS` says how many else, `LOWTIDE_PROGRAMS_SEED` the first seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from programs.grammar import Program, make
from programs.open_defects import which
from programs.run import shrunk, verdict
from promises import promise

pytestmark = [
    promise("patched", "reported", "reversible"),
    # PyTorch's, of the generator in a checkpoint whose recompute an error ended
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BATCH, FIXED = 40, 5
SLOW_BATCHES = 40
MOST_SHOWN = 10  # failures of a batch
SLOW = int(os.environ.get("LOWTIDE_PROGRAMS", "10000"))
SEED = os.environ.get("LOWTIDE_PROGRAMS_SEED")  # of the first slow batch; none: fresh ones


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
                failures.append(f"# seed {seed}: {why}\n{small.text}")
            found.kind = f"open: {defect}"
        kinds[found.kind] += 1
    if failures:
        pytest.fail("\n\n" + "\n\n".join(failures[:MOST_SHOWN]) + f"\n\n{len(failures)} of {count}", pytrace=False)
    return kinds


@pytest.mark.parametrize("number", range(FIXED))
def test_fixed_programs(number: int) -> None:
    check(number * BATCH, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SLOW_BATCHES))
def test_fresh_programs(number: int, record_property: pytest.RecordProperty) -> None:
    count = -(-SLOW // SLOW_BATCHES)
    first = random.SystemRandom().randrange(10**9) if SEED is None else int(SEED) + number * count
    kinds = check(first, count)
    for kind, programs in kinds.items():
        record_property(kind, programs)  # in the file of --junitxml: several processes print nowhere
    # most run to their end, or the grammar would test little
    assert kinds["equal"] > 0.6 * count, kinds
    assert kinds["refused"] < 0.2 * count, kinds


PROGRAM = (
    "model = build('llama', torch.float32)",
    "x, y = batch(3)",
    "see(x.float().mean())",
    "patch(model)",
    "out = model(input_ids=x, labels=y)",
    "loss = out.loss",
    "{}",
    "loss.backward()",
    "see(model.training)",
)


@pytest.mark.parametrize("wrong", ["loss = 1.001 * loss", "replace(out, 'logits', 2 * out.logits)\nsee(out.logits)"])
def test_a_difference_is_found_and_shown_small(wrong: str) -> None:
    """A program that sees whether it runs patched, as no other can."""
    program = Program(0, tuple(line.format(f"if patch.__name__ == 'patch':\n    {wrong}") for line in PROGRAM))
    assert verdict(program).kind == "different"
    small = shrunk(program)
    assert len(small.statements) <= 7
    assert "statement" in verdict(small).why or ".grad: off by" in verdict(small).why

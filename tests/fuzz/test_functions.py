"""Random argument sets for the contract's functions against plain PyTorch in float64: fixed seeds, and slow fresh ones.

A failure prints a case as simple as can be. `LOWTIDE_SETS` says how many sets the slow test draws (20,000),
`LOWTIDE_SEED` from which seed (fresh, and printed).
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest

from contract.table import FUNCTIONS
from fuzz import machine
from fuzz.machine import draw, fails, shrink
from promises import promise

pytestmark = [
    promise("values", "options", "layouts"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, about what a case does: nothing of them is lowtide's
]
FIXED, FRESH_BLOCKS = 40, 4
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def judge_all(name: str, seeds: range) -> None:
    for seed in seeds:
        case = draw(name, seed)
        if (found := fails(case)) is not None:
            small = shrink(case)
            pytest.fail(f"{name}, seed {seed}: {found}\n\n{small}: {fails(small)}", pytrace=False)


@every_function
def test_fixed_seeds(name: str) -> None:
    judge_all(name, range(FIXED))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(FRESH_BLOCKS))
@every_function
def test_fresh_seeds(name: str, block: int) -> None:
    """As many sets as `LOWTIDE_SETS` says, split over the functions and their blocks."""
    count = -(-int(os.environ.get("LOWTIDE_SETS", "20000")) // (len(FUNCTIONS) * FRESH_BLOCKS))
    first = int(os.environ.get("LOWTIDE_SEED") or secrets.randbelow(10**9)) + block * count
    print(f"{name}: seeds {first} to {first + count - 1}")  # noqa: T201
    judge_all(name, range(first, first + count))


@every_function
def test_what_is_wrong_by_a_ten_thousandth_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, each gradient by itself, and a value too."""
    real, which = machine.run_ours, 0

    def wrong(*args: Any) -> Any:
        outs, ups, grads = real(*args)
        if which < len(grads):
            grads[which] = grads[which] * (1 + 1e-4)
        else:
            outs = {key: out * (1 + 1e-4) if out.is_floating_point() else out for key, out in outs.items()}
        return outs, ups, grads

    options = machine.options_of(name)
    case = {"function": name, "seed": 3} | {option: values[0] for option, values in options.items()}
    case["leading"] = (2, 3)
    assert fails(case) is None
    monkeypatch.setattr(machine, "run_ours", wrong)
    for which in range(len(machine.trained(machine.arguments_of(case)[1])) + 1):
        assert fails(case) is not None, which

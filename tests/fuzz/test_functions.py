"""Random argument sets for every public function against plain PyTorch in float64: fixed seeds, and with --slow fresh.

A failure prints a case as simple as can be. `LOWTIDE_SETS` says how many sets the slow test draws (60,000),
`LOWTIDE_SEED` from which seed (fresh, and printed).
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest
import torch

from fuzz import machine
from fuzz.cases import Case, draw, tables
from fuzz.machine import Refused, fails, judge, shrink

pytestmark = [
    pytest.mark.filterwarnings("ignore")  # PyTorch's own, about what a program does: nothing of them is lowtide's
]
NAMES = list(tables())
BLOCKS, EACH = 2, 150  # of fixed seeds, for each function
FRESH_BLOCKS = 12


def judge_all(name: str, seeds: range) -> None:
    refused = 0
    for seed in seeds:
        case = draw(name, seed)
        try:
            judge(case)
        except Refused:
            refused += 1
        except machine.Problem as found:
            small = shrink(case)
            pytest.fail(f"{name}, seed {seed}: {found}\n\n{small}: {fails(small)}", pytrace=False)
    assert refused < len(seeds) / 2 or len(seeds) < 20, "hardly anything was compared"


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("name", NAMES)
def test_fixed_seeds(name: str, block: int) -> None:
    judge_all(name, range(block * EACH, (block + 1) * EACH))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(FRESH_BLOCKS))
@pytest.mark.parametrize("name", NAMES)
def test_fresh_seeds(name: str, block: int) -> None:
    """As many sets as `LOWTIDE_SETS` says, split over the functions and their blocks."""
    count = -(-int(os.environ.get("LOWTIDE_SETS", "60000")) // (len(NAMES) * FRESH_BLOCKS))
    first = int(os.environ.get("LOWTIDE_SEED") or secrets.randbelow(10**9)) + block * count
    print(f"{name}: seeds {first} to {first + count - 1}")  # noqa: T201
    judge_all(name, range(first, first + count))


def ordinary(name: str, seed: int, **changes: Any) -> Case:
    """Return a case whose gradients are not 0, of the simplest kind but for what ``changes`` says."""
    table = tables()[name][1]
    case = {"function": name, "seed": seed} | {option: values[0] for option, values in table.items()}
    return case | {k: v for k, v in changes.items() if k in table}


@pytest.mark.parametrize("wrong_by", [1e-4, -1e-4])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_wrong_by_a_ten_thousandth_fails(
    name: str, wrong_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, each gradient by itself; and a value too."""
    real, which = machine.run_ours, 0

    def wrong(*args: Any) -> Any:
        outs, ups, grads = real(*args)
        if which < len(grads):
            grads[which] = grads[which] * (1 + wrong_by)
        else:
            outs[0] = outs[0] * (1 + wrong_by)
        return outs, ups, grads

    for seed in range(3):
        case = ordinary(name, seed, dtype="float32", upstream="random", D=16, V=33, linear_bias=True, leading=(2, 3))
        assert fails(case) is None
        leaves = sum(t.requires_grad for t in machine.tensors_of(machine.program_of(case))[1].values())
        with monkeypatch.context() as patch:
            patch.setattr(machine, "run_ours", wrong)
            for which in range(leaves + 1):
                assert fails(case) is not None, (seed, which)
    which = 0


def test_other_options_are_drawn() -> None:
    """Every value of every option is drawn in a few hundred sets: none is dead."""
    for name in NAMES:
        cases = [draw(name, seed) for seed in range(400)]
        for option, values in tables()[name][1].items():
            seen = [case[option] for case in cases]
            assert all(value in seen for value in values), (name, option)


def test_the_truth_is_that_of_pytorchs_own_functions() -> None:
    """The reference itself, against `torch.nn.functional.cross_entropy` in float64."""
    from fuzz import references

    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((9, 5), (7, 5), (7,)))
    y, q = torch.randint(0, 7, (9,), generator=g), torch.rand(7, generator=g, dtype=torch.float64)
    y[::3] = 3
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.3):
            kwargs: dict[str, Any] = {
                "weight": q,
                "reduction": reduction,
                "ignore_index": 3,
                "label_smoothing": smoothing,
            }
            want = torch.nn.functional.cross_entropy(x @ w.T + b, y, **kwargs)
            torch.testing.assert_close(references.cross_entropy(x, w, y, linear_bias=b, **kwargs)[0], want)

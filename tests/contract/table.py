"""All public functions that the contract's tests go through, and their modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from contract import cases, parts
from contract.function import Mode
from support import pairs

HEADS = cases.MODES
FUNCTIONS = {**cases.FUNCTIONS, **parts.FUNCTIONS}
MODES = {**HEADS, **cases.CONTRASTIVE, **parts.MODES}
PUBLIC = {name: mode for name, mode in MODES.items() if mode.function.public}
PER_TOKEN = {name: mode for name, mode in HEADS.items() if mode.per_token}
UNLIKE = ("mean", "each", "statistics", "sets", "jsd-sum", "top-k", "apply")  # heads that others share the code of
SHARING = [mode for name, mode in HEADS.items() if name not in UNLIKE]


def each(modes: Mapping[str, Mode]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mode", modes.values(), ids=modes)


def every_pair_of_modes(**options: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with every pair of a mode and of these options; modes that share others' code in `make slow`."""
    cases = pairs({"mode": [*MODES.values()], **{name: [*values] for name, values in options.items()}}, seed=0)
    params = [
        pytest.param(*case.values(), marks=[pytest.mark.slow] * any(case["mode"] is mode for mode in SHARING))
        for case in cases
    ]
    return pytest.mark.parametrize(("mode", *options), params)


every_mode, every_head = each(MODES), each(HEADS)

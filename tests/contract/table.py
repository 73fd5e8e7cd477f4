"""All public functions that the contract's tests go through, and their modes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from contract import cases, parts
from contract.function import Mode

HEADS = cases.MODES
FUNCTIONS = {**cases.FUNCTIONS, **parts.FUNCTIONS}
MODES = {**HEADS, **cases.CONTRASTIVE, **parts.MODES}
PUBLIC = {name: mode for name, mode in MODES.items() if mode.function.public}
PER_TOKEN = {name: mode for name, mode in HEADS.items() if mode.per_token}


def each(modes: Mapping[str, Mode]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mode", modes.values(), ids=modes)


every_mode, every_head = each(MODES), each(HEADS)

"""docs/losses.md: every public function has an example, and every published loss its source."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lowtide import losses

TEXT = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
FUNCTIONS = [name for name in losses.__all__ if name.islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example(name: str) -> None:
    assert any(f"losses.{name}(" in block for block in BLOCKS)


def test_every_published_loss_names_its_source() -> None:
    own = {"policy_loss", "sft_loss", "bnpo_loss", "reduce_tokens", "sequence_logprobs", "future_labels"}  # no papers
    for name in set(FUNCTIONS) - own:
        assert "Source" in (getattr(losses, name).__doc__ or ""), name


def test_the_kinds_of_dpo_are_listed_where_they_are_explained() -> None:
    for kind in losses.DPO_KINDS:
        assert f'"{kind}"' in TEXT
        assert f'\n    "{kind}"' in (inspect.getdoc(losses.dpo_loss) or "")

"""One parser for every size of memory that a user says."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.measure.units import as_gib, parse_gib


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40", 40), ("40GiB", 40), (" 40 gib ", 40), ("40G", 40), ("40g", 40), (".5", 0.5), ("1.5TiB", 1536),
        ("2T", 2048), ("512MiB", 0.5), ("512M", 0.5), ("2097152K", 2), ("2097152kib", 2), ("40GB", 40e9 / 2**30),
        ("24000MB", 24e9 / 2**30), ("1tb", 1e12 / 2**30), ("1000kB", 1e6 / 2**30), ("1073741824B", 1),
    ],
)  # fmt: skip
def test_sizes(text: str, size: float) -> None:
    assert parse_gib("budget", text) == pytest.approx(size, rel=1e-15)


@pytest.mark.parametrize("text", ["", "GiB", "4e3", "1,5", "40GiBs", "-4G", "nan", "inf", "٤٠", "40 GiB GiB", "4P"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentValueError, match=r"^budget: expected a size such as 40GiB"):
        parse_gib("budget", text)


def test_arguments_in_gib() -> None:
    assert as_gib("budget_gib", 40) == as_gib("budget_gib", 40.0) == as_gib("budget_gib", "40GiB") == 40
    assert as_gib("budget_gib", Fraction(1, 2)) == 0.5
    assert as_gib("budget_gib", 10**400) == math.inf
    assert as_gib("budget_gib", "40GB") == pytest.approx(40e9 / 2**30)
    for wrong in (True, None, "40", b"40G", [40]):
        with pytest.raises(ArgumentTypeError, match=r"^budget_gib: expected a number of GiB, or a text"):
            as_gib("budget_gib", wrong)
    with pytest.raises(ArgumentValueError, match=r"^budget_gib: expected a size"):
        as_gib("budget_gib", "40 apples")

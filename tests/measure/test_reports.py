"""What results say of the machine, sizes as users write them, and functions in processes of their own."""

from __future__ import annotations

import json
import math
import os
import signal
from fractions import Fraction

import pytest
import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.measure.child import run_child
from lowtide.measure.machine import describe_machine
from lowtide.measure.units import as_gib
from promises import promise

pytestmark = promise("commands")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40", 40), (" 40 gib ", 40), ("40G", 40), (".5", 0.5), ("1.5TiB", 1536), ("2T", 2048), ("512m", 0.5),
        ("2097152K", 2), ("40GB", 40e9 / 2**30), ("24000MB", 24e9 / 2**30), ("1tb", 1e12 / 2**30),
        ("1000kB", 1e6 / 2**30), ("1073741824B", 1),
    ],
)  # fmt: skip
def test_sizes(text: str, size: float) -> None:
    assert as_gib("budget", text) == pytest.approx(size, rel=1e-15)


@promise("errors")
def test_what_is_no_size() -> None:
    for text in ("", "GiB", "4e3", "1,5", "40GiBs", "-4G", "nan", "٤٠", "40 GiB GiB", "4P"):
        with pytest.raises(ArgumentValueError, match=r"^budget: expected a size such as 40GiB"):
            as_gib("budget", text)
    for wrong in (True, None, b"40G", [40]):
        with pytest.raises(ArgumentTypeError, match=r"^budget_gib: expected a number of GiB, or a text"):
            as_gib("budget_gib", wrong)


def test_arguments_in_gib() -> None:
    assert {as_gib("budget_gib", size) for size in (40, 40.0, "40GiB", "40")} == {40}
    assert as_gib("budget_gib", Fraction(1, 2)) == 0.5
    assert as_gib("budget_gib", 10**400) == math.inf


def test_the_machine_is_json_with_the_requested_versions() -> None:
    found = describe_machine(["packaging", "no-such-package"])
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # a wheel's name may lack the build
    assert found["packaging"]
    assert found["no-such-package"] is None
    assert (found["driver"] is None) == (not torch.cuda.is_available())
    json.dumps(found)


def surroundings(name: str) -> dict[str, str]:
    return {name: os.environ[name]}


def test_a_child_returns_the_functions_dict_or_how_it_ended() -> None:
    assert run_child(surroundings, "WHERE", env={"WHERE": "here"}) == {"WHERE": "here"}
    failed = run_child(json.loads, "{")["failed"]
    assert failed.startswith("the process ended with status 1: json.decoder.JSONDecodeError: ")
    killed = run_child(signal.raise_signal, 9)["failed"]
    assert killed == "the process ended with status -9, as the system kills one that takes too much host memory"

"""Rows are printed and written one by one, results are dated and whole, what a peer raises is its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowtide.bench.harness import (
    OUT_OF_MEMORY,
    CannotError,
    Files,
    Peer,
    Row,
    Table,
    reason_in,
    replace,
)
from lowtide.errors import ArgumentValueError
from promises import promise

pytestmark = promise("commands")
TABLE = Table(
    {"name": "<8", "tokens": "7"},
    {"ms": "7.2f", "twice": "9,.0f", "x": "6.1f"},
    lambda row: [row["note"]] if "note" in row else [],
)


def test_a_table_has_a_width_for_each_column() -> None:
    assert TABLE.header == "name     tokens     ms    twice     x\n"
    row: Row = {"name": "lowtide", "tokens": 64, "ms": 1234.5, "twice": 2469.0}
    assert TABLE.line(row) == "lowtide      641234.50    2,469\n"
    assert TABLE.line({**row, "note": "a", "failed": "b"}) == "lowtide      641234.50    2,469        a; b\n"
    assert TABLE.line({"name": "naive", "tokens": 64, "cannot": "not here"}) == "naive        64  not here\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CannotError("not this"), "not this"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots"), OUT_OF_MEMORY),
        (AssertionError(), "AssertionError"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError("long " * 1000), f"RuntimeError: {'long ' * 37}…"),
    ],
)
def test_what_a_peer_raises_is_its_row(error: Exception, reason: str) -> None:
    row: Row = {}
    with reason_in(row, cannot="cannot"):
        raise error
    unable = isinstance(error, CannotError)
    assert row == ({"cannot": reason, "unsupported": True} if unable else {"failed": reason})
    with pytest.raises(KeyboardInterrupt), reason_in(row):
        raise KeyboardInterrupt


def test_a_package_that_is_missing_comes_with_what_to_install() -> None:
    def build(_: object) -> object:
        raise ModuleNotFoundError("No module named 'quack'")

    with pytest.raises(CannotError, match=r"ModuleNotFoundError: No module named 'quack'\. pip install quack-kernels"):
        Peer("quack", build, "quack-kernels").built(None)


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for expected in ("day-head-h100", "day-head-h100-2", "day-head-h100-3"):
        files = Files.prepare(str(tmp_path / "new"), "day-head", "NVIDIA H100 80GB HBM3")
        assert files.json.stem == expected
        files.write_json({"run": expected})
        files.write_json({"run": expected, "more": 1})  # the same run may
        assert json.loads(files.json.read_text())["more"] == 1
    assert files.plot("16,2,3", lambda file: file.write_text("")).name == "day-head-h100-3-16-2-3.png"
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def write(file: Path) -> None:
        file.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace(target, write)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(ArgumentValueError, match="output: expected a folder"):
        Files.prepare(str(target), "day-head", None)

"""Result files are dated, never over an older one, and whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.bench.results import Files, replace, short_gpu
from lowtide.errors import ArgumentValueError


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


def test_a_folder_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentValueError, match="output: expected a folder"):
        Files.prepare(str(tmp_path / "file"), "day-head", None)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Some Device", "device"),
        (None, "cpu"),
    ],
)
def test_gpus_in_file_names(name: str | None, short: str) -> None:
    assert short_gpu(name) == short

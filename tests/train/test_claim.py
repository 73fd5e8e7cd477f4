"""One run at a time in an output folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowtide.train import checkpoints
from train.conftest import Run


def test_a_second_run_in_the_folder_of_one_under_way(
    finished: Path, lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would overwrite run.json, remove checkpoints that are being written, and add its steps to the log."""
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.0)
    shutil.copytree(finished, output := tmp_path / "run")
    with checkpoints.claimed(output):
        before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
        err = lowtide.refused("train", "--resume_from_checkpoint", "true", "--output", output)
        assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    told = f"output: expected a folder in which no other run is under way, got {output}, in which one is."
    assert err == f"lowtide train: {told} Wait for it, or name another.\n"

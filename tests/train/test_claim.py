"""One run at a time in an output folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.train import claim
from lowtide.train.claim import claimed
from train.conftest import Run


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_PATIENCE", 0.0)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_second_run_in_the_folder_of_one_under_way(
    resumed: bool, finished: Path, tiny: list[str], lowtide: Run, tmp_path: Path
) -> None:
    """It would overwrite run.json, remove checkpoints that are being written, and add its steps to the log."""
    output, words = tmp_path / "run", tiny
    if resumed:
        shutil.copytree(finished, output)
        words = ["train", "--resume_from_checkpoint", "true"]
    with claimed(output):
        before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != claim.LOCK}
        err = lowtide.refused(*words, "--output", output)
        assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != claim.LOCK} == before
    told = f"output: expected a folder in which no other run is under way, got {output}, in which one is."
    assert err == f"lowtide train: {told} Wait for it, or name another.\n"


def test_a_folder_is_free_again_after_a_run(tiny: list[str], lowtide: Run, tmp_path: Path) -> None:
    output = tmp_path / "run"
    lowtide.done(*tiny, "--output", output)
    with claimed(output):
        pass
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)


def test_what_was_made_is_removed_if_it_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for output, left in ((tmp_path / "a" / "b", False), (tmp_path / "there", True)):
        with claimed(output):
            assert output.is_dir()
        assert output.exists() == left
    assert not (tmp_path / "a").exists()
    with claimed(tmp_path / "c" / "d"):
        (tmp_path / "c" / "d" / "file").touch()
    assert (tmp_path / "c" / "d" / "file").exists()


def test_the_claim_ends_with_the_process_but_not_with_its_children(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from lowtide.train.claim import claimed\n"
        "with claimed(Path(sys.argv[1])):\n"
        "    if not os.fork(): print(os.getpid(), flush=True)\n"  # the child runs, and has let go
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ArgumentValueError, match="in which no other run is under way"), claimed(tmp_path):
            pass
        process.kill()
        process.wait()
        os.kill(child, 0)  # it is there
        with claimed(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_run_that_is_just_being_ended_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_PATIENCE", 60.0)
    code = "import sys, time; from pathlib import Path; from lowtide.train.claim import claimed\n"
    code += "with claimed(Path(sys.argv[1])): print(flush=True); time.sleep(0.5)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    with claimed(tmp_path):
        assert time.monotonic() - began < 30
    process.wait()
    process.stdout.close()

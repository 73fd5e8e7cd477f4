"""A run's folder: which checkpoint is resumed, whose it is, and what could not be written."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from lowtide.errors import ArgumentValueError
from lowtide.train import SaveError, WholeCheckpoints
from lowtide.train.checkpoints import (
    COMPLETE,
    checkpoint_to_resume,
    checkpoints,
    is_not_written,
    locked,
    save_error,
)
from promises import promise

pytestmark = promise("resume")
STATES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


def write(output: Path, step: int, *files: str) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run with two whole checkpoints and the remains of a third, and a folder of another name."""
    write(tmp_path, 90, *STATES, COMPLETE)
    write(tmp_path, 100, *STATES, COMPLETE)
    write(tmp_path, 110, "model.safetensors")
    write(tmp_path, 0, *STATES, COMPLETE).rename(tmp_path / "checkpoint-old")
    return tmp_path


def test_the_newest_whole_checkpoint_is_resumed(output: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert [path.name for path in checkpoints(output)] == ["checkpoint-90", "checkpoint-100"]
    for choice in ("auto", "true", "True", str(output / "checkpoint-100")):
        assert checkpoint_to_resume(output, choice) == output / "checkpoint-100"
    new = tmp_path_factory.mktemp("new")
    assert [checkpoint_to_resume(new, choice) for choice in ("auto", None, "false")] == [None] * 3
    for folder, choice, says in (
        (new, "true", "expected a complete checkpoint, got none in"),
        (new, str(output / "checkpoint-110"), "expected a complete checkpoint"),
        (output, None, "--output_dir: expected a folder without checkpoints"),
    ):
        with pytest.raises(ArgumentValueError) as raised:
            checkpoint_to_resume(folder, choice)
        assert says in str(raised.value)
        assert "auto" in str(raised.value)


@pytest.mark.parametrize("engine", ["", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
@pytest.mark.parametrize("missing", ["optimizer", "scheduler.pt"])
def test_a_checkpoint_without_its_states_is_refused(
    engine: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer would begin with new ones, in silence; DeepSpeed checks its own. What another engine wrote has others."""
    states = {"": "optimizer.pt", "ACCELERATE_USE_FSDP": "optimizer.bin"}
    if engine:
        monkeypatch.setenv(engine, "true")
    whole = write(tmp_path, 1, COMPLETE, "scheduler.pt", states.get(engine, "none"))
    assert checkpoint_to_resume(tmp_path, "auto") == whole
    (whole / (states.get(engine, "none") if missing == "optimizer" else missing)).unlink()
    (whole / "optimizer.pt").touch() if engine and missing == "optimizer" else None
    if engine == "ACCELERATE_USE_DEEPSPEED":
        assert checkpoint_to_resume(tmp_path, "auto") == whole
        return
    with pytest.raises(ArgumentValueError, match=f"which has no {missing}"):
        checkpoint_to_resume(tmp_path, "auto")


def callback(output: Path, step: int, keep: int | None, best: str | None = None) -> None:
    """Let the callback see that Trainer has saved a checkpoint."""
    args = SimpleNamespace(output_dir=str(output), save_total_limit=keep)
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, best_model_checkpoint=best)
    one = WholeCheckpoints("this")
    one.on_init_end(args, state, None)
    assert args.save_total_limit is None  # Trainer would remove older ones before this is on the disk
    one.on_save(args, state, None)


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(None, None, [90, 100, 120]), (2, None, [100, 120]), (1, "checkpoint-90", [90, 120])]
)
def test_older_checkpoints_go_once_a_newer_one_is_whole(
    keep: int | None, best: str | None, left: list[int], output: Path
) -> None:
    """The best one stays."""
    write(output, 120, *STATES)
    callback(output, 120, keep, best and str(output / best))
    assert [path.name for path in checkpoints(output)] == [f"checkpoint-{step}" for step in left]


def test_a_checkpoint_that_is_not_on_the_disk_is_not_marked(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(output, 120, *STATES)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SaveError) as raised:
        callback(output, 120, 1)
    text = f"could not write {output / 'checkpoint-120'} (No space left on device). Make room or choose another"
    assert str(raised.value).startswith(text)
    assert str(raised.value).endswith("Resume with: this")
    assert [path.name for path in checkpoints(output)] == ["checkpoint-90", "checkpoint-100"]


def test_two_runs_do_not_share_a_folder(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.train.checkpoints._PATIENCE", 0.0)
    with locked(output), pytest.raises(ArgumentValueError, match="no other run is under way"), locked(output):
        pass
    with locked(output):
        pass
    with pytest.raises(SaveError, match="Not a directory"), locked(output / "checkpoint-90" / "optimizer.pt" / "new"):
        pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (SafetensorError("I/O error: File too large (os error 27)"), "I/O error: File too large (os error 27)"),
        (RuntimeError("[enforce fail] . unexpected pos 64 vs 0\nmore"), "[enforce fail] . unexpected pos 64 vs 0"),
    ],
)
def test_what_could_not_be_written_is_said_in_the_systems_words(error: Exception, reason: str, output: Path) -> None:
    assert is_not_written(error)
    text = str(save_error(output / "checkpoint-120", error, "this"))
    assert f"({reason}). Make room or choose another --output_dir. Resume with: this" in text
    assert "There is no checkpoint yet" in str(save_error(output / "new" / "x", error, "this"))


@pytest.mark.parametrize("error", [MemoryError(), ValueError("x"), RuntimeError("x"), ArgumentValueError("x")])
def test_other_errors_are_none_of_the_disk(error: Exception) -> None:
    assert not is_not_written(error)

"""Killed at any moment, a run goes on from its last whole checkpoint as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowtide.train.resuming import resumed_config
from safetensors.torch import load_file, save_file

from distributed.train_ranks import shared
from lowtide.train import checkpoints
from lowtide.train.config import DEFAULT_ROOT

Run = Callable[..., tuple[int, str, str]]
STEPS = 12  # as the fixture `finished`

# Kills itself when the named function is called for the nth time: before it does anything, or half way through.
KILL_IN = """
import os, signal, sys, warnings
from lowtide.cli import main
import lowtide.train.run, torch
from lowtide.train import checkpoints, trainer
warnings.simplefilter("error")
where, calls = sys.argv[1], int(sys.argv[2])

def die(*args, **kwargs):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

owner, name = {
    "weights": (lowtide.train.run.LowtideTrainer, "_save"),
    "optimizer": (torch, "save"),
    "position": (trainer, "write_positions"),
    "rename": (checkpoints, "publish"),
    "removal": (checkpoints.shutil, "rmtree"),
    "step": (lowtide.train.run.LowtideTrainer, "training_step"),
}[where]
original = getattr(owner, name)
setattr(owner, name, die)
sys.exit(main(sys.argv[3:]))
"""


def losses(output: Path) -> dict[int, float]:
    state = json.loads((checkpoints.checkpoints(output)[-1] / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def assert_same_run(output: Path, expected: Path) -> None:
    assert losses(output) == losses(expected)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (output, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def longer(tiny: list[str]) -> list[str]:
    return [*tiny, "--max-steps", str(STEPS)]


@pytest.mark.parametrize(
    ("where", "calls"), [("weights", 2), ("optimizer", 7), ("position", 2), ("rename", 2), ("removal", 4), ("step", 8)]
)
def test_killed_at_a_chosen_place(
    where: str, calls: int, tmp_path: Path, longer: list[str], lowtide: Run, finished: Path
) -> None:
    output = tmp_path / "killed"
    script = tmp_path / "killed.py"
    script.write_text(KILL_IN)
    ended = shared()(1, where, calls, *longer, "--output", output, script=script)
    assert ended.statuses == [-9], ended
    assert checkpoints.checkpoints(output), "it was killed before its first checkpoint: the test tests nothing"
    for checkpoint in checkpoints.checkpoints(output):
        assert (checkpoint / "data_position_0.json").exists()
        assert (checkpoint / "optimizer.pt").exists()
    status, _, err = lowtide("train", "--resume", "--output", output)
    assert status == 0, err
    assert_same_run(output, finished)
    assert not (output / checkpoints.STAGING).exists()
    assert len(checkpoints.checkpoints(output)) == 2  # --keep


def test_killed_at_random_moments(tmp_path: Path, longer: list[str], lowtide: Run, finished: Path) -> None:
    rng = random.Random(time.time_ns())
    output = tmp_path / "killed"
    arguments = [*longer, "--save-every", "1", "--output", str(output)]
    for _ in range(2):
        shared().start(1, *arguments)
        until = time.monotonic() + 60
        while time.monotonic() < until and not (shared().pids() and checkpoints.checkpoints(output)):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            for pid in shared().pids():
                os.kill(pid, signal.SIGKILL)
        shared().end()
        arguments = ["train", "--resume", "--output", str(output)]
    assert lowtide(*arguments)[0] == 0
    assert_same_run(output, finished)


def test_killed_before_the_model_was_saved(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    output = tmp_path / "out"
    assert lowtide(*tiny, "--output", output)[0] == 0
    saved = load_file(output / "model" / "model.safetensors")
    names = {path.name for path in (output / "model").iterdir()}
    (output / "model").rename(tmp_path / "away")
    status, out, err = lowtide("train", "--resume", "--output", output)
    assert (status, err) == (0, "")
    assert "nothing is left of" in out
    assert {path.name for path in (output / "model").iterdir()} == names
    again = load_file(output / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    output = tmp_path / "out"
    assert lowtide(*tiny, "--output", output)[0] == 0
    assert lowtide("train", "--resume", "--output", output, "--max-steps", 8)[0] == 0
    assert sorted(losses(output)) == list(range(1, 9))


def test_without_output_the_newest_run_goes_on(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert lowtide(*tiny)[0] == 0
    (run,) = (tmp_path / DEFAULT_ROOT).iterdir()
    assert lowtide("train", "--resume", "--max-steps", 7)[0] == 0
    assert max(losses(run)) == 7


def test_a_run_inside_its_data_goes_on(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes is no data, for itself or for the next run."""
    monkeypatch.chdir(tmp_path)
    status, out, _ = lowtide(*tiny, "--data", ".", "--max-steps", 1)
    assert status == 0
    status, again, err = lowtide("train", "--resume", "--max-steps", 2)
    assert (status, err) == (0, "")
    status, other, _ = lowtide(*tiny, "--data", ".", "--max-steps", 1, "--output", "other")
    assert status == 0
    assert all("5 files," in said for said in (out, again, other))


def test_gradient_accumulation_resumes_at_the_same_text(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    arguments = [*tiny, "--grad-accum", "3"]
    assert lowtide(*arguments, "--output", tmp_path / "a")[0] == 0
    assert lowtide(*arguments, "--output", tmp_path / "b", "--keep", 1, "--save-every", 4)[0] == 0
    from_middle = tmp_path / "c"
    assert lowtide(*arguments, "--output", from_middle)[0] == 0
    (from_middle / "checkpoint-6").rename(tmp_path / "away")
    assert lowtide("train", "--resume", "--output", from_middle)[0] == 0
    assert_same_run(from_middle, tmp_path / "a")
    assert [p.name for p in checkpoints.checkpoints(tmp_path / "b")] == ["checkpoint-6"]


def test_a_model_older_than_the_last_checkpoint_is_not_the_result(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    wanted = load_file(run / "checkpoint-12" / "model.safetensors")
    older = {name: value + 1 for name, value in wanted.items()}
    save_file(older, run / "model" / "model.safetensors", metadata={"format": "pt"})
    assert lowtide("train", "--resume", "--output", run)[0] == 0
    got = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_its_optimizer_is_not_whole(
    name: str, finished: Path, tmp_path: Path, lowtide: Run
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "checkpoint-12" / name).unlink()
    status, _, err = lowtide("train", "--resume", "--output", run, "--max-steps", 14)
    assert (status, err.count("\n")) == (2, 1), err
    assert f"lacks {name}" in err


def test_a_resumed_run_is_given_another_rate_and_decay(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    """What the optimizer's checkpoint says of them would stand against it, in silence."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    began = torch.load(run / "checkpoint-12" / "optimizer.pt")["param_groups"]
    assert [group["initial_lr"] for group in began] == [2e-3, 2e-3]
    given = ["--max-steps", 16, "--lr", 1e-2, "--trainer-args", "weight_decay=0.5", "adam_beta1=0.8"]
    assert lowtide("train", "--resume", "--output", run, *given)[0] == 0
    groups = torch.load(run / "checkpoint-16" / "optimizer.pt")["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert {group["betas"] for group in groups} == {(0.8, 0.95)}
    assert lowtide("train", "--resume", "--output", run, "--max-steps", 17, "--trainer-args", "adam_beta1=0.7")[0] == 0
    groups = torch.load(run / "checkpoint-17" / "optimizer.pt")["param_groups"]
    assert (groups[0]["weight_decay"], groups[0]["betas"]) == (0.5, (0.7, 0.95)), "the others are still as given"
    rates = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in rates if line.get("learning_rate") is not None}
    for step in range(13, 17):  # the cosine of 16 steps, 2 of which warm up; a log has the rate that its step had
        share = (step - 1 - 2) / (16 - 2)
        assert rates[step] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * share))), step


@pytest.mark.parametrize("optim", ["adagrad", "adafactor", "rmsprop"])
def test_a_resume_that_is_given_nothing_leaves_the_optimizer_as_it_was(
    optim: str, tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    """Not every optimizer has AdamW's epsilon, or takes Trainer's."""
    output = tmp_path / "out"
    given = ["--trainer-args", f"optim={optim}", "weight_decay=0.25"]
    assert lowtide(*tiny, "--max-steps", 3, "--output", output, *given)[0] == 0
    before = torch.load(output / "checkpoint-3" / "optimizer.pt")["param_groups"]
    assert lowtide("train", "--resume", "--output", output, "--max-steps", 4)[0] == 0
    after = torch.load(output / "checkpoint-4" / "optimizer.pt")["param_groups"]
    for group, was in zip(after, before, strict=True):
        assert {**group, "lr": 0} == {**was, "lr": 0}


def test_a_resumed_run_keeps_its_optimizer(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    status, _, err = lowtide("train", "--resume", "--output", run, "--max-steps", 14, "--trainer-args", "optim=sgd")
    assert (status, err.count("\n")) == (2, 1)
    assert "optim=sgd" in err
    assert "as the run began" in err


GIVEN = {
    "lr": {"lr": 0.5},
    "weight_decay": {"trainer_args": ("weight_decay=0.5",)},
    "adam_beta2": {"trainer_args": ("adam_beta2=0.9",)},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_deepspeed_would_not_heed_is_refused(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    given = {"resume": True, "output": str(run), "parallel": "zero2", "max_steps": 20}
    assert resumed_config({**given, **GIVEN[name]}).max_steps == 20, "one process has PyTorch's optimizer"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resumed_config(given).lr == 2e-3
    assert resumed_config({**given, "lr": 2e-3}).max_steps == 20, "the same is nothing new"
    with pytest.raises(ValueError, match=f"{name} as the run began"):
        resumed_config({**given, **GIVEN[name]})

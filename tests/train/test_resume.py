"""Ended or killed at any moment, a run goes on from its last complete checkpoint as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Trainer

from chat_data import byte_tokenizer
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.train import checkpoints
from lowtide.train.checkpoints import COMPLETE, MODEL, TOKENS, write_run_file
from lowtide.train.config import DEFAULT_ROOT, TrainConfig
from lowtide.train.resuming import resumed
from lowtide.train.tokens import Blocks
from train.conftest import SHAPE, Run, assert_same_weights, log, losses, options

Tune = Callable[..., list[str]]
STEPS = 12  # as the fixture `finished`


def names(output: Path) -> list[str]:
    return [path.name for path in checkpoints.checkpoints(output)]


def assert_same_run(output: Path, expected: Path) -> None:
    assert losses(output) == losses(expected)
    assert_same_weights(output / MODEL, expected / MODEL)


def calls_before(owner: Any, name: str, number: int, what: Callable[[], object]) -> Callable[[], None]:
    """Let the function of that name do something more before its ``number``-th call; return what undoes it."""
    original, calls = getattr(owner, name), iter(range(1, 10**6))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            what()
        return original(*args, **kwargs)

    setattr(owner, name, called)
    return lambda: setattr(owner, name, original)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, as do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Do something in the middle of a step."""

    def at(step: int, what: Callable[[], object]) -> None:
        monkeypatch.setattr(Trainer, "training_step", Trainer.training_step)  # restored at the end
        calls_before(Trainer, "training_step", step, what)

    return at


def killed(arguments: list[str], owner: Any, name: str, number: int) -> int:
    """Run the command in a fork of this process that kills itself; return how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            for standard in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
            calls_before(owner, name, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(main(arguments))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PLACES = {
    "a step": (Trainer, "training_step", 8),
    "the weights": (Trainer, "_save", 2),
    "the optimizer": (torch, "save", 7),
    "the mark": (checkpoints, "_flush_all", 2),
    "removal": (checkpoints.shutil, "rmtree", 4),  # the first one is of the tokenizer's temporary folder
    "the end": (checkpoints.shutil, "rmtree", 5),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_chosen_place(place: str, tmp_path: Path, tiny: list[str], lowtide: Run, finished: Path) -> None:
    output = tmp_path / "killed"
    assert killed([*tiny, "--max-steps", str(STEPS), "--output", str(output)], *PLACES[place]) == -9
    assert names(output), "it was killed before its first checkpoint: the test tests nothing"
    half = [path for path in output.glob("checkpoint-*") if not (path / COMPLETE).exists()]
    assert bool(half) == (place in ("the optimizer", "the mark", "removal"))
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)
    assert_same_run(output, finished)
    assert names(output) == ["checkpoint-9", "checkpoint-12"], "save_total_limit is 2"
    assert sorted(p.name for p in output.iterdir() if p.name.startswith((".", "checkpoint"))) == sorted(names(output))


RESUMED = {
    "conversations": ("messages", {"assistant_only_loss": True, "gradient_accumulation_steps": 2}),
    "adapters with dropout": ("messages", {"use_peft": True, "lora_r": 4, "lora_dropout": 0.3, "policy": "input"}),
    "packed": ("text", {}),
    "two epochs": ("pairs", {"num_train_epochs": 2, "per_device_train_batch_size": 28, "max-steps": None}),
    "bfloat16": ("rows", {"dtype": "bfloat16"}),
    "adafactor": ("rows", {"optim": "adafactor"}),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_fine_tuning_is_the_same_to_the_bit(kind: str, tune: Tune, tmp_path: Path, lowtide: Run) -> None:
    pytest.importorskip("trl")
    data, more = RESUMED[kind]
    output, expected = tmp_path / "resumed", tmp_path / "whole"
    arguments = tune(data, **more)
    lowtide.done(*arguments, "--output", expected)
    assert names(expected) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    shutil.copytree(expected, output)
    shutil.rmtree(output / MODEL)
    shutil.rmtree(output / "checkpoint-6")
    (output / "checkpoint-4" / COMPLETE).unlink()  # as if it had been killed in step 4
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)
    assert_same_run(output, expected)
    assert sorted(losses(output)) == list(range(1, 7))
    assert [line["step"] for line in log(output)] == [line["step"] for line in log(expected)]


def test_a_finished_run_is_given_more_steps_and_saves_its_model_again(
    tmp_path: Path, finished: Path, lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, resume = tmp_path / DEFAULT_ROOT / "now", ["train", "--resume_from_checkpoint"]
    shutil.copytree(finished, output)
    shutil.rmtree(output / MODEL)
    monkeypatch.chdir(tmp_path)
    lowtide.done(*resume, "true")  # without --output the newest run goes on
    assert_same_run(output, finished)
    lowtide.done(*resume, "true", "--max-steps", 13, "--output", output)
    assert sorted(losses(output)) == list(range(1, 14))
    status, out, err = lowtide(*resume, output / "checkpoint-12", "--policy", "input", "--seed", 42)
    assert (status, out) == (2, ""), "another checkpoint than the newest can be named, but the seed is the run's"
    assert "--seed: expected the default, as the run began" in err
    (output / "checkpoint-12" / "optimizer.pt").write_bytes(b"half")
    err = lowtide.refused(*resume, output / "checkpoint-12", "--max-steps", 14)
    assert "checkpoint-12, which cannot be read" in err


def test_a_run_is_resumed_from_another_folder(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it has written into the folder of its data is no data."""
    monkeypatch.chdir(tmp_path / "text")
    lowtide.done(*tiny, "--data", ".", "--model", "../tiny.json", "--output", "out")
    shutil.rmtree(tmp_path / "text" / "out" / "checkpoint-6")
    monkeypatch.chdir(tmp_path)
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", "text/out")
    assert max(losses(tmp_path / "text" / "out")) == 6


REFUSED: dict[str, tuple[list[str], str]] = {
    "rate": (["--lr", "1.0"], "lr: expected the default, as the run began, got 1.0. A resumed run keeps its model"),
    "model": (["--model", "llama-3-8b"], "model: expected "),
    "length": (["--seq-len", "64"], "seq_len: expected 32, as the run began, got 64"),
    "optimizer": (["--optim", "sgd"], "--optim: expected the default, as the run began, got 'sgd'"),
    "sequences": (["--per_device_train_batch_size", "3"], "a divisor of the run's 2 sequences per step, got 1"),
    "no run": (["--output", "elsewhere"], "--resume_from_checkpoint: expected a run's folder in --output"),
    "no checkpoint": (["--resume_from_checkpoint", "elsewhere"], "expected a complete checkpoint of a lowtide run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_resumed_run_keeps_its_settings(
    case: str, finished: Path, tmp_path: Path, lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("words\n" * 999)
    before = sorted(finished.rglob("*"))
    resume = {"resume_from_checkpoint": "true", "output": finished, "max-steps": 14}
    err = lowtide.refused("train", *options(**resume), *given)
    assert named in err
    assert sorted(finished.rglob("*")) == before


PLANNED = {"memory_budget": "40GiB", "host_budget": "10GiB"}


@pytest.mark.parametrize(
    ("began", "now", "left"),
    [
        (PLANNED, {"policy": "input/1"}, {}),
        (PLANNED | {"offload_states": True}, {"policy": "all"}, {"host_budget": "10GiB"}),
        (PLANNED, {"policy": "all", "offload_states": True}, {"host_budget": "10GiB"}),
        ({"policy": "input-offload"}, PLANNED, PLANNED),
    ],
)
def test_other_activations_than_the_run_began_with(
    began: dict[str, Any], now: dict[str, Any], left: dict[str, Any], tmp_path: Path
) -> None:
    """They keep what they have a use for, of host memory."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "complete").touch()
    write_run_file(tmp_path, {"config": TrainConfig(**began).to_json(), "sequences": 1, "engine": ""})
    config, _ = resumed(TrainConfig(options={"resume_from_checkpoint": str(checkpoint)}, **now))
    expected = {"policy": None, "memory_budget": None, "host_budget": None} | left | now
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_same_settings_again_and_another_batch_are_no_change(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    same = ["--seq-len", 32, "--per_device_train_batch_size", 1, "--save_steps", 1, "--policy", "input"]
    resume = ["train", "--resume_from_checkpoint", "true", "--output", output]
    lowtide.done(*resume, *same, "--max-steps", 13)
    run = json.loads((output / "run.json").read_text())
    assert (run["sequences"], run["config"]["policy"]) == (2, "input"), "two batches of one make a step"
    (output / "run.json").write_text("{}")
    err = lowtide.refused(*resume)
    assert "a run.json as this version writes it" in err


def test_a_command_for_launchers_begins_a_run_and_resumes_it(
    tiny: list[str], finished: Path, tmp_path: Path, lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, auto = tmp_path / "run", ["--resume_from_checkpoint", "auto"]
    given = [*tiny, "--max-steps", STEPS, *auto, "--output", output]
    assert "resume" not in lowtide.done(*given)
    assert_same_run(output, finished)
    shutil.rmtree(output / "checkpoint-12")
    shutil.rmtree(output / MODEL)
    assert f"from {output}/checkpoint-9" in lowtide.done(*given)
    assert_same_run(output, finished)
    monkeypatch.chdir(tmp_path)
    assert "output: expected a folder beside auto, got none" in lowtide.refused(*tiny, *auto)
    assert "data: expected" in lowtide.refused("train", *auto, "--data", "none.txt", "--output", "new")


def test_the_best_model_is_saved(tune: Tune, tmp_path: Path, lowtide: Run) -> None:
    """A rate so high that it soon gets worse; every model that may be the best is a checkpoint."""
    pytest.importorskip("trl")
    output = tmp_path / "out"
    given = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "warmup_steps": 0}
    arguments = tune("rows", **{**given, "learning_rate": 0.3, "max-steps": 40, "load_best_model_at_end": True})
    out = lowtide.done(*arguments, "--output", output)
    held_out = {line["step"]: line["eval_loss"] for line in log(output) if "eval_loss" in line and line["step"]}
    best = min(held_out, key=lambda step: held_out[step])
    assert best < 40
    assert f"best             step {best}: the run went on to step 40" in out
    assert names(output) == [f"checkpoint-{best}", "checkpoint-40"], "the newest and the best"
    assert_same_weights(output / MODEL, output / f"checkpoint-{best}")


@pytest.mark.parametrize(("number", "status", "name"), [(15, 143, "SIGTERM"), (2, 130, "Ctrl-C")])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    number: int, status: int, name: str, at_step: Any, tiny: list[str], finished: Path, lowtide: Run, tmp_path: Path
) -> None:
    output, handlers = tmp_path / "out", [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    at_step(5, lambda: [signal.raise_signal(number) for _ in range(1 + (number == signal.SIGTERM))])
    ended, out, err = lowtide(*tiny, "--max-steps", STEPS, "--output", output)
    assert (ended, err.count("\n"), "training loss" in out) == (status, 1, False), err
    assert f"ended by {name} after step 5. Resume with: lowtide train --resume_from_checkpoint true --output" in err
    assert names(output) == ["checkpoint-3", "checkpoint-5"]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not (output / MODEL).exists()
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)
    assert_same_run(output, finished)


def test_a_second_interrupt_ends_it_at_once(at_step: Any, tiny: list[str], lowtide: Run, tmp_path: Path) -> None:
    at_step(5, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    status, _, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert (status, err.strip().count("\n"), "Traceback" in err) == (130, 0, False), err
    assert "interrupted. Resume with: lowtide train --resume_from_checkpoint true" in err
    assert names(tmp_path / "out") == ["checkpoint-3"]


@pytest.mark.parametrize("place", ["prepare", "find_data", "trainer_settings"])
def test_an_interrupt_before_the_first_step_is_one_line(
    place: str, tiny: list[str], lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(f"lowtide.train.run.{place}", interrupted)
    status, _, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert (status, err.strip()) == (130, "lowtide train: interrupted. There is no checkpoint yet: start again.")


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = {
    "run.json": ("lowtide.train.checkpoints._flush", 1, "run.json", []),
    "first checkpoint": ("transformers.Trainer._save", 1, "checkpoint-3", []),
    "second checkpoint": ("transformers.Trainer._save", 2, "checkpoint-6", ["checkpoint-3"]),
    "its mark": ("lowtide.train.checkpoints._flush_all", 2, "checkpoint-6", ["checkpoint-3"]),
    "model": ("transformers.Trainer._save", 3, MODEL, ["checkpoint-3", "checkpoint-6"]),
    "log": ("lowtide.train.monitor.os.write", 4, "log.jsonl", ["checkpoint-3"]),
}


@pytest.fixture
def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let a function's call fail like a write to a full disk."""

    def at(name: str, number: int) -> None:
        owner, _, attribute = name.rpartition(".")
        found = pytest.importorskip(owner.removesuffix(".Trainer").removesuffix(".os"))
        for part in owner.removeprefix(found.__name__).split("."):
            found = getattr(found, part) if part else found
        monkeypatch.setattr(found, attribute, getattr(found, attribute))
        calls_before(found, attribute, number, full)

    return at


@pytest.mark.parametrize("what", FULL)
def test_a_disk_that_takes_no_more_leaves_whole_checkpoints(
    what: str, tiny: list[str], lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_is_full: Any
) -> None:
    function, number, named, left = FULL[what]
    output = tmp_path / "out"
    disk_is_full(function, number + (what == "log"))  # the first line is that of the evaluation before
    err = lowtide.refused(*tiny, "--output", output)
    assert f"could not write {output / named}" in err
    assert "No space left on device" in err
    go_on = f"Resume with: lowtide train --resume_from_checkpoint true --output {output}"
    assert (go_on if left else "There is no checkpoint yet: start again.") in err
    assert names(output) == left
    assert not (output / MODEL).exists()
    monkeypatch.undo()
    again = ["train", "--resume_from_checkpoint", "true"] if left else tiny
    lowtide.done(*again, "--output", output)
    assert names(output) == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_states_is_not_resumed_with_new_ones(
    missing: str, finished: Path, lowtide: Run, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (checkpoint := tmp_path / "run" / "checkpoint-9").joinpath(missing).unlink()
    err = lowtide.refused("train", "--resume_from_checkpoint", checkpoint)
    assert f"expected a complete checkpoint, got {checkpoint}, which has no {missing}. Resume from another" in err


@pytest.mark.parametrize("found", [["run.json.new"], ["run.json", "log.jsonl", "checkpoint-3"], ["tokens.bin"]])
def test_a_run_that_ended_before_its_first_checkpoint_can_begin_again(found: list[str], tmp_path: Path) -> None:
    for name in found:
        (tmp_path / name).write_text("{")
    assert checkpoints.new_output(str(tmp_path), "now") == tmp_path
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentValueError, match="a folder that is new or empty"):
        checkpoints.new_output(str(tmp_path), "now")


@pytest.mark.parametrize("named", [False, True])
def test_a_type_whose_tokenizer_transformers_replaces(
    named: bool, tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    """Qwen2's splits text elsewhere, and pads with the end of text: whose row is trained from the first step on."""
    (tmp_path / "tiny.json").write_text(json.dumps({**SHAPE, "model_type": "qwen2", "tie_word_embeddings": False}))
    numbers = random.Random(0)
    for i in range(400):  # short documents, each with an end
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(numbers.choices(("2023", "2024", "77", "1000"), k=9)))
    if named:
        byte_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
        tiny += ["--tokenizer", str(tmp_path / "tokenizer")]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    lowtide.done(*tiny, "--output", whole)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint-6")
    shutil.rmtree(resumed / MODEL)
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", resumed)
    assert_same_run(resumed, whole)

    tokenizer = AutoTokenizer.from_pretrained(whole / MODEL)
    text = "\n".join(file.read_text() for file in (tmp_path / "text").iterdir())
    known = {*tokenizer(text)["input_ids"], tokenizer.eos_token_id}
    trained = {token for block in Blocks(whole / TOKENS, "train") for token in block["input_ids"].tolist()}
    assert trained <= known, "the saved tokenizer is the one that the model was trained with"
    states = torch.load(whole / "checkpoint-3" / "optimizer.pt", weights_only=True)["state"]
    assert states[0]["exp_avg"][tokenizer.eos_token_id].any()

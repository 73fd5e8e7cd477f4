"""What a user can get wrong: one line that says what to do, status 2, and nothing half written."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowtide.train.resuming import resumed_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from distributed.train_ranks import shared
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.train import checkpoints, train, trainer

Run = Callable[..., tuple[int, str, str]]


def binary(folder: Path) -> list[str]:
    (folder / "b.txt").write_bytes(bytes(range(256)) * 100)
    return ["--data", str(folder / "b.txt")]


def empty(folder: Path) -> list[str]:
    (folder / "e.txt").touch()
    return ["--data", str(folder / "e.txt")]


def empty_folder(folder: Path) -> list[str]:
    (folder / "none").mkdir()
    return ["--data", str(folder / "none")]


def short(folder: Path) -> list[str]:
    (folder / "s.txt").write_text("too short\n")
    return ["--data", str(folder / "s.txt")]


def shorter_than_a_block(folder: Path) -> list[str]:
    (folder / "s.txt").write_text("some words and a few more\n" * 400)
    return ["--data", str(folder / "s.txt"), "--seq-len", "5000"]


def wrong_field(folder: Path) -> list[str]:
    (folder / "d.jsonl").write_text('{"content": "words"}\n' * 2000)
    return ["--data", str(folder / "d.jsonl")]


def broken_json(folder: Path) -> list[str]:
    (folder / "m.json").write_text('{"model_type": "llama", ')
    return ["--model", str(folder / "m.json")]


def config(**settings: object) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "m.json").write_text(json.dumps(settings))
        return ["--model", str(folder / "m.json")]

    return write


def used_output(folder: Path) -> list[str]:
    (folder / "used").mkdir()
    (folder / "used" / "thesis.tex").touch()
    return ["--output", str(folder / "used")]


def output_below_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--output", str(folder / "file" / "run")]


def named_pipe(folder: Path) -> list[str]:
    os.mkfifo(folder / "p.txt")
    return ["--data", str(folder / "p.txt")]


def not_text_after_its_beginning(folder: Path) -> list[str]:
    (folder / "late").mkdir()
    for i in range(3):
        (folder / "late" / f"{i}.txt").write_bytes(b"some plain words\n" * 600 + b"caf\xe9 \xff\n" * 3000)
    return ["--data", str(folder / "late")]


def half_characters(folder: Path) -> list[str]:
    (folder / "d.jsonl").write_text('{"text": "words \\ud800"}\n' * 2000)
    return ["--data", str(folder / "d.jsonl")]


def deep_json(folder: Path) -> list[str]:
    (folder / "d.jsonl").write_text(("[" * 100_000 + "\n") * 2)
    return ["--data", str(folder / "d.jsonl")]


def chat(folder: Path) -> list[str]:
    line = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a " * 20}]}
    (folder / "c.jsonl").write_text((json.dumps(line) + "\n") * 300)
    return ["--data", str(folder / "c.jsonl")]


def template_alone(folder: Path) -> list[str]:
    (folder / "t.jinja").write_text("{{ messages }}")
    return ["--chat-template", str(folder / "t.jinja")]


ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LEARNED = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 512}

CASES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "missing data": (lambda f: ["--data", str(f / "nowhere")], ["data", "nowhere", "No such file"]),
    "binary data": (binary, ["data", "is binary", "Give UTF-8 text"]),
    "empty file": (empty, ["data", "is empty"]),
    "empty folder": (empty_folder, ["data", "has none"]),
    "too little text": (short, ["data", "more text", "--batch-size"]),
    "shorter than a block": (shorter_than_a_block, ["data", "5000 tokens", "--seq-len"]),
    "wrong field": (wrong_field, ["data", "'text'", "--text-field"]),
    "broken json": (broken_json, ["model", "JSON", "line 1"]),
    "no model type": (config(hidden_size=8), ["model", "model_type"]),
    "unknown model type": (config(model_type="lama"), ["model", "lama"]),
    "bad value": (config(model_type="llama", hidden_size="wide"), ["model", "hidden_size"]),
    "no causal model": (config(model_type="clip"), ["model", "m.json"]),
    "impossible shape": (config(model_type="llama", hidden_size=30, num_attention_heads=4), ["model"]),
    "unknown model": (lambda f: ["--model", "meta-llama/Llama-3.2-1B"], ["model", "llama-3.2-1b", "download it first"]),
    "small vocabulary": (config(model_type="llama", vocab_size=256), ["model", "got 256", "--vocab-size"]),
    "no tokenizer": (lambda f: ["--tokenizer", str(f)], ["tokenizer"]),
    "used output": (used_output, ["output", "used", "new or empty"]),
    "unwritable output": (output_below_a_file, ["output", "file/run"]),
    "nothing to resume": (lambda f: ["--resume", "--output", str(f / "none")], ["resume", "leave --resume out"]),
    "no steps": (lambda f: ["--max-steps", "0"], ["max_steps", "at least 1", "got 0"]),
    "negative rate": (lambda f: ["--lr", "-1"], ["lr", "above 0"]),
    "workspace": (lambda f: ["--workspace-mib", "0"], ["workspace_mib", "above 0"]),
    "not a number": (lambda f: ["--max-steps", "many"], ["--max-steps", "many", "--help"]),
    "unknown option": (lambda f: ["--frobnicate"], ["--frobnicate", "lowtide train --help"]),
    "unknown trainer argument": (lambda f: ["--trainer-args", "colour=blue"], ["trainer_args", "colour=blue"]),
    "own trainer argument": (lambda f: ["--trainer-args", "max_steps=3"], ["trainer_args", "max_steps", "--help"]),
    "bad trainer argument": (lambda f: ["--trainer-args", "optim=none"], ["trainer_args", "adafactor"]),
    "json alone": (lambda f: ["--json", str(f / "x.json")], ["json", "--compare"]),
    "json nowhere": (lambda f: ["--compare", "--json", str(f / "no" / "x.json")], ["json", "x.json"]),
    "named pipe": (named_pipe, ["data", "not a regular file"]),
    "not text after its beginning": (not_text_after_its_beginning, ["data", "UTF-8", "from line "]),
    "half characters": (half_characters, ["data", "line 1 (byte 0)", "mend the line"]),
    "deep json": (deep_json, ["data", "mend the line"]),
    "encoder": (config(model_type="bert", vocab_size=512, **ENCODER), ["model", "causal", "is_decoder"]),
    "learned positions": (config(model_type="gpt2", **LEARNED), ["seq_len", "at most 16", "got 32"]),
    "label smoothing": (
        lambda f: ["--trainer-args", "label_smoothing_factor=0.1"],
        ["label_smoothing_factor", "logits"],
    ),
    "cache": (lambda f: ["--trainer-args", "use_cache=true"], ["use_cache", "see each other"]),
    "text for a number": (lambda f: ["--trainer-args", "weight_decay=abc"], ["trainer_args", "weight_decay", "'abc'"]),
    "huge vocabulary": (lambda f: ["--vocab-size", "99999999999"], ["vocab_size", "at most"]),
    "empty name": (lambda f: ["--model", ""], ["model", "not empty"]),
    "abbreviation": (lambda f: ["--max-step", "3"], ["--max-step", "--help"]),
    "fp16 on a CPU": (lambda f: ["--dtype", "float16"], ["dtype: expected float16 on a GPU", "bfloat16"]),
    "policy": (lambda f: ["--policy", "everything"], ["policy", "'everything'", "12 x input/1"]),
    "policy of other layers": (lambda f: ["--policy", "3 x all"], ["policy", "2 layers", "got 3"]),
    "policy without a fused MLP": (lambda f: ["--policy", "all/0", "--no-patch"], ["checkpoint_level"]),
    "budget and policy": (lambda f: ["--policy", "all", "--memory-budget", "1GiB"], ["--policy", "one of"]),
    "budget without patch": (lambda f: ["--memory-budget", "1GiB", "--no-patch"], ["memory_budget", "--no-patch"]),
    "budget": (lambda f: ["--memory-budget", "much"], ["memory_budget", "40GiB", "'much'"]),
    "budget for an unknown optimizer": (
        lambda f: ["--memory-budget", "1GiB", "--trainer-args", "optim=adafactor"],
        ["memory_budget", "adafactor", "--policy"],
    ),
    "early stop": (lambda f: ["--early-stop", "2"], ["early_stop", "--eval-every"]),
    "alpha alone": (lambda f: ["--lora-alpha", "2"], ["lora_alpha", "--lora-rank"]),
    "unknown targets": (lambda f: ["--lora-rank", "2", "--lora-targets", "qproj"], ["lora_targets", "q_proj"]),
    "weights and products": (lambda f: ["--weights", "bfloat16", "--dtype", "float32"], ["dtype", "'float32'"]),
    "flash on a CPU": (lambda f: ["--attention", "flash_attention_2"], ["attention", "GPU", "sdpa"]),
    "flex on a CPU": (lambda f: ["--attention", "flex_attention"], ["attention", "GPU", "sdpa"]),
    "template for text": (template_alone, ["chat_template", "conversations", "got text"]),
    "chat without a template": (chat, ["chat_template", "--chat-template"]),
    "chat joined": (lambda f: [*chat(f), "--packing", "joined"], ["packing", "separate", "joined"]),
    "chat and text": (lambda f: [*chat(f), str(f / "text")], ["data", "both"]),
    "scheduler": (
        lambda f: ["--trainer-args", 'lr_scheduler_kwargs={"colour": 1}'],
        ["trainer_args", "colour", "Leave them out"],
    ),
    "optimizer's arguments": (lambda f: ["--trainer-args", "adam_beta1=7"], ["trainer_args", "adam_beta1=7", "beta"]),
    "optimizer of layers": (lambda f: ["--trainer-args", "optim=galore_adamw"], ["trainer_args", "galore"]),
    "compare and resume": (lambda f: ["--compare", "--resume"], ["compare", "--resume"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_status_2(case: str, tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    given, words = CASES[case]
    output = tmp_path / "out"
    arguments = given(tmp_path)
    if not {"--output", "--compare", "--resume"} & set(arguments):
        arguments += ["--output", str(output)]
    status, _, err = lowtide(*tiny, *arguments)
    assert status == 2, err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("lowtide train: ")
    assert not [word for word in words if word not in err], err
    left = {path.name for path in output.rglob("*")}
    assert left <= {"run.json"} if "Leave them out" in err else not output.exists()


def test_a_run_is_not_overwritten(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    assert lowtide(*tiny, "--output", tmp_path / "out")[0] == 0
    status, _, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert status == 2
    assert "holds a run" in err
    assert "--resume" in err


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    assert lowtide(*tiny, "--output", tmp_path / "out")[0] == 0
    for step in (3, 6):
        (tmp_path / "out" / f"checkpoint-{step}").rename(tmp_path / f"away-{step}")
    status, _, err = lowtide("train", "--resume", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert "has none yet" in err


def test_resume_refuses_other_data_and_other_settings(
    tmp_path: Path, text: Path, tiny: list[str], lowtide: Run
) -> None:
    output = tmp_path / "out"
    assert lowtide(*tiny, "--output", output)[0] == 0
    resume = ["train", "--resume", "--output", output, "--max-steps", "9"]
    for option, value in {"--batch-size": "3", "--seed": "1", "--seq-len": "64"}.items():
        status, _, err = lowtide(*resume, option, value)
        assert (status, err.count("\n")) == (2, 1)
        assert "as the run began" in err
    (text / "0.txt").write_text("other words\n" * 2000)
    status, _, err = lowtide(*resume)
    assert (status, err.count("\n")) == (2, 1)
    assert "the files the run began with" in err


FULL_DISK = """
import contextlib, io, resource, sys, warnings
from lowtide.cli import main
warnings.simplefilter("error")
said = io.StringIO()  # standard error is a file too
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
with contextlib.redirect_stderr(said):
    status = main(sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sys.stderr.write(said.getvalue())
sys.exit(status)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit on file sizes here")
@pytest.mark.parametrize("limit", [100, 60_000, 200_000])  # stops run.json, the weights, the optimizer
def test_a_disk_that_takes_no_more(tmp_path: Path, tiny: list[str], limit: int) -> None:
    output = tmp_path / "out"
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    ended = shared()(1, limit, *tiny, "--output", output, script=script)
    assert ended.statuses == [2], ended
    assert ended.err[0].count("\n") == 1, ended
    assert "could not write" in ended.err[0]
    left = {path.name for path in output.rglob("*")} - {"run.json", ".incoming", "log.jsonl"}
    assert not left, "nothing half written"


def test_a_disk_that_fills_up_later_leaves_the_last_whole_checkpoint(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    publish, published = checkpoints.publish, []

    def full(staged: Path, final: Path) -> None:
        if published:
            raise OSError(errno.ENOSPC, "No space left on device")
        published.append(final)
        publish(staged, final)

    monkeypatch.setattr(checkpoints, "publish", full)
    status, _, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert "No space left on device" in err
    assert "checkpoint-3 is whole" in err
    monkeypatch.undo()
    assert lowtide("train", "--resume", "--output", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    status, _, err = lowtide(*tiny, "--lr", "1e30", "--warmup", "0", "--max-steps", "12", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1), err
    assert "finite" in err
    assert "--lr" in err
    assert not (tmp_path / "out" / "model").exists()


def test_a_run_that_failed_before_its_first_checkpoint_can_begin_again(
    tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    out = tmp_path / "out"
    lowtide(*tiny, "--lr", "1e30", "--warmup", "0", "--save-every", "50", "--max-steps", "60", "--output", out)
    assert lowtide(*tiny, "--output", out)[0] == 0


@pytest.mark.parametrize("found", [["run.json.new"], ["run.json", "run.json.new", "log.jsonl"]])
def test_a_run_killed_while_it_wrote_its_first_file_can_begin_again(found: list[str], tmp_path: Path) -> None:
    for name in found:
        (tmp_path / name).write_text("{")
    assert checkpoints.new_output(str(tmp_path), "now") == tmp_path
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentValueError, match="new or empty"):
        checkpoints.new_output(str(tmp_path), "now")


def test_pretrained_weights_that_lack_some_are_refused(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    assert lowtide(*tiny, "--output", tmp_path / "first")[0] == 0
    file = tmp_path / "first" / "model" / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if "norm" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    given = [*tiny, "--model", tmp_path / "first" / "model", "--output", tmp_path / "second"]
    status, _, err = lowtide(*given)
    assert (status, err.count("\n")) == (2, 1), err
    assert "model.norm.weight" in err or "layernorm" in err
    assert not (tmp_path / "second").exists()


def test_weights_are_float32_whatever_the_config_says(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    shape = json.loads((tmp_path / "tiny.json").read_text())
    (tmp_path / "tiny.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}))
    assert lowtide(*tiny, "--output", tmp_path / "out")[0] == 0
    saved = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", None),
        ("optimizer.pt", None),
        ("scheduler.pt", b"garbage" * 40),
        ("trainer_state.json", None),
        ("rng_state.pth", b"garbage" * 40),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    name: str, content: bytes | None, finished: Path, tmp_path: Path, lowtide: Run
) -> None:
    """Its second half is missing, or something else is in its place."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    file = run / "checkpoint-12" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    status, _, err = lowtide("train", "--resume", "--output", run, "--max-steps", 14)
    assert (status, err.count("\n")) == (2, 1), err
    assert "checkpoint-12" in err
    if name != "tokenizer.json":
        assert "Remove it, to take an older one" in err
    if name == "optimizer.pt":
        shutil.rmtree(run / "checkpoint-12")
        assert lowtide("train", "--resume", "--output", run, "--max-steps", 13)[0] == 0


@pytest.mark.parametrize("given", ["adam_beta1=1.5", "adam_epsilon=-1", 'lr_scheduler_kwargs={"colour": 1}'])
def test_a_resume_with_a_bad_argument_blames_no_checkpoint(
    given: str, finished: Path, tmp_path: Path, lowtide: Run
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = [(run / name).read_text() for name in ("run.json", "log.jsonl")]
    status, _, err = lowtide("train", "--resume", "--output", run, "--max-steps", 13, "--trainer-args", given)
    assert (status, err.count("\n")) == (2, 1), err
    assert "trainer_args" in err
    assert given in err
    assert "Remove it" not in err
    assert [(run / name).read_text() for name in ("run.json", "log.jsonl")] == before
    assert lowtide("train", "--resume", "--output", run, "--max-steps", 13)[0] == 0


NOT_OF_THE_DISK = {
    "bug": (RuntimeError("shapes differ"), RuntimeError),
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), MemoryError),
    "own": (UnsupportedError("not here"), UnsupportedError),
}


@pytest.mark.parametrize("part", ["write_positions", "save_whole_model"])
@pytest.mark.parametrize("kind", NOT_OF_THE_DISK)
def test_an_error_while_saving_that_is_not_of_the_disk_stays_what_it_is(
    kind: str, part: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, expected = NOT_OF_THE_DISK[kind]

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if part == "write_positions":
        monkeypatch.setattr(trainer, part, fail)
    else:
        monkeypatch.setattr(trainer.LowtideTrainer, "save_model", lambda self, folder, _internal_call: fail())
        monkeypatch.setattr(trainer.LowtideTrainer, "_save_checkpoint", lambda self, model, trial: None)
    with pytest.raises(expected) as raised:
        train(resumed_config({"resume": True, "output": str(run), "max_steps": 13, "progress": False}))
    assert not isinstance(raised.value, checkpoints.SaveError)
    assert not list(run.rglob("checkpoint-13"))


def test_which_errors_are_of_files(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    for error in (full, SafetensorError("I/O error"), CheckpointException("", {1: (full, None)})):  # type: ignore[dict-item]
        assert checkpoints.is_not_written(error)
    with pytest.raises(RuntimeError) as raised:
        torch.save([torch.zeros(3)], tmp_path / "none" / "file")
    assert checkpoints.is_not_written(raised.value)
    assert not checkpoints.is_not_written(CheckpointException("", {1: (ValueError("x"), None)}))  # type: ignore[dict-item]

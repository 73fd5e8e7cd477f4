"""The command as a shell sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowtide
from distributed.train_ranks import shared
from lowtide.cli import EXTRAS, _parser, main
from lowtide.train.arguments import RunArguments
from lowtide.train.shapes import SHAPES
from pages.blocks import options_of_train

ROOT = Path(__file__).parents[2]
SUBCOMMANDS = ("train", "plan", "profile", "bench")
SCRIPT = Path(sys.executable).parent / "lowtide"
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def command(*arguments: object) -> list[str]:
    """The installed script, with warnings as errors."""
    return [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny products gain nothing from more
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text("the tide came in and went out\n" * 2000)
    small = ["--max_length", 32, "--per_device_train_batch_size", 2, "--held-out", 2]
    where = ["--model_name_or_path", tmp_path / "tiny.json", "--dataset_name", tmp_path / "text.txt"]
    return ["train", *where, *small]


def test_help_has_every_setting_its_default_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for field in (field for field in dataclasses.fields(RunArguments) if "help" in field.metadata):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in out if field.default is True else f"--{flag}" in out
    assert "--resume_from_checkpoint auto" in out
    assert "--no-patch trains the stock model" in out  # what the option does, not what its field means
    assert all(name in out for name in SHAPES)


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lowtide", "--version"])
    monkeypatch.delitem(sys.modules, "lowtide.__main__", raising=False)  # of a test that imports every module
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lowtide", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


@pytest.mark.parametrize(("words", "named"), [([], SUBCOMMANDS), (["bench"], ("head", "step", "mlp"))])
def test_no_command_shows_what_there_is(
    words: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    for name in named:
        assert re.search(rf"^    {name} +\w", err, re.MULTILINE), name


def test_the_first_help_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    commands = re.findall(r"^  lowtide (train .*|plan .*)$", out, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert callable(_parser().parse_args(shlex.split(command)).main)


PLAN = ["plan", "--model", "x", "--seq-len", "4"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PLAN, "--budgets=4"], "Did you mean --budget?"),
        ([*PLAN, "--xyzzy"], "unknown arguments: --xyzzy (see"),
        ([*PLAN, "."], "unknown arguments: . (see"),
        (["tarin"], "Did you mean train?"),
        (["bench", "haed"], "Did you mean head?"),
        (["plan", "--optimizer", "adamv"], "Did you mean adamw?"),
        ([*PLAN, "--epochs", "3"], "unknown arguments: --epochs 3 (see"),
    ],
)
def test_an_option_that_is_not_known_names_its_nearest(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--held-out", "0"], "--held-out: expected a whole number"),
        (["plan", "--model", "llama-3-8b", "--seq-len", "64", "--budget", "-4GiB"], "budget: expected a size"),
        (["bench", "head", "--shape", "-5,64,100"], "shape: expected"),
    ],
)
def test_a_negative_size_is_read_as_one(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And not as an option, whose error would not say what is wrong."""
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_an_error_begins_with_the_command_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "head", "--tokens", "0"]) == 2
    assert capsys.readouterr().err.startswith("lowtide bench head: tokens: expected")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_examples_of_a_help_are_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in lines that end in a backslash where it goes on, none with a pretrained model at the small run's rate."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    examples = examples.partition("\n\n")[0]
    commands = re.findall(r"(?m)^  (?! )((?:.*\\\n)*.*)$", examples)
    assert len(commands) >= 3
    for command in commands:
        assert not re.search(r"\S {2,}\S", command), command
        words = shlex.split(command.replace("\\\n", " "))
        if "WHAT" in words:
            continue
        arguments = words[words.index("lowtide") + 1 :]
        _, unknown = _parser().parse_known_args(arguments)
        if name == "train":
            flags = {word.partition("=")[0] for word in unknown if word.startswith("--")}
            assert flags <= options_of_train(), command
        else:
            assert not unknown, command
        if name == "train" and "--model_name_or_path ./" in command and "--use_peft" not in command:
            assert float(arguments[arguments.index("--learning_rate") + 1]) <= 1e-5, command


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("rich.console", ["train"]),
        ("transformers", ["profile"]),
        ("transformers", ["plan", "--model", "llama-3.2-1b", "--seq-len", "64", "--gpu", "h100"]),
        ("transformers", ["bench", "step", "--device", "cpu"]),
    ],
)
def test_a_package_that_is_missing_is_one_line(
    module: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After `pip install .`, which installs torch alone."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    typed = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    assert re.match(rf"lowtide {typed}: (model: )?expected {module.partition('.')[0]}", err)
    assert f"pip install 'lowtide[{'hf' if arguments[0] == 'plan' else 'train'}]'" in err


def test_the_packages_whose_lack_is_explained_are_those_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras["train"] += extras["hf"]
    listed = {(name, re.split(r"[>=<]", line)[0]) for name in ("train", "trl", "peft") for line in extras[name]}
    modules = {"pyyaml": "yaml"}
    named = {(modules.get(package, package), name) for name, package in listed if not package.startswith("lowtide")}
    assert named | {("datasets", "trl"), ("huggingface_hub", "train")} == {
        (name, extra.split(",")[-1]) for name, extra in EXTRAS.items()
    }


def test_another_package_that_is_missing_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lowtide.memory.plan_memory")
    monkeypatch.setitem(sys.modules, "lowtide.plan", None)
    monkeypatch.setitem(sys.modules, "lowtide.memory", None)
    with pytest.raises(ModuleNotFoundError):
        main(["plan", "--model", "llama-3-8b", "--seq-len", "64"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(("more", "says"), [([], True), (["--shape", "8,8,8"], False), (["--device", "cpu"], False)])
def test_a_benchmark_without_a_gpu_names_a_small_one(
    more: list[str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.bench.harness.Benchmark.run", lambda *_: SimpleNamespace(status=0))
    assert main(["bench", "head", *more]) == 0
    err = capsys.readouterr().err
    assert ("A small run: lowtide bench head --shape 1024,256,8192 --skip compile --device cpu\n" in err) == says


def test_help_and_checks_import_nothing_heavy() -> None:
    """Checks are of what is wrong with arguments, a path that is not there among them."""
    code = """
import contextlib, io, sys
from lowtide.cli import main
plan = sys.argv[1:]
for words in (
    ["--help"], ["--version"], ["train", "--help"], ["plan", "--help"],
    ["plan", "--model", "/nobody", "--seq-len", "1"],
    [*plan, "--budget", "x"], [*plan, "--gpu", "x"],
    ["profile", "--help"], ["profile", "--impl", "stock:some"], ["profile", "--model", "/nobody"],
    ["profile", "--impl", "nobody"], ["profile", "--device", "cpu", "--memory-limit", "1"],
):
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        main(words)
    heavy = {"torch", "transformers", "tokenizers", "accelerate", "triton"} & set(sys.modules)
    assert said.getvalue() and not heavy, (words, heavy)
"""
    plan = ["plan", "--model", "llama-3.2-1b", "--seq-len", "4096", "--gpu", "h100"]
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code, *plan], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_the_script_trains_without_a_warning(tmp_path: Path, tiny: list[object]) -> None:
    run = command(*tiny, "--max_steps", 3, "--output_dir", tmp_path / "out")
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("loading torch and transformers ...\n")
    assert "held out " in ended.stdout
    assert (tmp_path / "out" / "config.json").exists()


INTERRUPTIBLE = """
import signal, sys
from lowtide.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, as do theirs
sys.exit(main(sys.argv[1:]))
"""


def test_interrupt_says_how_to_go_on(tmp_path: Path, tiny: list[object]) -> None:
    output, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(INTERRUPTIBLE)
    endless = ["--max_steps", 100_000, "--save_steps", 5, "--output_dir", output]
    shared().start(1, *tiny, *endless, script=script, seconds=600)
    until = time.monotonic() + 600
    while time.monotonic() < until and not (output / "checkpoint-5").exists():
        time.sleep(0.05)
    for pid in shared().pids():
        os.kill(pid, signal.SIGINT)
    ended = shared().end()
    assert ended.statuses == [130], ended
    (err,) = ended.err
    assert err.strip().count("\n") == 0, err
    assert "Resume with: lowtide train --model_name_or_path" in err
    assert f"--output_dir {output} " in err
    assert err.endswith("--resume_from_checkpoint auto\n")

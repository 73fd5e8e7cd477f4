"""The command as a shell sees it."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.cli import EXTRAS, _parser, main
from pages.blocks import options_of_train
from promises import promise

pytestmark = promise("commands")
ROOT = Path(__file__).parents[2]
SUBCOMMANDS = ("train", "plan", "profile", "bench")


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


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_the_examples_of_a_help_are_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in lines that end in a backslash where it goes on, none with a pretrained model at the small run's rate."""
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    _, _, examples = capsys.readouterr().out.partition("examples:\n" if name else "to begin with:\n")
    commands = re.findall(r"(?m)^  (?! )((?:.*\\\n)*.*)$", examples.partition("\n\n")[0])
    assert len(commands) >= 3
    for command in commands:
        assert not re.search(r"\S {2,}\S", command), command
        words = shlex.split(command.replace("\\\n", " "))
        if {"WHAT", "COMMAND"}.isdisjoint(words):
            _, unknown = _parser().parse_known_args(words[words.index("lowtide") + 1 :])
            flags = {word.partition("=")[0] for word in unknown if word.startswith("--")}
            assert flags <= (options_of_train() if "train" in words else set()), command


PLAN = ["plan", "--model", "x", "--seq-len", "4"]


@promise("errors")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([*PLAN, "--budgets=4"], "Did you mean --budget?"),
        ([*PLAN, "--xyzzy"], "unknown arguments: --xyzzy (see"),
        ([*PLAN, "."], "run: expected a config in YAML or JSON, got ."),
        (["tarin"], "Did you mean train?"),
        (["bench", "haed"], "Did you mean head?"),
        (["profile", "--optimizer", "adamv"], "Did you mean adamw?"),
        (["bench", "step", "--tokens", "many"], "lowtide bench step: argument --tokens: invalid int value: 'many'"),
        (["train", "--held-out", "0"], "--held-out: expected a whole number"),
        (["plan", "--model", "llama-3-8b", "--seq-len", "64", "--budget", "-4GiB"], "--budget: expected a size"),
        (["bench", "head", "--shape", "-5,64,100"], "lowtide bench head: --shape: expected"),
    ],
)
def test_wrong_arguments_are_one_line_that_names_the_nearest_option(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A negative size is read as one, and not as an option, whose error would not say what is wrong."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(str(ended.code))
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1)
    assert error in err


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("transformers", ["profile"]),
        ("transformers", ["plan", "--model", "llama-3.2-1b", "--seq-len", "64", "--gpu", "h100"]),
        ("transformers", ["bench", "step", "--device", "cpu"]),
    ],
)
def test_a_package_that_is_missing_is_one_line(
    module: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After `pip install .`, which installs torch alone."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    typed = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    assert re.match(rf"lowtide {typed}: expected {module}", err)
    assert "pip install 'lowtide[train]'" in err


def test_the_packages_whose_lack_is_explained_are_those_of_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras["train"] += extras["hf"]
    listed = {(name, re.split(r"[>=<]", line)[0]) for name in ("train", "trl", "peft") for line in extras[name]}
    modules = {"pyyaml": "yaml"}
    named = {(modules.get(package, package), name) for name, package in listed if not package.startswith("lowtide")}
    assert named | {("datasets", "trl"), ("huggingface_hub", "train")} == {
        (name, extra.split(",")[-1]) for name, extra in EXTRAS.items()
    }
    monkeypatch.setitem(sys.modules, "lowtide.bench.head", None)  # which is no package: a defect
    with pytest.raises(ModuleNotFoundError):
        main(["bench", "head", "--device", "cpu"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(("more", "named"), [([], True), (["--shape", "8,8,8"], False), (["--device", "cpu"], False)])
def test_a_benchmark_without_a_gpu_names_a_small_one(
    more: list[str], named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.bench.head.measure", lambda *_: 0)
    assert main(["bench", "head", *more]) == 0
    err = capsys.readouterr().err
    assert ("A small run: lowtide bench head --shape 1024,256,8192 --device cpu\n" in err) == named


def test_help_and_checks_import_nothing_heavy() -> None:
    """Checks are of what is wrong with arguments, a path that is not there among them."""
    code = """
import contextlib, io, sys
from lowtide.cli import main
plan = sys.argv[1:]
for words in (
    ["--help"], ["train", "--help"], ["plan", "--help"], ["bench", "--help"], ["bench", "step", "--help"],
    ["plan", "--model", "/nobody", "--seq-len", "1"], [*plan, "--budget", "x"], [*plan, "--gpu", "x"],
    ["profile", "--help"], ["profile", "--impl", "stock:some"], ["profile", "--model", "/nobody"],
):
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        main(words)
    heavy = {"torch", "transformers", "tokenizers", "accelerate", "triton"} & set(sys.modules)
    assert text.getvalue() and not heavy, (words, heavy)
"""
    plan = ["plan", "--model", "llama-3.2-1b", "--seq-len", "4096", "--gpu", "h100"]
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code, *plan], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")

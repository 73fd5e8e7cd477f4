"""The benchmarks are one command: the same options, the same words for the result, and examples that run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import pytest

from lowtide.bench.apply import FUNCTIONS
from lowtide.bench.config import TuneConfig
from lowtide.bench.mlp_peers import GROUPS, MLP_PEERS, MLP_SHAPES
from lowtide.bench.peers import PEERS
from lowtide.bench.shapes import APPLY_SHAPES, SHAPES
from lowtide.cli import _parser, bench

KINDS = ("head", "sweep", "stats", "divergence", "apply", "layers", "step", "longest", "mlp", "models", "tune")
UNTIMED = ("models", "tune")  # those that compare nothing in rounds, and have options of their own
NAMES = {
    "head": (*SHAPES, *PEERS), "sweep": (*SHAPES, *PEERS), "apply": (*APPLY_SHAPES, *FUNCTIONS),
    "mlp": (*MLP_SHAPES, *GROUPS, *MLP_PEERS),
}  # fmt: skip
COMMON = ("warm", "reps", "dtype", "device", "seed", "output")


def help_of(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(["bench", kind, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def parsed(command: str) -> Any:
    """Return the settings that a command line means, as its benchmark gets them."""
    arguments, unknown = _parser().parse_known_args(shlex.split(command)[1:])
    assert not unknown, unknown
    return arguments.config(**bench._given(arguments, arguments.config))


def test_all_kinds_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["bench", "--help"])
    listed = re.findall(r"^    ([a-z]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert tuple(listed) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_settings_that_can_be(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, examples = help_of(kind, capsys).partition("examples:\n")
    commands = [line.strip() for line in examples.splitlines() if line.strip().startswith("lowtide bench")]
    assert len(commands) >= 3
    for command in commands:
        assert command.startswith(f"lowtide bench {kind}"), command
        config = parsed(command)
        if kind != "tune":  # and a config's own command means the same config
            assert parsed(config.command()) == dataclasses.replace(config, output=".")
    assert kind in UNTIMED or "--device cpu" in examples


@pytest.mark.parametrize("kind", KINDS)
def test_help_has_every_setting_and_every_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(help_of(kind, capsys).split())
    for field in dataclasses.fields(parsed(f"lowtide bench {kind}")):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in out if field.default is True else f"--{flag}" in out
    assert all(name in out for name in NAMES.get(kind, ()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNTIMED])
def test_what_all_have_in_common(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = type(parsed(f"lowtide bench {kind}"))
    assert config is not TuneConfig
    names = [field.name for field in sorted(dataclasses.fields(config), key=lambda f: f.metadata["last"])]
    assert set(COMMON) == set(names[-len(COMMON) :])
    text = " ".join(help_of(kind, capsys).split())
    assert f"The result is DIR/<date>-{kind}-" in text
    assert "Exit status 1 where" in text

"""What the settings of all benchmarks have in common: how a field becomes an option, and a run the command it was."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lowtide.errors import ArgumentValueError, message

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]


def setting(default: Any, help: str, *, metavar: str | None = None, last: bool = False) -> Any:
    """Return a field that `lowtide.cli.parser.add_options` makes an option of; ``last``: listed after the others."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "last": last})


class Settings:
    """A dataclass of settings that checks itself."""

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a result file tells: all but where it was to lie."""
        return {name: value for name, value in vars(self).items() if name != "output"}

    def _require_at_least(self, name: str, least: int) -> None:
        self._require(name, getattr(self, name) >= least, f"a whole number of at least {least}")

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            got = getattr(self, name)
            raise ArgumentValueError(message(name, expected, " ".join(got) if isinstance(got, tuple) else repr(got)))


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What all benchmarks have that measure in rounds and write a result: the last of their options."""

    warm: int = setting(2, "rounds that do not count", last=True)
    reps: int = setting(6, "rounds that count; every candidate takes turns with the limit", last=True)
    dtype: Dtype = setting("auto", "of all inputs; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    device: Device = setting("auto", "where; auto: a GPU if there is one", last=True)  # noqa: RUF009
    seed: int = setting(0, "of the random inputs", last=True)
    output: str = setting(".", "folder for the result (json)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        for name, least in (("warm", 0), ("reps", 1), ("seed", 0)):
            self._require_at_least(name, least)
        self._require("seed", self.seed < 2**32 - 1, "a whole number below 2**32 - 1")
        self._require("dtype", self.dtype in get_args(Dtype), " or ".join(get_args(Dtype)))
        self._require("device", self.device in get_args(Device), " or ".join(get_args(Device)))
        self._require("output", self.output != "", "a name that is not empty")


def command_of(benchmark: str, config: Any) -> str:
    """Return the command that asks for the same: the settings that differ from their defaults."""
    return shlex.join(["lowtide", "bench", benchmark, *options_of(config, but=("output",))])


def options_of(config: Any, *, but: Sequence[str]) -> list[str]:
    """Return a dataclass's settings that differ from their defaults as options, all ``but`` these."""
    words: list[str] = []
    for setting in sorted(dataclasses.fields(config), key=lambda setting: setting.metadata["last"]):
        value, flag = getattr(config, setting.name), "--" + setting.name.replace("_", "-")
        if value == setting.default or setting.name in but:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def number(name: str, text: str, kind: type) -> Any:
    """Return a setting's text as an int or a float.

    Raises:
        ArgumentValueError: it is none.
    """
    try:
        return kind(text)
    except ValueError:
        raise ArgumentValueError(message(name, "numbers", repr(text))) from None

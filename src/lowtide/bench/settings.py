"""What the settings of all benchmarks have in common: how a field becomes an option, and a run the command it was."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from lowtide.errors import ArgumentValueError, message

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Sdpa = Literal["auto", "flash", "cudnn", "efficient", "math"]
ALL = "all"


def setting(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    last: bool = False,
    least: int | None = None,
    known: Iterable[str] = (),
) -> Any:
    """Return a field that `lowtide.cli.parser.add_options` makes an option of.

    Args:
        default: its default.
        help: its meaning; ``{known}`` stands for the names that are known.
        metavar: what stands for its value in the help.
        last: listed after the others.
        least: of a whole number.
        known: the names that it can have; none: any.
    """
    known = tuple(known)
    about = {"help": help.replace("{known}", ", ".join(known)), "metavar": metavar, "last": last}
    return field(default=default, metadata={**about, "least": least, "known": known})


class Settings:
    """A dataclass of settings that checks itself: whole numbers, names and choices as their fields say.

    Attributes:
        benchmark: the name of the subcommand.
    """

    benchmark: ClassVar[str]

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = each.name, getattr(self, each.name)
            least, known = each.metadata["least"], each.metadata["known"]
            if least is not None and value is not None:
                self._require(name, value >= least, f"a whole number of at least {least}")
            if known:
                self._require(name, set(value) <= set(known), f"names out of {', '.join(known)}")
            if name == "output":
                self._require(name, value != "", "a name that is not empty")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                self._require(name, getattr(self, name) in get_args(kind), " or ".join(get_args(kind)))

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a dict that has been JSON, in which tuples are lists."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a result file has: all but its folder."""
        return {name: value for name, value in vars(self).items() if name != "output"}

    def command(self) -> str:
        """Return the command that asks for the same: the settings that differ from their defaults."""
        return shlex.join(["lowtide", "bench", self.benchmark, *options_of(self, but=("output",))])

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            got = getattr(self, name)
            raise ArgumentValueError(message(name, expected, " ".join(got) if isinstance(got, tuple) else repr(got)))

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        self._require(name, value is None or 0 < value < math.inf, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(Settings):
    """What scripts have that measure beside the subcommands: ``python benchmarks/NAME.py``."""

    device: ClassVar[str] = "auto"
    dtype: ClassVar[str] = "auto"
    output: str = setting(".", "folder for the result", metavar="DIR", last=True)

    def command(self) -> str:
        """Return the command that asks for the same."""
        return shlex.join(["python", f"benchmarks/{self.benchmark}.py", *options_of(self, but=("output",))])


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What all benchmarks have that measure in rounds and write a result: the last of their options."""

    warm: int = setting(2, "rounds that do not count", last=True, least=0)
    reps: int = setting(6, "rounds that count; every candidate takes turns with the limit", last=True, least=1)
    dtype: Dtype = setting("auto", "of all inputs; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    device: Device = setting("auto", "where; auto: a GPU if there is one", last=True)  # noqa: RUF009
    seed: int = setting(0, "of the random inputs", last=True, least=0)
    output: str = setting(".", "folder for the result (json)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("seed", self.seed < 2**32 - 1, "a whole number below 2**32 - 1")


class StepSettings(Settings):
    """What benchmarks have that run training steps: attention's kernel, where, and the seed of the tokens."""

    sdpa: Sdpa
    device: Device
    seed: int


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(RunSettings):
    """What benchmarks have that measure shapes.

    Attributes:
        named_shapes: those that have a name.
        usual_shape: what is measured where none is asked for.
        parse: reads one.
    """

    named_shapes: ClassVar[Mapping[str, Any]]
    usual_shape: ClassVar[str]
    parse: ClassVar[Any]

    shape: tuple[str, ...] = setting((), "named shapes, numbers, or all", metavar="SHAPE")

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.shapes

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes, each once."""
        if ALL in self.shape:
            return tuple(self.named_shapes.values())
        return tuple(dict.fromkeys(type(self).parse(text) for text in self.shape or (self.usual_shape,)))


class PeerSettings(Settings):
    """What benchmarks have that measure peers by name, with the fields ``only`` and ``skip``.

    Attributes:
        known_peers: all, in the table's order.
    """

    known_peers: ClassVar[Mapping[str, Any]]
    usual_peers: ClassVar[Sequence[str]] = ()  # where none are asked for; empty: all
    only: tuple[str, ...]
    skip: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("skip", bool(self.peers), "at least one peer that is left")

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        asked = self.only or self.usual_peers or tuple(self.known_peers)
        return tuple(name for name in self.known_peers if name in asked and name not in self.skip)


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

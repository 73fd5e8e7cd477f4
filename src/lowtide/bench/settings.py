"""What the settings of all benchmarks share: a field becomes an option, and a run the command that repeats it.

Nothing here or in the files of settings imports torch: ``--help`` and the checks of arguments need none.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from lowtide.bench.shapes import Choice
from lowtide.errors import ArgumentValueError, message
from lowtide.train.shapes import SHAPES, config_file

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Precision = Literal["highest", "high", "medium"]
Device = Literal["auto", "cpu", "cuda"]
Sdpa = Literal["auto", "flash", "cudnn", "efficient", "math"]


def setting(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    last: bool = False,
    least: int | None = None,
    known: str | None = None,
) -> Any:
    """Return a field that `lowtide.cli.parser.add_options` makes an option of.

    Args:
        default: its default.
        help: its meaning; ``{key}`` stands for the names that the class's ``known`` has under that key.
        metavar: what stands for its value in the help.
        last: listed after the others.
        least: of a whole number.
        known: the key of the names that its values are out of; None: any.
    """
    about = {"help": help, "metavar": metavar, "last": last, "least": least, "known": known}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that check themselves: whole numbers, names and choices as their fields say.

    The docstring of a class of settings is the description in ``--help``.

    Attributes:
        benchmark: the name of the subcommand.
        summary: its line in ``lowtide bench --help``.
        examples: arguments, and what they do.
        known: names that options can have, by the key that stands for them in the help.
        exit_1: when the exit status is 1.
        program: the command; ``{benchmark}`` stands for that name.
        stem: of the result file's name, after the date; ``{dtype}`` stands for the dtype.
        folders: options that say where files are written: in no result, and in no command that repeats a run.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[Mapping[str, str]]
    known: ClassVar[Mapping[str, Iterable[str]]] = {}
    exit_1: ClassVar[str] = "lowtide itself failed"
    program: ClassVar[str] = "lowtide bench {benchmark}"
    stem: ClassVar[str] = "{benchmark}"
    folders: ClassVar[Sequence[str]] = ("output",)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            name, value, about = each.name, getattr(self, each.name), each.metadata
            if about["least"] is not None and value is not None:
                self._require(name, value >= about["least"], f"a whole number of at least {about['least']}")
            if about["known"]:
                known = tuple(self.known[about["known"]])
                self._require(name, set(value) <= set(known), f"names out of {', '.join(known)}")
            if get_origin(hints[name]) is Literal:
                choices = get_args(hints[name])
                self._require(name, value in choices, " or ".join(choices))
            if name == "output":
                self._require(name, value != "", "a name that is not empty")
            if name == "seed":  # NumPy's largest, and one seed beyond it is used
                self._require(name, value < 2**32 - 1, "a whole number below 2**32 - 1")

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a dict that has been JSON, in which tuples are lists."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})

    def check_here(self) -> None:
        """Check what depends on files, before torch is loaded: raise `ArgumentValueError` for an unknown ``model``."""
        model = getattr(self, "model", "auto")
        if model != "auto" and model not in SHAPES:
            config_file(model)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a result file has: all but `folders`."""
        return {name: value for name, value in vars(self).items() if name not in self.folders}

    def command(self) -> str:
        """Return the command that repeats the run: the settings that differ from their defaults."""
        words = self.program.format(benchmark=self.benchmark).split()
        for each in sorted(dataclasses.fields(self), key=lambda each: each.metadata["last"]):
            value, flag = getattr(self, each.name), "--" + each.name.replace("_", "-")
            if value == each.default or each.name in self.folders:
                continue
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-"))
            else:
                words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
        return shlex.join(words)

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            got = getattr(self, name)
            text = " ".join(got) or "none" if isinstance(got, tuple) else repr(got)
            raise ArgumentValueError(message(name, expected, text))

    def chosen(self, key: str) -> tuple[str, ...]:
        """Return the known names that an option has chosen, or all where it has none, in the order of the tables."""
        names = next(getattr(self, each.name) for each in dataclasses.fields(self) if each.metadata["known"] == key)
        return tuple(name for name in self.known[key] if not names or name in names)


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(Settings):
    """What scripts have that measure beside the subcommands: ``python benchmarks/NAME.py``."""

    program = "python benchmarks/{benchmark}.py"
    device: ClassVar[str] = "auto"
    dtype: ClassVar[str] = "auto"
    output: str = setting(".", "folder for the result", metavar="DIR", last=True)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What all benchmarks have that measure in rounds and write a result: the last of their options."""

    warm: int = setting(2, "rounds that do not count", last=True, least=0)
    reps: int = setting(6, "rounds that count; each runs every candidate once", last=True, least=1)
    dtype: Dtype = setting("auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    device: Device = setting("auto", "where; auto: a GPU if there is one", last=True)  # noqa: RUF009
    seed: int = setting(0, "of random inputs and weights", last=True, least=0)
    output: str = setting(".", "folder for the result (json) and its plots (png)", metavar="DIR", last=True)


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(RunSettings):
    """What benchmarks have that measure shapes; ``choice`` is what ``--shape`` can be."""

    choice: ClassVar[Choice[Any]]

    shape: tuple[str, ...] = setting((), "{shapes}", metavar="SHAPE")

    def __init_subclass__(cls) -> None:
        """Add the names of the shapes to those that the help has."""
        if choice := cls.__dict__.get("choice"):
            groups = ", ".join((*choice.groups, "all"))
            about = f"{', '.join(choice.named)}; {groups}; or numbers {choice.numbers} (default: {choice.usual})"
            cls.known = {**cls.known, "shapes": (about,)}

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.shapes

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes, each once."""
        return tuple(dict.fromkeys(s for text in self.shape or (self.choice.usual,) for s in self.choice.read(text)))


@dataclass(frozen=True, kw_only=True)
class PeerSettings(RunSettings):
    """What benchmarks have that measure peers by name; ``known`` has all as ``peers``, in the table's order."""

    only: tuple[str, ...] = setting((), "measure these alone: {peers}", metavar="PEER", known="peers")
    skip: tuple[str, ...] = setting((), "leave these out", metavar="PEER", known="peers")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("skip", bool(self.peers), "at least one peer that is left")

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        return tuple(name for name in self.chosen("peers") if name not in self.skip)


def numbers(name: str, texts: Iterable[str], kind: type) -> tuple[Any, ...]:
    """Return a setting's texts as finite ints or floats above 0; else `ArgumentValueError`."""
    found = []
    for text in texts:
        try:
            found.append(kind(text))
        except ValueError:
            raise ArgumentValueError(message(name, "numbers", repr(text))) from None
    if not all(0 < value < math.inf for value in found):
        raise ArgumentValueError(message(name, f"{'whole ' if kind is int else ''}numbers above 0", " ".join(texts)))
    return tuple(found)

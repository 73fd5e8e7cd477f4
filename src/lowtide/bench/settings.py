"""What the settings of all benchmarks share: a field becomes an option. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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
    least: float | None = None,
    known: str | None = None,
) -> Any:
    """Return a field that `lowtide.cli.parser.add_options` makes an option of.

    Args:
        default: its default.
        help: its meaning; ``{key}`` stands for the names that the class's ``known`` has under that key.
        metavar: what stands for its value in the help.
        last: listed after the others.
        least: of a number, or of each of several.
        known: the key of the names that its values are out of; None: any.
    """
    about = {"help": help, "metavar": metavar, "last": last, "least": least, "known": known}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that check themselves: numbers, names and choices as their fields say.

    The docstring of a class of settings is the description in ``--help``.

    Attributes:
        benchmark: the name of the subcommand.
        summary: its line in ``lowtide bench --help``.
        examples: arguments, and what they do.
        known: names that options can have, by the key that stands for them in the help.
        exit_1: when the exit status is 1.
        stem: of the result file's name, after the date; ``{dtype}`` stands for the dtype.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[Mapping[str, str]]
    known: ClassVar[Mapping[str, Iterable[str]]] = {}
    exit_1: ClassVar[str] = "lowtide itself failed"
    stem: ClassVar[str] = "{benchmark}"
    device: Any = "auto"
    dtype: Any = "auto"
    output: str = setting(".", "folder for the result (json) and its plots (png)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value, known, least = getattr(self, each.name), each.metadata.get("known"), each.metadata.get("least")
            if least is not None and value is not None:
                whole = "" if isinstance(least, float) else "a whole number of "
                values = value if isinstance(value, tuple) else (value,)
                self.require(each.name, all(v >= least for v in values), f"{whole}at least {least:g}")
            if known:
                names = tuple(self.known[known])
                self.require(each.name, set(value) <= {*names}, f"names out of {', '.join(names)}")
            if get_origin(hints[each.name]) is Literal:
                choices = get_args(hints[each.name])
                self.require(each.name, value in choices, " or ".join(choices))

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings of a dict that has been JSON, in which tuples are lists."""
        values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        return cls(**values)

    def check_here(self) -> None:
        """Check what depends on files, before torch is loaded: raise `ArgumentValueError` for an unknown ``model``."""
        model = getattr(self, "model", "auto")
        if model != "auto" and model not in SHAPES:
            config_file(model)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a result file has: all but the folder."""
        return {name: value for name, value in vars(self).items() if name != "output"}

    def require(self, name: str, met: bool, expected: str) -> None:
        """Raise `ArgumentValueError` for a setting of this name unless the condition is met."""
        if not met:
            got = getattr(self, name)
            text = " ".join(map(str, got)) or "none" if isinstance(got, tuple) else repr(got)
            raise ArgumentValueError(message(name, expected, text))

    def chosen(self, key: str) -> tuple[str, ...]:
        """Return the known names that an option has chosen, or all where it has none, in the order of the tables."""
        names = next(getattr(self, each.name) for each in dataclasses.fields(self) if each.metadata.get("known") == key)
        return tuple(name for name in self.known[key] if not names or name in names)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What all benchmarks have that measure in rounds: the last of their options."""

    warm: int = setting(2, "rounds that do not count", last=True, least=0)
    reps: int = setting(6, "rounds that count; each runs every candidate once", last=True, least=1)
    dtype: Dtype = setting("auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    device: Device = setting("auto", "where; auto: a GPU if there is one", last=True)  # noqa: RUF009
    seed: int = setting(0, "of random inputs and weights", last=True, least=0)


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(RunSettings):
    """What benchmarks have that measure shapes; ``choice`` is what ``--shape`` can be."""

    choice: ClassVar[Choice[Any]]

    shape: tuple[str, ...] = setting((), "{shapes}", metavar="SHAPE")

    def __init_subclass__(cls) -> None:
        """Add the names of the shapes to those that the help has."""
        if choice := cls.__dict__.get("choice"):
            cls.known = {**cls.known, "shapes": (str(choice),)}

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
        self.require("skip", bool(self.peers), "at least one peer that is left")

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        return tuple(name for name in self.chosen("peers") if name not in self.skip)


@dataclass(frozen=True, kw_only=True)
class ErrorSettings(PeerSettings, ShapeSettings):
    """What benchmarks of values and gradients share: whether errors are computed, and how float32 GEMMs run."""

    error: bool = setting(True, "do not compute the errors of values and gradients")
    matmul_precision: Precision = setting("highest", "torch.set_float32_matmul_precision, for lowtide and every peer")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class TokenSettings(ErrorSettings):
    """What benchmarks of values for each token share; ``known`` has the names of their tables as ``works``."""

    work: tuple[str, ...] = setting((), "these tables alone: {works}", metavar="WORK", known="works")

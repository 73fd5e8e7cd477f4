"""The settings of benchmarks: a field becomes an option, with its default and its help. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from lowtide.errors import ArgumentValueError, message
from lowtide.train.shapes import SHAPES, config_file

HEADS = {  # N, D, V
    "llama-1b": (16384, 2048, 131072),  # a Llama-3.2-1B's head, its vocabulary rounded up to 2**17
    "gemma-2b": (8192, 2304, 256000),
    "llama-8b": (16384, 4096, 128256),
    "small-32k": (32768, 768, 32000),
    "qwen-4k": (8192, 4096, 151936),
    "qwen-248k": (16384, 2048, 248320),  # Qwen3.5's vocabulary
    "gemma-262k": (8192, 2560, 262144),  # Gemma 3's
}


def setting(
    default: Any, help: str, *, least: int | None = None, names: Iterable[Any] | None = None, **more: Any
) -> Any:
    """Return a field that `lowtide.cli.parser.add_options` makes an option of, with the least that a number (or each of
    several) can be, and all that values can be, which the help lists; ``more`` is metadata: ``metavar`` stands for the
    value in the help.
    """
    if names is not None:
        help = f"{help}: {', '.join(map(str, names))}"
    return field(default=default, metadata={"help": help, "least": least, "names": names, **more})


class Shape(SimpleNamespace):
    """Named sizes, such as ``N``, ``D`` and ``V`` of a head: ``vars`` are what a result file has of it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all benchmarks have; a subclass's docstring is the description in ``--help``. A number that is too small is
    an `ArgumentValueError`.
    """

    benchmark: ClassVar[str]  # the name of the subcommand, and of the result's file
    summary: ClassVar[str]  # its line in ``lowtide bench --help``
    examples: ClassVar[Mapping[str, str]]  # arguments, and what they do
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions a result has, besides its peers'
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where; auto: a GPU if there is one")
    output: str = setting(".", "folder for the files that are written", metavar="DIR")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            values = value if isinstance(value, tuple | list) else (value,)
            met = least is None or all(v >= least for v in values)
            self.require(each.name, met, f"a whole number of at least {least}")

    def require(self, name: str, met: bool, expected: str) -> None:
        """Raise `ArgumentValueError` for a setting of this name unless the condition is met."""
        if not met:
            got = getattr(self, name)
            text = " ".join(map(str, got)) if isinstance(got, tuple) else repr(got)
            raise ArgumentValueError(message(name, expected, text))

    def check_here(self) -> None:
        """Check what depends on files, before torch is loaded: raise `ArgumentValueError` for an unknown ``model``."""
        model = getattr(self, "model", "auto")
        if model != "auto" and model not in SHAPES:
            config_file(model)


@dataclass(frozen=True, kw_only=True)
class RoundSettings(Settings):
    """What benchmarks have that measure in rounds."""

    warm: int = setting(2, "rounds that do not count", least=0)
    reps: int = setting(6, "rounds that count; each runs every candidate once", least=1)


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(RoundSettings):
    """What benchmarks of shapes have; subclasses have the field ``shape`` from `shape_setting`."""

    shape: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shapes  # noqa: B018 - raises

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the names, of ``all``, and of numbers; else `ArgumentValueError`."""
        about = self.__dataclass_fields__["shape"].metadata
        sizes, named = about["sizes"], about["shapes"]
        texts = [name for text in self.shape for name in (named if text == "all" else [text])]
        shapes = []
        for text in texts:
            numbers: Any = named.get(text) or text.split(",")
            whole = all(str(number).isdecimal() and int(number) > 0 for number in numbers)
            known = f"{', '.join(named)}, all, or numbers above 0: {','.join(sizes)}"
            self.require("shape", whole and len(numbers) == len(sizes), known)
            shapes.append(Shape(name=text, **dict(zip(sizes, map(int, numbers), strict=True))))
        return shapes


def shape_setting(
    usual: str, sizes: Sequence[str] = ("N", "D", "V"), shapes: Mapping[str, tuple[int, ...]] = HEADS
) -> Any:
    """Return the field ``shape`` of `ShapeSettings`: ``usual`` is what is measured without the option, ``sizes`` what a
    shape's numbers are called, in order, and ``shapes`` those by name.
    """
    about = f"{', '.join(shapes)}; all; or numbers {','.join(sizes)}"
    return setting((usual,), about, metavar="SHAPE", sizes=sizes, shapes=shapes)

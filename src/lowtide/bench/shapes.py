"""The shapes that are measured, by name or as numbers: output layers and gated MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lowtide.errors import ArgumentValueError, message


@dataclass(frozen=True)
class Sizes:
    """Named sizes: the other fields, in the order of the numbers that an option has for them."""

    name: str

    def __str__(self) -> str:
        numbers = ",".join(str(size) for field, size in vars(self).items() if field != "name")
        return numbers if self.name == numbers else f"{self.name} ({numbers})"


@dataclass(frozen=True)
class Shape(Sizes):
    """An output layer: N tokens, hidden size D, vocabulary V."""

    N: int
    D: int
    V: int

    def flops(self, gemms: int) -> int:
        """Return the floating-point operations of so many GEMMs of this shape, 2NDV each."""
        return gemms * 2 * self.N * self.D * self.V


@dataclass(frozen=True)
class MlpShape(Sizes):
    """Gated MLPs of one size, one after another: hidden size D, intermediate size F."""

    batch: int
    seq: int
    D: int
    F: int
    layers: int

    @property
    def N(self) -> int:
        """Tokens."""
        return self.batch * self.seq


S = TypeVar("S", bound=Sizes)


@dataclass(frozen=True)
class Choice(Generic[S]):
    """What an option ``--shape`` can be: ``numbers``, as these are called in order, or a name; ``usual`` is the name of
    what is measured without the option, and ``groups`` are names of several shapes.
    """

    kind: type[S]
    numbers: str
    usual: str
    named: Mapping[str, S]
    groups: Mapping[str, tuple[S, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        groups = ", ".join((*self.groups, "all"))
        return f"{', '.join(self.named)}; {groups}; or numbers {self.numbers} (default: {self.usual})"

    def read(self, text: str) -> tuple[S, ...]:
        """Return the shape of a name, the shapes of a group, or that of numbers; else `ArgumentValueError`."""
        groups = {**self.groups, "all": tuple(self.named.values())}
        return groups[text] if text in groups else (self.one(text, *groups),)

    def one(self, text: str, *others: str) -> S:
        """Return the shape of a name or of numbers; else `ArgumentValueError`, which lists ``others`` as well."""
        if text in self.named:
            return self.named[text]
        sizes = [size.strip() for size in text.split(",")]
        whole = all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes)
        if not whole or len(sizes) != len(dataclasses.fields(self.kind)) - 1:
            expected = f"{', '.join((*self.named, *others))}, or numbers above 0: {self.numbers}"
            raise ArgumentValueError(message("shape", expected, repr(text)))
        return self.kind(",".join(sizes), *map(int, sizes))


def _by_name(*shapes: S) -> dict[str, S]:
    return {shape.name: shape for shape in shapes}


SHAPES = _by_name(
    Shape("llama-1b", 16384, 2048, 131072),  # a Llama-3.2-1B's head, its vocabulary rounded up to 2**17
    Shape("gemma-2b", 8192, 2304, 256000),
    Shape("llama-8b", 16384, 4096, 128256),
    Shape("small-32k", 32768, 768, 32000),
    Shape("qwen-4k", 8192, 4096, 151936),
    Shape("qwen-248k", 16384, 2048, 248320),  # Qwen3.5's vocabulary
    Shape("gemma-262k", 8192, 2560, 262144),  # Gemma 3's
)
MODELS = tuple(
    MlpShape(f"{name}-{tokens >> 10}k", 1, tokens, D, F, 1)
    for name, D, F in (("llama-8b", 4096, 14336), ("llama-70b", 8192, 28672))
    for tokens in (8192, 32768)
)
HEADS = Choice(Shape, "N,D,V", "llama-1b", SHAPES)
TOKENS = dataclasses.replace(HEADS, usual="qwen-4k")
MLPS = Choice(MlpShape, "batch,seq,hidden,intermediate,layers", "llama-8b-32k", _by_name(*MODELS), {"models": MODELS})

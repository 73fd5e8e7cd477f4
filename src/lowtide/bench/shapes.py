"""The shapes of output layers that are measured, by name or as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, message


@dataclass(frozen=True)
class Shape:
    """N tokens, hidden size D, vocabulary V."""

    name: str
    N: int
    D: int
    V: int

    def flops(self, gemms: int) -> int:
        """Return the floating-point operations of so many products of this shape, 2NDV each."""
        return gemms * 2 * self.N * self.D * self.V

    def __str__(self) -> str:
        numbers = f"{self.N},{self.D},{self.V}"
        return numbers if self.name == numbers else f"{self.name} ({numbers})"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-1b", 16384, 2048, 131072),  # a Llama-3.2-1B's head, its vocabulary rounded up to 2**17
        Shape("gemma-2b", 8192, 2304, 256000),
        Shape("llama-8b", 16384, 4096, 128256),
        Shape("small-32k", 32768, 768, 32000),
        Shape("qwen-4k", 8192, 4096, 151936),
    )
}


APPLY_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("4x4096", 4 * 4096, 4096, 128256),  # the published exercise: batch, tokens; hidden 4096, vocabulary 128K
        Shape("64x512", 64 * 512, 768, 32000),  # and its notebook's
    )
}


def parse_shape(text: str, named: Mapping[str, Shape] = SHAPES) -> Shape:
    """Return the shape of that name, or of three numbers ``N,D,V``.

    Raises:
        ArgumentValueError: It is neither.
    """
    if text in named:
        return named[text]
    numbers = parse_numbers(text)
    if numbers is not None:
        return numbers
    raise ArgumentValueError(message("shape", f"{', '.join(named)}, all or three numbers N,D,V above 0", repr(text)))


def parse_numbers(text: str) -> Shape | None:
    """Return the shape of three numbers ``N,D,V`` above 0, or None if that is not what the text is."""
    numbers = text.split(",")
    if len(numbers) == 3 and all(n.strip().isascii() and n.strip().isdigit() and int(n) > 0 for n in numbers):
        N, D, V = map(int, numbers)
        return Shape(f"{N},{D},{V}", N, D, V)
    return None

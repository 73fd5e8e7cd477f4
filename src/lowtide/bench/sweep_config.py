"""The settings of ``lowtide bench sweep``: which shapes, by which peers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lowtide.bench.peers import PEERS
from lowtide.bench.settings import PeerSettings, RunSettings, number, setting
from lowtide.bench.shapes import SHAPES, Shape, parse_shape

AXES = {"tokens": "N", "hidden": "D", "vocab": "V"}  # by option
AROUND = tuple(2.0**k for k in range(-4, 3))  # times the shape's own size, where no sizes are given
SWEEP_PEERS = ("lowtide", "naive", "compile", "torch", "liger", "cce")
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class SweepBenchConfig(PeerSettings, RunSettings):
    """What `lowtide.bench.sweep` measures; each field is the option of ``lowtide bench sweep`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "sweep"
    known_peers, usual_peers = PEERS, SWEEP_PEERS

    shape: str = setting(
        "llama-1b", f"where the three lines cross: a named shape ({', '.join(SHAPES)}) or N,D,V", metavar="SHAPE"
    )
    tokens: tuple[str, ...] = setting(
        (), "numbers of tokens N, with the shape's D and V; none: no such line; without it, powers of two times the"
        " shape's own, from a 16th to 4", metavar="N",
    )  # fmt: skip
    hidden: tuple[str, ...] = setting((), "likewise hidden sizes D", metavar="D")
    vocab: tuple[str, ...] = setting((), "likewise sizes of the vocabulary V", metavar="V")
    only: tuple[str, ...] = setting(
        (), f"measure these out of {{known}}; without it, {', '.join(SWEEP_PEERS)}", metavar="PEER", known=PEERS
    )
    skip: tuple[str, ...] = setting((), "leave these out", metavar="PEER", known=PEERS)
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    seconds: float | None = setting(
        None, "do not begin a shape that would end later; the same command goes on from there", metavar="S"
    )
    fresh: bool = setting(False, "begin anew where an unfinished result of the same sweep lies in the folder")
    warm: int = setting(1, "rounds that do not count", last=True, least=0)
    reps: int = setting(4, "rounds that count; every peer takes turns with the limit", last=True, least=1)
    output: str = setting(".", "folder for the result (json) and the plot (png)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in AXES:
            self._require(axis, all(size > 0 for size in self.sizes(axis)), "whole numbers above 0, or none")
        self._require("tokens", any(self.sizes(axis) for axis in AXES), "one line that is not none")
        self._require_positive("seconds")

    @property
    def center(self) -> Shape:
        """Where the lines cross."""
        return parse_shape(self.shape)

    def sizes(self, axis: str) -> tuple[int, ...]:
        """Return the sizes along an axis, ascending; empty where it is left out."""
        given: tuple[str, ...] = getattr(self, axis)
        own = getattr(self.center, AXES[axis])
        if NONE in given:
            return ()
        if given:
            return tuple(sorted({number(axis, text, int) for text in given}))
        return tuple(sorted({max(1, int(own * times)) for times in AROUND}))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes, each once: where the lines cross, then from the least work to the most."""
        center = self.center
        found = {}
        for axis, letter in AXES.items():
            for size in self.sizes(axis):
                N, D, V = (size if letter == other else getattr(center, other) for other in "NDV")
                found[N, D, V] = Shape(f"{N},{D},{V}", N, D, V)
        middle = (center.N, center.D, center.V)
        ordered = sorted(found, key=lambda sizes: (sizes != middle, math.prod(sizes)))
        return tuple(found[sizes] for sizes in ordered)

    @property
    def asked(self) -> dict[str, Any]:
        """What must be the same for one run to go on where another ended."""
        return {name: value for name, value in self.recorded().items() if name not in ("seconds", "fresh")}

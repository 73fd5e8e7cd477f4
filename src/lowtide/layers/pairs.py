"""Which two values of a head a rotary embedding rotates together, and where their angle is in the tables."""

from functools import cache
from typing import Literal, NamedTuple

Places = tuple[int, int]  # the step from pair to pair, and how far apart the two of a pair are


class Pairs(NamedTuple):
    """Where the pairs of a head's r rotated values are, before and after, and the entries of cos and sin for them."""

    read: Literal["halves", "neighbours"]
    written: Literal["halves", "neighbours"]
    # "each": where the values are read; for both "first": in the table's first half, "short": in tables half as wide
    entries: Literal["each", "first", "short"]
    backwards: bool = False  # by the negative angle
    last: bool = False  # a head's last r values are rotated, not its first

    def count(self, entries: int) -> int:
        """Return how many pairs a table with so many entries per position is for."""
        return entries if self.entries == "short" else entries // 2

    @cache  # noqa: B019 (of the few values of `PAIRS`)
    def parts(self, r: int, d: int) -> tuple[slice, slice]:
        """Return where a head's r rotated values are among its d, and its others."""
        return (slice(d - r, d), slice(d - r)) if self.last else (slice(r), slice(r, d))

    @cache  # noqa: B019
    def places(self, half: int, *, inverse: bool) -> tuple[Places, Places, Places]:
        """Return the places of the values read and written, by the ``inverse`` or not, and of the table's entries."""
        halves, neighbours = (1, half), (2, 1)
        read, written = (halves if side == "halves" else neighbours for side in (self.read, self.written))
        table = read if self.entries == "each" else (1, 0)
        return (written, read, table) if inverse else (read, written, table)


PAIRS = {
    "halves": Pairs("halves", "halves", "each"),
    "interleaved": Pairs("neighbours", "neighbours", "each"),
    "repeated": Pairs("neighbours", "neighbours", "first"),
    "short": Pairs("halves", "halves", "short"),
    "deinterleaved": Pairs("neighbours", "halves", "first"),
    "short_interleaved": Pairs("neighbours", "neighbours", "short"),
    "trailing": Pairs("neighbours", "neighbours", "short", last=True),
    "backwards": Pairs("halves", "halves", "each", backwards=True),
}

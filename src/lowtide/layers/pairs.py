"""Which two values of a head a rotary embedding rotates together, and where their angle is in the tables."""

from enum import Enum


class Pairs(Enum):
    """Where the pairs of a head's first r values are, and the entries of cos and sin for them."""

    HALVES = "halves"  # value i of either half; entries too
    INTERLEAVED = "interleaved"  # neighbours; entries too
    REPEATED = "repeated"  # neighbours, of which both have the entry of the table's first half
    SHORT = "short"  # value i of either half, of which both have the one entry of tables half as wide

    def count(self, entries: int) -> int:
        """Return how many pairs a table with so many entries per position is for."""
        return entries if self is Pairs.SHORT else entries // 2

    def places(self, half: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return, of the values and then of the tables, the step from pair to pair, and how far apart the two are."""
        values = (1, half) if self in (Pairs.HALVES, Pairs.SHORT) else (2, 1)
        return values, (1, 0) if self in (Pairs.REPEATED, Pairs.SHORT) else values


PAIRS = {kind.value: kind for kind in Pairs}  # a look-up takes the host less time than a call of the class

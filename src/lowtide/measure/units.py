"""Bytes in MiB and GiB, and sizes as users write them."""

import math
import re
from numbers import Real

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

_UNITS = {
    "": 2**30, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip


def mib(size: float) -> float:
    """Return bytes in MiB (2**20 bytes)."""
    return size / 2**20


def gib(size: float) -> float:
    """Return bytes in GiB (2**30 bytes)."""
    return size / 2**30


def gib_text(size: float) -> str:
    """Return bytes in GiB as text, with two significant digits below 0.1."""
    return f"{gib(size):.2f}" if size >= 2**30 // 10 else f"{gib(size):.2g}"


def as_gib(name: str, size: object) -> float:
    """Return argument ``name`` in GiB: a number, or a text of a number and a unit, in any case.

    ``40GiB``, ``40G`` and ``40`` are 40 times 2**30 bytes, ``40GB`` 40 times 10**9; likewise K, M, T; ``B`` is a byte.

    Raises:
        ArgumentTypeError: It is neither.
        ArgumentValueError: The text is not a size.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", size, re.ASCII)
        if not found or found[2].lower() not in _UNITS:
            raise ArgumentValueError(message(name, "a size such as 40GiB, 40GB, 24576MiB or 40 (GiB)", repr(size)))
        return float(found[1]) * _UNITS[found[2].lower()] / 2**30
    if isinstance(size, bool) or not isinstance(size, Real):
        raise ArgumentTypeError(message(name, "a number of GiB, or a text such as '40GiB'", f"{size!r}"))
    try:
        return float(size)
    except OverflowError:  # an int beyond every float
        return math.inf


def budget_bytes(name: str, size: object, *, above_0: bool = False, hint: str = "") -> int:
    """Return argument ``name``, a number of GiB or a text with a unit, in bytes; ``hint``: what to do after an error.

    Raises:
        ArgumentTypeError: It is neither.
        ArgumentValueError: It is negative, not finite, or 0 with ``above_0``.
    """
    value = as_gib(name, size) * 2**30
    if not 0 <= value < math.inf or (above_0 and value == 0):
        expected = f"a finite number of GiB, {'above' if above_0 else 'at least'} 0"
        raise ArgumentValueError(message(name, expected, f"{size}", hint))
    return int(value)

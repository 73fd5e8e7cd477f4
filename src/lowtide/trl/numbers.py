"""What TRL's numbers are to the heads."""

import math


def why_not_number(name: str, value: object, *, positive: bool) -> str | None:
    """Return why lowtide cannot take a number: a tensor, not finite, or not above 0 where it must be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} is a {type(value).__name__}, not a number"
    if not math.isfinite(value) or (positive and value <= 0):
        return f"{name} is {'not above 0' if math.isfinite(value) else 'not finite'}"
    return None


def why_not_cap(name: str, cap: object) -> str | None:
    """Return why lowtide cannot take a soft cap; None is none."""
    return None if cap is None else why_not_number(name, cap, positive=True)

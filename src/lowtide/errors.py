"""The errors that lowtide raises: each has the argument, what was expected, what was passed, and what to do."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["ArgumentTypeError", "ArgumentValueError", "LowtideError", "TargetIndexError", "UnsupportedError"]


class LowtideError(Exception):
    """Base of every error that lowtide raises; each child also derives from the builtin that fits."""


class ArgumentValueError(LowtideError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(LowtideError, TypeError):
    """An argument has a type or a dtype that is not allowed."""


class TargetIndexError(LowtideError, IndexError):
    """A target is neither a class index nor ``ignore_index``."""


class UnsupportedError(LowtideError, RuntimeError):
    """The function does not support the request, such as double backward."""


def message(argument: str, expected: str, got: object, hint: str = "") -> str:
    """Return an error's one sentence: ``argument: expected ..., got .... What to do.``"""
    text = f"{argument}: expected {expected}, got {got}."
    return f"{text} {hint}" if hint else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is nearest to one that is unknown; empty where none is near.

    Dashes in front of both do not count, or all options would be near each other.
    Of names such as ``llama-3.2-1b`` the letters before the first digit count, where the whole name is too far off.
    """
    names, plain = {one.lstrip("-"): one for one in known}, name.lower().lstrip("-")
    found = get_close_matches(plain, names, n=1)
    if not found:
        stems = {_stem(one): one for one in reversed(names)}
        found = [stems[stem] for stem in get_close_matches(_stem(plain), stems, n=1)]
    return f"Did you mean {names[found[0]]}?" if found else ""


def _stem(name: str) -> str:
    return re.split(r"(?<=[a-z])\W*\d", name)[0]

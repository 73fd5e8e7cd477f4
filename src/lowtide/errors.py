"""The errors that lowtide raises: each names the argument, what was expected, what came, and what to do."""

__all__ = ["ArgumentTypeError", "ArgumentValueError", "LowtideError", "TargetIndexError", "UnsupportedError"]


class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose; each child also derives from the builtin that fits."""


class ArgumentValueError(LowtideError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(LowtideError, TypeError):
    """An argument has a type or a dtype that is not allowed."""


class TargetIndexError(LowtideError, IndexError):
    """A target is neither a class index nor ``ignore_index``."""


class UnsupportedError(LowtideError, RuntimeError):
    """What was asked for is outside what this function can do, such as double backward."""


def message(argument: str, expected: str, got: object, hint: str = "") -> str:
    """Return an error's one sentence: ``argument: expected ..., got .... What to do.``"""
    text = f"{argument}: expected {expected}, got {got}."
    return f"{text} {hint}" if hint else text

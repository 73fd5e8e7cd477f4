"""argparse with errors of one line, and options made from a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from lowtide.errors import did_you_mean


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the way to the help, and whose options are written out."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        # argparse takes -4 for a value and -4GiB for an option: then nobody says that it must not be negative
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; a command that wants a further word and got none shows what there is, with status 2."""
        wanted = any(isinstance(each, argparse._SubParsersAction) and each.required for each in self._actions)
        if wanted and not (sys.argv[1:] if args is None else args):
            self.print_help(sys.stderr)
            raise SystemExit(2)
        return super().parse_known_args(args, namespace)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the arguments that are not known, and the options that may have been meant."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hints = [did_you_mean(word.partition("=")[0], known) for word in unknown if word.startswith("-")]
        self.error(". ".join(filter(None, [f"unknown arguments: {' '.join(unknown)}", " ".join(filter(None, hints))])))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if hint := did_you_mean(str(value), map(str, action.choices or ())):
                error.message += f". {hint}"
            raise

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with status 2."""
        sys.stderr.write(f"{self.prog}: {message} (see `{self.prog} --help`)\n")
        raise SystemExit(2)


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add an option for each field of a dataclass, its help and default taken from the field.

    The namespace gets the options that were given and no others, so that the dataclass alone has the defaults. A flag
    that is on by default becomes ``--no-NAME``; of a help "does this; --no-NAME does that" the option has the end.
    Options of the class itself come before those of its bases.

    Args:
        parser: where to.
        config: the dataclass; ``metadata`` of its fields has ``help`` and ``metavar``, and may have ``names``: what the
            values are out of.
    """
    hints, own = get_type_hints(config), inspect.get_annotations(config)
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name not in own):
        flag, kind, default = "--" + field.name.replace("_", "-"), hints[field.name], field.default
        text = field.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if kind is bool:
            flag = flag.replace("--", "--no-") if default else flag
            text = text.partition(f"; {flag} ")[2] or text
            parser.add_argument(flag, action="store_false" if default else "store_true", help=text, **options)
            continue
        if default not in (None, ()):
            text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        inside = [each for each in get_args(kind) if each not in (type(None), ...)]  # of X | None, and of tuple[X, ...]
        if get_origin(kind) is Literal:
            options["choices"] = inside
        else:
            plain = inside[0] if inside else kind
            options |= {"type": plain, "metavar": field.metadata["metavar"] or ("N" if plain is int else "X")}
        if get_origin(kind) is tuple:
            options |= {"nargs": "+", "choices": field.metadata.get("names")}
        parser.add_argument(flag, help=text, **options)


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the options of a dataclass that stand in the arguments."""
    names = {field.name for field in dataclasses.fields(config)}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def say(text: str) -> None:
    """Print text at once, also into a pipe."""
    sys.stdout.write(text)
    sys.stdout.flush()

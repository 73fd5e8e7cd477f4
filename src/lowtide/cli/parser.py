"""argparse with errors of one line, and options made from a dataclass."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args, get_type_hints

from lowtide.errors import did_you_mean


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the way to the help, and whose options are written out.

    The namespace has it as ``parser``, of several the one of the last subcommand.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        # argparse takes -4 for a value and -4GiB for an option: then nobody says that it must not be negative
        self._negative_number_matcher = re.compile(r"^-\.?\d")
        self.set_defaults(parser=self)

    def flag_of(self, name: str) -> str:
        """Return the option that sets an argument, as a user writes it; the name itself where none does."""
        return next(
            (each.option_strings[0] for each in self._actions if each.dest == name and each.option_strings), name
        )

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the arguments that are not known, and the first option that may have been meant."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        hint = next(filter(None, (did_you_mean(flag, self._option_string_actions) for flag in flags)), "")
        self.error(f"unknown arguments: {' '.join(unknown)}{hint and f'. {hint}'}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if hint := did_you_mean(str(value), map(str, action.choices or ())):
                error.message += f". {hint}"
            raise

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with status 2; a command that wants a further word shows what there is."""
        if self._subparsers is not None and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
        else:
            sys.stderr.write(f"{self.prog}: {message} (see `{self.prog} --help`)\n")
        raise SystemExit(2)


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add an option for each field of a dataclass that has a help, its default taken from the field.

    The namespace gets the options that were given and no others, so that the dataclass alone has the defaults. A flag
    that is on by default becomes ``--no-NAME``. Options of the class itself come before those of its bases.

    Args:
        parser: where to.
        config: the dataclass; ``metadata`` of its fields has ``help``, and may have ``metavar``, ``flag``: another name
            of the option, and ``names``: what the values are out of.
    """
    hints = get_type_hints(config)
    for field in sorted(fields(config), key=lambda field: field.name not in config.__annotations__):
        if not (about := field.metadata):
            continue
        hint, default = hints[field.name], field.default
        kinds, flag = get_args(hint) or (hint,), about.get("flag") or "--" + field.name.replace("_", "-")
        options = {"dest": field.name, "default": argparse.SUPPRESS, "help": about["help"].replace("%", "%%")}
        if bool in kinds:
            on = default is not False
            flag = flag.replace("--", "--no-") if on else flag
            parser.add_argument(flag, action="store_false" if on else "store_true", **options)
            continue
        many = isinstance(default, tuple)
        if default not in (None, (), MISSING):
            options["help"] += f" (default: {' '.join(map(str, default)) if many else default})"
        if isinstance(kinds[0], str):  # a Literal
            options["choices"] = kinds
        else:
            options |= {"type": int if int in kinds else str, "metavar": about.get("metavar") or "N"}
        if many:
            options |= {"nargs": "+", "choices": about.get("names")}
        parser.add_argument(flag, **options)


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the options of a dataclass that stand in the arguments."""
    values = vars(arguments)
    found = {field.name: values[field.name] for field in fields(config) if field.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def say(text: str) -> None:
    """Print text at once, also into a pipe."""
    sys.stdout.write(text)
    sys.stdout.flush()

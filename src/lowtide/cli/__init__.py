"""The ``lowtide`` command: one file a subcommand, each with ``add(parser)``. None of them imports torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from lowtide.cli.parser import OneLineParser
from lowtide.errors import LowtideError
from lowtide.train.ranks import is_first_rank, let_first_report

SUBCOMMANDS = {
    "train": "train a model on text or conversations",
    "plan": "what fits in a budget of memory, and how fast",
    "profile": "where a step's memory and time go, beside its peers",
    "bench": "measure lowtide beside its peers",
}

EXTRAS = {  # of packages without which lowtide imports
    **dict.fromkeys(("transformers", "huggingface_hub", "accelerate", "tokenizers", "psutil", "yaml"), "train"),
    **dict.fromkeys(("trl", "datasets"), "train,trl"),
    "peft": "train,peft",
}

_EXAMPLES = """\
to begin with:
  lowtide train --compare
      train a small model with lowtide and without, on any machine, and see the two side by side
  lowtide plan --model llama-3.2-1b --seq-len 32768 --budget 16GiB --dtype bfloat16
      what a training step takes, from a model's shape alone
  lowtide COMMAND --help
      all options, with examples

In a script of your own, lowtide.patch(model) does it for a Hugging Face model."""

USAGE_ERROR = 2  # argparse's own; also for every error that the user can mend
SIGNALS = 128  # above it, as shells have it, the number of the signal that ended the command
INTERRUPTED = SIGNALS + 2  # SIGINT
CLOSED_PIPE = SIGNALS + 13  # SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lowtide`` and return its exit status.

    0; 1: a comparison that failed; 2: an error; 3: out of memory, with advice in several lines; 130: Ctrl-C; 143:
    SIGTERM in a training run.

    Args:
        argv: the arguments; ``sys.argv`` without it.

    Raises:
        SystemExit: by argparse, after ``--help``, ``--version``, no argument, and arguments it does not know.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, unknown = _parser().parse_known_args(words)
    if unknown and arguments.subcommand != "train":  # which has the options of other libraries
        arguments.parser.refuse(unknown)
    arguments.words = words
    try:
        status: int = arguments.main(arguments)
    except BrokenPipeError:  # whoever read our output is gone: no more can be said, not even by the interpreter
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = CLOSED_PIPE
    except (LowtideError, ModuleNotFoundError, OSError, KeyboardInterrupt) as error:
        status = _report(error, arguments.parser, getattr(arguments, "flags", {}))
    if argv is None and status and (status > SIGNALS or "RANK" in os.environ):
        # tearing down an interpreter with torch and TRL takes seconds; a group's threads would abort it, and hide the
        # status
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _report(error: BaseException, parser: OneLineParser, flags: dict[str, str]) -> int:
    """Write what is wrong, in one line if the user can mend it, and return the exit status."""
    interrupted = isinstance(error, KeyboardInterrupt)
    status = INTERRUPTED if interrupted else int(getattr(error, "exit_status", USAGE_ERROR))
    text = f"interrupted. {error}".strip() if interrupted else str(error)
    if isinstance(error, ModuleNotFoundError):
        if (extra := EXTRAS.get(str(error.name).partition(".")[0])) is None:
            raise error
        text = f"expected {error.name} to be installed, got none. pip install 'lowtide[{extra}]'"
    if status > SIGNALS and not is_first_rank():  # it came to all ranks, one of which says so
        return status
    let_first_report()
    argument, colon, rest = (" ".join(text.split()) if status == USAGE_ERROR else text).partition(":")
    argument = flags.get(argument) or parser.flag_of(argument)
    rest = re.sub(r"\b(\w+)=(\S+) fits", lambda found: f"{parser.flag_of(found[1])} {found[2]} fits", rest)  # advice
    sys.stderr.write("\n" * interrupted + f"{parser.prog}: {argument}{colon}{rest}\n")
    return status


def _parser() -> OneLineParser:
    import lowtide

    parser = OneLineParser(
        prog="lowtide", description="Train language models without the memory peaks.", epilog=_EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"lowtide {lowtide.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="subcommand", metavar="COMMAND", required=True)
    for name, help in SUBCOMMANDS.items():
        import_module(f"lowtide.cli.{name}").add(subparsers.add_parser(name, help=help))
    return parser

"""The ``lowtide`` command: one file a subcommand, each with ``add(parser)``. None of them imports torch."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from lowtide.cli.parser import OneLineParser
from lowtide.errors import LowtideError

SUBCOMMANDS = {
    "train": "train a model on text or conversations",
    "plan": "what fits in a budget of memory, and how fast",
    "profile": "where a step's memory and time go, beside its peers",
    "bench": "measure lowtide beside its peers",
}

EXTRAS = {  # of packages without which lowtide imports
    **dict.fromkeys(("transformers", "huggingface_hub", "accelerate", "tokenizers", "psutil", "yaml", "rich"), "train"),
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
CLOSED_PIPE = 141  # 128 + SIGPIPE, as shells have it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lowtide`` and return its exit status.

    0; 1: a comparison that failed; 2: an error; 3: out of memory, with advice in several lines; 130: Ctrl-C; 143:
    SIGTERM in a training run.

    Args:
        argv: the arguments; ``sys.argv`` without it.

    Raises:
        SystemExit: by argparse, after ``--help``, ``--version``, no argument, and arguments it does not know.
    """
    status = _status(argv)
    if argv is None and (status in (INTERRUPTED, TERMINATED) or (status and _in_group())):
        # tearing down an interpreter with torch and TRL takes seconds; a group's threads would abort it, and hide the
        # status
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(argv: Sequence[str] | None) -> int:
    arguments, unknown = _parser().parse_known_args(argv)
    arguments.command = shlex.join(["lowtide", *(sys.argv[1:] if argv is None else argv)])
    if hasattr(arguments, "unknown"):  # options of other libraries
        arguments.unknown = unknown
    elif unknown:  # reported by the subcommand's parser, which has the right --help
        arguments.parser.refuse(unknown)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it wherever it is installed
    try:
        return int(arguments.main(arguments))
    except LowtideError as error:
        status = getattr(error, "exit_status", USAGE_ERROR)
        if not _may_speak(of_all=getattr(error, "of_all_ranks", False)):
            return int(status)
        text = " ".join(str(error).split()) if status == USAGE_ERROR else str(error)
        argument, colon, rest = text.partition(":")
        argument = getattr(arguments, "options_of", {}).get(argument, argument)  # what Python calls otherwise
        sys.stderr.write(f"{arguments.parser.prog}: {argument}{colon}{rest}\n")
        return int(status)
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get(str(error.name).partition(".")[0])) is None:
            raise
        needs = f"expected {error.name} to be installed, got none. pip install 'lowtide[{extra}]'"
        sys.stderr.write(f"{arguments.parser.prog}: {needs}\n")
        return USAGE_ERROR
    except BrokenPipeError:  # whoever read our output is gone: no more can be said, not even by the interpreter
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        sys.stderr.write(f"{arguments.parser.prog}: {' '.join(str(error).split())}\n")
        return USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        if _may_speak(of_all=True):
            sys.stderr.write(f"\n{arguments.parser.prog}: interrupted. {interrupt}".rstrip() + "\n")
        return INTERRUPTED


def _may_speak(*, of_all: bool) -> bool:
    """Return whether this process is to say its error: not on another rank than the first, if it is that of all."""
    if "RANK" not in os.environ:  # which launchers set
        return True
    from lowtide.train.ranks import is_first_rank, let_first_report

    if of_all:
        return is_first_rank()
    let_first_report()
    return True


def _in_group() -> bool:
    if "RANK" not in os.environ:
        return False
    from lowtide.train.ranks import in_group

    return in_group()


def _parser() -> OneLineParser:
    import lowtide

    parser = OneLineParser(
        prog="lowtide",
        description="Train language models without the memory peaks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lowtide {lowtide.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="subcommand", metavar="COMMAND", required=True)
    for name, help in SUBCOMMANDS.items():
        below = subparsers.add_parser(name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter)
        import_module(f"lowtide.cli.{name}").add(below)
    return parser

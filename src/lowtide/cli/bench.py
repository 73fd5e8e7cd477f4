"""``lowtide bench``: lowtide beside its peers and beside the hardware's limit."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from importlib import import_module

from lowtide.bench.config import BENCHMARKS
from lowtide.cli.parser import OneLineParser, add_options, given, say

OF_SIZE = {"device", "shape", "model", "tokens", "hidden", "vocab"}  # options that say how large a run is
_ABOUT = """\
Measure lowtide beside every peer that can be imported here, in one run. The figures are printed, and written with the
hardware and the versions to a json file in the current folder (--output)."""
_EXAMPLES = """\
examples:
  lowtide bench head
      the loss at sizes for a GPU
  lowtide bench head --shape 1024,256,8192 --device cpu
      a small one, on any machine
  lowtide bench WHAT --help
      all options of one, with examples"""
_RESULT = """\
The result is DIR/<date>-{}-<gpu>.json, with the hardware and the versions; set COMMIT in the environment where the
source has no git history. A peer that fails or cannot be imported is a row with the reason. Exit status 1 where lowtide
itself failed, other than by running out of memory, or where a peer of --only cannot be imported."""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    for config in BENCHMARKS:
        name, about = config.benchmark, inspect.cleandoc(str(config.__doc__))
        examples = (
            f"  lowtide bench {name} {words}".rstrip() + f"\n      {does}" for words, does in config.examples.items()
        )
        kind = kinds.add_parser(
            name,
            help=config.summary,
            description=f"{about}\n{_RESULT.format(name)}",
            epilog="\n".join(["examples:", *examples]),
        )
        add_options(kind, config)
        kind.set_defaults(main=main, config=config)


def main(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit status.

    Raises:
        LowtideError: something the user can fix.
    """
    options, name = given(arguments, arguments.config), arguments.benchmark
    config = arguments.config(**options)  # errors of the arguments are reported first, and without torch
    config.check_here()
    import torch

    if not options.keys() & OF_SIZE and not torch.cuda.is_available():
        small = next(words for words in config.examples if "--device cpu" in words)
        sys.stderr.write(
            f"There is no GPU here, and the default sizes are for one. A small run: lowtide bench {name} {small}\n"
        )
    from lowtide.bench.harness import Run

    kind = import_module(f"lowtide.bench.{name}")
    return Run(config, say, shlex.join(["lowtide", *arguments.words]), kind.PEERS).execute(kind.measure)

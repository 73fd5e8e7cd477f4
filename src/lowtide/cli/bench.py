"""``lowtide bench``: lowtide beside its peers and beside the hardware's limit."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping
from importlib import import_module

from lowtide.bench.config import BENCHMARKS
from lowtide.cli.parser import OneLineParser, add_options, given, say

OF_SIZE = {"device", "shape", "model", "tokens", "hidden", "vocab"}  # options that say how large a run is
_ABOUT = """\
Measure lowtide beside every peer that can be imported here, in one run. The figures are printed, and written with the
hardware and the versions to a json file in the current folder (--output)."""
_EXAMPLES = {
    "head": "the loss at sizes for a GPU",
    "head --shape 1024,256,8192 --device cpu": "a small one, on any machine",
    "WHAT --help": "all options of one, with examples",
}
_RESULT = """\
 The result is DIR/<date>-{}-<gpu>.json, with the hardware and the versions; set COMMIT in the environment where the
source has no git history. A peer that cannot be imported is a row that says so. Exit status 1 where lowtide itself
failed, other than by running out of memory, or where a peer of --only cannot be imported."""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _ABOUT, _examples("", _EXAMPLES)
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    for config in BENCHMARKS:
        about = " ".join(f"{config.__doc__} {_RESULT.format(config.benchmark)}".split())
        kind = kinds.add_parser(
            config.benchmark,
            help=config.summary,
            description=textwrap.fill(about, 120),
            epilog=_examples(f"{config.benchmark} ", config.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(kind, config)
        kind.set_defaults(main=main, parser=kind, config=config)


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
    from lowtide.bench.harness import run_benchmark

    kind = import_module(f"lowtide.bench.{name}")
    return run_benchmark(kind.measure, config, say, arguments.command, kind.PEERS)


def _examples(name: str, examples: Mapping[str, str]) -> str:
    lines = [f"  lowtide bench {name}{words}".rstrip() + f"\n      {about}" for words, about in examples.items()]
    return "\n".join(["examples:", *lines])

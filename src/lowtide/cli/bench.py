"""``lowtide bench``: lowtide beside its peers and beside the hardware's limit."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping
from importlib import import_module

from lowtide.bench import config as configs
from lowtide.bench.settings import Settings
from lowtide.cli.parser import OneLineParser, add_options, given, say

BENCHMARKS: tuple[type[Settings], ...] = (
    configs.HeadBenchConfig,
    configs.SweepBenchConfig,
    configs.StatsBenchConfig,
    configs.MlpBenchConfig,
    configs.StepBenchConfig,
)
OF_SIZE = {"device", "shape", "model", "tokens", "hidden", "vocab"}  # options that say how large a run is
_ABOUT = """\
Measure lowtide beside every peer that can be imported here, in one run. The figures are printed, and written with the
hardware and the versions to a json file in the current folder (--output)."""
_EXAMPLES = {
    "head": "the loss at sizes for a GPU",
    "head --shape 1024,256,8192 --skip compile --device cpu": "a small one, on any machine",
    "WHAT --help": "all options of one, with examples",
}


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _ABOUT, _examples("", _EXAMPLES)
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    for config in BENCHMARKS:
        kind = kinds.add_parser(
            config.benchmark,
            help=config.summary,
            description=textwrap.fill(_description(config), 120),
            epilog=_examples(f"{config.benchmark} ", config.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(kind, config, {key: ", ".join(names) for key, names in config.known.items()})
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

    small = [words for words in config.examples if "--device cpu" in words]
    if small and not options.keys() & OF_SIZE and not torch.cuda.is_available():
        sys.stderr.write(
            f"There is no GPU here, and the default sizes are for one. A small run: lowtide bench {name} {small[0]}\n"
        )
    benchmark = getattr(import_module(f"lowtide.bench.{name}"), name.upper())
    return int(benchmark.run(config, say, arguments.command).status)


def _description(config: type[Settings]) -> str:
    stem = config.stem.format(benchmark=config.benchmark, dtype="<dtype>")
    return (
        f"{' '.join(str(config.__doc__).split())} The result is DIR/<date>-{stem}-<gpu>.json, with the hardware and the"
        " versions; set COMMIT in the environment where the source has no git history. Exit status 1 where"
        f" {config.exit_1}."
    )


def _examples(name: str, examples: Mapping[str, str]) -> str:
    lines = [f"  lowtide bench {name}{words}".rstrip() + f"\n      {about}" for words, about in examples.items()]
    return "\n".join(["examples:", *lines])

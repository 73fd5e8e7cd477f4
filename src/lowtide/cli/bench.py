"""``lowtide bench``: lowtide beside its peers and beside what the hardware allows."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

import torch

from lowtide.bench.config import (
    ApplyBenchConfig,
    DivergenceBenchConfig,
    HeadBenchConfig,
    LayersBenchConfig,
    MlpBenchConfig,
    StatsBenchConfig,
    StepBenchConfig,
    TuneConfig,
)
from lowtide.bench.longest_config import LongestBenchConfig
from lowtide.bench.models_config import ModelsBenchConfig
from lowtide.bench.settings import Settings
from lowtide.bench.sweep_config import SweepBenchConfig
from lowtide.cli import bench_texts as texts
from lowtide.cli.parser import OneLineParser, add_options
from lowtide.cli.parser import given as _given

BENCHMARKS: dict[type[Settings], str] = {
    HeadBenchConfig: "linear + cross entropy",
    SweepBenchConfig: "the same over tokens, hidden size and vocabulary",
    StatsBenchConfig: "log-probabilities and entropies",
    DivergenceBenchConfig: "distance from a teacher",
    ApplyBenchConfig: "any function of the logits",
    LayersBenchConfig: "norm and rotary embedding",
    StepBenchConfig: "a training step, end to end",
    LongestBenchConfig: "the longest sequence that runs",
    MlpBenchConfig: "the gated MLP",
    ModelsBenchConfig: "what patch does to every model type",
    TuneConfig: "tile sizes of the head's GEMM for this GPU",
}
FILES = {"stats": "token_run", "divergence": "token_run"}  # of those whose file has another name
OF_SIZE = {"device", "shape", "model", "tokens", "hidden", "vocab", "start"}  # options that say how large a run is


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = texts.BENCH, texts.BENCH_EXAMPLES
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    for config, help in BENCHMARKS.items():
        name = config.benchmark
        description, examples = (getattr(texts, f"{name.upper()}{part}") for part in ("", "_EXAMPLES"))
        one = kinds.add_parser(
            name,
            help=help,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(one, config, {})
        one.set_defaults(main=main, parser=one, config=config)


def main(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit status.

    Raises:
        LowtideError: something the user can fix.
    """
    asked, name = _given(arguments, arguments.config), arguments.benchmark
    config = arguments.config(**asked)  # what is wrong is said first, and alone
    small = [line.strip() for line in arguments.parser.epilog.splitlines() if "--device cpu" in line]
    if small and not asked.keys() & OF_SIZE and not torch.cuda.is_available():
        sys.stderr.write(f"No GPU is here, and these sizes are made for one. A small run: {small[0]}\n")
    if name == "tune":  # which keeps tile sizes and writes no result
        from lowtide.bench.tune import run

        return int(run(config, _say) is None)
    benchmark = getattr(import_module(f"lowtide.bench.{FILES.get(name, name)}"), name.upper())
    return int(benchmark.run(config, _say).status)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

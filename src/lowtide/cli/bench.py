"""``lowtide bench``: lowtide beside its peers and beside what the hardware allows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from importlib import import_module

import torch

from lowtide.bench.config import (
    APPLY_FUNCTIONS,
    LAYER_OPS,
    STEP_PEERS,
    ApplyBenchConfig,
    DivergenceBenchConfig,
    HeadBenchConfig,
    LayersBenchConfig,
    MlpBenchConfig,
    StatsBenchConfig,
    StepBenchConfig,
    TuneConfig,
)
from lowtide.bench.divergence import PAIR_SHAPES
from lowtide.bench.longest_config import WAYS, LongestBenchConfig
from lowtide.bench.mlp_peers import GROUPS, MLP_PEERS, MLP_SHAPES
from lowtide.bench.models_case import MAPPINGS
from lowtide.bench.models_config import ModelsBenchConfig
from lowtide.bench.peers import PEERS
from lowtide.bench.problem import SETTINGS
from lowtide.bench.shapes import APPLY_SHAPES, SHAPES
from lowtide.bench.sweep_config import SWEEP_PEERS, SweepBenchConfig
from lowtide.cli import bench_texts as texts
from lowtide.cli.parser import OneLineParser, add_options
from lowtide.cli.parser import given as _given
from lowtide.memory.policy_words import FORM, STATES_FORM

Main = Callable[[argparse.Namespace], int]

HOMES = {"stats": "token_run", "divergence": "token_run"}  # of those that have no file of their name
OF_SIZE = {"device", "shape", "model", "tokens", "hidden", "vocab", "start"}  # options that say how large a run is


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = texts.BENCH, texts.BENCH_EXAMPLES
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)

    def benchmark(config: type, run: Main, help: str, texts: tuple[str, str, str], **names: Iterable[str]) -> None:
        """Add one: ``texts`` are its name, its description and its examples; ``names`` what its help names."""
        one = kinds.add_parser(
            texts[0],
            help=help,
            description=texts[1],
            epilog=texts[2],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(one, config, {key: ", ".join(each) for key, each in names.items()})
        one.set_defaults(main=_begin(run, config, texts[2]), parser=one, config=config)

    settings = [setting.name for setting in SETTINGS]
    benchmark(
        HeadBenchConfig, _run, "linear + cross entropy", ("head", texts.HEAD, texts.HEAD_EXAMPLES),
        shapes=SHAPES, peers=PEERS, settings=settings,
    )  # fmt: skip
    benchmark(
        SweepBenchConfig, _run, "the same over tokens, hidden size and vocabulary",
        ("sweep", texts.SWEEP, texts.SWEEP_EXAMPLES), shapes=SHAPES, peers=PEERS, default=SWEEP_PEERS,
    )  # fmt: skip
    benchmark(
        StatsBenchConfig, _run, "log-probabilities and entropies", ("stats", texts.STATS, texts.STATS_EXAMPLES),
        shapes=SHAPES, works=StatsBenchConfig.known_works, peers=StatsBenchConfig.known_peers,
    )  # fmt: skip
    benchmark(
        DivergenceBenchConfig, _run, "distance from a teacher",
        ("divergence", texts.DIVERGENCE, texts.DIVERGENCE_EXAMPLES), shapes=PAIR_SHAPES,
        works=DivergenceBenchConfig.known_works, peers=DivergenceBenchConfig.known_peers,
    )  # fmt: skip
    benchmark(
        ApplyBenchConfig, _run, "any function of the logits", ("apply", texts.APPLY, texts.APPLY_EXAMPLES),
        shapes=APPLY_SHAPES, functions=APPLY_FUNCTIONS,
    )  # fmt: skip
    benchmark(
        LayersBenchConfig, _run, "norm and rotary embedding", ("layers", texts.LAYERS, texts.LAYERS_EXAMPLES),
        ops=LAYER_OPS,
    )  # fmt: skip
    benchmark(
        StepBenchConfig, _run, "a training step, end to end", ("step", texts.STEP, texts.STEP_EXAMPLES),
        peers=STEP_PEERS, policies=[f"{FORM}; {STATES_FORM}"],
    )  # fmt: skip
    benchmark(
        LongestBenchConfig, _run, "the longest sequence that runs",
        ("longest", texts.LONGEST, texts.LONGEST_EXAMPLES), ways=WAYS,
    )  # fmt: skip
    benchmark(
        MlpBenchConfig, _run, "the gated MLP", ("mlp", texts.MLP, texts.MLP_EXAMPLES),
        shapes=MLP_SHAPES, groups=GROUPS, peers=MLP_PEERS,
    )  # fmt: skip
    benchmark(
        ModelsBenchConfig, _run, "what patch does to every model type",
        ("models", texts.MODELS, texts.MODELS_EXAMPLES), kinds=MAPPINGS,
    )  # fmt: skip
    benchmark(
        TuneConfig, main_tune, "tile sizes of the head's GEMM for this GPU", ("tune", texts.TUNE, texts.TUNE_EXAMPLES)
    )


def _begin(run: Main, config: type, examples: str) -> Main:
    """Return a benchmark that first says, where its own sizes would take hours without a GPU, which ones do not."""
    small = [line.strip() for line in examples.splitlines() if "--device cpu" in line]

    def begin(arguments: argparse.Namespace) -> int:
        asked = _given(arguments, config)
        config(**asked)  # what is wrong is said first, and alone
        if small and not asked.keys() & OF_SIZE and not torch.cuda.is_available():
            sys.stderr.write(f"No GPU is here, and these sizes are made for one. A small run: {small[0]}\n")
        return run(arguments)

    return begin


def _run(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit status.

    Raises:
        LowtideError: something the user can fix.
    """
    name = arguments.benchmark
    benchmark = getattr(import_module(f"lowtide.bench.{HOMES.get(name, name)}"), name.upper())
    return int(benchmark.run(arguments.config(**_given(arguments, arguments.config)), _say).status)


def main_tune(arguments: argparse.Namespace) -> int:
    """Tune, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.tune import run

    return int(run(TuneConfig(**_given(arguments, TuneConfig)), _say) is None)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

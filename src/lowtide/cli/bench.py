"""``lowtide bench``: lowtide beside its peers and beside what the hardware allows."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

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
    TokenBenchConfig,
    TuneConfig,
)
from lowtide.bench.divergence import PAIR_SHAPES
from lowtide.bench.models_case import MAPPINGS
from lowtide.bench.models_config import ModelsBenchConfig
from lowtide.bench.peers import PEERS
from lowtide.bench.policies import FORM
from lowtide.bench.problem import SETTINGS
from lowtide.bench.shapes import APPLY_SHAPES, SHAPES
from lowtide.cli.parser import OneLineParser, add_options

_HEAD = """\
Time, peak memory and errors of linear + cross entropy, forward and backward, of lowtide and of everyone who can be
imported, in one process and in turns with the limit: the bare matrix products over chunks of 2048, 4096 or all rows,
whichever is fastest. Peaks are above the inputs and include the gradients; errors are against float32 products. A peer
that fails is a row that says why. The result is DIR/<date>-head-<gpu>.json with the hardware and the versions; set
COMMIT in the environment where the source has no git history. Exit status 1 where lowtide itself failed."""

_EXAMPLES = """\
examples:
  lowtide bench head --sweep
      one shape with everyone, and the picture of time against memory
  lowtide bench head --shape all
      the table of all named shapes
  lowtide bench head --shape 4096,2048,50304 --only lowtide liger --no-error
      a shape of your own, two peers, times and peaks alone
  lowtide bench head --no-table --settings
      other uses of the loss, each beside its own limit
  lowtide bench head --no-table --tokens all
      from 1024 to 262144 tokens"""

_STATS = """\
Time, peak memory and errors of the log-probability of each token's target, with the entropy and without, and of
several targets, forward and backward with random upstream gradients; of backward alone; and without gradients of
these, of all other statistics and of the highest logits, of lowtide and of everyone who can be imported, in one
process and in turns with the limit: the bare matrix products (with gradients four, as no logits are kept, for
backward alone three; else one) over chunks of 2048, 4096 or all rows, whichever is fastest. Peaks are above the
inputs and include the gradients; errors are against float32 products. A peer that fails, or does not offer the work,
is a row that says why. The result is DIR/<date>-stats-<gpu>.json with the hardware and the versions; set COMMIT in
the environment where the source has no git history. Exit status 1 where lowtide itself failed."""

_STATS_EXAMPLES = """\
examples:
  lowtide bench stats
      8192 tokens of a Qwen's head with everyone
  lowtide bench stats --work logprob-entropy --only lowtide trl
      one table with two peers
  lowtide bench stats --shape 64,32,1000 --device cpu --skip compile
      a look at it without a GPU"""

_DIVERGENCE = """\
Time, peak memory and errors of a student's mean divergence from a teacher, forward and backward for the student:
forward KL, reverse KL and JSD(0.5), of lowtide and of everyone who can be imported, in one process and in turns with
the limit: the bare matrix products, the logits of both sides and the student's two gradients. lowtide's first row is
of the mean, lowtide-none of a value for each token. Peaks, errors and rows are those of lowtide bench stats. The result
is DIR/<date>-divergence-<gpu>.json. Exit status 1 where lowtide itself failed."""

_DIVERGENCE_EXAMPLES = """\
examples:
  lowtide bench divergence --shape all
      a Llama of 8B teaches one of 1B, and one of its own size
  lowtide bench divergence --shape 8192,1024,151936,2560 --work jsd
      shapes of your own: tokens, student's hidden size, vocabulary, teacher's hidden size
  lowtide bench divergence --shape 64,32,1000,48 --device cpu --skip compile liger-chunked
      a look at it without a GPU"""

_APPLY = """\
Peak memory, time and errors of functions of the logits, forward and backward: with float32 logits in full, and with
linear_apply in two chunks, by default, and with one result a token. Peaks are above the inputs and include the
gradients; errors of value and gradients (hidden states, weight, bias) are against autograd on exact products in a wider
dtype. The result is DIR/<date>-apply-<gpu>.json with the hardware and the versions; set COMMIT in the environment where
the source has no git history. Exit status 1 where linear_apply failed."""

_APPLY_EXAMPLES = """\
examples:
  lowtide bench apply --shape all
      batch 4, 4096 tokens, hidden size 4096, vocabulary 128256; and batch 64, 512 tokens, 768, 32000
  lowtide bench apply --shape 256,64,4096 --device cpu
      a look at it without a GPU
  lowtide bench apply --no-table --train --grpo
      50 steps of a Llama of 1B, with the stock loss and linear_apply; then with GRPO's objective"""

_LAYERS = """\
Time and bandwidth of what stands between a decoder layer's matrix products, forward and backward: RMS normalisation,
the same with a residual sum before it, and rotary embedding, by lowtide, PyTorch (eager, compiled, its own fused
operation) and Liger. GB/s counts what has to be read and written, not what is. "kept" is what stays for backward beyond
inputs and the residual stream. The result is DIR/<date>-layers-<gpu>.json. Exit status 1 where lowtide failed."""

_LAYERS_EXAMPLES = """\
examples:
  lowtide bench layers
      65536 tokens of a Llama-3.2-1B
  lowtide bench layers --hidden 4096 --head-dim 128
      of a Llama-3-8B
  lowtide bench layers --tokens 256 --hidden 64 --device cpu
      a look at it without a GPU"""

_STEP = """\
Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by transformers as it is,
with Liger's kernels, and patched by lowtide with each activation policy. A peer's layers are checkpointed;
NAME-attention keeps attention's output, NAME-all keeps everything. Each way is a process of its own. The last column is
the time over that of the first way. The result is DIR/<date>-step-<gpu>.json. Exit status 1 where lowtide itself
failed, other than for want of memory."""

_STEP_EXAMPLES = """\
examples:
  lowtide bench step
      a Llama-3.2-1B at three lengths
  lowtide bench step --tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1 --sdpa cudnn
      what a layer keeps, mixed
  lowtide bench step --model lowtide-small --tokens 64 --device cpu --peer stock --policy all input
      a look at it without a GPU"""

_MLP = """\
Time and memory of the gated MLP of today's transformers, forward and backward, at both levels of swiglu_mlp and of
everyone who can be imported, in one process and in turns with the limit: the bare matrix products, 9 a layer, or 11
where gate and up are computed twice. "kept" is what is alive after forward for backward's sake, the input counted;
peaks are above input and weights and include the gradients; "all" is everything, and "again" the same of a step that
adds to the gradients of the one before. A peer that fails is a row that says why. The result is
DIR/<date>-mlp-<dtype>-<gpu>.json with the hardware and the versions; set COMMIT in the environment where the source has
no git history. Exit status 1 where lowtide itself failed."""

_MLP_EXAMPLES = """\
examples:
  lowtide bench mlp --shape models
      a layer of a Llama of 8B and of 70B, at 8192 and 32768 tokens
  lowtide bench mlp --shape published --dtype float32
      the table of a published exercise, in its dtype
  lowtide bench mlp --shape 2,64,32,96,2 --device cpu --skip compile
      a look at it without a GPU"""

_MODELS = """\
What lowtide.patch does to every model type that transformers knows: a tiny model with random weights of each, stock
beside patched, float32 on the CPU; loss and every gradient are compared, and logits watched for. A type is "fused" (no
logits were built), "fell back" (they were, with the reason, and all was equal), "not built" (no tiny model of it could
be made or run; with the reason), "crashed", "timed out", or "different", which is a defect of lowtide. Each is one
process. The result is DIR/<date>-models-cpu.json, written after each type. Exit status 1 where one is different."""

_MODELS_EXAMPLES = """\
examples:
  lowtide bench models --only llama gemma2 t5
      a few types
  lowtide bench models --table docs/supported-models.md --output benchmarks/results
      all of them, and the page of the documents
  lowtide bench models --resume 2026-11-21-models-cpu.json
      go on with a result that was interrupted"""

_TUNE = """\
Find the tile sizes with which the exponential path's GEMM is fastest on this machine's GPU, for GPUs that lowtide's own
table does not know. It serves every head that takes that path, but for one without bias, scale and soft cap on Hopper,
which has a kernel of its own. Each candidate is compiled, its result checked against float32 products, and timed in
turns with torch.mm of the same shape; the first is what is in use now. The fastest is kept in
$XDG_CACHE_HOME/lowtide/gemm.json (~/.cache without it), where every later run looks before the table. Exit status 1
where no candidate ran and was right."""

_TUNE_EXAMPLES = """\
examples:
  lowtide bench tune
      a minute at most, and this GPU is known from then on
  lowtide bench tune --dry-run --seconds 20
      a look at the first candidates, and nothing is kept
  lowtide bench tune --shape 4096,4096,128256
      for the chunks of a large model"""


def add(subparsers: argparse._SubParsersAction[OneLineParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench", help="measure lowtide beside its peers", description="Measure lowtide beside its peers."
    )
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    head = kinds.add_parser(
        "head",
        help="linear + cross entropy",
        description=_HEAD,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = {
        "shapes": ", ".join(SHAPES),
        "peers": ", ".join(PEERS),
        "settings": ", ".join(setting.name for setting in SETTINGS),
    }
    add_options(head, HeadBenchConfig, names)
    head.set_defaults(main=main, parser=head)
    _add_tokens(kinds, StatsBenchConfig, "log-probabilities and entropies", _STATS, _STATS_EXAMPLES, ", ".join(SHAPES))
    pairs = ", ".join(PAIR_SHAPES)
    _add_tokens(kinds, DivergenceBenchConfig, "distance from a teacher", _DIVERGENCE, _DIVERGENCE_EXAMPLES, pairs)
    apply = kinds.add_parser(
        "apply",
        help="any function of the logits",
        description=_APPLY,
        epilog=_APPLY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(apply, ApplyBenchConfig, {"shapes": ", ".join(APPLY_SHAPES), "functions": ", ".join(APPLY_FUNCTIONS)})
    apply.set_defaults(main=main_apply, parser=apply)
    layers = kinds.add_parser(
        "layers",
        help="norm and rotary embedding",
        description=_LAYERS,
        epilog=_LAYERS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(layers, LayersBenchConfig, {"ops": ", ".join(LAYER_OPS)})
    layers.set_defaults(main=main_layers, parser=layers)
    step = kinds.add_parser(
        "step",
        help="a training step, end to end",
        description=_STEP,
        epilog=_STEP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(step, StepBenchConfig, {"peers": ", ".join(STEP_PEERS), "policies": FORM})
    step.set_defaults(main=main_step, parser=step)
    mlp = kinds.add_parser(
        "mlp",
        help="the gated MLP",
        description=_MLP,
        epilog=_MLP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(mlp, MlpBenchConfig, MlpBenchConfig.names())
    mlp.set_defaults(main=main_mlp, parser=mlp)
    models = kinds.add_parser(
        "models",
        help="what patch does to every model type",
        description=_MODELS,
        epilog=_MODELS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(models, ModelsBenchConfig, {"kinds": ", ".join(MAPPINGS)})
    models.set_defaults(main=main_models, parser=models)
    tune = kinds.add_parser(
        "tune",
        help="tile sizes of the head's GEMM for this GPU",
        description=_TUNE,
        epilog=_TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(tune, TuneConfig, {})
    tune.set_defaults(main=main_tune, parser=tune)


def _add_tokens(
    kinds: argparse._SubParsersAction[OneLineParser],
    config: type[TokenBenchConfig],
    help: str,
    description: str,
    examples: str,
    shapes: str,
) -> None:
    parser = kinds.add_parser(
        config.benchmark,
        help=help,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = {"shapes": shapes, "works": ", ".join(config.known_works), "peers": ", ".join(config.known_peers)}
    add_options(parser, config, names)
    parser.set_defaults(main=main_tokens, parser=parser, config=config)


def main(arguments: argparse.Namespace) -> int:
    """Measure the head, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.head import run

    config = HeadBenchConfig(**_given(arguments, HeadBenchConfig))
    results = run(config, _say)
    return int(any(row.failed and row.plan is not None for result in results for row in result.rows))


def main_apply(arguments: argparse.Namespace) -> int:
    """Measure linear_apply, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.apply import run

    told = run(ApplyBenchConfig(**_given(arguments, ApplyBenchConfig)), _say)
    return int(any("failed" in row and "plan" in row for shape in told["shapes"] for row in shape["rows"]))


def main_mlp(arguments: argparse.Namespace) -> int:
    """Measure the gated MLP, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.mlp import run

    rows = run(MlpBenchConfig(**_given(arguments, MlpBenchConfig)), _say)
    return int(any(row.failed and row.own for row in rows))


def main_tokens(arguments: argparse.Namespace) -> int:
    """Measure values of tokens, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench import token_run

    config = arguments.config(**_given(arguments, arguments.config))
    run = token_run.run_stats if isinstance(config, StatsBenchConfig) else token_run.run_divergence
    return int(any(row.failed and row.own for row in run(config, _say)))


def main_layers(arguments: argparse.Namespace) -> int:
    """Measure norm and rotary embedding, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.layers import run

    rows = run(LayersBenchConfig(**_given(arguments, LayersBenchConfig)), _say)
    return int(any("failed" in row for row in rows if row["peer"] == "lowtide"))


def main_step(arguments: argparse.Namespace) -> int:
    """Measure training steps, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.step import OUT_OF_MEMORY, run

    rows = run(StepBenchConfig(**_given(arguments, StepBenchConfig)), _say)
    return int(
        any(row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY for row in rows if row["way"].startswith("lowtide"))
    )


def main_models(arguments: argparse.Namespace) -> int:
    """Check model types, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.models import run
    from lowtide.bench.models_case import DIFFERENT

    rows = run(ModelsBenchConfig(**_given(arguments, ModelsBenchConfig)), _say)
    return int(any(row["status"] == DIFFERENT for row in rows))


def main_tune(arguments: argparse.Namespace) -> int:
    """Tune, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.tune import run

    return int(run(TuneConfig(**_given(arguments, TuneConfig)), _say) is None)


def _given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the options of a dataclass that stand in the arguments."""
    names = {field.name for field in dataclasses.fields(config)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in names
    }


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

"""``lowtide profile``: where a training step's memory and time go, implementation beside implementation."""

from __future__ import annotations

import argparse
import sys

from lowtide.bench.way import IMPLEMENTATIONS, LOWTIDE
from lowtide.cli.parser import OneLineParser, add_options, given
from lowtide.memory.policy_words import FORM
from lowtide.profile.config import ProfileConfig
from lowtide.train.shapes import SHAPES

_DESCRIPTION = """\
Run a few training steps of a model with random weights by each implementation, each in a process of its own, and show
where memory and time go: memory over the time of a step, all implementations in one picture with the phases named
(forward of each layer, head, backward, optimizer); the peak by owner (weights, gradients, optimizer, activations by
layer, head, transients); time by phase, TFLOP/s, MFU. Writes DIR/<date>-profile-<gpu>.json, .png and .html (one page
that opens offline), for each implementation a trace (perfetto.dev) and, on a GPU, PyTorch's memory snapshot
(pytorch.org/memory_viz). An implementation that runs out of memory is drawn up to there. Exit status 1 where lowtide
itself failed, other than for want of memory."""

_EXAMPLES = """\
examples:
  lowtide profile
      the small model on a CPU, or a Llama-3.2-1B at 8192 tokens on a GPU; as it is, and with lowtide
  lowtide profile --model llama-3.2-1b --seq-len 32768 --impl stock,compile,liger,lowtide
      four implementations, layers checkpointed in all of them
  lowtide profile --model llama-3-8b --seq-len 32768 --impl stock,liger,lowtide --policy input-offload --lora 16
      checkpoints in host memory, and adapters
  lowtide profile --model llama-3-8b --seq-len 32768 --policy input-offload --offload-params --impl stock,liger,lowtide
      full training, parameters and optimizer in host memory
  lowtide profile --impl lowtide --seq-len 16384 --include stock.json
      beside an earlier run of the same job
  lowtide profile --impl stock lowtide:input "lowtide:8xattention+8xall" --seq-len 16384
      what layers keep, mixed"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    names = {"names": ", ".join(SHAPES), "impls": ", ".join(IMPLEMENTATIONS), "policies": FORM}
    add_options(parser, ProfileConfig, names)
    parser.set_defaults(main=main, parser=parser)


def main(arguments: argparse.Namespace) -> int:
    """Profile, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.bench.harness import OUT_OF_MEMORY
    from lowtide.profile.run import run

    told = run(ProfileConfig(**given(arguments, ProfileConfig)), _say)
    own = [row for row in told["implementations"] if row["impl"] == LOWTIDE and "failed" in row]
    return int(any(not row["failed"].startswith(OUT_OF_MEMORY) for row in own))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

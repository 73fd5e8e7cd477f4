"""``lowtide profile``: where a training step's memory and time go, implementation beside implementation."""

from __future__ import annotations

import argparse
import shlex

from lowtide.cli.parser import OneLineParser, add_options, given, say
from lowtide.profile.config import ProfileConfig

_DESCRIPTION = """\
Run a few training steps of a model with random weights by each implementation, each in its own process, and show where
memory and time go: memory over the time of a step by owner (weights, gradients, optimizer, activations, head,
transients) with the phases labelled (forward of each layer, head, backward, optimizer), the peak by owner, the time by
phase. Writes DIR/<date>-profile-<gpu>.json, .png and .html (the tables and the plot on one page), for each
implementation a trace (perfetto.dev) and, on a GPU, PyTorch's memory snapshot (pytorch.org/memory_viz). An
implementation that runs out of memory is drawn up to that point. Exit status 1 if lowtide itself failed for another
reason than lack of memory."""

_EXAMPLES = """\
examples:
  lowtide profile
      the small model on a CPU, or a Llama-3.2-1B at 8192 tokens on a GPU: stock, and with lowtide
  lowtide profile --model llama-3.2-1b --seq-len 32768 --impl stock compile liger lowtide
      four implementations, layers checkpointed in all of them
  lowtide profile --model llama-3-8b --seq-len 32768 --impl stock liger lowtide --policy input-offload --lora 16
      checkpoints in host memory, and adapters
  lowtide profile --impl stock lowtide:input "lowtide:8xattention+8xall" --seq-len 16384
      a different policy for each half of the layers"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_options(parser, ProfileConfig)
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Profile, and return the exit status.

    Raises:
        LowtideError: something the user can fix.
    """
    config = ProfileConfig(**given(arguments, ProfileConfig))
    config.check_here()  # before torch is loaded
    from lowtide.bench.harness import Run
    from lowtide.profile.run import profile

    return Run(config, say, shlex.join(["lowtide", *arguments.words]), {}).execute(profile)

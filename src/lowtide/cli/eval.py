"""``lowtide eval``: how well a model predicts text, and lm-evaluation-harness's tasks, without logits."""

from __future__ import annotations

import argparse
import warnings
from importlib import import_module

from lowtide.cli.parser import OneLineParser, add_options, given, say
from lowtide.evaluation.config import EvalConfig
from lowtide.train.quiet import quiet_transformers, stay_offline

_DESCRIPTION = """\
Evaluate a pretrained model without building its logits. With --data: how many tokens were scored, their mean loss (nats
per token), the perplexity, bits per byte of the UTF-8 text, and the peak memory. Every token of a document is scored
once, the first one from a beginning-of-sequence token, in windows of --seq-len tokens. With --tasks: the tasks of
lm-evaluation-harness by its own hf model, and its own table. Nothing is downloaded; to let tasks download their data,
set HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0 in the environment."""

_EXAMPLES = """\
examples:
  lowtide eval --model ./Llama-3.2-1B --data book.txt
      the perplexity of a text, in windows of 1024 tokens
  lowtide eval --model ./Llama-3.2-1B --data books/ --seq-len 8192 --stride 4096 --batch-size 1 --json eval.json
      each token with at least 4096 tokens before it, once that many are there; the figures as a file
  lowtide eval --model ./Llama-3.2-1B-Instruct --data chats.jsonl --dtype bfloat16
      conversations, by the chat template
  lowtide eval --model ./Llama-3.2-1B --tasks hellaswag,arc_easy --batch-size 32
      tasks of lm-evaluation-harness
  lowtide eval --model ./Llama-3.2-1B --data book.txt --no-patch
      the stock model, to compare the memory"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_options(parser, EvalConfig, {})
    parser.set_defaults(main=main, parser=parser)


def main(arguments: argparse.Namespace) -> int:
    """Evaluate, and return the exit status.

    Raises:
        LowtideError: something the user can fix.
    """
    config = EvalConfig(**given(arguments, EvalConfig))
    config.check_here()  # before torch is loaded
    stay_offline(pushes=False)
    quiet_transformers()
    if config.tasks:  # a package that is missing is reported before a model is loaded
        import_module("lm_eval")
    from lowtide.evaluation.run import run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        run(config, say)
    return 0

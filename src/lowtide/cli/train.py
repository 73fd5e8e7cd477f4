"""``lowtide train``: a training run, or the same run with and without lowtide."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import warnings

from lowtide.cli.parser import OneLineParser, add_options, say
from lowtide.train.arguments import RunArguments, check_early, launch, parse, peek
from lowtide.train.ranks import is_first_rank, quiet
from lowtide.train.shapes import SHAPES

_DESCRIPTION = f"""\
Train a causal language model whose logits are never built. A pretrained model is fine-tuned by TRL's SFTTrainer, with
every option of `trl sft` under its own name; random weights are trained on text by transformers' Trainer, with every
option of its TrainingArguments. Without arguments, a small Llama is trained on the sources of this Python's standard
library, in about two minutes on two CPU cores. Checkpoints and the final model are in the stock format.

`trl sft --help` lists TRL's options: --model_name_or_path, --dataset_name, --output_dir, --max_length, --learning_rate,
--per_device_train_batch_size, --packing, --use_peft, --load_in_4bit, --config run.yaml, --accelerate_config fsdp2, ...
Defaults differ in few: no bf16 where there is no GPU, lora_dropout 0, a NaN is logged as one.
Random weights have --model_name_or_path (a config.json or a name from below), --dataset_name (text files),
--max_length, --dtype, --attn_implementation and --tokenizer_name; the schedule is a cosine of 500 steps. The names:
{textwrap.fill(", ".join(SHAPES), 120, break_on_hyphens=False)}"""

_EXAMPLES = """\
examples:
  lowtide train
      the small run
  lowtide train --compare --json compare.json
      the same with and without lowtide, interleaved; exit status 1 where the losses differ
  lowtide train --model_name_or_path ./Llama-3.2-1B-Instruct --dataset_name chats.jsonl --max_length 4096 \\
      --learning_rate 1e-5 --num_train_epochs 2 --assistant_only_loss --held-out 50 --output_dir my-run
      fine-tune on conversations, with loss on the assistant's turns only
  lowtide train --model_name_or_path ./Llama-3.2-1B --dataset_name chats.jsonl --use_peft --lora_r 16 \\
      --dtype bfloat16 --learning_rate 2e-4 --output_dir my-adapter
      adapters
  lowtide train --config run.yaml --learning_rate 1e-5
      options from a file, which the command line overrides
  lowtide train --model_name_or_path ./Llama-3.1-8B --dataset_name books/ --packing --max_length 16384 \\
      --learning_rate 1e-5 --memory-budget 75GiB --output_dir my-run --resume_from_checkpoint auto
      each layer saves for backward what fits; repeated after a crash or Ctrl-C, the command resumes
  lowtide train --accelerate_config fsdp2 --num_processes 8 --model_name_or_path ./Llama-3.1-8B \\
      --dataset_name books/ --learning_rate 1e-5 --output_dir my-run
      eight GPUs that shard weights, gradients and optimizer states; also by accelerate launch and torchrun

SIGTERM or Ctrl-C ends a run after the current step, with a checkpoint; a second Ctrl-C ends it at once.

Exit status: 0; 1: --compare found a difference; 2: an error, in one line; 3: out of memory, with what would fit; 130:
Ctrl-C; 143: SIGTERM.

On a CPU that other programs use too, set OMP_WAIT_POLICY=PASSIVE in the environment: threads that spin while they wait
can make training ten times slower there."""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser, which has lowtide's own options for the help; `parse` reads all of them."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_options(parser, RunArguments)
    parser.set_defaults(main=main, flags={"model": "--model_name_or_path"})


def main(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status.

    Raises:
        LowtideError: an error that the user can correct.
        KeyboardInterrupt: with what to do next as its text.
    """
    words = arguments.words[1:]
    early = peek(words)
    if launch(early, words):
        return 0
    # Nothing is sent, and the Hub is called only where the user configured it or the run pushes its model there. Its
    # client, which `check_early` may import, reads the environment once.
    offline = str(int(early.get("push_to_hub", "false").lower() != "true"))
    for name, value in (
        ("HF_HUB_OFFLINE", offline),
        ("HF_DATASETS_OFFLINE", offline),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ):
        os.environ.setdefault(name, value)
    libraries = "torch, transformers, datasets and TRL" if check_early(early) else "torch and transformers"
    if is_first_rank():
        say(f"loading {libraries} ...\n")
    with warnings.catch_warnings():
        quiet(bars=sys.stderr.isatty())
        from lowtide.train import compare, train

        found = parse(words)
        if not found.run.compare:
            train(found)
            return 0
        comparison = compare(found)
        say(str(comparison))
        return int(not comparison.equal)

"""``lowtide train``: a training run, or the same run with and without lowtide."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from lowtide.cli.parser import OneLineParser, add_options
from lowtide.train.config import TrainConfig
from lowtide.train.corpus import text_files
from lowtide.train.shapes import SHAPES, config_file

_DESCRIPTION = """\
Train a causal language model whose logits are never built. With no argument, a small Llama is trained on the sources of
this Python's standard library, in about two minutes on two CPU cores. The loop is transformers.Trainer: start it with
torchrun or `accelerate launch` for several GPUs, FSDP2 or DeepSpeed. Checkpoints and the final model (in DIR/model) are
in the stock format and load with AutoModelForCausalLM.from_pretrained."""

_EXAMPLES = """\
examples:
  lowtide train
      the small run
  lowtide train --compare --json compare.json
      the same with and without lowtide, side by side; exit status 1 where the losses differ
  lowtide train --model ./Llama-3.2-1B --data books/ --seq-len 8192 --batch-size 2 --lr 1e-5 --output my-run
      go on training a downloaded model on the text files in a folder
  lowtide train --model qwen3-0.6b --tokenizer ./Qwen3-0.6B --data part-1.jsonl part-2.jsonl --max-steps 10000
      a built-in shape with random weights
  lowtide train --model ./Llama-3.2-1B-Instruct --data chats.jsonl --seq-len 4096 --lr 2e-4 \\
      --lora-rank 16 --lora-merge --weights bfloat16 --output my-adapter
      adapters on conversations, loss on the assistant's turns alone
  lowtide train --model ./Llama-3.1-8B --data books/ --seq-len 16384 --lr 1e-5 --memory-budget 75GiB \\
      --output my-run
      each layer keeps for backward what fits; `lowtide plan` shows why
  lowtide train --resume --output my-run
      go on from the last whole checkpoint, after a crash or Ctrl-C; the settings are those it began with
  torchrun --nproc-per-node 8 --no-python lowtide train --model ./Llama-3.1-8B --data books/ --output my-run \\
      --parallel fsdp2 --lr 1e-5 --trainer-args weight_decay=0.1
      eight GPUs that share out weights, gradients and optimizer
  accelerate launch --config_file fsdp2.yaml --num_processes 8 -m lowtide train --model ./Llama-3.1-8B \\
      --data books/ --output my-run --lr 1e-5
      the same by accelerate, after lowtide train --parallel fsdp2 --write-launch-file fsdp2.yaml
  torchrun --nproc-per-node 4 --no-python lowtide train --resume --output my-run
      go on with it on four GPUs: the steps stay as they were

SIGTERM, as clusters send it before they take a machine away, ends a run after the step it is in, with a checkpoint.
More of them change nothing; SIGKILL ends it at once.

Exit status: 0; 1: --compare found a difference; 2: an error, in one line; 3: out of memory, with what would fit; 130:
Ctrl-C; 143: SIGTERM.

On a CPU that other programs use too, set OMP_WAIT_POLICY=PASSIVE in the environment: threads that spin while they wait
can make training ten times slower there. --compare runs both as the environment says."""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_options(parser, TrainConfig, {"names": ", ".join(SHAPES)})
    parser.add_argument(
        "--compare", action="store_true", help="train twice, with and without lowtide; nothing is saved"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --compare: write the numbers here")
    parser.add_argument(
        "--write-launch-file",
        type=Path,
        metavar="FILE",
        help="write what --parallel means for `accelerate launch --config_file FILE`, and train nothing",
    )
    planned = {"budget_gib": "memory_budget, in GiB", "host_gib": "host_budget, in GiB"}  # the planner's own words
    parser.set_defaults(main=main, parser=parser, options_of=planned)


def main(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status.

    Raises:
        LowtideError: something the user can mend.
        KeyboardInterrupt: with what to do next as its text.
    """
    from rich.console import Console

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if arguments.json is not None and not arguments.compare:
        raise _usage("json", "--compare beside it", "--json alone")
    if arguments.compare and {"resume", "output", "patch"} & set(given):
        raise _usage("compare", "no --resume, --output or --no-patch beside it", "one of them")
    if arguments.write_launch_file is not None:
        return _write_launch_file(arguments.write_launch_file, given)
    config = None if given.get("resume") else _checked(TrainConfig(**given))
    console = Console()
    if "transformers" not in sys.modules and os.environ.get("RANK", "0") == "0":
        console.print("loading torch and transformers ...")
    # peft imports it wherever it is installed, and on a CPU it logs what a training run has no use for
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from lowtide.train.progress import quiet_transformers

    quiet_transformers()
    if arguments.compare and config is not None:
        from lowtide.train import compare

        return 0 if compare(config, console=console, json_file=arguments.json).equal else 1
    return _train(config, given, console)


def _checked(config: TrainConfig) -> TrainConfig:
    """Return a config whose model and data are there, before seconds are spent on loading libraries."""
    if config.model not in SHAPES:
        config_file(config.model)
    text_files(config.data)
    return config


def _train(config: TrainConfig | None, given: dict[str, Any], console: Any) -> int:
    from lowtide.train import train
    from lowtide.train.ranks import is_first_rank
    from lowtide.train.resuming import resumed_config
    from lowtide.train.run import finish_complete_run

    if config is None:
        config = resumed_config(given)
        if model := finish_complete_run(config):
            if is_first_rank():
                console.print(f"nothing is left of {config.max_steps} steps; the model is in {model}", soft_wrap=True)
            return 0
    train(config, console=console)
    return 0


def _write_launch_file(file: Path, given: dict[str, Any]) -> int:
    from lowtide.train.parallel import AUTO, launch_file

    name = given.get("parallel", AUTO)
    if name == AUTO:
        raise _usage("write_launch_file", "--parallel with the name of an engine beside it", "none")
    file.write_text(launch_file(name))
    start = f"accelerate launch --config_file {shlex.quote(str(file))} --num_processes N -m lowtide train ..."
    sys.stdout.write(f"written: {file}. To start a run with it: {start}\n")
    return 0


def _usage(name: str, expected: str, got: str) -> Exception:
    from lowtide.errors import ArgumentValueError, message

    return ArgumentValueError(message(name, expected, got))

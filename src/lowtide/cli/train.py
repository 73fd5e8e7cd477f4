"""``lowtide train``: a training run, or the same run with and without lowtide."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

from lowtide.cli.parser import OneLineParser, add_options, given
from lowtide.errors import ArgumentValueError, message
from lowtide.train.config import NEWEST_IF_ANY, TrainConfig
from lowtide.train.files import find_data
from lowtide.train.options import check_pretraining, parse
from lowtide.train.quiet import stay_offline
from lowtide.train.shapes import SHAPES, config_file

_DESCRIPTION = """\
Train a causal language model whose logits are never built. A pretrained model is fine-tuned by TRL's SFTTrainer; random
weights are trained by transformers' Trainer. Without arguments, a small Llama is trained on the sources of this
Python's standard library, in about two minutes on two CPU cores. Start it with torchrun or `accelerate launch` for
several GPUs, FSDP2 or DeepSpeed. Checkpoints and the final model (in DIR/model) are in the stock format.

Besides the options below, every option of TRL's SFTConfig and ModelConfig and of transformers' TrainingArguments is an
option here, with dashes or underscores: --per_device_train_batch_size, --gradient_accumulation_steps,
--num_train_epochs, --packing, --assistant_only_loss, --use_peft, --load_in_4bit, --report_to, ... The defaults are
TRL's and transformers', except: logging_steps 1, save_steps and eval_steps 100, save_total_limit 2, bf16 on GPUs that
have it, gradient_checkpointing off, text files packed (wrapped), lora_dropout 0, no telemetry, and from random weights
a cosine schedule."""

_EXAMPLES = """\
examples:
  lowtide train
      the small run
  lowtide train --compare --json compare.json
      the same with and without lowtide, interleaved; exit status 1 where the losses differ
  lowtide train --model ./Llama-3.2-1B --data books/ --seq-len 8192 --per_device_train_batch_size 2 --lr 1e-5 \\
      --max-steps 2000 --output my-run
      go on training a pretrained model on the text files in a folder
  lowtide train --model ./Llama-3.2-1B-Instruct --data chats.jsonl --seq-len 4096 --lr 2e-4 --num_train_epochs 2 \\
      --assistant_only_loss --use_peft --lora_r 16 --dtype bfloat16 --output my-adapter
      adapters on conversations, loss on the assistant's turns only
  lowtide train --config run.yaml --lr 1e-5
      options from a file, which the command line overrides
  lowtide train --model qwen3-0.6b --tokenizer ./Qwen3-0.6B --data part-1.jsonl part-2.jsonl --max-steps 10000
      a built-in shape with random weights
  lowtide train --model ./Llama-3.1-8B --data books/ --seq-len 16384 --lr 1e-5 --memory-budget 75GiB --output my-run
      each layer saves for backward what fits; `lowtide plan` shows why
  lowtide train --resume_from_checkpoint true --output my-run
      resume from the last complete checkpoint, after a crash or Ctrl-C, with the settings it began with; `auto` in
      place of `true` begins the run if there is no checkpoint, for a whole command that a launcher or cluster repeats
  torchrun --nproc-per-node 8 --no-python lowtide train --model ./Llama-3.1-8B --data books/ --output my-run \\
      --parallel fsdp2 --lr 1e-5 --weight_decay 0.1
      eight GPUs that shard weights, gradients and optimizer states
  accelerate launch --config_file fsdp2.yaml --num_processes 8 -m lowtide train --model ./Llama-3.1-8B \\
      --data books/ --output my-run --lr 1e-5
      the same by accelerate, after lowtide train --parallel fsdp2 --write-launch-file fsdp2.yaml

SIGTERM or Ctrl-C ends a run after the current step, with a checkpoint; a second Ctrl-C ends it at once.

Exit status: 0; 1: --compare found a difference; 2: an error, in one line; 3: out of memory, with what would fit; 130:
Ctrl-C; 143: SIGTERM.

On a CPU that other programs use too, set OMP_WAIT_POLICY=PASSIVE in the environment: threads that spin while they wait
can make training ten times slower there."""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add_options(parser, TrainConfig, {"names": ", ".join(SHAPES)})
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of options and their values")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train twice, with lowtide and without (for fine-tuning: with TRL's own head); nothing is saved",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --compare: write the figures here")
    parser.add_argument(
        "--write-launch-file",
        type=Path,
        metavar="FILE",
        help="write what --parallel means for `accelerate launch --config_file FILE`, and train nothing",
    )
    planner = {"budget_gib": "memory_budget, in GiB", "host_gib": "host_budget, in GiB"}  # the planner's own names
    parser.set_defaults(main=main, parser=parser, options_of=planner, unknown=[])


def main(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status.

    Raises:
        LowtideError: an error that the user can correct.
        KeyboardInterrupt: with what to do next as its text.
    """
    own = given(arguments, TrainConfig)
    if arguments.json is not None and not arguments.compare:
        raise ArgumentValueError(message("json", "--compare beside it", "--json alone"))
    if arguments.write_launch_file is not None:
        return _write_launch_file(arguments.write_launch_file, own.get("parallel", "auto"))
    config = _config(own, arguments)
    if arguments.compare and (config.resumes_from or config.output is not None or not config.patch):
        expected = "no --resume_from_checkpoint, --output or --no-patch beside it"
        raise ArgumentValueError(message("compare", expected, "one of them"))
    return _run(config, compares=arguments.compare, json_file=arguments.json)


def _config(own: dict[str, Any], arguments: argparse.Namespace) -> TrainConfig:
    """Return the run's config, checked as far as that takes no library; a resumed run's data is in its folder."""
    settings, options = parse(own, arguments.unknown, arguments.config)
    config = TrainConfig(**settings, options=options)
    stay_offline(pushes=str(options.get("push_to_hub", "false")).lower() == "true")
    if config.resumes_from in (None, NEWEST_IF_ANY):
        if config.model not in SHAPES:
            config_file(config.model)
        if not config.fine_tunes:
            check_pretraining(options)
        find_data(config.data)
    return config


def _run(config: TrainConfig, *, compares: bool, json_file: Path | None) -> int:
    from rich.console import Console

    from lowtide.train.parallel import is_first_rank
    from lowtide.train.quiet import quiet_transformers

    console = Console()
    if "transformers" not in sys.modules and is_first_rank():
        libraries = "torch, transformers, datasets and TRL" if config.fine_tunes else "torch and transformers"
        console.print(f"loading {libraries} ...")
    quiet_transformers()
    from lowtide.train import compare, train

    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        if compares:
            return 0 if compare(config, console=console, json_file=json_file).equal else 1
        train(config, console=console)
    return 0


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"lowtide train: {message}\n")  # without the file and line that raised it


def _write_launch_file(file: Path, name: object) -> int:
    from lowtide.train.parallel import AUTO, launch_file

    if name == AUTO:
        raise ArgumentValueError(
            message("write_launch_file", "--parallel with the name of an engine beside it", "none")
        )
    file.write_text(launch_file(str(name)))
    start = f"accelerate launch --config_file {shlex.quote(str(file))} --num_processes N -m lowtide train ..."
    sys.stdout.write(f"written: {file}. To start a run with it: {start}\n")
    return 0

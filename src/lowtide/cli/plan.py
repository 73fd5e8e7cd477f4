"""``lowtide plan``: what fits in a budget of memory, and the fastest way to spend it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from lowtide.cli.parser import OneLineParser, add_options, given
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.output_file import check_output_file
from lowtide.measure.units import gib
from lowtide.plan.arguments import Adapters, PlanArguments
from lowtide.plan.config import nf4, read_settings, with_layers
from lowtide.plan.gpus import gpu_named
from lowtide.plan.run_file import RunFile, read_run
from lowtide.train.shapes import SHAPES, config_file

LEAST_WIDTH = 60  # letters: below this a terminal breaks the tables anyway
_DESCRIPTION = """\
Predict the memory and the time of a language model's training step, and choose what each layer saves for backward so
that the step is the fastest that fits in a budget of GPU memory, and in one of pinned host memory. From the model's
config alone: no weights, no GPU. Prints the answer, the bytes of every phase, and what is assumed."""

_EXAMPLES = """\
examples:
  lowtide plan --model llama-3.2-1b --seq-len 32768 --budget 16GiB --dtype bfloat16
      the fastest step in 16 GiB of an H100
  lowtide plan --model ./Llama-3.1-8B --seq-len 8192 --optimizer adamw-8bit --host 64GiB --gpu h200
      a downloaded model's config; layers and optimizer states may be offloaded into 64 GiB of host memory
  lowtide plan --model config.json --seq-len 4096 --batch-size 8 --gpu rtx4090 --json plan.json
      the figures as a file
  lowtide plan --model llama-3-8b --seq-len 8192 --lora-rank 16 --load-in-4bit --gpu rtx4090
      QLoRA: adapters over a frozen model in NF4
  lowtide plan sft.yaml --gpu rtx5090
      a run of trl sft or axolotl, with the length, batch, adapters and DeepSpeed config that it names
  lowtide plan --model llama-3-8b --seq-len 8192 --gpu h200 --gpus 2
      two GPUs with a sequence each, among which FSDP2 shards the model
  lowtide plan --model llama-3-8b --layers 8 --seq-len 16384 --budget 40GiB --dtype bfloat16 --gpu cuda --check
      real steps on the GPU at hand, predicted beside measured"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    about = "a config of trl sft, lowtide train or axolotl, with its DeepSpeed JSON"
    parser.add_argument("run", nargs="?", metavar="RUN.YAML", help=about)
    about = f"a config.json, a folder with one, or one of {', '.join(SHAPES)}"
    parser.add_argument("--model", metavar="MODEL", help=about)
    parser.add_argument("--load-in-4bit", action="store_true", help="the frozen layers in 4 bits, with --lora-rank")
    parser.add_argument("--layers", type=int, metavar="N", help="plan for so many layers instead of the model's")
    about = "write the plan as JSON; - is the standard output, and the text then goes to stderr"
    parser.add_argument("--json", metavar="FILE", help=about)
    about = "run real steps with random weights on the GPU at hand, and compare"
    parser.add_argument("--check", action="store_true", help=about)
    for config in (PlanArguments, Adapters):
        add_options(parser, config)
    parser.set_defaults(main=main, flags={"config": "--model", "adapters": "--lora-rank"})


def main(arguments: argparse.Namespace) -> int:
    """Plan, and return the exit status: 1 where a checked step took more than the budget.

    Raises:
        LowtideError: something that the user can fix.
    """
    to_stdout = arguments.json == "-"
    check_output_file("json", None if to_stdout else arguments.json)  # before minutes of a check are spent
    if (file := arguments.run) in SHAPES:
        raise ArgumentValueError(message("run", "a YAML file", file, f"Give --model {file}."))
    run = RunFile() if file is None else read_run(Path(file))
    step, settings = _asked(arguments, run)
    if sys.stderr.isatty():  # importing and tracing take seconds
        sys.stderr.write(f"lowtide plan: {settings['model_type']}: one layer of each kind is traced, without weights\n")
    from lowtide.plan import plan_memory

    plan = plan_memory(settings, **vars(step))
    report, status, out = plan.to_dict(), 0, sys.stderr if to_stdout else sys.stdout
    width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) if out.isatty() else None
    out.write(f"{plan.text(width, checkpointed=run.checkpointed)}\n")
    if arguments.check:
        from lowtide.bench.plan_check import check_plan, check_text

        report["check"] = checked = check_plan(settings, plan)
        status = int(checked["peak_gib"] > gib(plan.budget_bytes))
        out.write(f"\n{check_text(checked)}\n")
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    elif arguments.json is not None:
        Path(arguments.json).write_text(text)
        out.write(f"written: {arguments.json}\n")
    return status


def _asked(arguments: argparse.Namespace, run: RunFile) -> tuple[PlanArguments, dict[str, Any]]:
    """Return what is to be planned, and the model's config, for which transformers is loaded once all else is right."""
    own, lora, model = vars(arguments), given(arguments, Adapters), arguments.model or run.model
    values = {**run.arguments, **given(arguments, PlanArguments)}
    for name, there in (("model", model or None), ("seq_len", values.get("seq_len"))):
        if there is None:
            raise ArgumentValueError(message(name, "one, or the config of a run", "none"))
    for name, other in (("targets", "rank"), ("parallel", "gpus"), ("link", "gpus")):
        if name in own and other not in own:
            raise ArgumentValueError(message(name, f"{arguments.parser.flag_of(other)} beside it", "none"))
    if lora:
        values["adapters"] = Adapters(**lora)
    if not own.get("device", "cuda").lower().startswith("cuda"):
        gpu_named(own["device"])
    step = PlanArguments(**values)
    if arguments.check and (step.attention_mask or not step.fused_mlp or step.gpus > 1):
        raise ArgumentValueError(message("check", "a plan of a patched model, without a mask, on one GPU", "another"))
    settings = read_settings(SHAPES.get(model) or config_file(model))
    if arguments.layers is not None:
        settings = with_layers(settings, arguments.layers)
    if arguments.load_in_4bit or run.four_bit:
        settings["quantization_config"] = nf4(nested=run.nested)
    return step, settings

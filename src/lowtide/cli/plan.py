"""``lowtide plan``: what fits in a budget of memory, and the fastest way to spend it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.parser import OneLineParser
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.output_files import check_output_files
from lowtide.measure.units import gib
from lowtide.plan.arguments import DTYPES, OPTIMIZERS, PARALLEL, Adapters, PlanArguments
from lowtide.plan.config import nf4, read_settings, with_layers
from lowtide.plan.gpus import GPUS, gpu_named
from lowtide.plan.run_file import RunFile, default_targets, read_run
from lowtide.train.shapes import DEFAULT, SHAPES, VOCAB_SIZE, config_file

if TYPE_CHECKING:
    from lowtide.plan import MemoryPlan

_NO_RUN = RunFile("", {}, four_bit=False, nested=False, checkpointed=False, default_targets=False)
LEAST_WIDTH = 60  # letters: below this a terminal breaks the tables anyway
_DESCRIPTION = """\
Predict the memory and the time of a language model's training step, and choose what each layer saves for backward so
that the step is the fastest that fits in a budget of GPU memory, and in one of pinned host memory. From the model's
config alone: no weights, no GPU. Prints the answer, the bytes of every phase, and what is assumed."""

_OPTIONS = {  # plan_memory's arguments, where the option is called otherwise
    "budget_gib": "budget, in GiB",
    "host_gib": "host, in GiB",
    "device": "gpu",
    "adapters": "lora_rank",
    "model_or_config": "model",
    "rank": "lora_rank",
    "targets": "lora_targets",
}

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
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    names = {"gpus": GPUS, "dtypes": DTYPES, "optimizers": OPTIMIZERS, "parallel": PARALLEL}
    add(
        "run",
        nargs="?",
        metavar="RUN.YAML",
        help="a config of trl sft, lowtide train or axolotl, with its DeepSpeed JSON",
    )
    add("--model", metavar="MODEL", help=f"a config.json, a folder with one, or one of {shapes}")
    for each in fields(PlanArguments):
        if not (about := each.metadata):
            continue
        flag = about["flag"] or "--" + each.name.replace("_", "-")
        given: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": about["help"]}
        for name, known in names.items():
            given["help"] = given["help"].replace(f"{{{name}}}", ", ".join(known))
        given["help"] = given["help"].replace("%", "%%")
        if isinstance(each.default, bool):
            flag = flag.replace("--", "--no-") if each.default else flag
            add(flag, action=f"store_{str(not each.default).lower()}", **given)
            continue
        if each.default not in (None, MISSING):
            given["help"] += f" (default: {each.default})"
        kind = int if about["metavar"] is None else str
        add(flag, type=kind, metavar=about["metavar"] or "N", **given)
    add("--no-autocast", dest="autocast", action="store_false", default=None, help="GEMMs in float32 as well")
    add("--grad-accum", type=int, metavar="N", help="backward passes per step; gradients stay (default: 1)")
    add("--lora-rank", type=int, metavar="N", help="train adapters of this rank and freeze the model")
    add("--lora-targets", nargs="+", metavar="NAME", help="what is adapted (default: all linear layers)")
    add("--load-in-4bit", action="store_true", help="the frozen layers in 4 bits (QLoRA), with --lora-rank")
    add("--layers", type=int, metavar="N", help="plan for so many layers instead of the model's")
    add("--json", metavar="FILE", help="write the plan as JSON; - is the standard output, which then has nothing else")
    add("--check", action="store_true", help="run real steps with random weights on the GPU at hand, and compare")
    parser.set_defaults(main=main, parser=parser, options_of=_OPTIONS)


def main(arguments: argparse.Namespace) -> int:
    """Plan, and return the exit status: 1 where a checked step took more than the budget.

    Raises:
        LowtideError: something that the user can fix.
    """
    check_output_files(json=None if arguments.json == "-" else arguments.json)  # before minutes of a check are spent
    name, run = arguments.run, _NO_RUN
    if name is not None:
        if name in SHAPES or Path(name, "config.json").is_file():
            raise ArgumentValueError(message("run", "a YAML file", name, f"Give --model {name}."))
        run = read_run(Path(name))
    for name, said in (("model", "--model"), ("seq_len", "--seq-len")):
        if run is _NO_RUN and getattr(arguments, name, None) is None:
            raise ArgumentValueError(message(name, f"{said}, or the config of a run", "none"))
    step = _step(arguments, run.arguments)
    settings = _settings(arguments, run)
    if run.default_targets and arguments.lora_rank is None and step.adapters is not None:
        step = replace(step, adapters=replace(step.adapters, targets=default_targets(settings["model_type"])))
    if sys.stderr.isatty():  # importing and tracing take seconds
        sys.stderr.write(f"lowtide plan: {settings['model_type']}: one layer of each kind is traced, without weights\n")
    from lowtide.plan.planning import plan_step

    return _write(arguments, settings, plan_step(settings, step), checkpointed=run.checkpointed)


def _step(arguments: argparse.Namespace, of_run: dict[str, Any]) -> PlanArguments:
    """Return what is to be planned; torch is not needed for it."""
    rank, targets, passes = arguments.lora_rank, arguments.lora_targets, arguments.grad_accum
    names = {each.name for each in fields(PlanArguments)} - {"options", "adapters"}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    alone = given.get("gpus", 1) == 1
    for name, needs, lacks in (
        ("lora_targets", "--lora-rank", rank is None),
        ("parallel", "--gpus above 1", alone),
        ("link", "--gpus above 1", alone),
    ):
        if lacks and getattr(arguments, name, None) is not None:
            raise ArgumentValueError(message(name, f"{needs} beside it", "none"))
    if not given.get("device", "cuda").lower().startswith("cuda"):
        gpu_named(given["device"])
    if rank is not None:
        given["adapters"] = Adapters(rank, tuple(targets or ()))
    if passes is not None:
        if passes < 1:
            raise ArgumentValueError(message("grad_accum", "at least 1", str(passes)))
        given["keep_gradients"] = passes > 1
    step = PlanArguments(**{**of_run, **given})
    others = {"--load-in-4bit": arguments.load_in_4bit, "--attention-mask": step.attention_mask}
    others |= {"--no-fused-mlp": not step.fused_mlp, "--gpus": step.gpus > 1}
    if arguments.check and (got := next((name for name, is_given in others.items() if is_given), None)):
        expected = "a plan of weights in 16 or 32 bits, patched, without a mask, on one GPU"
        raise ArgumentValueError(message("check", expected, got))
    return step


def _settings(arguments: argparse.Namespace, run: RunFile) -> dict[str, Any]:
    """Return the config of the model, with the requested number of layers, in 4 bits if these are asked for."""
    name = arguments.model or run.model
    named = {"vocab_size": VOCAB_SIZE} if name == DEFAULT else {}
    settings = read_settings({**named, **SHAPES[name]} if name in SHAPES else config_file(name))
    settings = settings if arguments.layers is None else with_layers(settings, arguments.layers)
    if arguments.load_in_4bit or run.four_bit:
        settings["quantization_config"] = nf4(nested=run.nested)
    return settings


def _write(arguments: argparse.Namespace, settings: dict[str, Any], plan: MemoryPlan, *, checkpointed: bool) -> int:
    """Print the plan, check it and write its file, as the arguments say; return the exit status."""
    report, status, quiet = plan.to_dict(), 0, arguments.json == "-"
    if not quiet:
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        sys.stdout.write(f"{plan.text(width, checkpointed=checkpointed)}\n")
    if arguments.check:
        from lowtide.bench.plan_check import check_plan, check_text

        checked = check_plan(settings, plan)
        report["check"] = checked
        status = int(checked["peak_gib"] > gib(plan.budget_bytes))
        sys.stdout.write("" if quiet else f"\n{check_text(checked)}\n")
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if quiet:
        sys.stdout.write(text)
    elif arguments.json is not None:
        Path(arguments.json).write_text(text)
        sys.stdout.write(f"written: {arguments.json}\n")
    return status

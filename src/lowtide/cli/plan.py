"""``lowtide plan``: what fits in a budget of memory, and the fastest way to spend it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.parser import OneLineParser
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import parse_gib
from lowtide.memory.planner.adapters import PROJECTIONS, Adapters, numbers_alone
from lowtide.memory.planner.gpus import GPUS, gpu_named
from lowtide.memory.planner.optimizers import DTYPES, OPTIMIZERS
from lowtide.memory.planner.shapes import read_settings, read_shape, with_layers
from lowtide.train.config import TrainConfig
from lowtide.train.shapes import DEFAULT, SHAPES, config_file

if TYPE_CHECKING:
    from lowtide.memory import MemoryPlan

LEAST_WIDTH = 60  # letters: below this a terminal breaks the tables anyway
_DESCRIPTION = """\
Say what a training step of a language model takes, and what each layer should keep for backward so that the step is
the fastest that fits in a budget of GPU memory, and in one of pinned host memory. From the model's config alone:
no weights, no GPU. The table has the bytes of every phase, the ladder of what a layer can keep, the front of memory
against time, the longest sequence and the largest batch that fit, and the lines of Python that do it."""

_OPTIONS = {  # plan_memory's arguments, where the option is called otherwise
    "budget_gib": "budget, in GiB",
    "host_gib": "host, in GiB",
    "device": "gpu",
    "model_or_config": "model",
    "rank": "lora_rank",
    "targets": "lora_targets",
}

_EXAMPLES = """\
examples:
  lowtide plan --model llama-3.2-1b --seq-len 32768 --budget 16GiB
      the fastest step in 16 GiB of an H100
  lowtide plan --model ./Llama-3.1-8B --seq-len 8192 --optimizer adamw-8bit --host 64GiB --gpu h200
      a downloaded model's config; layers and optimizer states may be offloaded into 64 GiB of host memory
  lowtide plan --model config.json --seq-len 4096 --batch-size 8 --gpu rtx4090 --json plan.json --png plan.png
      the numbers and the picture as files
  lowtide plan --model llama-3-8b --layers 8 --seq-len 16384 --budget 40GiB --gpu cuda --check
      rates measured on the GPU at hand; one real step, predicted beside measured"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add = parser.add_argument
    names = ", ".join(SHAPES)
    add("--model", required=True, metavar="MODEL", help=f"a config.json, a folder with one, or one of {names}")
    add("--seq-len", required=True, type=int, metavar="N", help="tokens of a sequence")
    add("--batch-size", default=1, type=int, metavar="N", help="sequences of a step (default: 1)")
    add(
        "--budget", metavar="SIZE", help="GPU memory for tensors, such as 40GiB, 40GB or 40 (GiB) (default: 93%% of it)"
    )
    add(
        "--host",
        default="0GiB",
        metavar="SIZE",
        help="pinned host memory for offloaded layers and optimizer states (default: 0GiB)",
    )
    add(
        "--no-offload-states",
        dest="offload_states",
        action="store_const",
        const=False,
        default="auto",
        help="spend --host on layers alone",
    )
    gpus = ", ".join(GPUS)
    add("--gpu", metavar="NAME", help=f"{gpus}; or cuda: the one at hand, measured (default: that by name, or h100)")
    add("--dtype", choices=list(DTYPES), help="of parameters and all else (default: bfloat16; float32 with --autocast)")
    add(
        "--autocast",
        action="store_true",
        help="float32 parameters and states, products in bfloat16: lowtide train's way",
    )
    add("--optimizer", default="adamw", choices=list(OPTIMIZERS), help="(default: adamw, fused)")
    add("--grad-accum", default=1, type=int, metavar="N", help="backward passes a step; gradients stay (default: 1)")
    add("--lora-rank", type=int, metavar="N", help="train adapters of this rank and freeze the model")
    add(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        help=f"with --lora-rank: the projections that get them (default: {' '.join(PROJECTIONS)})",
    )
    add(
        "--attention-mask",
        action="store_true",
        help="attention takes a [T, T] mask: documents packed apart, without flash attention",
    )
    add(
        "--no-fused-mlp",
        dest="fused_mlp",
        action="store_false",
        help="the MLPs stay the model's own, as where lowtide.patch cannot fuse them",
    )
    add("--layers", type=int, metavar="N", help="plan for so many layers instead of the model's")
    add("--workspace-mib", type=float, metavar="X", help="the loss's workspace, as in HeadOptions (default: chosen)")
    add(
        "--json", metavar="FILE", help="write the plan here as JSON; - is the standard output, and then nothing else is"
    )
    add("--png", type=Path, metavar="FILE", help="draw the front of memory against time (needs matplotlib)")
    add("--check", action="store_true", help="run real steps with random weights on the GPU at hand, and compare")
    parser.set_defaults(main=main, parser=parser, options_of=_OPTIONS)


def main(arguments: argparse.Namespace) -> int:
    """Plan, and return the exit status: 1 where a checked step took more than the budget.

    Raises:
        LowtideError: something the user can mend.
    """
    from lowtide.head.options import HeadOptions

    if arguments.grad_accum < 1:
        raise ArgumentValueError(message("grad_accum", "at least 1", str(arguments.grad_accum)))
    for name, file in (("json", arguments.json), ("png", arguments.png)):  # before minutes of a check are spent
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ArgumentValueError(message(name, "a file in a folder that exists", str(file)))
    budget = None if arguments.budget is None else parse_gib("budget", arguments.budget)
    host = parse_gib("host", arguments.host)
    if arguments.gpu is not None and not arguments.gpu.lower().startswith("cuda"):
        gpu_named(arguments.gpu)  # before torch is loaded
    adapters = _adapters(arguments)
    others = {"--lora-rank": adapters, "--attention-mask": arguments.attention_mask}
    others["--no-fused-mlp"] = not arguments.fused_mlp
    if arguments.check and (got := next((name for name, given in others.items() if given), None)):
        raise ArgumentValueError(message("check", "a plan of full training, patched, without a mask", got))
    settings = _settings(arguments.model, arguments.layers)
    if adapters is not None and (kind := numbers_alone(read_shape(settings))):
        hint = "Say in Python how many numbers are trained: lowtide.memory.plan_memory(..., adapters=NUMBERS)."
        raise ArgumentValueError(message("lora_rank", f"none for {kind}", str(adapters.rank), hint))
    from lowtide.memory import plan_memory

    plan = plan_memory(
        settings,
        arguments.seq_len,
        arguments.batch_size,
        budget,
        host,
        arguments.gpu,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        autocast=arguments.autocast,
        keep_gradients=arguments.grad_accum > 1,
        adapters=adapters,
        attention_mask=arguments.attention_mask,
        fused_mlp=arguments.fused_mlp,
        offload_states=arguments.offload_states,
        options=None if arguments.workspace_mib is None else HeadOptions(workspace_mib=arguments.workspace_mib),
    )
    told = plan.to_dict()
    quiet = arguments.json == "-"
    if not quiet:
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        sys.stdout.write(f"{plan.text(width)}\n")
    status = 0
    if arguments.check:
        from lowtide.bench.plan import check_plan

        checked = check_plan(settings, plan)
        told["check"] = checked.to_dict()
        status = int(checked.peak_bytes > plan.budget_bytes)
        if not quiet:
            sys.stdout.write(f"\n{checked}\n")
    if arguments.png is not None:
        _draw(arguments.png, plan)
    text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    if quiet:
        sys.stdout.write(text)
        return status
    if arguments.json is not None:
        Path(arguments.json).write_text(text)
    for file in (arguments.png, arguments.json):
        sys.stdout.write("" if file is None else f"written: {file}\n")
    return status


def _adapters(arguments: argparse.Namespace) -> Adapters | None:
    targets = arguments.lora_targets
    if arguments.lora_rank is None:
        if targets is not None:
            raise ArgumentValueError(message("lora_targets", "--lora-rank beside it", "none"))
        return None
    return Adapters(arguments.lora_rank, PROJECTIONS if targets is None else tuple(targets))


def _settings(name: str, layers: int | None) -> dict[str, Any]:
    """Return the config of a ``--model``, with another number of layers where asked for."""
    if name == DEFAULT:
        settings = read_settings({"vocab_size": TrainConfig.vocab_size, **SHAPES[name]})
    else:
        settings = read_settings(SHAPES[name] if name in SHAPES else config_file(name))
    return settings if layers is None else with_layers(settings, layers)


def _draw(file: Path, plan: MemoryPlan) -> None:
    from lowtide.measure.plots import Point, draw_budget

    job = plan.job
    title = (
        f"{job.shape.model_type}, {job.shape.params / 1e9:.2f} billion parameters, {job.batch_size} x {job.seq_len}"
        f" tokens, {job.optimizer}, on {job.gpu.name}"
    )
    last = len(plan.front) - 1
    near = 0.1 * (plan.front[last].peak - plan.front[0].peak)  # to the choice: a name would stand in its name's way
    marked = [i for i in (0, last // 3, 2 * last // 3, last) if abs(plan.front[i].peak - plan.peak_bytes) > near]
    front = [
        Point(str(one) if i in marked else "", one.peak / 2**20, one.seconds * 1e3) for i, one in enumerate(plan.front)
    ]
    chosen = Point(str(plan.chosen), plan.peak_bytes / 2**20, plan.seconds * 1e3)
    try:
        draw_budget(file, title, front=front, chosen=chosen, budget=plan.budget_bytes / 2**20)
    except ImportError as error:
        raise ArgumentValueError(
            message("png", "matplotlib to be installed", str(error), "pip install 'lowtide[plot]'")
        ) from error

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
from lowtide.measure.output_files import check_output_files
from lowtide.measure.plots import Point, draw_budget, require_matplotlib
from lowtide.measure.units import parse_gib
from lowtide.memory.planner.adapters import PROJECTIONS, Adapters
from lowtide.memory.planner.four_bit import config_of
from lowtide.memory.planner.gpus import GPUS, gpu_named
from lowtide.memory.planner.optimizers import DTYPES, FSDP2, OPTIMIZERS, PARALLEL
from lowtide.memory.planner.settings import read_settings, with_layers
from lowtide.train.config import TrainConfig
from lowtide.train.shapes import DEFAULT, SHAPES, config_file

if TYPE_CHECKING:
    from lowtide.memory import MemoryPlan
    from lowtide.memory.planner.search import Candidate

LEAST_WIDTH = 60  # letters: below this a terminal breaks the tables anyway
_DESCRIPTION = """\
Predict the memory and the time of a language model's training step, and choose what each layer saves for backward so
that the step is the fastest that fits in a budget of GPU memory, and in one of pinned host memory. From the model's
config alone: no weights, no GPU. Prints the bytes of every phase, the ladder of what a layer can save, the front of
memory against time, the longest sequence and the largest batch that fit, and the Python that applies the plan."""

_GIVEN = (  # as they are
    "seq_len", "batch_size", "dtype", "optimizer", "autocast", "attention_mask", "fused_mlp", "compile_layers",
    "parallel",
)  # fmt: skip
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
  lowtide plan --model llama-3.2-1b --seq-len 32768 --budget 16GiB
      the fastest step in 16 GiB of an H100
  lowtide plan --model ./Llama-3.1-8B --seq-len 8192 --optimizer adamw-8bit --host 64GiB --gpu h200
      a downloaded model's config; layers and optimizer states may be offloaded into 64 GiB of host memory
  lowtide plan --model config.json --seq-len 4096 --batch-size 8 --gpu rtx4090 --json plan.json --png plan.png
      the figures and the plot as files
  lowtide plan --model llama-3-8b --seq-len 8192 --lora-rank 16 --load-in-4bit --gpu rtx4090
      QLoRA: adapters over a frozen model in NF4
  lowtide plan --model llama-3-8b --seq-len 8192 --gpu h200 --gpus 2
      two GPUs with a sequence each, among which FSDP2 shards the model
  lowtide plan --model llama-3-8b --layers 8 --seq-len 16384 --budget 40GiB --gpu cuda --check
      real steps on the GPU at hand, predicted beside measured"""


def add(parser: OneLineParser) -> None:
    """Make it the subcommand's parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    add = parser.add_argument
    shapes, gpus, targets = ", ".join(SHAPES), ", ".join(GPUS), " ".join(PROJECTIONS)
    add("--model", required=True, metavar="MODEL", help=f"a config.json, a folder with one, or one of {shapes}")
    add("--seq-len", required=True, type=int, metavar="N", help="tokens per sequence")
    add("--batch-size", default=1, type=int, metavar="N", help="sequences per step (default: 1)")
    add("--budget", metavar="SIZE", help="GPU memory for tensors: 40GiB, 40GB or 40 (GiB) (default: 93%% of it)")
    add("--host", default="0GiB", metavar="SIZE", help="pinned host memory for offloading (default: 0GiB)")
    add("--no-offload-states", action="store_true", help="offload no optimizer states")
    add(
        "--gpu",
        metavar="NAME",
        help=f"{gpus}; or cuda: the one at hand (default: the one at hand, or h100)",
    )
    add("--gpus", type=int, metavar="N", help="GPUs that share the step (default: 1)")
    add("--parallel", choices=PARALLEL, default=FSDP2, help="with --gpus: what shards the model (default: fsdp2)")
    add("--link", metavar="SIZE", help="what a GPU receives from others per second: 50GB (default: NVLink's rate)")
    add("--dtype", choices=DTYPES, help="of parameters and all else (default: bfloat16; float32 with --autocast)")
    add("--autocast", action="store_true", help="float32 parameters and states, GEMMs in bfloat16: as lowtide train")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="(default: adamw, fused)")
    add("--grad-accum", default=1, type=int, metavar="N", help="backward passes per step; gradients stay (default: 1)")
    add("--lora-rank", type=int, metavar="N", help="train adapters of this rank and freeze the model")
    add("--lora-targets", nargs="+", metavar="NAME", help=f"the projections that are adapted (default: {targets})")
    add("--load-in-4bit", action="store_true", help="the frozen layers in 4 bits (QLoRA), with --lora-rank")
    add("--use-bnb-nested-quant", action="store_true", help="with --load-in-4bit: double quantisation")
    add("--attention-mask", action="store_true", help="attention takes a [T, T] mask, for packed documents")
    add("--no-fused-mlp", dest="fused_mlp", action="store_false", help="stock MLPs, as where lowtide.patch fuses none")
    add("--compile-layers", action="store_true", help="each layer through torch.compile, offloaded ones excepted")
    add("--layers", type=int, metavar="N", help="plan for so many layers instead of the model's")
    add("--workspace-mib", type=float, metavar="X", help="the loss's workspace, as in HeadOptions (default: chosen)")
    add("--json", metavar="FILE", help="write the plan as JSON; - is the standard output, which then has nothing else")
    add("--png", type=Path, metavar="FILE", help="plot the front of memory against time (needs matplotlib)")
    add("--check", action="store_true", help="run real steps with random weights on the GPU at hand, and compare")
    parser.set_defaults(main=main, parser=parser, options_of=_OPTIONS)


def main(arguments: argparse.Namespace) -> int:
    """Plan, and return the exit status: 1 where a checked step took more than the budget.

    Raises:
        LowtideError: something that the user can fix.
    """
    from lowtide.head.options import HeadOptions

    if arguments.grad_accum < 1:
        raise ArgumentValueError(message("grad_accum", "at least 1", str(arguments.grad_accum)))
    # before minutes of a check are spent
    check_output_files(json=None if arguments.json == "-" else arguments.json, png=arguments.png)
    if arguments.png is not None:
        require_matplotlib("png")
    budget = None if arguments.budget is None else parse_gib("budget", arguments.budget)
    host = parse_gib("host", arguments.host)
    if arguments.gpu is not None and not arguments.gpu.lower().startswith("cuda"):
        gpu_named(arguments.gpu)  # before torch is loaded
    for name, default in (("parallel", FSDP2), ("link", None)):
        if getattr(arguments, name) != default and arguments.gpus in (None, 1):
            raise ArgumentValueError(message(name, "--gpus above 1 beside it", arguments.gpus or "none"))
    adapters = _adapters(arguments)
    others = {"--load-in-4bit": arguments.load_in_4bit, "--attention-mask": arguments.attention_mask}
    others["--no-fused-mlp"], others["--gpus"] = not arguments.fused_mlp, (arguments.gpus or 1) > 1
    if arguments.check and (got := next((name for name, given in others.items() if given), None)):
        expected = "a plan of weights in 16 or 32 bits, patched, without a mask, on one GPU"
        raise ArgumentValueError(message("check", expected, got))
    settings = _settings(arguments.model, arguments.layers)
    if arguments.load_in_4bit:
        settings["quantization_config"] = config_of(nested=arguments.use_bnb_nested_quant)
    elif arguments.use_bnb_nested_quant:
        raise ArgumentValueError(message("use_bnb_nested_quant", "--load-in-4bit beside it", "none"))
    from lowtide.memory import plan_memory

    given: dict[str, Any] = {name: getattr(arguments, name) for name in _GIVEN}
    if arguments.workspace_mib is not None:
        given["options"] = HeadOptions(workspace_mib=arguments.workspace_mib)
    plan = plan_memory(
        settings,
        budget_gib=budget,
        host_gib=host,
        device=arguments.gpu,
        keep_gradients=arguments.grad_accum > 1,
        adapters=adapters,
        gpus=1 if arguments.gpus is None else arguments.gpus,
        link=None if arguments.link is None else parse_gib("link", arguments.link),
        offload_states=False if arguments.no_offload_states else "auto",
        **given,
    )
    return _write(arguments, settings, plan)


def _write(arguments: argparse.Namespace, settings: dict[str, Any], plan: MemoryPlan) -> int:
    """Print the plan, check it and write its files, as the arguments say; return the exit status."""
    report, status, quiet = plan.to_dict(), 0, arguments.json == "-"
    if not quiet:
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        sys.stdout.write(f"{plan.text(width)}\n")
    if arguments.check:
        from lowtide.bench.plan import check_plan

        checked = check_plan(settings, plan)
        report["check"] = checked.to_dict()
        status = int(checked.peak_bytes > plan.budget_bytes)
        sys.stdout.write("" if quiet else f"\n{checked}\n")
    if arguments.png is not None:
        _draw(arguments.png, plan)
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if quiet:
        sys.stdout.write(text)
        return status
    if arguments.json is not None:
        Path(arguments.json).write_text(text)
    for file in (arguments.png, arguments.json):
        sys.stdout.write("" if file is None else f"written: {file}\n")
    return status


def _adapters(arguments: argparse.Namespace) -> Adapters | None:
    rank, targets = arguments.lora_rank, arguments.lora_targets
    if rank is None and targets is not None:
        raise ArgumentValueError(message("lora_targets", "--lora-rank beside it", "none"))
    return None if rank is None else Adapters(rank, PROJECTIONS if targets is None else tuple(targets))


def _settings(name: str, layers: int | None) -> dict[str, Any]:
    """Return the config of a ``--model``, with the requested number of layers."""
    named = {"vocab_size": TrainConfig.vocab_size} if name == DEFAULT else {}
    settings = read_settings({**named, **SHAPES[name]} if name in SHAPES else config_file(name))
    return settings if layers is None else with_layers(settings, layers)


def _draw(file: Path, plan: MemoryPlan) -> None:
    def point(one: Candidate, name: str) -> Point:
        return Point(name, one.peak / 2**20, one.seconds * 1e3)

    last = len(plan.front) - 1
    near = 0.1 * (plan.front[last].peak - plan.front[0].peak)  # to the choice: their labels would overlap
    marked = [i for i in (0, last // 3, 2 * last // 3, last) if abs(plan.front[i].peak - plan.peak_bytes) > near]
    front = [point(one, str(one) if i in marked else "") for i, one in enumerate(plan.front)]
    chosen = point(plan.chosen, str(plan.chosen))
    draw_budget(file, plan.title, front=front, chosen=chosen, budget=plan.budget_bytes / 2**20)

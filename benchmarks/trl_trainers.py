"""Measure steps of TRL's trainers end to end: TRL's own losses, lowtide's, and Liger's, on models with random weights.

    python benchmarks/trl_trainers.py
    python benchmarks/trl_trainers.py --trainer GRPO --model lowtide-small --tokens 16 --batch 4 --steps 2 --way trl

The ways: "trl" is TRL with its defaults, "lowtide-loss" has lowtide.patch_trl, "lowtide" lowtide.patch of the model
too, "liger" has use_liger_kernel. SFT trains sequences of random tokens. GRPO answers prompts of random tokens, a group
of `--batch` answers a step, with transformers' generation; its time is also given without what generation takes.
Weights, gradients and AdamW's states are in bfloat16, layers are checkpointed (TRL's default).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from built_trainers import DEVICE, WARM_STEPS, Clock, make_trainer
from transformers.utils.logging import set_verbosity_error

import lowtide
from lowtide.bench.harness import begin, reason_of, release, write_json
from lowtide.bench.models import build_model
from lowtide.bench.variant import STOCK, Variant
from lowtide.measure.units import gib
from lowtide.train.shapes import model_config

RESULTS = Path(__file__).parent / "results"
WAYS = ("trl", "lowtide-loss", "lowtide", "liger")
FIGURES = (  # with their columns' widths
    ("seconds", 8, "8.4f"), ("seconds_without_generation", 12, "12.4f"), ("tokens_per_s", 9, "9,.0f"),
    ("peak_gib", 9, "9.2f"), ("loss", 8, "8.4f"),
)  # fmt: skip


def measure(trainer: str, name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a step's median seconds, tokens per second, peak and loss."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = build_model(Variant(impl=STOCK), model_config(name), dtype, DEVICE)
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    clock, calls = Clock(), None
    try:
        if way.startswith("lowtide"):
            calls = lowtide.patch_trl()
        if way == "lowtide":
            lowtide.patch(model)
        with tempfile.TemporaryDirectory() as folder:
            built = make_trainer(trainer, model, way, args, folder, clock)
            built.train()
    finally:
        lowtide.unpatch_trl()
    steps, generation = clock.steps[WARM_STEPS:], clock.generation[WARM_STEPS:]
    tokens = args.batch * args.tokens
    row = {
        "seconds": median(steps),
        "times": [round(each, 4) for each in steps],
        "tokens_per_s": tokens / median(steps),
        "loss": next(entry["loss"] for entry in built.state.log_history if "loss" in entry),
    }
    if trainer == "GRPO":
        row["seconds_without_generation"] = median(a - b for a, b in zip(steps, generation, strict=True))
    if DEVICE.type == "cuda":
        row["peak_gib"] = gib(torch.cuda.max_memory_allocated())
    if calls is not None:
        row["calls_lowtide"], row["calls_trl"] = dict(calls.calls_lowtide), dict(calls.calls_trl)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", nargs="+", choices=["SFT", "GRPO"], default=["SFT"])
    parser.add_argument("--model", nargs="+", default=["gemma-3-270m", "llama-3.2-1b", "qwen3-8b"])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step; of GRPO, answers to one prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence; of GRPO, of an answer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt of GRPO")
    parser.add_argument("--steps", type=int, default=6, help=f"that count, after {WARM_STEPS} others")
    parser.add_argument("--output", default=str(RESULTS))
    args = parser.parse_args()
    set_verbosity_error()
    command = shlex.join(["python", "benchmarks/trl_trainers.py", *sys.argv[1:]])
    file, result = begin(
        args.output, "trl-trainers", command, DEVICE, ["transformers", "trl", "liger-kernel", "accelerate"]
    )
    rows: list[dict[str, Any]] = []
    result["rows"] = rows
    heads = ("trainer", "model", "way", "seconds", "without gen.", "tokens/s", "peak GiB", "loss")
    print("{:7} {:13} {:13} {:>8} {:>12} {:>9} {:>9} {:>8}".format(*heads))
    # Liger comes last: it changes functions that all later models use
    ways = sorted(args.way, key=lambda way: way == "liger")
    for way, trainer, model in product(ways, args.trainer, args.model):
        row: dict[str, Any] = {"trainer": trainer, "model": model, "way": way}
        try:
            row |= measure(trainer, model, way, args)
        except Exception as error:  # the other rows are measured
            row["failed"] = reason_of(error)
        release(DEVICE)
        rows.append(row)
        write_json(file, result)
        cells = [format(row[key], spec) if key in row else " " * width for key, width, spec in FIGURES]
        print(f"{trainer:7} {model:13} {way:13}", *([row["failed"]] if "failed" in row else cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

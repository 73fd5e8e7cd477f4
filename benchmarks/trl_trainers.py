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
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import set_verbosity_error

import lowtide
from lowtide.bench.harness import begin, reason_of, release
from lowtide.bench.models import build_model, config_of
from lowtide.bench.variant import STOCK, Variant
from lowtide.measure.units import gib

RESULTS = Path(__file__).parent / "results"
WAYS = ("trl", "lowtide-loss", "lowtide", "liger")
WARM_STEPS = 2
FIGURES = (  # with their columns' widths
    ("seconds", 8, "8.4f"), ("seconds_without_generation", 12, "12.4f"), ("tokens_per_s", 9, "9,.0f"),
    ("peak_gib", 9, "9.2f"), ("loss", 8, "8.4f"),
)  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times each step, waiting for the GPU at both ends, and what generation takes of it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if len(self.steps) == WARM_STEPS and DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.generation.append(0.0)
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(now() - self.start)

    def around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generation[-1] += now() - start

        return timed


def tokenizer_of(vocab_size: int) -> Any:
    """One word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab_size)}
    built = Tokenizer(models.WordLevel(words, unk_token="w2"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="w0", eos_token="w1", unk_token="w2")


def make_trainer(trainer: str, model: Any, way: str, args: argparse.Namespace, folder: str, clock: Clock) -> Any:
    import trl
    from datasets import Dataset

    vocab, steps = model.config.vocab_size, WARM_STEPS + args.steps
    common = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": args.batch, "report_to": [],
        "save_strategy": "no", "logging_steps": steps, "bf16": False, "use_cpu": DEVICE.type == "cpu",
        "optim": "adamw_torch_fused", "use_liger_kernel": way == "liger", "learning_rate": 1e-5, "disable_tqdm": True,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    if trainer == "SFT":
        ids = torch.randint(3, vocab, (steps * args.batch, args.tokens), generator=generator)
        loss = {"loss_type": "nll"} if way == "liger" else {}  # Liger's is TRL's "nll"; the default is the chunked one
        built = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**common, **loss, max_length=args.tokens),
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
            processing_class=tokenizer_of(vocab),
            callbacks=[clock],
        )
    else:
        prompts = torch.randint(3, vocab, (steps, args.prompt), generator=generator).tolist()
        built = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=trl.GRPOConfig(
                **common, num_generations=args.batch, max_completion_length=args.tokens, beta=0.0,
                generation_kwargs={"min_new_tokens": args.tokens},
            ),
            train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in prompts]}),
            processing_class=tokenizer_of(vocab),
            callbacks=[clock],
        )  # fmt: skip
        built._generate = clock.around(built._generate)
    built.remove_callback(PrinterCallback)
    return built


def measure(trainer: str, name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a step's median seconds, tokens per second, peak and loss."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = build_model(Variant(impl=STOCK), config_of(name), dtype, DEVICE, seed=0)
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
    files, result = begin(
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
        files.write_json(result)
        cells = [format(row[key], spec) if key in row else " " * width for key, width, spec in FIGURES]
        print(f"{trainer:7} {model:13} {way:13}", *([row["failed"]] if "failed" in row else cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

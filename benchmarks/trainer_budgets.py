"""Hold trainers to budgets of memory by `PatchCallback(memory_budget=...)`: their peaks beside the planned ones.

    python benchmarks/trainer_budgets.py
    python benchmarks/trainer_budgets.py --trainer SFT --budget 30GiB --tokens 4096

Each trainer runs a few steps on sequences of random tokens of full length: transformers' own, TRL's SFT, DPO (with a
copy of the model as the reference) and GRPO (with transformers' generation). A peak is what PyTorch's allocator counts.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from built_trainers import DEVICE, tokenizer_of
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import set_verbosity_error

import lowtide
from lowtide.bench.harness import begin, reason_of, release, write_json
from lowtide.measure.units import gib

TRAINERS = ("Trainer", "SFT", "DPO", "GRPO")
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def make_trainer(name: str, model: Any, args: argparse.Namespace, folder: str, callback: Any) -> Any:
    """Return a trainer of full sequences: half a sequence is the prompt of a preference, or of a rollout."""
    vocab, rows, half = model.config.vocab_size, args.steps * args.batch, args.tokens // 2
    common = {
        "output_dir": folder, "max_steps": args.steps, "per_device_train_batch_size": args.batch, "report_to": [],
        "save_strategy": "no", "logging_steps": args.steps, "bf16": True, "use_cpu": DEVICE.type == "cpu",
        "optim": "adamw_torch_fused", "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    ids = torch.randint(3, vocab, (rows, args.tokens), generator=torch.Generator().manual_seed(0)).tolist()
    given: dict[str, Any] = {"model": model, "callbacks": [callback]}
    if name == "Trainer":
        data = [{"input_ids": row, "labels": row} for row in ids]
        return Trainer(**given, args=TrainingArguments(**common), train_dataset=data)
    import trl

    given["processing_class"] = tokenizer_of(vocab)
    if name == "SFT":
        config = trl.SFTConfig(**common, max_length=args.tokens)
        return trl.SFTTrainer(**given, args=config, train_dataset=Dataset.from_dict({"input_ids": ids}))
    words = [" ".join(f"w{i}" for i in row[:half]) for row in ids]
    if name == "DPO":
        answers = [[" " + " ".join(f"w{i + shift}" for i in row[half:-1]) for row in ids] for shift in (0, -1)]
        columns = {"prompt": words, "chosen": answers[0], "rejected": answers[1]}
        config = trl.DPOConfig(**common, max_length=args.tokens)
        reference = copy.deepcopy(model)
        return trl.DPOTrainer(**given, ref_model=reference, args=config, train_dataset=Dataset.from_dict(columns))
    config = trl.GRPOConfig(
        **common, num_generations=args.batch, max_completion_length=half, beta=0.0,
        generation_kwargs={"min_new_tokens": half},
    )  # fmt: skip
    return trl.GRPOTrainer(
        **given, args=config, train_dataset=Dataset.from_dict({"prompt": words}),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
    )  # fmt: skip


def measure(name: str, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the budget, what was planned within it and the peak, in GiB."""
    torch.manual_seed(0)
    shape = {**(LLAMA_1B if DEVICE.type == "cuda" else TINY), "max_position_embeddings": args.tokens}
    config = LlamaConfig(**shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    callback = lowtide.PatchCallback(memory_budget=budget, show=lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, model, args, folder, callback)
        trainer.remove_callback(PrinterCallback)
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    assert callback.plan is not None
    row = {"budget_gib": gib(callback.plan.budget_bytes), "planned_gib": gib(callback.plan.peak_bytes)}
    if DEVICE.type == "cuda":
        row["peak_gib"] = gib(torch.cuda.max_memory_allocated())
    return row | {"calls_fused": callback.counts()[0], "calls_materialised": callback.counts()[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--budget", nargs="+", default=["36GiB", "auto"])
    parser.add_argument("--batch", type=int, default=4, help="rows of a step; of GRPO, answers to one prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results"))
    args = parser.parse_args()
    set_verbosity_error()
    command = shlex.join(["python", "benchmarks/trainer_budgets.py", *sys.argv[1:]])
    file, result = begin(args.output, "trainer-budgets", command, DEVICE, ["transformers", "trl", "accelerate"])
    rows: list[dict[str, Any]] = []
    result["rows"] = rows
    for name, budget in itertools.product(args.trainer, args.budget):
        row: dict[str, Any] = {"trainer": name, "budget": budget}
        try:
            row |= measure(name, budget, args)
        except Exception as error:  # the other rows are measured
            row["failed"] = reason_of(error)
        lowtide.unpatch_trl()
        release(DEVICE)
        rows.append(row)
        write_json(file, result)
    for row in rows:
        figures = " ".join(f"{key} {row[key]:.2f}" for key in ("budget_gib", "planned_gib", "peak_gib") if key in row)
        print(f"{row['trainer']:8} {row['budget']:8} {row.get('failed', figures)}")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Measure `generate` of a patched model interleaved with the stock one: greedy, random weights.

    python benchmarks/generate.py [--model llama-3.2-1b] [--dtype bfloat16] [--output DIR]

Each step decodes one token, so the time is mostly the host's launches, which vary by some percent from call to call: a
second copy of the stock model in the same rounds shows by how much.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from script import main

import lowtide
from lowtide.bench.harness import Run, write_json
from lowtide.bench.settings import Settings, setting
from lowtide.train.shapes import model_config

CASES = ((1, 16, 17, 31), (8, 512, 17, 22), (1, 8192, 9, 10))  # sequences, tokens of the prompt, new ones, turns
STOCK = "stock"


def row_of(models: dict[str, Any], batch: int, prompt: int, new: int, turns: int, device: torch.device) -> Any:
    """Return the seconds of a call of each model, the median and the least of all turns but the first."""
    vocabulary = models[STOCK].config.vocab_size
    ids = torch.randint(3, vocabulary, (batch, prompt), device=device)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    tokens = {}
    for turn in range(turns):
        first = turn % len(models)
        for name in [*models][first:] + [*models][:first]:
            _wait(device)
            start = time.perf_counter()
            tokens[name] = models[name].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
            _wait(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    row: dict[str, Any] = {"batch": batch, "prompt": prompt, "new": new, "turns": turns - 1}
    for name, each in seconds.items():
        same = float((tokens[name] == tokens[STOCK]).float().mean())
        row[name] = {"median_s": statistics.median(each), "least_s": min(each), "same_tokens": same}
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Settings):
    benchmark = "generate"

    model: str = setting("llama-3.2-1b", "whose shape: a built-in name or a config.json", metavar="NAME")


def measure(run: Run) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with run.device:
        config = model_config(run.config.model)
        config.eos_token_id, config.pad_token_id = None, 0
        stock = AutoModelForCausalLM.from_config(config, dtype=run.dtype).eval()
    models = {STOCK: stock, "stock again": copy.deepcopy(stock), "patched": copy.deepcopy(stock)}
    lowtide.patch(models["patched"])
    run.result |= {"model": run.config.model, "rows": []}
    for batch, prompt, new, turns in CASES:
        row = row_of(models, batch, prompt, new, turns, run.device)
        run.result["rows"].append(row)
        write_json(run.file, run.result)
        run.say(f"{batch} x {prompt} tokens, {new} new\n")
        for name in models:
            run.say(f"  {name:12}{row[name]['median_s']:9.4f} s, at least {row[name]['least_s']:.4f}\n")


if __name__ == "__main__":
    sys.exit(main(measure, GenerateConfig, __doc__))

"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each in a process."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import Peer, Row, Run, Table, reason_in
from lowtide.bench.models import build_model, language_part, measure_steps
from lowtide.bench.variant import Variant
from lowtide.measure.child import allocator, run_child
from lowtide.memory.policy import split_states
from lowtide.train.shapes import model_config

PEERS: dict[str, Peer] = {}  # they are models: see `Variant`
TABLE = Table(
    {
        "way": "<34", "tokens": "9", "seconds": "9.4f", "tokens_per_s": "14.0f", "peak_gib": "10.2f", "loss": "9.4f",
        "last_loss": "11.4f", "of_first": "10.3f",
    },
)  # fmt: skip


def row_of(way: str, tokens: int, settings: dict[str, Any]) -> Row:
    """Return seconds, tokens per second, memory and losses of training steps on random tokens, or why they failed;
    `run_child` calls it.
    """
    config, row = StepBenchConfig(**settings), Row()
    name, states = split_states(way)
    with reason_in(row):
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        model = build_model(Variant.named(name), model_config(config.model), dtype, device)
        row |= measure_steps(model, "adamw", states, (config.batch, tokens), warm=config.warm, reps=config.reps)
    return row


def measure(run: Run) -> None:
    """Measure each variant at each length, whatever it is called in ``way``."""
    config = run.config
    rows = run.result["rows"] = list[Row]()
    language_part(model_config(config.model))
    first: dict[int, float] = {}  # seconds of the first row of each length
    run.say(f"\n{config.model}, batch {config.batch}, {run.dtype_name}\n{TABLE.header}")
    for way in config.variants:
        for tokens in config.tokens:
            row = run_child(row_of, way, tokens, run.settings, env=allocator())
            if "seconds" in row:
                of_first = row["seconds"] / first.setdefault(tokens, row["seconds"])
                row |= {"of_first": of_first, "loss": row["losses"][0], "last_loss": row["losses"][-1]}
            run.add({"way": way, "tokens": tokens, **row}, rows, TABLE)

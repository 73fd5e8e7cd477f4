"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY, Row, Run, Table, reason_in, release
from lowtide.bench.models import attention_of, build_model, language_part, make_optimizer, measure_steps, train_step
from lowtide.bench.variant import Variant
from lowtide.measure.child import allocator, run_child
from lowtide.memory import offload_optimizer
from lowtide.memory.policy import split_states
from lowtide.train.shapes import model_config

TABLE = Table(
    {
        "way": "<34", "tokens": "9", "seconds": "9.4f", "tokens_per_s": "14.0f", "peak_gib": "10.2f", "loss": "9.4f",
        "last_loss": "11.4f", "of_first": "10.3f",
    },
)  # fmt: skip


def rows_of(way: str, settings: dict[str, Any]) -> list[Row]:
    """Return a row for each length: seconds, peak and losses of a step, or the reason; `run_child` calls it.

    No length is measured after one that did not fit.
    """
    config, rows, failed = StepBenchConfig(**settings), list[Row](), Row()
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    policy, states = split_states(way)
    with reason_in(failed):
        model = build_model(Variant.named(policy), model_config(config.model), dtype, device)
        optimizer = make_optimizer("adamw", list(model.parameters()))
        if states is not None:
            offload_optimizer(optimizer, model, **states)
    for tokens in config.tokens:
        row: Row = {"tokens": tokens, **failed}
        if not failed:
            with reason_in(row):
                row |= measured(model, optimizer, config, tokens)
            if row.get("failed") == OUT_OF_MEMORY:
                failed = {"failed": OUT_OF_MEMORY}
            optimizer.zero_grad(set_to_none=True)  # what a step that failed has left
        rows.append(row)
    return rows


def measured(model: Any, optimizer: Any, config: StepBenchConfig, tokens: int) -> Row:
    """Return seconds, tokens per second, memory and losses of training steps on random tokens."""
    device = torch.device(config.device)
    generator, sizes = torch.Generator().manual_seed(0), (config.batch, tokens)
    ids = torch.randint(0, model.config.vocab_size, sizes, generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(train_step(lambda: model(input_ids=ids, labels=ids).loss, optimizer))

    release(device)
    row = measure_steps(step, device, warm=config.warm, reps=config.reps)
    values = {"losses": [loss.item() for loss in losses], "attention": attention_of(model)}
    return row | {"tokens_per_s": ids.numel() / row["seconds"], **values}


def main(config: StepBenchConfig, say: Callable[[str], object], command: str) -> int:
    """Measure each variant at each length, whatever it is called in ``way``, and return the exit status."""
    language_part(model_config(config.model))
    with Run(config, say, command, packages=["liger-kernel"]) as run:
        rows = run.result["rows"] = []
        run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
        first: dict[int, float] = {}  # seconds of the first row of each length
        say(f"\n{config.model}, batch {config.batch}, {run.dtype_name}\n{TABLE.header}")
        for way in config.variants:
            ended = run_child(rows_of, way, run.settings, env=allocator())
            for row in ended.value or [{"tokens": tokens, "failed": ended.failure} for tokens in config.tokens]:
                if "seconds" in row:
                    of_first = row["seconds"] / first.setdefault(row["tokens"], row["seconds"])
                    row |= {"of_first": of_first, "loss": row["losses"][0], "last_loss": row["losses"][-1]}
                run.add({"way": way, **row}, rows, TABLE)
    return run.status

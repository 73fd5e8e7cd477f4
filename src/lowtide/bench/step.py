"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each in a process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import (
    OUT_OF_MEMORY,
    Benchmark,
    CannotError,
    Row,
    Run,
    Table,
    fails_otherwise,
    reason_in,
    release,
)
from lowtide.bench.models import SDPA, attention_of, build_model, config_of, language_part, make_optimizer, train_step
from lowtide.bench.variant import Variant
from lowtide.errors import UnsupportedError, message
from lowtide.measure.child import ALLOCATOR, allocator_setting, run_child
from lowtide.measure.resident import cuda_peak_bytes, cuda_reserved_bytes, peak_resident_bytes, reset_cuda_peak
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import gib
from lowtide.memory import offload_optimizer
from lowtide.memory.policy import split_states

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
TABLE = Table(
    {"way": "<34", "tokens": "9"},
    {
        "seconds": "9.4f", "tokens_per_s": "14.0f", "peak_gib": "10.2f", "loss": "9.4f", "last_loss": "11.4f",
        "of_first": "10.3f",
    },
)  # fmt: skip


def rows_of(way: str, settings: dict[str, Any]) -> list[Row]:
    """Return a row for each length: seconds, peak and losses of a step, or the reason; `run_child` calls it.

    No length is measured after one that did not fit.
    """
    config, rows, failed = StepBenchConfig.read(settings), list[Row](), Row()
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    policy, states = split_states(way)
    with reason_in(failed):
        try:
            shape = config_of(config.model, config.layers)
            model = build_model(Variant.named(policy), shape, dtype, device, seed=config.seed)
            if config.sdpa != "auto" and attention_of(model) != SDPA:
                raise UnsupportedError(message("sdpa", f"auto for attention by {attention_of(model)}", config.sdpa))
            optimizer = make_optimizer("adamw", list(model.parameters()))
            if states is not None:
                offload_optimizer(optimizer, model, **states)
        except UnsupportedError as error:
            raise CannotError(str(error)) from error
    for tokens in config.tokens:
        row: Row = {"tokens": tokens, **failed}
        if not failed:
            with reason_in(row):
                row |= steps(model, optimizer, config, tokens)
            if row.get("failed") == OUT_OF_MEMORY:
                failed = {"failed": OUT_OF_MEMORY}
            optimizer.zero_grad(set_to_none=True)  # what a step that failed has left
        rows.append(row)
    return rows


def steps(model: Any, optimizer: torch.optim.Optimizer, config: StepBenchConfig, tokens: int) -> dict[str, Any]:
    """Return seconds, tokens per second, memory and losses of training steps on random tokens."""
    device, batch = torch.device(config.device), config.batch
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(train_step(lambda: model(input_ids=ids, labels=ids).loss, optimizer))

    release(device)
    with contextlib.nullcontext() if config.sdpa == "auto" else sdpa_kernel(_KERNELS[config.sdpa]):
        for _ in range(config.warm):
            step()
        reset_cuda_peak()
        timing = time_side_by_side({"step": step}, device, warm=0, reps=config.reps)["step"]
    row: Row = {"seconds": timing.median_ms / 1e3, "spread": timing.spread}
    row |= {"tokens_per_s": batch * tokens / row["seconds"], "losses": [loss.item() for loss in losses]}
    if device.type == "cuda":  # also what its allocator held for the tensors, and how that was set
        held = {"reserved_gib": gib(cuda_reserved_bytes()), "allocator": allocator_setting()}
        row |= {"peak_gib": gib(cuda_peak_bytes()), **held}
    else:
        row["peak_gib"] = gib(peak_resident_bytes())
    return row | {"attention": attention_of(model)}


def measure(run: Run[StepBenchConfig]) -> None:
    """Measure each variant at each length, whatever it is called in ``way``."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    first: dict[int, float] = {}  # seconds of the first row of each length
    run.say(f"\n{config.model}, batch {config.batch}, {run.dtype_name}, attention by {config.sdpa}\n{TABLE.header}")
    for way in config.ways:
        ended = run_child(rows_of, way, run.settings, env=ALLOCATOR)
        for row in ended.value or [{"tokens": tokens, "failed": ended.failure} for tokens in config.tokens]:
            if "seconds" in row:
                of_first = row["seconds"] / first.setdefault(row["tokens"], row["seconds"])
                row |= {"of_first": of_first, "loss": row["losses"][0], "last_loss": row["losses"][-1]}
            run.add({"way": way, **row}, rows, TABLE)


STEP = Benchmark(
    measure=measure,
    failed=fails_otherwise,
    packages=["liger-kernel"],
    check=lambda config: language_part(config_of(config.model, config.layers)),
)

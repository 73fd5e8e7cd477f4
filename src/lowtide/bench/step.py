"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each way a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.bench.harness import (
    OUT_OF_MEMORY,
    Benchmark,
    CannotError,
    Column,
    Row,
    Run,
    Table,
    add_rows,
    append,
    own_failure,
    reason_in,
    reason_of,
    release,
    why_ended,
)
from lowtide.bench.train_config import StepBenchConfig
from lowtide.bench.way import Way
from lowtide.bench.ways import SDPA, attention_of, build_way, config_of, language_part, make_optimizer, train_step
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
COLUMNS = (
    Column("s", "seconds", "9.4f"),
    Column("tokens/s", "tokens_per_s", "11.0f"),
    Column("GiB", "peak_gib", "8.2f"),
    Column("loss", lambda row: row["losses"][0], "9.4f"),
    Column("last", lambda row: row["losses"][-1], "9.4f"),
)


def measure_way(way: str, settings: dict[str, Any], file: str) -> None:
    """Append the rows of a way to a file as they are known; `run_child` calls it."""
    for row in rows_of(way, StepBenchConfig.read(settings)):
        append(row, Path(file))


def rows_of(way: str, config: StepBenchConfig) -> Iterator[Row]:
    """Yield a row for each length: seconds, peak and losses of a step, or the reason; none runs after one that did not
    fit.
    """
    why, unsupported = None, False  # why nothing is measured any more
    try:
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        policy, states = split_states(way)
        built = build_way(Way.named(policy), config.model, dtype, device, seed=config.seed, layers=config.layers)
        if config.sdpa != "auto" and attention_of(built) != SDPA:
            raise UnsupportedError(message("sdpa", f"auto for attention by {attention_of(built)}", config.sdpa))
        optimizer = make_optimizer("adamw", list(built.parameters()))
        if states is not None:
            offload_optimizer(optimizer, built, **states)
    except (CannotError, UnsupportedError) as error:
        why, unsupported = reason_of(error), True
    except Exception as error:
        why = reason_of(error)
    for tokens in config.lengths:
        row: Row = {"tokens": tokens}
        if why is None:
            with reason_in(row):
                row |= steps(built, optimizer, config, tokens, config.batch, warm=config.warm, reps=config.reps)
            if row.get("failed") == OUT_OF_MEMORY:
                why = OUT_OF_MEMORY
            optimizer.zero_grad(set_to_none=True)  # what a step that failed has left
        else:
            row["failed"] = why
        if unsupported:
            row["unsupported"] = True
        yield row


def steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    config: StepBenchConfig,
    tokens: int,
    batch: int,
    *,
    warm: int,
    reps: int,
) -> dict[str, Any]:
    """Return seconds, tokens per second, memory and losses of training steps on random tokens, ``batch`` sequences."""
    device = torch.device(config.device)
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(train_step(lambda: model(input_ids=ids, labels=ids).loss, optimizer))

    release(device)
    with contextlib.nullcontext() if config.sdpa == "auto" else sdpa_kernel(_KERNELS[config.sdpa]):
        for _ in range(warm):
            step()
        reset_cuda_peak()
        timing = time_side_by_side({"step": step}, device, warm=0, reps=reps)["step"]
    return {
        "seconds": timing.median_ms / 1e3,
        "spread": timing.spread,
        "tokens_per_s": batch * tokens / timing.median_ms * 1e3,
        **_memory(device),
        "losses": [loss.item() for loss in losses],
        "attention": attention_of(model),
    }


def _memory(device: torch.device) -> dict[str, Any]:
    """Return the peak since the last reset; on a GPU also what its allocator held for it, and how that was set."""
    if device.type != "cuda":
        return {"peak_gib": gib(peak_resident_bytes())}
    held = gib(cuda_reserved_bytes())
    return {"peak_gib": gib(cuda_peak_bytes()), "reserved_gib": held, "allocator": allocator_setting()}


def measure(run: Run[StepBenchConfig]) -> None:
    """Measure each way at each length."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    first: dict[int, float] = {}  # seconds of the first way at each length
    share = Column("of first", lambda row: row["seconds"] / first[row["tokens"]], "10.3f")
    table = Table((Column("", "way", "<34"), Column("T", "tokens", "9")), (*COLUMNS, share))
    run.say(f"\n{config.model}, batch {config.batch}, {run.dtype_name}, attention by {config.sdpa}\n{table.header}")

    for way in config.ways:
        known: list[Row] = []

        def add(row: Row, way: str = way, known: list[Row] = known) -> None:
            if "seconds" in row:
                first.setdefault(row["tokens"], row["seconds"])
            known.append(row)
            run.add({"way": way, **row}, rows, table)

        ended = add_rows(lambda file, way=way: run_child(measure_way, way, run.settings, str(file), env=ALLOCATOR), add)  # type: ignore[misc]
        for tokens in config.lengths[len(known) :]:  # it died
            add({"tokens": tokens, "failed": why_ended(ended)})


STEP = Benchmark(
    measure=measure,
    failed=lambda row: own_failure(row) and row["failed"] != OUT_OF_MEMORY,
    packages=["liger-kernel"],
    check=lambda config: language_part(config_of(config.model, config.layers)),
)

"""The benchmark of skipped tiles: time, share and errors on a model's own hidden states.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import HeadOptions, linear_cross_entropy, skip_report
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, reason_in
from lowtide.bench.problem import blocks
from lowtide.bench.task import BUSY_CYCLES, exact_gemms, relative_error
from lowtide.bench.train_config import SkipBenchConfig
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib

LIMIT, DENSE = "three GEMMs", "lowtide"
ROWS = 2048  # of a chunk of exact logits
CHUNKS = (4096, 16384)  # rows, of the bare GEMMs

TABLE = Table(
    heads=(Column("", "name", "<24"),),
    figures=(
        Column("ms", "ms", "8.2f"),
        Column("busy", "busy_ms", "8.2f"),
        Column("x limit", "speed", "9.2f"),
        Column("share", "share", "7.3f"),
        Column("dX", "input_error", "10.2e"),
        Column("dW", "weight_error", "10.2e"),
        Column("MiB", "mib", "7.0f"),
    ),
)


def run_of(x: Tensor, w: Tensor, y: Tensor, options: HeadOptions | None) -> Callable[[], tuple[Tensor, ...]]:
    """Return what computes the loss and both gradients; of each its own weight, for which an order is remembered."""
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, w, y, options=options)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    run.weight = w  # type: ignore[attr-defined]
    return run


def bare_gemms(x: Tensor, w: Tensor, rows: int) -> Callable[[], None]:
    """Return what runs the three GEMMs of a dense head in chunks of so many rows."""
    z = torch.randn(min(rows, len(x)), len(w), device=x.device, dtype=x.dtype)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    @torch.no_grad()
    def run() -> None:
        for rows in blocks(len(x), len(z)):
            part = z[: rows.stop - rows.start]
            torch.mm(x[rows], w.T, out=part)
            torch.mm(part, w, out=dx[rows])
            if rows.start:
                dw.addmm_(part.T, x[rows])
            else:
                torch.mm(part.T, x[rows], out=dw)

    return run


@torch.no_grad()
def exact(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the mean loss and both gradients of narrow numbers, in float32."""
    x, w = x.float(), w.float()
    loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(w)
    with exact_gemms():
        for rows in blocks(len(x), ROWS):
            z = x[rows] @ w.T
            at = torch.arange(len(z), device=z.device)
            lse = z.logsumexp(1)
            loss += (lse - z[at, y[rows]]).sum()
            z.sub_(lse[:, None]).exp_()
            z[at, y[rows]] -= 1
            dx[rows] = z @ w
            dw.addmm_(z.T, x[rows])
    return loss / len(x), dx / len(x), dw / len(x)


def measure_head(x: Tensor, w: Tensor, y: Tensor, config: SkipBenchConfig) -> Iterator[Row]:
    """Yield the rows of one head: its limit, the dense loss, and each accepted error, timed in turns."""
    right = exact(x, w, y)
    ways: dict[str, HeadOptions | None] = {DENSE: None}
    for text in config.accepted:
        ways[f"skip={text}"] = HeadOptions(skip=float(text), workspace_mib=config.workspace_mib)
        if config.unbiased:
            ways[f"skip={text} unbiased"] = HeadOptions(
                skip=float(text), skip_unbiased=True, workspace_mib=config.workspace_mib
            )
    limits = {f"{LIMIT} {rows}": bare_gemms(x, w, rows) for rows in CHUNKS if rows == CHUNKS[0] or rows <= len(x)}
    runs = {name: run_of(x, w, y, options) for name, options in ways.items()}
    rows: dict[str, Row] = {}
    for name, run in runs.items():
        for _ in range(config.calls if ways[name] else 1):
            run()
        loss, dx, dw = run()
        errors = {"input_error": relative_error(dx, right[1]), "weight_error": relative_error(dw, right[2])}
        rows[name] = {"name": name, **errors, "loss_error": abs(loss - right[0]).item()}
        del loss, dx, dw
        report = skip_report(run.weight)  # type: ignore[attr-defined]
        if report is not None:
            rows[name] |= {"share": report.share, "dropped_mass": report.dropped_mass, "threshold": report.threshold}
            rows[name] |= {f"reported_{name}": getattr(report, name) for name in errors}
        rows[name]["mib"] = mib(peak_above(run, x.device))
    del right
    timed: dict[str, Callable[[], object]] = {**limits, **runs}
    idle = time_side_by_side(timed, x.device, warm=config.warm, reps=config.reps)
    behind = partial(torch.cuda._sleep, BUSY_CYCLES)
    busy = time_side_by_side(timed, x.device, warm=config.warm, reps=config.reps, behind=behind)
    limit, busy_limit = (min(times[name].median_ms for name in limits) for times in (idle, busy))
    yield {"name": LIMIT, "ms": limit, "busy_ms": busy_limit, "speed": 1.0}
    for name, row in rows.items():
        ms, busy_ms = idle[name].median_ms, busy[name].median_ms
        yield row | {"ms": ms, "busy_ms": busy_ms, "speed": busy_limit / busy_ms}


def held_out(config: SkipBenchConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a model's hidden states of text, its head and the targets, in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = [Path(file).read_text(errors="replace") for file in config.data]
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    ids = torch.tensor([i for text in texts for i in tokenizer(text)["input_ids"]])[: config.tokens + 1]
    if len(ids) <= config.tokens:
        raise ArgumentValueError(message("data", f"text of more than {config.tokens} tokens", f"{len(ids)} tokens"))
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16).to(device).eval()
    states = []
    with torch.no_grad():
        for rows in blocks(config.tokens, config.seq_len):
            found = model.base_model(ids[rows][None].to(device)).last_hidden_state[0]
            states.append(found)
    head: Any = model.get_output_embeddings()
    return torch.cat(states), head.weight.detach().clone(), ids[1:].to(device)


def measure(run: Run[SkipBenchConfig]) -> None:
    """Measure one model's head."""
    rows = run.result.setdefault("rows", [])
    x, w, y = held_out(run.config, run.device)
    run.result |= {"tokens": len(x), "hidden": x.shape[1], "vocab": len(w), "calls": run.config.calls}
    run.say(f"{len(x)} x {x.shape[1]} x {len(w)}\n{TABLE.header}")
    failure: Row = {"name": DENSE}
    with reason_in(failure):
        for row in measure_head(x, w, y, run.config):
            run.add(row, rows, TABLE)
    if "failed" in failure:
        run.add(failure, rows, TABLE)


SKIP = Benchmark(measure=measure)

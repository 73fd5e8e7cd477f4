"""The benchmark of skipped tiles: time, share and errors on a model's own hidden states, or on random ones like them.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowtide.bench.harness import Benchmark, CannotError, Column, Peer, Row, Run, Table
from lowtide.bench.head import loss_task
from lowtide.bench.problem import PLAIN, SETTINGS, Problem, blocks
from lowtide.bench.shapes import Shape
from lowtide.bench.task import Bench, Function, Task
from lowtide.bench.train_config import SkipBenchConfig
from lowtide.bench.way import LOWTIDE
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.skipping import skip_report
from lowtide.train.model import pretrained_model
from lowtide.train.shapes import model_folder
from lowtide.train.tokenizer import load_tokenizer

LIMITS = {3: "three GEMMs", 4: "four GEMMs"}
PER_TOKEN = next(setting for setting in SETTINGS if setting.reduction == "none")
ERRORS = {"loss": "loss_error", "dx": "input_error", "dw": "weight_error"}

TABLE = Table(
    heads=(Column("", "name", "<28"),),
    figures=(
        Column("ms", "ms", "8.2f"),
        Column("busy", "busy_ms", "8.2f"),
        Column("x limit", "speed", "9.2f"),
        Column("share", "share", "7.3f"),
        Column("logits", "logit_error", "10.2e"),
        Column("dX", "input_error", "10.2e"),
        Column("dW", "weight_error", "10.2e"),
        Column("MiB", "mib", "7.0f"),
    ),
)


def peers(config: SkipBenchConfig) -> Iterator[Peer]:
    """Yield the dense loss, and the one with each accepted error."""
    yield Peer(LOWTIDE, partial(loss_of, None, 0))
    for text in config.accepted:
        for unbiased in (False, True) if config.unbiased else (False,):
            options = HeadOptions(skip=float(text), skip_unbiased=unbiased, workspace_mib=config.workspace_mib)
            name = f"{LOWTIDE} skip={text}{' unbiased' if unbiased else ''}"
            yield Peer(name, partial(loss_of, options, config.calls))


def loss_of(options: HeadOptions | None, calls: int, task: Task) -> Function:
    """Return a task's loss with these options, after so many steps."""
    head = task.head
    reduction, cap = head.setting.reduction, head.setting.softcap

    def function() -> dict[str, Tensor]:
        loss = linear_cross_entropy(head.x, head.w, head.y, reduction=reduction, softcap=cap, options=options)
        return {"loss": loss}

    try:
        for _ in range(calls):
            task.step(function)
    except UnsupportedError as error:
        raise CannotError(str(error)) from error
    return function


def measure_head(x: Tensor, w: Tensor, y: Tensor, config: SkipBenchConfig) -> Iterator[Row]:
    """Yield the rows of one head, with the config's soft cap: its limit, the dense loss, and each accepted error.

    ``speed`` is the limit's time, in the same rounds, over the row's: where the GPU is busy, on a GPU.
    """
    (N, D), V = x.shape, len(w)
    setting = replace(PER_TOKEN if config.per_token else PLAIN, softcap=config.softcap)
    problem = Problem(shape=Shape("", N, D, V), setting=setting, dtype=x.dtype, x=x, w=w, y=y, g=torch.empty(0))
    for peer in peers(config):
        own = problem.in_setting(setting)  # with a tensor of its own as weight, of which an order is remembered
        bench = Bench(loss_task(own), error=True, warm=config.warm, reps=config.reps)
        row = bench.measure(peer)
        if peer.name == LOWTIDE:
            busy = {"busy_ms": row["busy_limit_ms"]} if "busy_limit_ms" in row else {}
            yield {"name": LIMITS[setting.gemms], "ms": bench.limit_ms, **busy, "speed": 1.0}
        del bench  # its truth, before the next is computed
        yield _told(row, own.w)


def _told(row: Row, w: Tensor) -> Row:
    """Return a `Bench`'s row in this table's keys, with what the last call with the weight reports."""
    if row.pop("unsupported", False):
        return {"name": row["name"], "cannot": row["failed"], "unsupported": True}
    if "share" in row:
        share = row.pop("share")
        row["speed"] = row.pop("busy_share", share)
    if "peak_mib" in row:
        row["mib"] = row.pop("peak_mib")
    row |= {ERRORS[name]: error for name, error in row.pop("errors", {}).items()}
    report = skip_report(w)
    if report is None:
        return row
    about = {name: getattr(report, name) for name in ("share", "dropped_mass", "logit_error", "threshold")}
    return row | about | {f"reported_{name}": getattr(report, name) for name in ("input_error", "weight_error")}


def random_head(config: SkipBenchConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states, a head and targets, with a softmax as concentrated as a trained model's.

    One direction of the hidden states has the logarithms of the classes' frequencies, Zipf's; in the others a hidden
    state is near its target's row.
    """
    generator = torch.Generator(device).manual_seed(config.seed)
    normal = partial(torch.randn, device=device, generator=generator)
    scale = config.hidden**0.5
    w = normal(config.vocab, config.hidden) / scale
    frequency = 1 / (torch.randperm(config.vocab, device=device, generator=generator) + 3.0)
    w[:, 0] = frequency.log() / 4 + 2
    y = frequency.multinomial(config.tokens, replacement=True, generator=generator)
    x = normal(config.tokens, config.hidden) * 1.5 + w[y] * scale / 4
    x[:, 0] = 4
    return x.to(dtype), w.to(dtype), y


def held_out(
    config: SkipBenchConfig, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], SkipBenchConfig]:
    """Return a model's hidden states of text, its head and the targets; and the config with its soft cap."""
    folder = model_folder(config.model)
    assert folder is not None
    texts = [Path(file).read_text(errors="replace") for file in config.data]
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([i for text in texts for i in tokenizer(text)["input_ids"]])[: config.tokens + 1]
    if len(ids) <= config.tokens:
        raise ArgumentValueError(message("data", f"text of more than {config.tokens} tokens", f"{len(ids)} tokens"))
    model = pretrained_model(folder, dtype=dtype, alone=True).to(device).eval()
    with torch.no_grad():
        sequences = [ids[rows][None].to(device) for rows in blocks(config.tokens, config.seq_len)]
        x = torch.cat([model.base_model(sequence).last_hidden_state[0] for sequence in sequences])
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    head = x, model.get_output_embeddings().weight.detach().clone(), ids[1:].to(device)
    return head, replace(config, softcap=cap)


def measure(run: Run[SkipBenchConfig]) -> None:
    """Measure a model's head, or a random one."""
    config, rows = run.config, run.result.setdefault("rows", [])
    if config.model:
        (x, w, y), config = held_out(config, run.dtype, run.device)
    else:
        x, w, y = random_head(config, run.dtype, run.device)
    run.result |= {"tokens": len(x), "hidden": x.shape[1], "vocab": len(w), "dtype": run.dtype_name}
    run.result |= {} if config.softcap is None else {"softcap": config.softcap}
    run.result |= {"calls": config.calls, "warm": config.warm, "reps": config.reps}
    run.say(f"{len(x)} x {x.shape[1]} x {len(w)}\n{TABLE.header}")
    for row in measure_head(x, w, y, config):
        run.add(row, rows, TABLE)


SKIP = Benchmark(measure=measure)

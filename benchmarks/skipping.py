"""Train small language models with the loss that skips tiles, beside the dense one; or measure heads trained here.

    python benchmarks/skipping.py --part train
    python benchmarks/skipping.py --part heads

The text is what the packages on this machine ship: sources and documents, a part of the files held out. Runs of one
seed have the same weights and batches.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from script import main
from skipped_heads import TABLE, measure_head
from small_model import BATCH, LENGTH, Model, batches, evaluated, loss_of, texts, tokenized
from torch import Tensor, nn

from lowtide import HeadOptions, skip_report
from lowtide.bench.harness import Row, Run, Table, release
from lowtide.bench.settings import Settings, setting

VARIANTS: dict[str, HeadOptions | None] = {"dense": None, "skip": HeadOptions(skip=5e-3)}
HEADS = {65536: (1024, 8, 400), 131072: (2048, 4, 120), 32768: (1024, 8, 300)}  # V: D, layers, steps


@dataclass(frozen=True, kw_only=True)
class SkippingConfig(Settings):
    benchmark = "skipping"

    part: str = setting("train", "train: runs beside each other; heads: the head's time on models trained here")
    megabytes: int = setting(160, "of text", least=1)
    vocab: int = setting(65536, "of the runs", least=300)
    hidden: int = setting(768, "of the runs", least=64)
    layers: int = setting(4, "of the runs", least=1)
    steps: int = setting(1000, "of a run", least=1)
    seeds: int = setting(3, "of each variant", least=1)
    accepted: tuple[str, ...] = setting(("5e-3",), "errors that heads are measured at")
    heads: tuple[int, ...] = setting((65536, 131072), "sizes of their vocabularies", metavar="V", names=HEADS)


def train(
    model: Model, layers: Callable[[Tensor], Tensor], data: dict[str, Tensor], steps: int, seed: int,
    options: HeadOptions | None,
) -> Row:  # fmt: skip
    """Train in place by AdamW; return the last losses' mean, the held-out loss, the seconds and the tiles' share."""
    parameters, rate = list(model.parameters()), 1e-3
    step = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream, losses = batches(data["train"], seed), []
    begin = time.perf_counter()
    for i in range(steps):
        for group in step.param_groups:
            group["lr"] = rate * min(1, (i + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * i / steps)))
        loss = loss_of(model, layers, next(stream), options)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        step.step()
        step.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds, last = time.perf_counter() - begin, torch.stack(losses[-50:]).mean().item()
    report = skip_report(model.head.weight)
    more = {} if report is None else report._asdict()
    return {"seconds": seconds, "held_out": evaluated(model, layers, data["held_out"]), "last": last, **more}


RUNS = Table({"variant": "<10", "seed": "5d", "held_out": "10.4f", "last": "9.4f", "seconds": "9.1f", "share": "7.3f"})


def runs(run: Run, data: dict[str, Tensor]) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    run.say(RUNS.header)
    for seed in range(config.seeds):
        for variant, options in VARIANTS.items():
            torch.manual_seed(seed)
            model = Model(config.vocab, config.hidden, config.layers).cuda()
            row = train(model, torch.compile(model.__call__), data, config.steps, seed, options)
            run.add({"variant": variant, "seed": seed} | row, rows, RUNS)


def heads(run: Run, found: list[tuple[str, str]]) -> None:
    config, shapes = run.config, run.result.setdefault("shapes", [])
    for vocab in config.heads:
        hidden, layers, steps = HEADS[vocab]
        data = tokenized(found, vocab)
        torch.manual_seed(0)
        model = Model(vocab, hidden, layers).cuda()
        row = train(model, torch.compile(model.__call__), data, steps, 0, None)
        ids = data["held_out"][: 16 * LENGTH + 1].cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            x = torch.cat([model(ids[i : i + LENGTH][None])[0] for i in range(0, 16 * LENGTH, LENGTH)]).bfloat16()
        w, y = model.head.weight.detach().bfloat16(), ids[1:].clone()
        shape: dict[str, Any] = {
            "tokens": len(x), "hidden": hidden, "vocab": vocab, "steps": steps, "held_out": row["held_out"], "rows": [],
        }  # fmt: skip
        shapes.append(shape)
        del model
        release(run.device)
        run.say(f"{len(x)} x {hidden} x {vocab}, held-out loss {row['held_out']:.3f}\n{TABLE.header}")
        for one in measure_head(x, w, y, config.accepted):
            run.add(one, shape["rows"], TABLE)
        release(run.device)


def measure(run: Run) -> None:
    found = texts(run.config.megabytes)
    run.result |= {"files": len(found), "characters": sum(len(text) for _, text in found)}
    if run.config.part == "heads":
        heads(run, found)
        return
    data = tokenized(found, run.config.vocab)
    run.result |= {f"{name}_tokens": len(ids) for name, ids in data.items()}
    run.result |= {"batch": BATCH, "length": LENGTH}
    runs(run, data)


if __name__ == "__main__":
    sys.exit(main(measure, SkippingConfig, __doc__))

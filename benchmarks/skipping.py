"""Train small language models with the loss that skips tiles, beside the dense one; or measure heads trained here.

    python benchmarks/skipping.py --part train
    python benchmarks/skipping.py --part heads

The text is what the packages on this machine ship: sources and documents, a part of the files held out. Runs of one
seed have the same weights and batches.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from script import main
from skipped_heads import TABLE, measure_head
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from lowtide import HeadOptions, linear_cross_entropy, skip_report
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, release
from lowtide.bench.settings import ScriptSettings, numbers, setting

HELD_OUT = 25  # one file in so many
LENGTH, BATCH = 1024, 16
VARIANTS: dict[str, HeadOptions | None] = {"dense": None, "skip": HeadOptions(skip=5e-3)}
HEADS = {65536: (1024, 8, 400), 131072: (2048, 4, 120), 32768: (1024, 8, 300)}  # V: D, layers, steps


@dataclass(frozen=True, kw_only=True)
class SkippingConfig(ScriptSettings):
    benchmark = "skipping"

    part: str = setting("train", "train: runs beside each other; heads: the head's time on models trained here")
    megabytes: int = setting(160, "of text", least=1)
    vocab: int = setting(65536, "of the runs", least=300)
    hidden: int = setting(768, "of the runs", least=64)
    layers: int = setting(4, "of the runs", least=1)
    steps: int = setting(1000, "of a run", least=1)
    seeds: int = setting(3, "of each variant", least=1)
    accepted: tuple[str, ...] = setting(("5e-3",), "errors that heads are measured at")
    heads: tuple[str, ...] = setting(("65536", "131072"), "sizes of their vocabularies", metavar="V")
    per_token: bool = setting(False, "heads' losses of each token alone")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = set(map(str, HEADS))
        self._require("heads", set(self.heads) <= known, f"sizes out of {', '.join(map(str, HEADS))}")


def texts(megabytes: int) -> list[tuple[str, str]]:
    """Return (suffix, text) of installed packages' sources and documents, no text twice, in a fixed order."""
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}
    files = sorted(
        {
            file
            for root in roots
            for suffix in (".py", ".pyi", ".md", ".rst", ".txt")
            for file in Path(root).rglob(f"*{suffix}")
        }
    )
    random.Random(0).shuffle(files)
    seen, found, size = set[bytes](), list[tuple[str, str]](), 0
    for file in files:
        if not file.is_file() or not 500 < file.stat().st_size < 300_000:
            continue
        text = file.read_text(errors="replace")
        key = hashlib.sha256(text.encode(errors="replace")).digest()
        if key in seen:
            continue
        seen.add(key)
        found.append((file.suffix, text))
        size += len(text)
        if size > megabytes * 1e6:
            break
    return found


def tokenized(found: list[tuple[str, str]], vocab: int) -> dict[str, Tensor]:
    """Return token ids of "train" and "held_out", by a BPE of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for _, text in found], trainer)
    held = len(found) // HELD_OUT

    def ids(part: list[tuple[str, str]]) -> Tensor:
        return torch.tensor([i for one in tokenizer.encode_batch([text for _, text in part]) for i in one.ids])

    return {"train": ids(found[held:]), "held_out": ids(found[:held])}


class Model(nn.Module):
    """A Llama's layers, and its head beside them."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=-(-hidden * 11 // 4 // 128) * 128,
            num_hidden_layers=layers, num_attention_heads=hidden // 64, use_cache=False, max_position_embeddings=LENGTH,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.layers = LlamaModel(config)
        self.head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.layers(input_ids=ids).last_hidden_state
        return hidden


def batches(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield random windows [BATCH, LENGTH + 1] for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([ids[i : i + LENGTH + 1] for i in starts.tolist()]).cuda(non_blocking=True)


def loss_of(model: Model, layers: Callable[[Tensor], Tensor], ids: Tensor, options: HeadOptions | None) -> Tensor:
    """Return the mean loss of windows."""
    with torch.autocast("cuda", torch.bfloat16):
        hidden = layers(ids[:, :-1])
        return linear_cross_entropy(hidden, model.head.weight, ids[:, 1:], options=options)


@torch.no_grad()
def evaluated(model: Model, layers: Callable[[Tensor], Tensor], ids: Tensor) -> float:
    """Return the mean loss of held-out windows, the same ones each time."""
    stream = batches(ids, 12345)
    return sum(loss_of(model, layers, next(stream), None).item() for _ in range(12)) / 12


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


RUNS = Table(
    heads=(Column("variant", "variant", "<10"),),
    figures=(
        Column("seed", "seed", "5d"),
        Column("held-out", "held_out", "10.4f"),
        Column("last 50", "last", "9.4f"),
        Column("s", "seconds", "7.1f"),
        Column("share", lambda row: row.get("share"), "7.3f"),
    ),
)


def runs(run: Run[SkippingConfig], data: dict[str, Tensor]) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    run.say(RUNS.header)
    for seed in range(config.seeds):
        for variant, options in VARIANTS.items():
            torch.manual_seed(seed)
            model = Model(config.vocab, config.hidden, config.layers).cuda()
            row = train(model, torch.compile(model.__call__), data, config.steps, seed, options)
            run.add({"variant": variant, "seed": seed} | row, rows, RUNS)


def heads(run: Run[SkippingConfig], found: list[tuple[str, str]]) -> None:
    config, shapes = run.config, run.result.setdefault("shapes", [])
    of = "per_token" if config.per_token else "rows"
    for vocab in numbers("heads", config.heads, int):
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
            "tokens": len(x), "hidden": hidden, "vocab": vocab, "steps": steps, "held_out": row["held_out"], of: [],
        }  # fmt: skip
        shapes.append(shape)
        del model
        release(run.device)
        run.say(f"{len(x)} x {hidden} x {vocab}, held-out loss {row['held_out']:.3f}\n{TABLE.header}")
        for one in measure_head(x, w, y, config.accepted, per_token=config.per_token):
            run.add(one, shape[of], TABLE)
        release(run.device)


def measure(run: Run[SkippingConfig]) -> None:
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
    sys.exit(main(Benchmark(measure=measure), SkippingConfig, __doc__))

"""Train small language models whose loss skips tiles of the softmax, beside the dense loss; then measure their heads.

    python benchmarks/skipping.py --part train
    python benchmarks/skipping.py --part heads

The text is what the packages on this machine ship: sources and documents, a part of the files held out. Runs of one
seed have the same weights and batches. "drop" leaves out the tiles that skip=5e-3 leaves out, and puts nothing in their
place; its threshold stays what the run before it ended with.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from script import main
from skipped_heads import LIMITS, TABLE, measure_head
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from lowtide import HeadOptions, linear_cross_entropy, skip_report
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, release
from lowtide.bench.settings import ScriptSettings, numbers, setting
from lowtide.head import threshold, vocabulary_order
from lowtide.head.kernels import kept_tiles
from lowtide.measure.plots import Named, name_points, new_figure

HELD_OUT = 25  # one file in so many
LENGTH, BATCH = 1024, 16
EVERY = 10  # steps whose losses are averaged in the result
VARIANTS: dict[str, HeadOptions | None] = {
    "dense": None,
    "skip": HeadOptions(skip=5e-3),
    "unbiased": HeadOptions(skip=5e-3, skip_unbiased=True),
    "drop": HeadOptions(skip=5e-3),
}
COLORS = {"dense": "#777777", "skip": "#0b62a8", "unbiased": "#d06b00"}
OF_SHAPES, STEPS = ("#0b62a8", "#d06b00", "#00806a"), 24  # points of a line that no label covers
HEADS = {65536: (1024, 8, 400), 131072: (2048, 4, 120), 32768: (1024, 8, 300)}  # V: D, layers, steps


@dataclass(frozen=True, kw_only=True)
class SkippingConfig(ScriptSettings):
    benchmark = "skipping"

    part: str = setting("train", "train: runs beside each other; heads: the head's time on models trained here")
    megabytes: int = setting(160, "of text", least=1)
    vocab: int = setting(65536, "of the runs", least=300)
    hidden: int = setting(768, "of the runs", least=64)
    layers: int = setting(4, "of the runs", least=1)
    steps: int = setting(1000, "of a run from random weights", least=1)
    tuned_steps: int = setting(200, "of a fine-tune on the documents alone", least=1)
    seeds: int = setting(3, "of each variant", least=1)
    seconds: int = setting(500, "after which no run begins", least=1)
    accepted: tuple[str, ...] = setting(("1e-2", "5e-3", "4e-3", "3e-3"), "errors that heads are measured at")
    heads: tuple[str, ...] = setting(tuple(map(str, HEADS)), "sizes of their vocabularies", metavar="V")
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
    """Return token ids of "train", "held_out" and the documents among the training files, by a BPE of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for _, text in found], trainer)
    held = len(found) // HELD_OUT

    def ids(part: list[tuple[str, str]]) -> Tensor:
        return torch.tensor([i for one in tokenizer.encode_batch([text for _, text in part]) for i in one.ids])

    documents = [one for one in found[held:] if one[0] not in (".py", ".pyi")]
    return {"train": ids(found[held:]), "held_out": ids(found[:held]), "documents": ids(documents)}


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
    options: HeadOptions | None, *, rate: float, optimizer: str = "adam", documents: bool = False,
) -> Row:  # fmt: skip
    """Train in place; return the curve of losses and of the tiles' shares, the held-out loss and the seconds."""
    parameters = list(model.parameters())
    if optimizer == "adam":
        step = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    else:
        step = torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)  # type: ignore[assignment]
    stream, losses, shares = batches(data["documents" if documents else "train"], seed), [], []
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
        if options is not None and i % (EVERY * 5) == 0 and (report := skip_report(model.head.weight)):
            shares.append(
                [i, report.share, report.dropped_mass, report.input_error, report.weight_error, report.logit_error]
            )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    curve = torch.stack(losses).float().cpu()
    held = evaluated(model, layers, data["held_out"])
    known = vocabulary_order.known_order(model.head.weight)
    more = {} if known is None else {"dense_calls": known.dense, "calls": known.calls}
    return {
        "seconds": seconds, "held_out": held, "last": curve[-50:].mean().item(), "shares": shares,
        "curve": [round(v, 4) for v in curve[: steps // EVERY * EVERY].view(-1, EVERY).mean(1).tolist()], **more,
    }  # fmt: skip


class Dropped:
    """While it is entered, nothing stands for the tiles that are left out, and the threshold stays."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def __enter__(self) -> None:
        order = vocabulary_order.VocabularyOrder
        self.before = kept_tiles.put_in_order, kept_tiles.put_back, order.adapt, threshold.FIRST
        put_in_order, put_back = self.before[:2]

        def without_means(w: Tensor, order: Tensor, out: Tensor, mean: Tensor) -> None:
            put_in_order(w, order, out, mean)
            mean.zero_()

        def without_shared(total: Tensor, shared: Tensor, order: Tensor, out: Tensor) -> None:
            put_back(total, shared.zero_(), order, out)

        kept_tiles.put_in_order, kept_tiles.put_back = without_means, without_shared
        order.adapt, threshold.FIRST = (lambda *_: None), self.threshold / 5e-3  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        order = vocabulary_order.VocabularyOrder
        kept_tiles.put_in_order, kept_tiles.put_back, order.adapt, threshold.FIRST = self.before


RUNS = Table(
    heads=(Column("", "of", "<9"), Column("", "optimizer", "<6"), Column("variant", "variant", "<10")),
    figures=(
        Column("seed", "seed", "5d"),
        Column("held-out", "held_out", "10.4f"),
        Column("last 50", "last", "9.4f"),
        Column("s", "seconds", "7.1f"),
        Column("share", lambda row: row["shares"][-1][1] if row["shares"] else None, "7.3f"),
    ),
)


def draw(file: Path, rows: list[Row]) -> None:
    """Draw, of the runs from random weights by Adam, the share of the tiles and how losses lie about the dense mean."""
    chosen = [row for row in rows if (row["of"], row["optimizer"]) == ("scratch", "adam") and row["variant"] != "drop"]
    dense = [row["curve"] for row in chosen if row["variant"] == "dense"]
    mean = [sum(values) / len(values) for values in zip(*dense, strict=True)]
    with new_figure(file, 10, 3.8, dpi=130) as figure:
        share, loss = figure.subplots(1, 2)
        for row in chosen:
            color, name = COLORS[row["variant"]], row["variant"] if row["seed"] == 0 else None
            steps = [EVERY * (i + 1) for i in range(len(mean))]
            loss.plot(steps, [y - m for y, m in zip(row["curve"], mean, strict=True)], color=color, label=name, lw=0.9)
            if points := [(step, part) for step, part, *_ in row["shares"]]:
                share.plot(*zip(*points, strict=True), color=color, label=name, marker="o", ms=3, lw=1.2)
        for axes, what in ((share, "share of the tiles that stay"), (loss, "loss, less the mean of the dense runs")):
            axes.set(xlabel="steps", ylabel=what)
            axes.grid(alpha=0.25)
            axes.legend()
        share.set_ylim(0, 1)


def runs(run: Run[SkippingConfig], data: dict[str, Tensor]) -> None:
    config, rows, began = run.config, run.result.setdefault("rows", []), time.perf_counter()
    run.say(RUNS.header)
    layers: Any = None
    model = Model(config.vocab, config.hidden, config.layers).cuda()
    run.result["parameters"] = sum(p.numel() for p in model.parameters())
    layers = torch.compile(model.__call__)
    thresholds: dict[tuple[str, str], float] = {}
    start: dict[str, Tensor] | None = None

    def one(of: str, optimizer: str, variant: str, seed: int) -> None:
        nonlocal start
        if time.perf_counter() - began > config.seconds:
            return
        torch.manual_seed(seed)
        if of == "fine-tune":
            assert start is not None
            model.load_state_dict(start)
        else:
            model.load_state_dict(Model(config.vocab, config.hidden, config.layers).state_dict())
        vocabulary_order._orders.clear()
        rate = {"scratch": 1e-3 if optimizer == "adam" else 0.3, "fine-tune": 1e-4}[of]
        steps = config.steps if of == "scratch" else config.tuned_steps
        arguments = model, layers, data, steps, seed, VARIANTS[variant]
        more: dict[str, Any] = {"rate": rate, "optimizer": optimizer, "documents": of == "fine-tune"}
        if variant == "drop":
            with Dropped(thresholds[of, optimizer]):
                row = train(*arguments, **more)
        else:
            row = train(*arguments, **more)
        if variant == "skip" and (report := skip_report(model.head.weight)):
            thresholds[of, optimizer] = report.threshold
        if (of, variant, seed, optimizer) == ("scratch", "dense", 0, "adam"):
            start = {name: value.clone() for name, value in model.state_dict().items()}
        run.add({"of": of, "optimizer": optimizer, "variant": variant, "seed": seed} | row, rows, RUNS)

    train(model, layers, data, 3, 0, None, rate=1e-3)  # compiled before anything is timed
    for seed in range(config.seeds):
        for variant in ("dense", "skip", "unbiased"):
            one("scratch", "adam", variant, seed)
    one("scratch", "adam", "drop", 0)
    for variant in ("dense", "skip", "drop"):
        one("scratch", "sgd", variant, 0)
    for seed in range(config.seeds):
        for variant in ("dense", "skip", "unbiased"):
            one("fine-tune", "adam", variant, seed)
    one("fine-tune", "adam", "drop", 0)
    run.files.plot("runs", lambda file: draw(file, rows))


def draw_heads(file: Path, shapes: list[dict[str, Any]]) -> None:
    """Draw speed against error: a line for each shape, labelled by what was accepted, and a panel for each limit."""
    panels = {of: gemms for of, gemms in (("rows", 3), ("per_token", 4)) if any(shape.get(of) for shape in shapes)}
    with new_figure(file, 1 + 6.5 * len(panels), 5, dpi=130) as figure:
        for axes, (of, gemms) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            axes.set(xlabel="the larger of the relative errors of dX and dW", ylabel=f"{LIMITS[gemms]} / time")
            axes.xaxis.set_major_formatter(lambda error, _: f"{error * 1e3:g}e-3")
            axes.grid(alpha=0.25)
            axes.margins(0.12)
            named = [
                one for shape, color in zip(shapes, OF_SHAPES, strict=False) for one in _lines(axes, shape, of, color)
            ]
            errors = [one.x for one in named] or [0, 1]
            axes.plot([min(errors), max(errors)], [1, 1], "--", color=COLORS["dense"], lw=1, label=LIMITS[gemms])
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2)
            ends = [end for line in axes.lines for end in pairwise(line.get_xydata())]
            name_points(axes, named, beside=[a + (b - a) * i / STEPS for a, b in ends for i in range(STEPS)])


def _lines(axes: Any, shape: dict[str, Any], of: str, color: str) -> list[Named]:
    """Draw one shape's calls; return their labels."""
    lines: dict[str, list[Named]] = {"o-": [], "s:": [], "D": []}
    for row in shape.get(of, []):
        if "speed" in row and "input_error" in row:
            accepted, error = row["name"].partition("skip=")[2], max(row["input_error"], row["weight_error"])
            line = lines["D" if not accepted else "s:" if accepted.endswith("unbiased") else "o-"]
            line.append(Named(accepted or "dense", error, row["speed"], color, 8))
    label: str | None = " x ".join(str(shape[axis]) for axis in ("tokens", "hidden", "vocab"))
    for style, line in lines.items():
        if points := sorted((point.x, point.y) for point in line):
            axes.plot(*zip(*points, strict=True), style, color=color, label=label, ms=5, lw=1.5)
            label = None
    return [point for line in lines.values() for point in line]


def heads(run: Run[SkippingConfig], found: list[tuple[str, str]]) -> None:
    config, shapes = run.config, run.result.setdefault("shapes", [])
    of = "per_token" if config.per_token else "rows"
    for vocab in numbers("heads", config.heads, int):
        hidden, layers, steps = HEADS[vocab]
        data = tokenized(found, vocab)
        torch.manual_seed(0)
        model = Model(vocab, hidden, layers).cuda()
        row = train(model, torch.compile(model.__call__), data, steps, 0, None, rate=1e-3)
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
    run.files.plot("errors", lambda file: draw_heads(file, shapes))


def measure(run: Run[SkippingConfig]) -> None:
    found = texts(run.config.megabytes)
    run.result |= {"files": len(found), "characters": sum(len(text) for _, text in found)}
    if run.config.part == "heads":
        heads(run, found)
        return
    data = tokenized(found, run.config.vocab)
    run.result |= {f"{name}_tokens": len(ids) for name, ids in data.items()}
    run.result |= {"batch": BATCH, "length": LENGTH, "every": EVERY}
    runs(run, data)


if __name__ == "__main__":
    sys.exit(main(Benchmark(measure=measure), SkippingConfig, __doc__))

"""What a run and a comparison print."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lowtide.measure.units import mib
from lowtide.train.checkpoints import MERGED
from lowtide.train.config import TrainConfig
from lowtide.train.model import has_weights
from lowtide.train.parallel import engine_line
from lowtide.train.trainer import product_dtype

if TYPE_CHECKING:
    from lowtide.train.prepare import Prepared
    from lowtide.train.result import Comparison, TrainResult

_NAMES = 15  # letters of the longest name of a result; what lies in lines of their own stands two further on
_LAST = 10  # single steps are noisy: the loss at the end is the mean of so many


def show_start(console: Console, ready: Prepared, args: Any, streams: int, resume_from: Path | None) -> None:
    """Say what is about to be trained on what; ``streams``: sequences of all processes in a batch."""
    config, corpus, shape = ready.config, ready.corpus, ready.model.config.get_text_config()
    parameters = sum(p.numel() for p in ready.model.parameters())
    source = "Python's standard library" if not config.data else ", ".join(config.data)
    left_out = f", {corpus.skipped} files that are not text left out" if corpus.skipped else ""
    loss = "patched by lowtide" if ready.patched else "stock"
    high = has_weights(config.model) and config.lr >= TrainConfig.lr
    rate = "2e-4" if config.lora_rank else "1e-5"
    wants = f": a pretrained model wants far less, such as --lr {rate}" if high else ""
    lines = [
        f"model    {config.model}: {parameters / 1e6:,.1f} M parameters, vocabulary {shape.vocab_size:,}, {loss}",
        f"data     {source}: {len(corpus.files):,} files, {mib(corpus.bytes):,.1f} MiB{left_out}",
        f"steps    {config.max_steps:,} of {_sequences(config, streams)} of {config.seq_len:,} tokens, "
        f"on {args.world_size} x {args.device.type}",
        f"numbers  weights {config.weights}, products {product_dtype(config)}, "
        f"learning rate up to {config.lr:g}{wants}",
    ]
    if engine := engine_line(config):
        lines.append(engine)
    lines += [*ready.lines, *(ready.chosen.lines if ready.chosen else ())]
    if resume_from is not None:
        lines.append(f"resume   from {resume_from}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _sequences(config: TrainConfig, streams: int) -> str:
    return f"{streams} sequences" if config.grad_accum == 1 else f"{config.grad_accum} x {streams} sequences"


def show_result(console: Console, result: TrainResult, config: TrainConfig) -> None:
    """Print a run's numbers."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(min_width=_NAMES)
    for name, value in result_rows(result):
        table.add_row(name, value)
    console.print()
    console.print(table, highlight=False, markup=False)
    if result.conversations:
        seen, cut, left_out = result.conversations
        told = f"{seen:,} read, {cut:,} cut at {config.seq_len:,} tokens, {left_out:,} left out"
        console.print(f"conversations    {told}", highlight=False, markup=False, soft_wrap=True)
    if result.best is not None:
        last = max(result.losses)
        told = "the last" if result.best == last else f"the run went on to step {last} and none was better"
        console.print(f"best             step {result.best}: {told}", highlight=False, markup=False, soft_wrap=True)
    if result.saved:
        console.print(f"saved            {result.saved}", highlight=False, markup=False, soft_wrap=True)
        if config.lora_merge:
            merged = Path(result.saved).parent / MERGED
            console.print(f"merged           {merged}", highlight=False, markup=False, soft_wrap=True)


def result_rows(result: TrainResult) -> list[tuple[str, str]]:
    """Return a run's numbers as a person reads them."""
    last = min(_LAST, len(result.losses))
    mean = f"mean of the last {last} steps" if last > 1 else "one step"
    rows = [
        ("training loss", f"{first_loss(result):.3f} -> {last_loss(result):.3f} ({mean})"),
        ("held-out loss", f"{_number(result.held_out_before)} -> {_number(result.held_out_after)}"),
        ("speed", f"{result.tokens_per_second:,.0f} tokens/s, {result.step_seconds * 1e3:,.0f} ms a step (median)"),
        ("peak memory", f"{mib(result.peak_resident_bytes):,.0f} MiB resident"),
    ]
    if result.peak_cuda_bytes:
        rows.append(("peak GPU memory", f"{mib(result.peak_cuda_bytes):,.0f} MiB"))
    if result.calls_fused is not None:
        rows.append(("losses", f"{result.calls_fused} without logits, {result.calls_materialised} with"))
    rows.append(("time", f"{result.seconds:.0f} s"))
    return rows


def first_loss(result: TrainResult) -> float:
    """Return the loss of a run's first step."""
    return result.losses[min(result.losses)]


def last_loss(result: TrainResult) -> float:
    """Return the mean loss of a run's last steps."""
    return statistics.fmean(result.losses[step] for step in sorted(result.losses)[-_LAST:])


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the two runs side by side."""
    stock, patched = comparison.stock, comparison.patched
    table = Table("", "stock", "lowtide", "lowtide / stock", title="the same model, seed and data")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, a: float | None, b: float | None, form: str, *, ratio: bool = True) -> None:
        told = f"{b / a:.2f}" if ratio and a and b is not None else ""
        table.add_row(name, _number(a, form), _number(b, form), told)

    row("loss, first step", first_loss(stock), first_loss(patched), ".4f", ratio=False)
    row(f"loss, last {_LAST} steps", last_loss(stock), last_loss(patched), ".4f", ratio=False)
    row("held-out loss", stock.held_out_after, patched.held_out_after, ".4f", ratio=False)
    kind = "GPU" if stock.peak_cuda_bytes else "resident"
    row(f"peak {kind} MiB above warm model", stock.above_warm_mib, patched.above_warm_mib, ",.0f")
    row(f"peak {kind} MiB", mib(stock.peak_step_bytes), mib(patched.peak_step_bytes), ",.0f")
    row("step, ms (median)", stock.step_seconds * 1e3, patched.step_seconds * 1e3, ",.0f")
    row("tokens/s", stock.tokens_per_second, patched.tokens_per_second, ",.0f")
    console.print()
    console.print(table, highlight=False)
    limit = comparison.tolerance
    same = "equal to rounding" if comparison.equal else "NOT EQUAL"
    measured = "; rounding as the stock model's own, told by a run of it in float32" if comparison.reference else ""
    console.print(
        f"losses of {len(stock.losses)} steps: {same}; the largest difference is {comparison.early_difference:.0e} "
        f"in the first steps (rounding: up to {limit.early:.0e}) and {comparison.max_difference:.0e} in all "
        f"(up to {limit.late:.0e}){measured}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"losses without logits: {patched.calls_fused}, with: {patched.calls_materialised}",
        highlight=False,
        soft_wrap=True,
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)

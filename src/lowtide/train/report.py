"""What a run and a comparison print."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lowtide.measure.units import mib
from lowtide.train.model import count
from lowtide.train.parallel import engine_line

if TYPE_CHECKING:
    from lowtide.train.result import Comparison, TrainResult
    from lowtide.train.run_state import RunState

_NAMES = 15  # letters of the longest name of a result; what lies in lines of their own stands two further on
_HIGH_RATE = 1e-3
_LAST = 10  # single steps are noisy: the loss at the end is the mean of so many


def show_start(console: Console, run: RunState) -> None:
    """Print what is about to be trained on what."""
    config, args, model = run.config, run.settings.args, run.model
    parameters, vocabulary = count(model.parameters()), model.config.get_text_config().vocab_size
    loss = "patched by lowtide" if run.patched else "stock"
    length = f"{steps:,} steps" if (steps := args.max_steps) > 0 else f"{args.num_train_epochs:g} epochs"
    sequences = f"{run.settings.sequences} sequences of {'up to ' if config.fine_tunes else ''}{run.seq_len:,} tokens"
    high = config.fine_tunes and args.learning_rate >= _HIGH_RATE and not hasattr(model, "peft_config")
    wants = ": high for a pretrained model, which takes 1e-5 or so" if high else ""
    lines = [
        f"model    {config.model}: {parameters / 1e6:,.1f} M parameters, vocabulary {vocabulary:,}, {loss}",
        *run.lines[:1],
        f"steps    {length} of {sequences}, on {args.world_size} x {args.device.type}",
        f"dtypes   weights {run.settings.model.dtype}, GEMMs {run.settings.product_dtype}; "
        f"learning rate up to {args.learning_rate:g}{wants}",
        *filter(None, [engine_line(config)]),
        *run.lines[1:],
    ]
    if run.checkpoint is not None:
        lines.append(f"resume   from {run.checkpoint}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_result(console: Console, result: TrainResult) -> None:
    """Print a run's numbers."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(min_width=_NAMES)
    for name, value in _result_rows(result):
        table.add_row(name, value)
    console.print()
    console.print(table, highlight=False, markup=False)
    if result.best is not None:
        last = max(result.losses)
        text = "the last" if result.best == last else f"the run went on to step {last} and none was better"
        console.print(f"best             step {result.best}: {text}", highlight=False, markup=False, soft_wrap=True)
    if result.saved:
        console.print(f"saved            {result.saved}", highlight=False, markup=False, soft_wrap=True)


def _result_rows(result: TrainResult) -> list[tuple[str, str]]:
    """Return a run's numbers as a person reads them."""
    last = min(_LAST, len(result.losses))
    speed = f"{result.tokens_per_second:,.0f} tokens/s, {result.step_seconds * 1e3:,.0f} ms a step (median)"
    mean = f"mean of the last {last} steps" if last > 1 else "one step"
    rows = [
        ("training loss", f"{_first_loss(result):.3f} -> {_last_loss(result):.3f} ({mean})"),
        ("held-out loss", f"{_number(result.held_out_before)} -> {_number(result.held_out_after)}"),
        ("speed", speed if result.steps_seconds else "no further step"),
        ("peak memory", f"{mib(result.peak_resident_bytes):,.0f} MiB resident"),
    ]
    if result.peak_cuda_bytes:
        rows.append(("peak GPU memory", f"{mib(result.peak_cuda_bytes):,.0f} MiB"))
    if result.calls_fused is not None:
        rows.append(("losses", f"{result.calls_fused} without logits, {result.calls_materialised} with"))
    rows.append(("time", f"{result.seconds:.0f} s"))
    return rows


def _first_loss(result: TrainResult) -> float:
    """Return the loss of a run's first step."""
    return result.losses[min(result.losses)]


def _last_loss(result: TrainResult) -> float:
    """Return the mean loss of a run's last steps."""
    return statistics.fmean(result.losses[step] for step in sorted(result.losses)[-_LAST:])


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the two runs side by side."""
    stock, patched = comparison.stock, comparison.patched
    title = f"the same model, seed and data; stock: {comparison.stock_is}"
    table = Table("", "stock", "lowtide", "lowtide / stock", title=title)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, a: float | None, b: float | None, form: str, ratio: float | None = None) -> None:
        table.add_row(name, _number(a, form), _number(b, form), "" if ratio is None else f"{ratio:.2f}")

    def divided(a: float | None, b: float | None) -> float | None:
        return b / a if a and b is not None else None

    row("loss, first step", _first_loss(stock), _first_loss(patched), ".4f")
    row(f"loss, last {_LAST} steps", _last_loss(stock), _last_loss(patched), ".4f")
    row("held-out loss", stock.held_out_after, patched.held_out_after, ".4f")
    kind = "GPU" if stock.peak_cuda_bytes else "resident"
    above = stock.above_warm_mib, patched.above_warm_mib
    peaks = mib(stock.peak_step_bytes), mib(patched.peak_step_bytes)
    row(f"peak {kind} MiB above warm model", *above, ",.0f", divided(*above))
    row(f"peak {kind} MiB", *peaks, ",.0f", divided(*peaks))
    ratio = comparison.step_ratio
    row("step, ms (median)", stock.step_seconds * 1e3, patched.step_seconds * 1e3, ",.0f", ratio)
    row("tokens/s", stock.tokens_per_second, patched.tokens_per_second, ",.0f", 1 / ratio if ratio else None)
    console.print()
    console.print(table, highlight=False)
    limit = comparison.tolerance
    same = "equal to rounding" if comparison.equal else "NOT EQUAL"
    measured = "; rounding measured by a float32 run of the stock model" if comparison.reference else ""
    lines = [
        f"losses of {len(stock.losses)} steps: {same}; the largest difference is {comparison.early_difference:.0e} "
        f"in the first steps (rounding: up to {limit.early:.0e}) and {comparison.max_difference:.0e} in all "
        f"(up to {limit.late:.0e}){measured}",
        f"losses without logits: {patched.calls_fused}, with: {patched.calls_materialised}",
        f"times: the runs took turns every {comparison.block} steps; the ratio is the median over pairs of blocks",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)

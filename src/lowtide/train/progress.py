"""Progress while a run trains: a bar on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from lowtide.measure.resident import resident_bytes
from lowtide.measure.units import mib
from lowtide.train.metrics import StepMetrics

LINE_EVERY_SECONDS = 10.0


class ProgressDisplay(TrainerCallback):  # type: ignore[misc]
    """Shows steps, loss, tokens/s and memory on the first rank.

    Args:
        console: where to.
        metrics: what a `Recorder` that runs before it has just filled.
        label: said in front of the bar.
    """

    def __init__(self, console: Console, metrics: StepMetrics, label: str) -> None:
        self._console, self._metrics, self._label = console, metrics, label
        self._bar: Progress | None = None
        self._said = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar."""
        del args, control
        if state.is_world_process_zero and self._console.is_terminal:
            columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
            texts = [TextColumn(c) if isinstance(c, str) else c for c in columns]
            self._bar = Progress(*texts, TimeRemainingColumn(), console=self._console)
            self._bar.add_task(self._label, total=state.max_steps, completed=state.global_step, now="")
            self._bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Show the step that has just ended."""
        del args, control
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs and 0 < state.global_step < state.max_steps:
            told = f"{self._label}: step {state.global_step}/{state.max_steps}  held-out loss {logs['eval_loss']:.3f}"
            self._console.print(told, highlight=False)
        if "loss" not in logs:
            return
        metrics = self._metrics
        speed = metrics.last_tokens_per_second
        memory = metrics.peak_bytes if metrics.on_gpu else resident_bytes()
        now = f"loss {logs['loss']:.3f}  {speed:,.0f} tokens/s  {mib(memory):,.0f} MiB"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step, now=now)
        elif time.monotonic() - self._said > LINE_EVERY_SECONDS or state.global_step == state.max_steps:
            self._said = time.monotonic()
            self._console.print(f"{self._label}: step {state.global_step}/{state.max_steps}  {now}", highlight=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the bar down."""
        del args, state, control
        self.close()

    def close(self) -> None:
        """Give the terminal back; also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

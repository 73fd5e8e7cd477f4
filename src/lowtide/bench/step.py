"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each way a process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import chosen_device, chosen_dtype
from lowtide.bench.results import begin
from lowtide.bench.step_way import VOCABULARY, measure
from lowtide.bench.ways import language_part
from lowtide.measure.child import ALLOCATOR, run_child
from lowtide.train.model import model_config

_COLUMNS = f"{'':34}{'T':>9}{'s':>9}{'tokens/s':>11}{'GiB':>8}{'loss':>9}{'last':>9}{'of first':>10}\n"


def run(config: StepBenchConfig, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure, tell each row as it is known, write the result after each, and return the rows.

    Args:
        config: what.
        say: gets the text.

    Raises:
        UnsupportedError: there is no such device.
        ArgumentValueError: there is no such model, or the folder for the results cannot be written.
    """
    device = chosen_device(config.device)
    dtype = str(chosen_dtype(config.dtype, device)).removeprefix("torch.")
    language_part(model_config(config.model, vocab_size=VOCABULARY))
    files, about = begin(config.output, "step", config.command(), device, ["liger-kernel"])
    rows: list[dict[str, Any]] = []
    told = {
        **about,
        "dtype": dtype,
        "config": config.recorded(),
        "rows": rows,
    }
    say(f"\n{config.model}, batch {config.batch}, {dtype}, attention by {config.sdpa}\n{_COLUMNS}")
    first: dict[int, float] = {}

    def tell(way: str, results: list[dict[str, Any]]) -> None:
        for result in results:
            rows.append({"way": way, **result})
            if "seconds" in result:
                first.setdefault(result["tokens"], result["seconds"])
            say(line(rows[-1], first))
        files.write_json(told)

    for way in config.ways:
        with tempfile.TemporaryDirectory(prefix="lowtide-step-") as folder:
            known = Path(folder) / "rows.json"
            try:
                ended = run_child(
                    measure, way, config.model, config.lengths, config.batch, config.warm, config.reps, dtype,
                    device.type, config.sdpa, config.seed, str(known), env=ALLOCATOR,
                )  # fmt: skip
            except BaseException:  # Ctrl-C: the lengths that were measured are told
                tell(way, json.loads(known.read_text()) if known.exists() else [])
                raise
            results = ended.value
            if results is None:  # it died: what it had written, and why there is no more
                results = json.loads(known.read_text()) if known.exists() else []
                why = f"the process ended with status {ended.returncode}"
                results += [{"tokens": tokens, "failed": why} for tokens in config.lengths[len(results) :]]
        tell(way, results)
    say(f"written: {files.json}\n")
    return rows


def line(row: dict[str, Any], first: dict[int, float]) -> str:
    """Return a row as text; ``first`` has the times at each length that the last column compares with."""
    head = f"{row['way']:34}{row['tokens']:9}"
    if "failed" in row:
        return f"{head}  {row['failed']}\n"
    share = row["seconds"] / first[row["tokens"]]
    return (
        f"{head}{row['seconds']:9.4f}{row['tokens_per_s']:11.0f}{row['peak_gib']:8.2f}{row['losses'][0]:9.4f}"
        f"{row['losses'][-1]:9.4f}{share:10.3f}\n"
    )

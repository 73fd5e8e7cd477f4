"""The benchmark end to end: one step of full fine-tuning, forward, backward and fused AdamW, each way a process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lowtide.bench import step_way
from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Column, Row, Run, Table
from lowtide.bench.way import LOWTIDE
from lowtide.bench.ways import language_part
from lowtide.measure.child import ALLOCATOR, run_child
from lowtide.train.model import model_config

COLUMNS = (
    Column("s", "seconds", "9.4f"),
    Column("tokens/s", "tokens_per_s", "11.0f"),
    Column("GiB", "peak_gib", "8.2f"),
    Column("loss", lambda row: row["losses"][0], "9.4f"),
    Column("last", lambda row: row["losses"][-1], "9.4f"),
)


def measure(run: Run[StepBenchConfig]) -> None:
    """Measure each way at each length."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    first: dict[int, float] = {}  # seconds of the first way at each length
    share = Column("of first", lambda row: row["seconds"] / first[row["tokens"]], "10.3f")
    table = Table((Column("", "way", "<34"), Column("T", "tokens", "9")), (*COLUMNS, share))
    run.say(f"\n{config.model}, batch {config.batch}, {run.dtype_name}, attention by {config.sdpa}\n{table.header}")

    def add(way: str, results: list[Row]) -> None:
        for row in results:
            if "seconds" in row:
                first.setdefault(row["tokens"], row["seconds"])
            run.add({"way": way, **row}, rows, table)

    for way in config.ways:
        with tempfile.TemporaryDirectory(prefix="lowtide-step-") as folder:
            known = Path(folder) / "rows.json"
            try:
                ended = run_child(step_way.measure, way, run.settings, str(known), env=ALLOCATOR)
            except BaseException:  # Ctrl-C: the lengths that were measured are written
                add(way, json.loads(known.read_text()) if known.exists() else [])
                raise
            results = ended.value
            if results is None:  # it died: what it had written, and why there is no more
                results = json.loads(known.read_text()) if known.exists() else []
                why = f"the process ended with status {ended.returncode}"
                results += [{"tokens": tokens, "failed": why} for tokens in config.lengths[len(results) :]]
        add(way, results)


STEP = Benchmark(
    name="step",
    measure=measure,
    failed=lambda row: row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY and row["way"].startswith(LOWTIDE),
    packages=["liger-kernel"],
    check=lambda config: language_part(model_config(config.model, vocab_size=step_way.VOCABULARY)),
)

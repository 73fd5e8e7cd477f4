"""The sweep over model types, one process each: one that crashes or hangs is a row like another; and its page."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.harness import Benchmark, Column, Row, Run, Table
from lowtide.bench.models_case import (
    COMPARED,
    CRASHED,
    DIFFERENT,
    FACTOR,
    FELL_BACK,
    FUSED,
    KINDS,
    STATUSES,
    TIMED_OUT,
    check,
    types,
)
from lowtide.bench.results import Files, replace
from lowtide.bench.train_config import ModelsBenchConfig
from lowtide.errors import ArgumentValueError, message

TABLE = Table(
    (Column("", "kind", "<11"), Column("", "type", "<28"), Column("", "status", "<11")),
    (Column("", "seconds", "6.1f"), Column("", lambda _: " s", "")),
    lambda row: [row["why"][:150]] if row["why"] else [],
    reason=lambda row: None if "seconds" in row else row["why"][:150],
)
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}
_PRELOADED = ("lowtide.bench.models_case", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def measure(run: Run[ModelsBenchConfig]) -> None:
    """Check every type, and write the page; `ArgumentValueError` where a file cannot be read or written."""
    config = run.config
    wanted = _wanted(config)
    run.result |= {"config": config.recorded(), "rows": []}
    if config.resume:
        run.files, run.result = _earlier(config.resume)
    rows: list[Row] = run.result["rows"]
    known = {(row["kind"], row["type"]) for row in rows}
    todo = [one for one in wanted if one not in known]
    run.say(f"{len(wanted)} types, {len(todo)} to check\n")
    with _servers() as context, ThreadPoolExecutor(config.workers) as pool:
        waiting = {pool.submit(_in_child, context, kind, name, config): (kind, name) for kind, name in todo}
        for at, ended in enumerate(as_completed(waiting), 1):
            kind, name = waiting[ended]
            rows.append({"kind": kind, "type": name, **ended.result()})
            run.say(f"{at:4}/{len(todo)}  {TABLE.line(rows[-1])}")
            rows.sort(key=lambda row: (list(KINDS).index(row["kind"]), row["type"]))
            run.save()
    run.save()
    run.rows = [row for row in rows if (row["kind"], row["type"]) in set(wanted)]
    run.say(summary(run.rows))
    if config.table:
        text = markdown(run.result, run.files.json.name)
        replace(Path(config.table), lambda file: file.write_text(text))
        run.say(f"written: {config.table}\n")


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how many rows of each kind ended how."""
    text = ""
    for kind in KINDS:
        counts = Counter(row["status"] for row in rows if row["kind"] == kind)
        if counts:
            text += f"{kind:11}" + ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s]) + "\n"
    return text


def _wanted(config: ModelsBenchConfig) -> list[tuple[str, str]]:
    """Return the kinds and types to check; `ArgumentValueError` where there is no such type."""
    wanted = [
        (kind, name)
        for kind in config.chosen("kinds")
        for name in types(kind)
        if not config.only or name in config.only
    ]
    unknown = set(config.only) - {name for _, name in wanted}
    if unknown or not wanted:
        raise ArgumentValueError(message("only", "types that transformers has", ", ".join(sorted(unknown)) or "none"))
    return wanted


def _earlier(file: str) -> tuple[Files, dict[str, Any]]:
    """Return an earlier result with the rows that were compared."""
    try:
        result = json.loads(Path(file).read_text())
        result["rows"] = [row for row in result["rows"] if row["status"] in COMPARED]
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentValueError(message("resume", "a result of lowtide bench models", f"{error}")) from error
    return Files(Path(file)), result


@contextlib.contextmanager
def _servers() -> Iterator[Any]:
    """Yield where children start: from a process that has imported everything, where the system can fork."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(list(_PRELOADED))
        yield context
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _in_child(context: Any, kind: str, name: str, config: ModelsBenchConfig) -> dict[str, Any]:
    answer, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, kind, name, config.seed), daemon=True)
    child.start()
    sender.close()  # the child's alone now: its end is read as one
    try:
        if answer.poll(config.timeout):
            return dict(answer.recv())
        return {"status": TIMED_OUT, "why": f"no answer within {config.timeout} s"}
    except EOFError:
        child.join()
        return {"status": CRASHED, "why": f"its process ended with status {child.exitcode}"}
    finally:
        child.kill()
        child.join()
        answer.close()


def _answer(sender: Any, kind: str, name: str, seed: int) -> None:
    """The child's side."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for descriptor in (1, 2):  # what models print, and what C++ does
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    start = time.perf_counter()
    row = check(kind, name, seed)
    sender.send({**row, "seconds": round(time.perf_counter() - start, 1)})
    os._exit(0)  # whatever a model's package started does not hold the child up


_PAGE = """\
# Supported models

Of the {types} model types in transformers {transformers}, {fused} train without logits, {fell_back} fall back to the
stock loss (the tables give the reason), and {others} cannot be built or run in this test.

`lowtide bench models` takes every model type that transformers maps to a causal language model, to images and text, or
to sequence-to-sequence generation. It builds a tiny model with random weights, and compares it with the same model
after `lowtide.patch` with all parts, in float32 on a CPU (torch {torch}). The loss and every gradient are compared on
several batches: with ignored labels, padding, `num_items_in_batch`, `output_hidden_states`, `logits_to_keep` and
`output_router_logits`; and so are the logits when they are read after the loss. Each tolerance is {factor} times what
the result changes when every weight changes by one unit in the last place.

- **fused**: the loss and its gradients were computed without logits. The test looks for an allocation of V columns and
  at least half a batch's rows, inside operators too: the stock model has one, and the patched model has none.
- **fell back**: logits were built, and all results are equal.
- **not built**: no tiny model could be made from the type's default config, or it does not run on tokens (and images)
  alone. `patch` may work on such a model; this test cannot tell.

This page is generated: `{command}`. The figures behind it: [{file}](../benchmarks/results/{file}).
Types of images and text run on text alone, unless they need an image too.

"""


def markdown(result: dict[str, Any], file: str) -> str:
    """Return the page of a result, with a link to its file of that name."""
    rows, machine = result["rows"], result["machine"]
    counts = Counter(row["status"] for row in rows)
    text = _PAGE.format(
        types=len(rows),
        fused=counts[FUSED],
        fell_back=counts[FELL_BACK],
        others=len(rows) - sum(counts[status] for status in COMPARED),
        transformers=machine["transformers"],
        torch=machine["torch"],
        command=result["command"],
        file=file,
        factor=f"{FACTOR:g}",
    )
    of_kind = {title: [row for row in rows if row["kind"] == kind] for kind, (_, title) in KINDS.items()}
    statuses = [status for status in STATUSES if counts[status]]
    text += f"| | {' | '.join(statuses)} | types |\n|---|{'--:|' * (len(statuses) + 1)}\n"
    for title, found in of_kind.items():
        counts = Counter(row["status"] for row in found)
        text += f"| {title} | {' | '.join(str(counts[status]) for status in statuses)} | {len(found)} |\n"
    text += (
        "\nThe last columns count the modules whose MLP, norm and rotary embedding were fused too, in a model of two to"
        " four layers.\n"
    )
    for title, found in of_kind.items():
        if found:
            text += f"\n## {title}\n\n| type | loss | mlp | norm | rope |\n|---|---|--:|--:|--:|\n"
            text += "".join(map(_line, found))
    return text


def _line(row: dict[str, Any]) -> str:
    why = re.sub(r"([|<>*_`])", r"\\\1", row["why"])
    parts = row.get("parts", {})
    fused = " | ".join(str(parts[name] or "") if name in parts else "" for name in ("mlp", "norm", "rope"))
    status = f"**{row['status']}**" if row["status"] == DIFFERENT else row["status"]
    return f"| {row['type']} | {status}{': ' + why if why else ''} | {fused} |\n"


MODELS = Benchmark(
    measure=measure,
    failed=lambda row: row["status"] == DIFFERENT,
    packages=["transformers"],
    check=_wanted,
)

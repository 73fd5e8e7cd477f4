"""Every model type of transformers checked in a process of its own, and the page that shows the results."""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from models.type_case import (
    COMPARED,
    CRASHED,
    FELL_BACK,
    FUSED,
    KINDS,
    TIMED_OUT,
    check,
    types,
)

Row = dict[str, Any]


def checked_types(seconds: float, workers: int) -> list[Row]:
    """Return the row of every kind and type, each at most so long; a crash and a hang are rows too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.type_case", "transformers.modeling_utils"])
    with ThreadPoolExecutor(workers) as pool:
        waiting = [
            (kind, name, pool.submit(_in_child, context, kind, name, seconds)) for kind in KINDS for name in types(kind)
        ]
        return [{"kind": kind, "type": name, **row.result()} for kind, name, row in waiting]


def _in_child(context: Any, kind: str, name: str, seconds: float) -> Row:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_row, args=(sender, kind, name), daemon=True)
    child.start()
    sender.close()  # the child has its own: where it ends without an answer, the pipe ends
    try:
        if receiver.poll(seconds):
            return dict(receiver.recv())
        return {"status": TIMED_OUT, "why": f"no answer within {seconds:g} s"}
    except EOFError:
        child.join()
        return {"status": CRASHED, "why": f"its process ended with status {child.exitcode}"}
    finally:
        child.kill()
        child.join()
        receiver.close()


def _send_row(sender: Any, kind: str, name: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for descriptor in (1, 2):  # what models print, and what C++ does
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    sender.send(check(kind, name))
    os._exit(0)  # whatever a model's package started does not hold the child up


_PAGE = """\
# Supported models

Of {types} causal, multimodal and translation models in transformers {transformers}, {fused} train without logits,
{fell_back} fall back to the stock loss, and {others} cannot be built or run in the test behind this page. It builds a
tiny model of each type from its default config, and compares loss, gradients and logits of the stock and the patched
model on a CPU (torch {torch}). What it cannot build may work with your weights: `print(lowtide.patch(model))` says so.

Each line is a family; behind the colon are the parts that run fused too.

| without logits | stock loss, or not built in the test |
|---|---|
"""


def page(rows: list[Row], versions: dict[str, str]) -> str:
    """Return the page of all rows, as Markdown; ``versions`` has those of torch and transformers."""
    counts = Counter(row["status"] for row in rows)
    text = _PAGE.format(
        types=len(rows),
        fused=counts[FUSED],
        fell_back=counts[FELL_BACK],
        others=len(rows) - sum(counts[status] for status in COMPARED),
        **versions,
    )
    families: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["type"]):
        families.setdefault(re.match(r"[a-z]\d+|[a-z]+", row["type"])[0], []).append(row)  # type: ignore[index]
    return text + "".join(_line(families[name]) for name in sorted(families))


def _line(rows: list[Row]) -> str:
    """Return the line of a family: its types by what is fused, then those that are not, with their kinds."""
    fused: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == FUSED:
            parts = ", ".join(name for name in ("mlp", "norm", "rope") if row["parts"][name])
            fused.setdefault(parts, []).append(row["type"])
        else:
            why = re.sub(r"([|<>*_`])", r"\\\1", f": {row['why']}" if row["status"] == FELL_BACK else "")
            kind = "" if row["kind"] == "causal" else f" ({KINDS[row['kind']][1].lower()})"
            others.setdefault(row["status"] + why, []).append(row["type"] + kind)
    known = "; ".join(", ".join(dict.fromkeys(types)) + (parts and f": {parts}") for parts, types in fused.items())
    unknown = "; ".join(f"{', '.join(types)}: {status}" for status, types in others.items())
    return f"| {known} | {unknown} |\n"

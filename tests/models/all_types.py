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

Of the {types} model types in transformers {transformers}, {fused} train without logits, {fell_back} fall back to the
stock loss (the tables give the reason), and {others} cannot be built or run in this test.

The test takes every model type that transformers maps to a causal language model, to images and text, or
to sequence-to-sequence generation. It builds a tiny model with random weights, and compares it with the same model
after `lowtide.patch` with all parts, in float32 on a CPU (torch {torch}). The loss and every gradient are compared on
several batches: with ignored labels, padding, `num_items_in_batch`, `output_hidden_states`, `logits_to_keep` and
`output_router_logits`; and so are the logits when they are read after the loss. From the second batch on MLPs have
`checkpoint_level` 1. Each tolerance is {factor:g} times what the result changes when every weight changes by one unit
in the last place.

- **fused**: the loss and its gradients were computed without logits. The test looks for an allocation of V columns and
  at least half a batch's rows, inside operators too: the stock model has one, and the patched model has none.
- **fell back**: logits were built, and all results are equal.
- **not built**: no tiny model could be made from the type's default config, or it does not run on tokens (and images)
  alone. `patch` may work on such a model; this test cannot tell.

This page is generated: `pytest tests/models/test_every_type.py --slow --supported-models`.
Types of images and text run on text alone, unless they need an image too.

"""


def page(rows: list[Row], versions: dict[str, str]) -> str:
    """Return the page of all rows, as Markdown; ``versions`` has those of torch and transformers."""
    counts = Counter(row["status"] for row in rows)
    text = _PAGE.format(
        types=len(rows),
        fused=counts[FUSED],
        fell_back=counts[FELL_BACK],
        others=len(rows) - sum(counts[status] for status in COMPARED),
        factor=FACTOR,
        **versions,
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


def _line(row: Row) -> str:
    why = re.sub(r"([|<>*_`])", r"\\\1", row["why"])
    parts = row.get("parts", {})
    fused = " | ".join(str(parts[name] or "") if name in parts else "" for name in ("mlp", "norm", "rope"))
    status = f"**{row['status']}**" if row["status"] == DIFFERENT else row["status"]
    return f"| {row['type']} | {status}{': ' + why if why else ''} | {fused} |\n"

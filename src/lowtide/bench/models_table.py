"""The sweep's result as a page of the documents."""

from __future__ import annotations

import re
from typing import Any

from lowtide.bench.models_case import DIFFERENT, FACTOR, STATUSES

_TITLES = {
    "causal": "Causal language models",
    "image-text": "Pictures and text",
    "seq2seq": "Sequence to sequence",
}
_INTRODUCTION = """\
# Supported models

Every model type that transformers {transformers} maps to a causal language model, to pictures and text, or to
sequence-to-sequence generation: a tiny model with random weights, stock beside patched with all parts, in float32 on a
CPU (torch {torch}). Loss and every gradient are compared on several batches: with ignored labels, with padding, with
`num_items_in_batch`, `output_hidden_states`, `logits_to_keep` and `output_router_logits`; and the logits that are read
after the loss. The tolerance is what one unit in the last place more or less in each weight does to the same result,
{factor} times over.

- **fused**: the loss and its gradients were computed without logits. An allocation of half a batch's rows of V columns
  was watched for, inside operators too, and there was none; the stock model makes them.
- **fell back**: logits were built, and all was equal.
- **not built**: no tiny model could be made of the type's default config, or it could not be run on tokens (and
  pictures) alone. `patch` may well do there what it does elsewhere; nothing is known of it.

This page is generated: `{command}`. The figures behind it: [{json_name}](../benchmarks/results/{json_name}).
Types of pictures and text are run on text alone, but where they want a picture too.

"""


def markdown(told: dict[str, Any], json_name: str) -> str:
    """Return the page of a result, with a link to its file of that name."""
    text = _INTRODUCTION.format(
        transformers=told["machine"]["transformers"],
        torch=told["machine"]["torch"],
        command=told["command"],
        json_name=json_name,
        factor=f"{FACTOR:g}",
    )
    statuses = [status for status in STATUSES if any(row["status"] == status for row in told["rows"])]
    text += f"| | {' | '.join(statuses)} | types |\n|---|{'--:|' * (len(statuses) + 1)}\n"
    for kind, title in _TITLES.items():
        rows = [row for row in told["rows"] if row["kind"] == kind]
        counts = [sum(row["status"] == status for row in rows) for status in statuses]
        text += f"| {title} | {' | '.join(map(str, counts))} | {len(rows)} |\n"
    text += (
        "\nThe last columns count the modules whose MLP, norm and rotary embedding were fused too, in a model of two to"
        " four layers.\n"
    )
    for kind, title in _TITLES.items():
        rows = [row for row in told["rows"] if row["kind"] == kind]
        if rows:
            text += f"\n## {title}\n\n| type | loss | mlp | norm | rope |\n|---|---|--:|--:|--:|\n"
            text += "".join(_line(row) for row in rows)
    return text


def _line(row: dict[str, Any]) -> str:
    why = re.sub(r"([|<>*_`])", r"\\\1", row["why"])
    parts = row.get("parts", {})
    fused = " | ".join(str(parts[name] or "") if name in parts else "" for name in ("mlp", "norm", "rope"))
    status = f"**{row['status']}**" if row["status"] == DIFFERENT else row["status"]
    return f"| {row['type']} | {status}{': ' + why if why else ''} | {fused} |\n"

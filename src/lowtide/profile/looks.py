"""Names and colours of a profile's parts: the same in the tables, the picture and the page."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.bench.way import LOWTIDE
from lowtide.profile.owners import (
    ACTIVATIONS,
    GRADIENTS,
    HEAD_OWNER,
    OPTIMIZER_STATES,
    OTHER,
    RECOMPUTED,
    TRANSIENTS,
    WEIGHTS,
)
from lowtide.profile.phases import (
    BACKWARD,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    OPTIMIZER,
    RECOMPUTE,
)

OWNER_TEXTS = {
    WEIGHTS: "weights",
    GRADIENTS: "gradients",
    OPTIMIZER_STATES: "optimizer states",
    ACTIVATIONS: "activations, kept",
    HEAD_OWNER: "head: logits, loss",
    RECOMPUTED: "computed again",
    TRANSIENTS: "transients",
    OTHER: "inputs, workspaces",
}
OWNER_COLORS = {
    WEIGHTS: "#5b6770",
    GRADIENTS: "#9fa8ad",
    OPTIMIZER_STATES: "#cfd4d6",
    ACTIVATIONS: "#2f7fb8",
    HEAD_OWNER: "#d1602a",
    RECOMPUTED: "#8fc1e3",
    TRANSIENTS: "#e8b84a",
    OTHER: "#b9a3c9",
}
KIND_TEXTS = {
    EMBEDDING: "embedding",
    FORWARD: "layers, forward",
    HEAD: "head, forward",
    HEAD_BACKWARD: "head, backward",
    RECOMPUTE: "layers, computed again",
    BACKWARD: "layers, backward",
    EMBEDDING_BACKWARD: "embedding, backward",
    OPTIMIZER: "optimizer",
}
KIND_COLORS = {
    EMBEDDING: "#b9a3c9",
    FORWARD: "#2f7fb8",
    HEAD: "#d1602a",
    HEAD_BACKWARD: "#eea37e",
    RECOMPUTE: "#8fc1e3",
    BACKWARD: "#3f9b7a",
    EMBEDDING_BACKWARD: "#d7c9e2",
    OPTIMIZER: "#8d969b",
}
_OWN = ("#0b5fa5", "#12a5c4", "#5b3fa0", "#1b8f5a", "#1f2f66", "#6fa8d6")
_OTHERS = ("#c4561c", "#b58900", "#a32a6b", "#7a4a2b", "#e0849b", "#5d5d1a")


def line_colors(impls: Sequence[str]) -> list[str]:
    """Return a colour for each implementation's line: ours are of one family, the others of another."""
    found, own, others = [], 0, 0
    for impl in impls:
        if impl == LOWTIDE:
            found.append(_OWN[own % len(_OWN)])
            own += 1
        else:
            found.append(_OTHERS[others % len(_OTHERS)])
            others += 1
    return found


def unit_of(most_gib: float) -> tuple[str, float]:
    """Return the unit that a size is told in, and how many of it a GiB is."""
    return ("GiB", 1.0) if most_gib >= 1 else ("MiB", 1024.0)


def title_of(told: dict[str, object]) -> str:
    """Return a profile's two lines: what, and on what."""
    settings, model, machine = told["settings"], told["model"], told["machine"]
    assert isinstance(settings, dict)
    assert isinstance(model, dict)
    assert isinstance(machine, dict)
    where = machine["gpu"] if settings["device"] == "cuda" else machine["cpu"]
    how = [settings["dtype"], settings["optimizer"]]
    how += [f"LoRA of rank {settings['lora']}"] if settings["lora"] else []
    how += ["parameters and optimizer on the host"] if settings["offload_params"] else []
    how += [f"FSDP2 {settings['sharding']} on {settings['gpus']}"] if settings["gpus"] > 1 else []
    return (
        f"{model['name']}, {settings['batch_size']} x {settings['seq_len']} tokens, {', '.join(how)}\n"
        f"{where}, torch {machine['torch']}, transformers {machine['transformers']}"
    )


def loss_text(loss: float | None) -> str:
    """Return a loss; json has no word for one that is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"

"""What `lowtide.memory.apply_policy` set: a short table."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.memory.offload import Offloader
from lowtide.memory.policy import ActivationPolicy

_KEPT = {
    "all": "all that its operations save",
    "attention": "input and attention's output",
    "input": "input",
}


@dataclass(frozen=True)
class PolicyReport:
    """What each decoder layer keeps from now on.

    Args:
        stack: The name of the list of layers inside the model.
        policies: Each layer's policy, by the layer's name, in order.
        bytes_per_token: What a layer keeps for a token, by the layer's name; None where it depends on the layer's
            operations (``keep="all"``) or the model does not tell its sizes. In the dtype of its parameters: under
            autocast attention's output is narrower.
        on_device: The names of layers with ``offload=True`` that stay on the GPU, since backward begins with them.
        others: Further lists of layers, left as they were.
        offloader: What the layers with ``offload=True`` share; None without any.
    """

    stack: str
    policies: dict[str, ActivationPolicy]
    bytes_per_token: dict[str, int | None]
    on_device: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    offloader: Offloader | None = field(default=None, repr=False, compare=False)

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned for these layers now; it grows in the first forward and stays."""
        return self.offloader.host_bytes if self.offloader is not None else 0

    def __str__(self) -> str:
        header = ("layers", "keeps", "where", "mlp level", "bytes a token")
        rows = [header]
        for first, last, cells in self._runs():
            rows.append((first if first == last else f"{first} - {last}", *cells))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [f"left as it was: {other}" for other in self.others]
        return "\n".join(lines)

    def _runs(self) -> list[tuple[str, str, tuple[str, str, str, str]]]:
        """Return neighbours that keep the same, as the first's name, the last's, and the cells that they share."""
        runs: list[tuple[str, str, tuple[str, str, str, str]]] = []
        for name, policy in self.policies.items():
            size = self.bytes_per_token[name]
            where = "host" if policy.offload and name not in self.on_device else "GPU"
            level = "as it was" if policy.mlp_level is None else str(policy.mlp_level)
            cells = (_KEPT[policy.keep], where, level, "-" if size is None else f"{size:,}")
            if runs and runs[-1][2] == cells:
                runs[-1] = (runs[-1][0], name, cells)
            else:
                runs.append((name, name, cells))
        return runs

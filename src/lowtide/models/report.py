"""What `lowtide.patch` did to a model, and what happened to the logits since."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PartReport:
    """One line of the report.

    Args:
        part: ``"loss"``, ``"mlp"``, ``"norm"`` or ``"rope"``.
        module: The name of the module inside the model, with ``*`` for the numbers where one line stands for several
            modules; ``"-"`` where there is none to name.
        outcome: What was done to it, or why it was left as it is.
        patched: Whether anything was changed.
        count: How many modules the line stands for.
        more: Further lines of the same part.
    """

    part: str
    module: str
    outcome: str
    patched: bool
    count: int = 1
    more: "tuple[PartReport, ...]" = ()


@dataclass
class PatchReport:
    """What was patched, what was left alone and why, and live counts of what became of the logits.

    The counts go on as the model runs with labels, and without them where it scores. Reading ``outputs.logits`` after a
    fused loss builds them, and adds to the second count as well. Other calls without labels are counted in training
    only. Those of a compiled model count as eager ones do.

    Args:
        parts: One `PartReport` a part, by the part's name; what was patched comes before what was not.
        calls_fused: Calls of the output layer whose loss, or scores, were computed without logits.
        calls_materialised: Calls of the output layer whose logits were built after all.
        why_materialised: How often each reason for building them came up.

    Example:
        >>> report = lowtide.patch(model)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> report.calls_fused, report.calls_materialised
        (1, 0)
        >>> print(report)
    """

    parts: dict[str, PartReport] = field(default_factory=dict)
    calls_fused: int = 0
    calls_materialised: int = 0
    why_materialised: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, module: str, outcome: str, *, patched: bool) -> None:
        """Put the line of ``part`` in, in place of what it may have had."""
        self.parts[part] = PartReport(part, module, outcome, patched)

    def add_modules(self, part: str, rows: Sequence[PartReport]) -> None:
        """Put in a part's modules, those that are alike as one line, in place of what it may have had."""
        alike: dict[tuple[str, str, bool], list[PartReport]] = {}
        for row in rows:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.module)
            alike.setdefault((pattern, row.outcome, row.patched), []).append(row)
        lines = [
            PartReport(part, pattern if len(group) > 1 else group[0].module, outcome, patched, len(group))
            for (pattern, outcome, patched), group in alike.items()
        ]
        first, *more = sorted(lines, key=lambda line: not line.patched)
        self.parts[part] = PartReport(part, first.module, first.outcome, first.patched, first.count, tuple(more))

    def count_materialised(self, why: str) -> None:
        """Count one call whose logits were built, and the reason."""
        self.calls_materialised += 1
        self.why_materialised[why] = self.why_materialised.get(why, 0) + 1

    def __str__(self) -> str:
        header = ("part", "module", "what was done, or why not")
        lines = [line for row in self.parts.values() for line in (row, *row.more)]
        names = [line.module if line.count == 1 else f"{line.module} ({line.count})" for line in lines]
        rows = [header, *((line.part, name, line.outcome) for line, name in zip(lines, names, strict=True))]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        text = [f"{part:<{widths[0]}}  {module:<{widths[1]}}  {outcome}" for part, module, outcome in rows]
        text.insert(1, f"{'-' * widths[0]}  {'-' * widths[1]}  {'-' * max(len(row[2]) for row in rows)}")
        text.append(f"calls with the loss fused: {self.calls_fused}; with the logits built: {self.calls_materialised}")
        text += [f"  {times} x {why}" for why, times in self.why_materialised.items()]
        return "\n".join(text)


# Reasons for building logits.
NOT_CALLED = "the output embedding was not called; what the loss was computed from is unknown"
WITHOUT_LABELS = "the model was called in training without labels, shift_labels and num_items_in_batch"

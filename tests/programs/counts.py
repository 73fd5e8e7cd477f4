"""What a report must have counted, as far as a program's text tells."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs.grammar import Program
    from programs.run import Outcome

_PLAIN = re.compile(
    r"model = build|scale, shift|x, y = batch|y = |y\[0\] = |patch\(model|out = model\(.*\blabels=y|loss = out\.loss$"
    r"|see\(loss\)$|loss\.backward\(\)$"
)
_LABELLED = re.compile(r"out = model\(.*\blabels=y")
_BUILDS = re.compile(
    r"see\(z\.(softmax|tolist|sort|exp|std|abs|var|cumsum)\(|see\(z @ z|see\(.*z\.detach\(\)\.(float\(\)\.)?numpy"
)


def counted_wrong(program: Program, patched: Outcome) -> str:
    """Return what a report counted wrong, "" where it was right or the text does not tell what is right."""
    if not patched.reports:
        return ""
    report, counts, statements = patched.reports[-1], patched.counts, program.statements
    if sum(report.why_materialised.values()) != report.calls_materialised:
        return f"{report.calls_materialised} calls with logits built, with reasons {report.why_materialised}"
    if any(now[i] < before[i] for before, now in itertools.pairwise(counts) for i in (0, 1)):
        return f"counts went back: {counts}"
    if "loss=False" in program.text or "unpatch" in program.text or not report.parts["loss"].patched:
        return ""
    labelled = [at for at, one in enumerate(statements) if _LABELLED.match(one) and at < len(counts)]
    # a later call without labels builds logits
    plain = all(map(_PLAIN.match, statements)) and program.text.count("model(") == len(labelled)
    if plain and counts[-1] != (len(labelled), 0):
        return f"{counts[-1]} counted of {len(labelled)} calls that need no logits: {report.why_materialised}"
    for at in labelled:
        if not statements[at - 1].startswith("patch(model"):
            continue
        if sum(counts[at]) <= sum(counts[at - 1]):
            return f"statement {at}: a loss was computed and nothing was counted"
        if at + 1 < len(counts) and _BUILDS.match(statements[at + 1]) and not counts[at + 1][1]:
            return f"statement {at + 1} built logits and nothing was counted"
    return ""

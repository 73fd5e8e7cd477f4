"""Runs a program stock and patched: is it equal, or is there an error of lowtide's that says what to do?"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lowtide.errors import LowtideError
from programs.families import build
from programs.grammar import Program
from programs.judge import Judge, largest
from programs.prelude import Recorder, namespace, sandbox


@dataclass
class Outcome:
    """What one run of a program gave.

    Args:
        seen: What ``see`` was given, each with its statement's number.
        log: What hooks and wrappers wrote.
        error: What ended it, and at which statement.
        state: By a parameter's name: requires_grad, its values, its gradient.
        reports: The `PatchReport`s.
        counts: What they had counted after each statement: calls fused, and with logits built.
        largest: The largest number of a gradient at any time: one step's may cancel the next one's.
        backwards: How many statements run backward.
    """

    seen: list[tuple[int, Any]] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    error: tuple[int, Exception] | None = None
    state: dict[str, tuple[bool, Tensor, Tensor | None]] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    largest: float = 0.0
    backwards: int = 0


@functools.lru_cache(8192)
def _code(statement: str) -> Any:
    return compile(statement, "<program>", "exec")


def run(program: Program, how: str) -> Outcome:
    """Run a program: "stock", "patched", "exact" (stock in float64) or "noise-1", ... (stock, its weights shaken).

    The noise is what the dtype's own rounding may do: what it changes, rounding may change.
    """
    outcome, recorder = Outcome(), Recorder()
    names: dict[str, Any] = {}
    with sandbox():
        torch.default_generator.manual_seed(program.seed)  # torch.manual_seed formats a stack for each absent device
        made = build
        if how.startswith("noise"):
            low = "bfloat16" in program.text or "half" in program.text
            made = functools.partial(_shaken, int(how.split("-")[1]), 2.0**-8 if low else None)
        names.update(namespace(recorder, patched=how == "patched", made=made))
        for at, statement in enumerate(program.statements):
            recorder.at = at
            text = _in_float64(statement) if how == "exact" else statement
            try:
                exec(_code(text), names)
            except Exception as error:
                error.__traceback__ = None
                outcome.error = (at, error)
                break
            reports = {id(report): report for report in recorder.reports}.values()
            outcome.counts.append((sum(r.calls_fused for r in reports), sum(r.calls_materialised for r in reports)))
            if "backward(" in statement and isinstance(model := names.get("model"), torch.nn.Module):
                outcome.backwards += 1
                outcome.largest = max(
                    [outcome.largest, *(largest(p.grad) for p in model.parameters() if p.grad is not None)]
                )
        model = names.get("model")
        if model is not None:
            outcome.state = _state(model)
    outcome.seen, outcome.log, outcome.reports = recorder.seen, recorder.log, recorder.reports
    return outcome


def _state(model: Any) -> dict[str, Any]:
    return {
        name: (p.requires_grad, p.detach().clone(), None if p.grad is None else p.grad.detach().clone())
        for name, p in model.named_parameters()
    }


def _shaken(number: int, eps: float | None, name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(name, dtype)
    g = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64) * (eps or 2.0**-23)
            p.copy_((p.double() * (1 + noise)).to(dtype))
    return model


_WIDER = (
    ("torch.autocast('cpu', dtype=torch.bfloat16)", "nullcontext()"), ("torch.bfloat16", "torch.float64"),
    ("torch.float32", "torch.float64"), (".float()", ".double()"),
    (".bfloat16()", ".double()"), (".half()", ".double()"),
)  # fmt: skip


def _in_float64(text: str) -> str:
    for low, wide in _WIDER:
        text = text.replace(low, wide)
    return text


def says_what_to_do(error: Exception) -> bool:
    """Whether an error's text has what was expected, what came, and a sentence after these."""
    return re.search(r"expected [\s\S]*got [\s\S]*\. \S", str(error)) is not None


# Errors of PyTorch's that refuse in words that users know.
_PYTORCHS = {
    "Cannot access data pointer of Tensor": "no data pointer for C code",
    "modified by an inplace operation": "weights changed, of which stock kept a copy (save_on_cpu)",
}


@dataclass
class Verdict:
    """What came of a program: "equal", "equal error", "refused" or "different"; ``why`` of the last two."""

    kind: str
    why: str = ""


def verdict(program: Program) -> Verdict:
    """Return what came of a program, run stock and patched."""
    stock, patched = run(program, "stock"), run(program, "patched")
    judge = Judge(program, stock, patched, lambda how: run(program, how))
    if patched.error is not None and (stock.error is None or patched.error[0] < stock.error[0]):
        at, error = patched.error
        if isinstance(error, CheckpointError):  # PyTorch's own word that a checkpoint's second forward ran otherwise
            return Verdict("refused", f"CheckpointError at statement {at}")
        for known, text in _PYTORCHS.items():
            if known in str(error):
                return Verdict("refused", f"PyTorch's error at statement {at}: {text}")
        if not isinstance(error, LowtideError):
            return Verdict("different", f"statement {at} raises {type(error).__name__}: {error}")
        if not says_what_to_do(error):
            return Verdict("different", f"statement {at}: an error that says not what to do: {error}")
        wrong = judge.seen(before=at)
        return Verdict("different", wrong) if wrong else Verdict("refused", str(error))
    if stock.error is not None:
        if "modified by an inplace operation" in str(stock.error[1]):  # lowtide may have its gradients already
            return Verdict("equal error", repr(stock.error[1]))
        if patched.error is None or patched.error[0] > stock.error[0]:
            return Verdict("different", f"statement {stock.error[0]} raises in stock alone: {stock.error[1]!r}")
        wrong = judge.seen(before=stock.error[0])
        return Verdict("different", wrong) if wrong else Verdict("equal error", repr(stock.error[1]))
    wrong = judge.seen() or judge.log() or judge.state() or counted_wrong(program, patched)
    return Verdict("different", wrong) if wrong else Verdict("equal")


_PLAIN = re.compile(
    r"model = build|scale, shift|x, y = batch|y = |y\[0\] = |patch\(model|out = model\(.*\blabels=y|loss = out\.loss$"
    r"|see\(loss\)$|loss\.backward\(\)$"
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
    calls = sum("labels=y" in statement for statement in statements)
    # a later call without labels builds logits
    plain = all(map(_PLAIN.match, statements)) and program.text.count("model(") == calls
    if plain and counts[-1] != (calls, 0):
        return f"{counts[-1]} counted of {calls} calls that need no logits: {report.why_materialised}"
    return ""


def shrunk(program: Program) -> Program:
    """Return a program that still fails, without the statements that it does not need."""
    statements = list(program.statements)
    again = True
    while again:
        again = False
        for at in reversed(range(len(statements))):
            fewer = Program(program.seed, (*statements[:at], *statements[at + 1 :]))
            if verdict(fewer).kind == "different":
                statements.pop(at)
                again = True
    return Program(program.seed, tuple(statements))

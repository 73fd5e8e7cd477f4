"""What the library promises, and which tests hold it: a test names its promise by a mark, `@promise("values")`.

`pytest --collect-only --promises` writes the table in tests/README.md, slow tests and those on a GPU included.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

PROMISES = {
    "values": "values and gradients within what plain PyTorch of the same dtype errs against float64",
    "options": "every option computes what its formula says, alone and with the others",
    "subsets": "gradients for every subset of the inputs that need one, for any upstream gradient",
    "again": "a second backward gives the same; double backward, forward mode and torch.func are errors",
    "ignored": "ignored tokens never contribute, even where their hidden state is NaN",
    "layouts": "any leading axes, strides and sizes, no tokens at all",
    "dtypes": "the dtypes of results; autocast",
    "checkpoint": "inside torch.utils.checkpoint",
    "compile": "under torch.compile, whole and without recompiling",
    "memory": "no logits: what a call and a step hold is what their plan says",
    "bitwise": "bitwise the same from run to run",
    "errors": "bad input: one error that names the argument, what was expected, what came, what to do",
    "kernels": "each kernel computes what plain PyTorch does, at odd sizes and with poisoned outputs",
    "host": "no wait for the GPU, few launches",
    "patched": "a patched model has stock's loss, gradients and logits, whatever reads them",
    "reported": "or it runs stock code, and the report counts it",
    "reversible": "unpatch, copies and pickles leave a model as it was; a refused call changes nothing",
    "adapters": "LoRA, 4-bit bases, frozen parts",
    "trainers": "Trainer's and TRL's own numbers",
    "ranks": "on several ranks what one process computes",
    "policies": "a policy changes what is saved and where, and no number",
    "plans": "planned bytes and times are those measured",
    "resume": "a run that is killed resumes from a whole checkpoint",
    "commands": "what a command prints is what ran",
    "pages": "every example in the documents runs, and what they say is so",
    "package": "rooms, budgets, and what an import costs",
}
README = Path(__file__).parent / "README.md"


def promise(*names: str) -> pytest.MarkDecorator:
    """Mark a test, or as ``pytestmark`` a file, with what it holds."""
    if not {*names} <= PROMISES.keys():
        raise ValueError(f"promise: expected some of {', '.join(PROMISES)}, got {names}")
    return pytest.mark.promise(*names)


def kept(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Return for each promise the folders whose tests hold it; those on a GPU may not run here."""
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for name in {name for mark in item.iter_markers("promise") for name in mark.args}:
            found[name].add(item.path.parent.relative_to(README.parent).as_posix())
    for file in README.parent.glob("gpu/test_*.py"):
        for marked in re.findall(r"\bpromise\(([^)]*)\)", file.read_text()):
            for name in re.findall(r"\w+", marked):
                found[name].add("gpu")
    return found


def table(items: Iterable[pytest.Item]) -> str:
    """Return the table of promises in Markdown."""
    found = kept(items)
    lines = ["| promise | held in |", "|---|---|"]
    for name, text in PROMISES.items():
        folders = [f"`{folder}`" for folder in sorted(found[name])]
        lines.append(f"| **{name}**: {text} | {', '.join(folders)} |")
    return "\n".join(lines) + "\n"


def write(items: Iterable[pytest.Item]) -> None:
    """Put the table into tests/README.md, in place of the one at its end."""
    before = README.read_text().partition("| promise |")[0]
    README.write_text(before + table(items))

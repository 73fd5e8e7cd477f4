"""The field's words: the pages, and the messages of the code, do without phrases that readers stumbled over.

A page is read without its code (fenced, indented or between backticks), which prints what the program prints. Of the
code, every text but docstrings is read: errors, help, reports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pages.blocks import PAGES, ROOT
from promises import promise

pytestmark = promise("pages")
GENERATED = ROOT / "docs" / "supported-models.md"  # by the code, of whose messages its words are
CODE = re.compile(r"^ *```.*?^ *```$|^ {4,}[^\n]*$|``.+?``|`[^`]*`", re.DOTALL | re.MULTILINE)
LEFT = {"requested": ("bench/sweep.py",)}  # a key of its results
PHRASES = {
    r"\b(compute[sd]?|built|builds?) (it |them )?(again|once more|a second time)\b": "recomputed",
    r"\b(keeps?|kept|keeping)( \w+)? for backward\b|\b(layers?|MLPs?|norms?) (keeps?|kept)\b": "saved for backward",
    r"\bkept tokens?\b": "valid tokens",
    r"\bas (it|they) (came|comes?)\b": "unmodified, stock",
    r"\b(bare|matrix) products?\b|\bthe products\b": "GEMMs",
    r"\b(some|few) (rows|tokens) at a time\b|\b(piece|part)s? at a time\b": "in chunks",
    r"\bin turns\b": "interleaved",
    r"\b(told|speaks?)\b": "reported, prints, logs",
    r"\b(wanted|asked)\b": "requested",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bpictures?\b": "plot, chart",
    r"\bvocabulary in parts\b": "sharded vocabulary",
    r"\bby (its |their )?names?\b": "explicitly",
    r"\bis [^.?!]{1,60} meant\?": "Did you mean X?",
    r"\bsee there\b": "the file and the section",
    r"\bwithout a word\b": "and the report counts them",
}
SAID = [(re.compile(pattern, re.IGNORECASE), word) for pattern, word in PHRASES.items()]


def misses(text: str, where: str) -> list[str]:
    text = " ".join(text.split())
    found = [(match[0], word) for pattern, word in SAID if (match := pattern.search(text))]
    return [f"{where}: {said!r}: write {word!r}" for said, word in found if not where.startswith(LEFT.get(word, "-"))]


def messages_of(source: str) -> Iterator[str]:
    """Yield the texts of a module that its users may read: all but docstrings; of an f-string what it has itself."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # from the outside in
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            skipped |= {id(part) for part in parts}
            yield "`".join(str(part.value) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def test_pages_have_the_fields_words() -> None:
    pages = [page for page in PAGES if page != GENERATED]
    assert not [miss for page in pages for miss in misses(CODE.sub("` `", page.read_text()), page.name)]


def test_messages_have_the_fields_words() -> None:
    package = ROOT / "src" / "lowtide"
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    found = [
        miss for name, file in files.items() for text in messages_of(file.read_text()) for miss in misses(text, name)
    ]
    assert not found

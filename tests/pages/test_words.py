"""The field's words: the pages, and the messages of the code, do without phrases that readers stumbled over.

A page is read without its code (fenced, indented or between backticks), which prints what the program prints. Of the
code, every text but docstrings is read: errors, help, reports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pages.blocks import PAGES, ROOT

GENERATED = ROOT / "docs" / "supported-models.md"  # by the code, of whose messages its words are
CODE = re.compile(r"^ *```.*?^ *```$|^ {4,}[^\n]*$|``.+?``|`[^`]*`", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A phrase, the field's word for it, and the files of the package whose messages still have it."""

    pattern: str
    word: str
    left_in: tuple[str, ...] = ()

    def found_in(self, text: str) -> list[str]:
        return [match[0] for match in re.finditer(self.pattern, " ".join(text.split()), re.IGNORECASE)]


PHRASES = (
    Phrase(r"\b(compute[sd]?|built|builds?) (it |them )?(again|once more|a second time)\b", "recomputed"),
    Phrase(
        r"\b(keeps?|kept|keeping)( \w+)? for backward\b|\b(layers?|MLPs?|norms?) (keeps?|kept)\b", "saved for backward"
    ),
    Phrase(r"\bkept tokens?\b", "valid tokens"),
    Phrase(r"\bas (it|they) (came|comes?)\b", "unmodified, stock"),
    Phrase(r"\b(bare|matrix) products?\b|\bthe products\b", "GEMMs"),
    Phrase(r"\b(some|few) (rows|tokens) at a time\b|\b(piece|part)s? at a time\b", "in chunks"),
    Phrase(r"\bin turns\b", "interleaved"),
    Phrase(r"\b(told|speaks?)\b", "reported, prints, logs"),
    Phrase(r"\b(wanted|asked)\b", "requested", ("bench/sweep.py",)),  # a key of its results
    Phrase(r"\bmend(s|ed|ing)?\b", "fix"),
    Phrase(r"\bpictures?\b", "plot, chart"),
    Phrase(r"\bvocabulary in parts\b", "sharded vocabulary"),
    Phrase(r"\bby (its |their )?names?\b", "explicitly"),
    Phrase(r"\bis [^.?!]{1,60} meant\?", "Did you mean X?"),
    Phrase(r"\bsee there\b", "the file and the section"),
    Phrase(r"\bwithout a word\b", "and the report counts them"),
)


def prose_of(text: str) -> str:
    """Return a page's text without its code."""
    return CODE.sub("` `", text)


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


@cache
def messages() -> dict[str, list[str]]:
    package = ROOT / "src" / "lowtide"
    return {str(file.relative_to(package)): list(messages_of(file.read_text())) for file in package.rglob("*.py")}


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED], ids=lambda page: page.name)
def test_a_page_has_the_fields_words(page: Path) -> None:
    prose = prose_of(page.read_text())
    found = [(said, phrase.word) for phrase in PHRASES for said in phrase.found_in(prose)]
    assert not found, "\n".join(f"{said!r}: write {word!r}" for said, word in found)


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase.word)
def test_messages_have_the_fields_words(phrase: Phrase) -> None:
    files = {file: texts for file, texts in messages().items() if not file.startswith(phrase.left_in or "-")}
    found = [(file, said) for file, texts in files.items() for text in texts for said in phrase.found_in(text)]
    assert not found, "\n".join(f"{file}: {said!r}: write {phrase.word!r}" for file, said in found)


def test_classes_are_named_by_nouns_that_say_what_they_hold() -> None:
    pattern = re.compile(r"^ *class _?(Told|Taken|Summed|Fetched|Settle|Everyone|Found)\b", re.MULTILINE)
    assert not [file for file in (ROOT / "src").rglob("*.py") if pattern.search(file.read_text())]


def test_a_phrase_is_seen_in_prose_and_in_messages_but_not_in_code_or_docstrings() -> None:
    said = "computed\nagain"
    assert [phrase.word for phrase in PHRASES if phrase.found_in(prose_of(f"Gate and up are {said}."))] == [
        "recomputed"
    ]
    code = f"Fine.\n\n```\n{said}\n```\n\n    {said}\n\n`by name`, ``by name``\n"
    assert len([phrase for phrase in PHRASES if phrase.found_in(prose_of(f"{code}\nAs it came."))]) == 1
    assert not [phrase for phrase in PHRASES if phrase.found_in(prose_of(code))]
    module = 'def f(x):\n    """Told by name."""\n    raise ValueError(f"Is {x} meant?", "See there.")\n'
    texts = list(messages_of(module))
    assert texts == ["Is ` meant?", "See there."]
    found = {phrase.word for phrase in PHRASES for text in texts if phrase.found_in(text)}
    assert found == {"Did you mean X?", "the file and the section"}

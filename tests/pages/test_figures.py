"""Figures: each table of them names its command, hardware, versions and result file, and is what that file has.

A table whose figures nobody measured says so in a comment above it: `<!-- not measured: planned -->`, or `counted`.
The tables of docs/scale.md are what the code above them prints.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from pages.blocks import PAGES, ROOT, Block, blocks_of, compiled

RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = ("planned", "counted", "defaults")  # by lowtide plan; by arithmetic on shapes; what the code sets
GENERATED = "docs/supported-models.md"  # from its result file, by the command that it names
RATIOS = ("time", "lowtide / stock")  # columns that divide the last two before them

_UNIT = re.compile(r"(?<=\d )s\b|\b(ms|seconds|GB/s|MiB|GiB|GB|tokens/s|errors?|speed|share)\b")
_LINK = re.compile(r"benchmarks/results/([\w.-]+\.json)")
_MARK = re.compile(r"<!-- not measured: (\w+) -->\s*\Z")
_COMMAND = re.compile(
    r"`(?:lowtide (?:bench|eval|plan|profile|train)|python benchmarks/|torchrun [^`]*benchmarks/|make train|pytest)"
)
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?(?![\w.])")


@dataclass(frozen=True)
class Table:
    """A table of a page, with the section that it stands in and what stands right before it."""

    page: str
    title: str
    section: str
    before: str
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.title}: {' | '.join(self.rows[0])[:40]}"

    @property
    def figures(self) -> list[str]:
        """The numbers below its header, but those of the first column, and of what was aimed at or chosen."""
        given = {at for at, head in enumerate(self.rows[0]) if at == 0 or head in ("aim", "chosen", *RATIOS)}
        cells = [cell for row in self.rows[1:] for at, cell in enumerate(row) if at not in given]
        return [number for cell in cells for number in _NUMBER.findall(cell)]

    @property
    def has_figures(self) -> bool:
        caption = self.before.rstrip().rpartition("\n\n")[2]
        words = " ".join((caption, *(cell for row in self.rows for cell in row)))
        return self.page != GENERATED and len(self.figures) >= len(self.rows) - 1 and _UNIT.search(words) is not None

    @property
    def mark(self) -> str:
        found = _MARK.search(self.before)
        return found[1] if found else ""

    @property
    def files(self) -> list[str]:
        return _LINK.findall(self.section)


def tables_of(page: str, text: str) -> Iterator[Table]:
    for section in re.split(r"(?m)^(?=#+ )", re.sub(r"(?ms)^ *```.*?^ *```$", "", text)):
        title = section.partition("\n")[0].lstrip("# ")
        for match in re.finditer(r"(?m)(?:^\|.*\n?)+", section):
            lines = [line for line in match[0].splitlines() if not re.fullmatch(r"[|\-: ]+", line)]
            cells = tuple(tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines)
            yield Table(page, title, section, section[: match.start()], cells)


TABLES = [table for page in PAGES for table in tables_of(str(page.relative_to(ROOT)), page.read_text())]
MEASURED = [table for table in TABLES if table.has_figures and not table.mark]


def rows_link_to_pages(table: Table) -> bool:
    """Whether each row says which page it is from (whose figures are held together by a test of the site)."""
    return all(re.search(r"\]\([\w-]+\.md#", " ".join(row)) for row in table.rows[1:])


@pytest.mark.parametrize("table", MEASURED, ids=str)
def test_a_table_of_figures_says_where_they_are_from(table: Table) -> None:
    if rows_link_to_pages(table):
        return
    assert table.files, "no result file is named in its section"
    for name in table.files:
        assert (RESULTS / name).is_file(), name
    page = (ROOT / table.page).read_text()
    assert _COMMAND.search(" ".join(table.section.split())), "no command is named in its section"
    assert re.search(r"H100|H200|EPYC|Xeon", table.section), "no hardware is named in its section"
    assert re.search(r"torch\s+2\.\d+", page), "no version is named on its page"


def test_every_mark_is_one_that_means_something() -> None:
    marks = [table.mark for table in TABLES if table.mark]
    assert marks
    assert set(marks) <= set(NOT_MEASURED)
    for page in PAGES:
        text = page.read_text()
        marked = re.findall(r"(?m)^<!-- not measured:", text)
        assert len(marked) == sum(bool(table.mark) for table in tables_of("", text)), page.name


def test_every_result_is_read_on_a_page_and_says_what_it_is() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for file in sorted(RESULTS.iterdir()):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[\w-]+\.(json|png)", file.name), file.name
        assert f"benchmarks/results/{file.name}" in pages, f"{file.name} is named on no page"
        if file.suffix == ".json":
            text = file.read_text()
            told = json.loads(text)
            assert told.get("command") or told.get("config"), f"{file.name}: no command"
            assert re.search(r"H100|H200|EPYC|Xeon", text), f"{file.name}: no hardware"
            assert re.search(r'"torch": "2\.', text), f"{file.name}: no versions"


@cache
def numbers_of(name: str) -> tuple[float, ...]:
    """Return every number of a result file, in the units in which a page may show it."""
    found: set[float] = set()

    def walk(value: Any) -> None:
        if isinstance(value, (dict, list)):
            below = list(value.values()) if isinstance(value, dict) else value
            last = [each for each in below[-10:] if isinstance(each, float)]
            found.update([sum(last) / 10] if len(last) == 10 else [])  # "the last 10 steps"
            for each in below:
                walk(each)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found.add(float(value))

    walk(json.loads((RESULTS / name).read_text()))
    units = (1, 1e3, 2**-20, 2**-30, 1e-9)  # as it is, s in ms, bytes in MiB, GiB and GB
    return tuple(sorted({number * unit for number in found for unit in units}))


def is_shown(figure: str, known: tuple[float, ...]) -> bool:
    """Whether a figure is one of these numbers, rounded as it stands there."""
    low, high = bounds(figure)
    at = bisect.bisect_left(known, low)
    return at < len(known) and known[at] <= high


def bounds(figure: str) -> tuple[float, float]:
    """Return between which numbers one lies that is rounded to this figure."""
    digits = figure.rstrip("%").replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    unit = 0.01 if figure.endswith("%") else 1
    half = 0.51 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return unit * (float(digits) - half), unit * (float(digits) + half)


@pytest.mark.parametrize("table", [table for table in MEASURED if table.files], ids=str)
def test_the_figures_are_those_of_the_result_files(table: Table) -> None:
    known = tuple(sorted({number for name in table.files for number in numbers_of(name)}))
    missing = [figure for figure in table.figures if not is_shown(figure, known)]
    assert not missing, missing


@pytest.mark.parametrize("table", [table for table in MEASURED if set(table.rows[0]) & set(RATIOS)], ids=str)
def test_ratios_are_those_of_the_columns_beside_them(table: Table) -> None:
    for row in table.rows[1:]:
        if row[-1]:
            (least, below), (above, most), (low, high) = (bounds(_NUMBER.findall(row[at])[0]) for at in (-2, -3, -1))
            assert least / most <= high, row
            assert low <= below / above, row


def test_a_wrong_figure_is_seen() -> None:
    """A number that no measurement has, a missing file, a table that says nothing of where it is from."""
    text = "# A\n\nOne H100, torch 2.11, ms:\n\n| | a |\n|---|--:|\n| b | 12,345.678 |\n\n`lowtide bench head`: {}\n"
    (table,) = tables_of("p", text.format("[f](../benchmarks/results/2026-11-21-head-h100.json)"))
    assert table.has_figures
    assert table.figures == ["12,345.678"]
    with pytest.raises(AssertionError, match=r"12,345\.678"):
        test_the_figures_are_those_of_the_result_files(table)
    for link in ("nothing", "[f](../benchmarks/results/2026-11-21-nobody-h100.json)"):
        (table,) = tables_of("README.md", text.format(link))
        with pytest.raises(AssertionError, match=r"no result file|nobody"):
            test_a_table_of_figures_says_where_they_are_from(table)
    (marked,) = tables_of("p", text.replace("\n| |", "\n<!-- not measured: planned -->\n\n| |", 1))
    assert marked.mark == "planned"
    assert is_shown("4.1e-3", (0.00414,))
    assert not is_shown("4.1e-3", (0.0042,))
    assert is_shown("6.8%", (0.0681,))
    assert is_shown("1,117", (1117.3,))


SCALE = ROOT / "docs" / "scale.md"


def printed() -> tuple[list[tuple[Block, str]], dict[str, Any]]:
    """Return each table with what its code prints, and the names that the page makes."""
    found: list[tuple[Block, str]] = []
    names: dict[str, Any] = {}
    out = ""
    for block in blocks_of(SCALE.read_text(), "docs/scale.md"):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compiled(block), names)
            out = stream.getvalue()
        elif block.language == "text":
            found.append((block, out))
    return found, names


def test_the_tables_are_what_the_code_prints() -> None:
    tables, _ = printed()
    assert len(tables) == 2
    for block, out in tables:
        assert block.code == out, f"{block}: put in its place\n{out}"


def test_the_rule_of_when_it_pays() -> None:
    """On one kind of link, at that many tokens both ways exchange as much, but for the few numbers a token."""
    _, names = printed()
    V, D, t = 128256, 4096, 8
    T = V * 6 / (8 * t)
    assert round(T) == 12024
    assert f"{T:,.0f}" in SCALE.read_text()
    many = 2**20 * t  # so many GPUs that (W - 1) / W is 1
    alone, both = names["fsdp"](V, D, many), names["fsdp"](V / t, D, many // t) + names["tensor_parallel"](D, t, T)
    assert abs(both / alone - 1) < 0.003
    level = 6 * names["FLOPS"] / (6 * names["NETWORK"])  # V D (w + g) / NETWORK = 6 T D V / FLOPS
    assert 19_000 < level < 21_000

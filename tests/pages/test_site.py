"""The pages: all are listed, their links lead somewhere, on GitHub too, and results are linked; `make docs` builds."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from pages.blocks import PAGES, ROOT
from promises import promise

pytestmark = promise("pages")
ALL = [*PAGES, ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def test_few_result_files_and_each_is_linked_and_says_how_it_was_measured() -> None:
    linked = {name for page in PAGES for name in re.findall(r"benchmarks/results/([\w.-]+)", page.read_text())}
    files = {file.name: file for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert linked == set(files)
    assert len(files) <= 25
    for name, file in files.items():
        if name.endswith(".json"):
            result = json.loads(file.read_text())
            assert result["command"], name
            assert "torch" in result["machine"], name


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere_on_github_too_and_every_page_is_listed() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    broken = [f"{page.name}: not in mkdocs.yml" for page in pages if page.name not in listed]
    for page in ALL:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in headings(target))):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_lists_and_tables_begin_after_an_empty_line() -> None:
    """GitHub takes them without one; Python-Markdown makes text of them."""
    wrong = []
    for page in ALL:
        lines = FENCE.sub("```", page.read_text()).splitlines()
        for above, line in itertools.pairwise(lines):
            starts_list = re.match(r"(- |\d+\. )", line) and not re.match(r"(- |\d+\. |  )", above)
            starts_table = line.startswith("|") and not above.startswith("|")
            if above.strip() and (starts_list or starts_table):
                wrong.append(f"{page.name}: {line}")
    assert not wrong

"""The site: it builds without a warning, holds every page and every public name, and asks nothing of the network."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from pages.blocks import PAGES, ROOT, public_names
from promises import promise

pytestmark = promise("pages")
ALL = [*PAGES, ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


class Html(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])


@pytest.mark.slow
def test_the_site_has_every_page_and_name_no_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Of what `mkdocs build --strict` makes: a warning of its or of Python's is an error.

    mkdocs looks at what stands in Markdown; this at what came of it, hooks' links and docstrings' among it.
    """
    pytest.importorskip("mkdocs", reason="mkdocs comes with the docs extra")
    pytest.importorskip("mkdocstrings_handlers.python")
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with pytest.MonkeyPatch.context() as here:
        here.setenv("NO_MKDOCS_2_WARNING", "1")
        here.chdir(ROOT)
        config = load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path))
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()
    pages = {file: Html(file) for file in tmp_path.rglob("*.html") if file.name != "404.html"}
    for module, names in public_names().items():
        anchors = pages[tmp_path / "reference" / f"{module}.html"].anchors
        assert not [name for name in names if f"{module}.{name}" not in anchors]
    for file, html in pages.items():
        for link in html.links + html.loaded:
            path, _, anchor = unquote(link).partition("#")
            target = (file.parent / path).resolve() if path else file
            known = pages[target].anchors if target in pages else set()
            if "://" in link or link.startswith("mailto:"):
                assert link in html.links, f"{file.name} loads {link}"
            else:
                assert target.exists(), f"{file.name}: {link}"
                assert not anchor or anchor in known or anchor.startswith("__"), f"{file.name}: {link}"


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

"""The site: it builds without a warning, holds every page and every public name, and asks nothing of the network."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from lowtide.errors import ArgumentValueError
from pages.blocks import PAGES, ROOT, public_names

pytest.importorskip("mkdocs", reason="mkdocs comes with the docs extra")
pytest.importorskip("mkdocstrings_handlers.python")
pytest.importorskip("material")


def build(root: Path, site: Path) -> None:
    """Do what `mkdocs build --strict` does, in this process, which has imported already what has docstrings."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with pytest.MonkeyPatch.context() as here:
        here.setenv("NO_MKDOCS_2_WARNING", "1")
        here.chdir(root)
        config = load_config("mkdocs.yml", strict=True, site_dir=str(site))
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning of mkdocs' or of Python's: each is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(ROOT, folder)
    return folder


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
        elif tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {file: Html(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_every_page_is_there(site: Path) -> None:
    for page in (page.relative_to(ROOT) for page in PAGES):
        if page.parts[0] == "docs":
            assert (site / page.relative_to("docs").with_suffix(".html")).exists(), page
    assert "0.1.0" in (site / "changelog.html").read_text()
    assert not (site / "hooks.py").exists()


def test_every_link_leads_to_a_page_and_an_anchor_of_it(site: Path, pages: dict[Path, Html]) -> None:
    """mkdocs looks at what stands in Markdown; this at what came of it, hooks' links and docstrings' among it."""
    broken = []
    for file, html in pages.items():
        for link in html.links:
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (file.parent / path).resolve() if path else file
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (anchor and anchor not in known and not anchor.startswith("__")):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    for file, html in pages.items():
        for source in html.loaded:
            assert "://" not in source, f"{file.name}: {source}"
            assert (file.parent / unquote(source)).exists(), f"{file.name}: {source}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", style.read_text()), style.name


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Html]) -> None:
    index = (site / "reference" / "index.html").read_text()
    for module, names in public_names().items():
        page = site / "reference" / f"{module}.html"
        for name in names:
            assert f"{module}.{name}" in pages[page].anchors, f"{module}.{name}"
            assert f"{module}.html#{module}.{name}" in index, f"{module}.{name}"


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


def test_a_public_name_is_a_link_and_another_librarys_word_is_not(site: Path) -> None:
    page = (site / "models.html").read_text()
    assert '<a href="reference/lowtide.html#lowtide.patch"><code>patch</code></a>' in page
    assert "<code>shift_labels</code>" in page
    assert "<code>shift_labels</code></a>" not in page
    reference = (site / "reference" / "lowtide.html").read_text()
    assert reference.index('id="lowtide.linear_cross_entropy"') < reference.index('id="lowtide.HeadOptions"')


def test_every_code_block_stands_as_one(site: Path) -> None:
    """A fence that Markdown does not take leaves its marks in the page."""
    for file in site.rglob("*.html"):
        assert "```" not in file.read_text(), file.name


def headings(text: str) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere_on_github_too(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target.read_text()), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """GitHub takes them without one; Python-Markdown makes text of them."""
    text = re.sub(r"^ *```.*?^ *```$", "```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        starts_list = re.match(r"(- |\d+\. )", line) and above.strip() and not re.match(r"(- |\d+\. |  )", above)
        starts_table = line.startswith("|") and above.strip() and not above.startswith("|")
        assert not starts_list, f"{above}\n{line}"
        assert not starts_table, f"{above}\n{line}"


BREAKS = {  # what is added to a page, and what the build then says
    "docs/head.md": ("[How](nowhere.md)", "nowhere.md"),
    "docs/mlp.md": ("[How](plan.md#nowhere)", "does not contain an anchor '#nowhere'"),
    "docs/layers.md": ("[this](../benchmarks/results/no.json)", "no.json"),
    "docs/new.md": ("# New", 'not included in the "nav"'),
}


def test_the_build_fails_on_broken_links_and_anchors_unlisted_pages_and_names_without_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mkdocs.exceptions import Abort

    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in (
        "src",
        "benchmarks",
        "mkdocs.yml",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LOG.md",
        "LICENSE",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    for page, (text, _) in BREAKS.items():
        with (tmp_path / page).open("a") as file:
            file.write(f"\n{text}\n")
    monkeypatch.setattr(ArgumentValueError, "__doc__", None)
    with pytest.raises(Abort, match="warnings in strict mode"):
        build(tmp_path, tmp_path / "site")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "lowtide.errors.ArgumentValueError has no docstring" in warnings
    for _, message in BREAKS.values():
        assert any(message in warning for warning in warnings), message

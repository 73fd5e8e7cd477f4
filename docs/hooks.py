"""What mkdocs does beside Markdown: pages that read well on GitHub become a site, with nothing written twice.

- A link out of docs/ (a figure, a result file, CHANGELOG.md) is followed: the file becomes part of the site, at the
  path that it has in the repository.
- Each public module gets a page of its docstrings, under reference/. A new public name is there by itself.
- Headings have GitHub's anchors, and a public name in `code` is a link to its docstring.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pkgutil
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import lowtide

ROOT = Path(__file__).parents[1]
LOGGER = logging.getLogger("mkdocs.hooks")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")
CODE = re.compile(r"<(pre|a|h\d)\b.*?</\1>|<code>(?P<name>[\w.]+)(\(\))?</code>", re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
BREAK = re.compile(  # within a name or a call, not in a tag; within CamelCase of code
    r"""(?<=[a-zA-Z)])[._(=/](?=[a-zA-Z_"])(?![^<>]*>)|(?<=[a-z]{3})(?=[A-Z])(?=[^<>]*</code>)"""
)
PAGES_OF_THE_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LOG.md": "log.md",
}
GENERATED = ("changelog.md", "contributing.md", "log.md")
REFERENCE = "reference/"
OTHERS_WORDS = {"shift_labels", "train"}  # an argument of transformers' models, a room: no link where they stand alone

# Where the names of `lowtide` itself come from, in the order in which a reader meets them.
GROUPS = {
    "head": "The head: hidden states to a loss",
    "mlp": "The gated MLP",
    "models": "Hugging Face models",
    "trl": "TRL's trainers",
}


def github_slug(text: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def public_modules() -> list[ModuleType]:
    """Return lowtide and every module right below it that says what is public (``__all__``), by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(lowtide.__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"lowtide.{name}") for name in names]
    return [lowtide, *(module for module in modules if hasattr(module, "__all__"))]


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module's page documents: those of ``__all__`` that are not modules, nor lowtide's own.

    Functions come first, as in the pages; what they take and return behind them.
    """
    above = [] if module is lowtide else lowtide.__all__
    names = [
        name
        for name in module.__all__
        if name not in above and not name.startswith("__") and not isinstance(getattr(module, name), ModuleType)
    ]
    return sorted(names, key=lambda name: not inspect.isfunction(getattr(module, name)))


def documented_modules() -> list[ModuleType]:
    """Return the modules that get a page."""
    return [module for module in public_modules() if public_names(module)]


def reference_page(module: ModuleType) -> str:
    """Return the Markdown of a module's page."""
    lines = [f"# {module.__name__}", "", module.__doc__ or "", ""]
    groups: dict[str, list[str]] = {}
    for name in public_names(module):
        room = getattr(module, name).__module__.split(".")[1] if module is lowtide else ""
        groups.setdefault(GROUPS.get(room, room), []).append(name)
    ordered = [title for title in dict.fromkeys(GROUPS.values()) if title in groups]
    for title in [*ordered, *(title for title in groups if title not in ordered)]:
        level = 3 if title else 2
        lines += [f"## {title}", ""] if title else []
        for name in groups[title]:
            path, value = f"{module.__name__}.{name}", getattr(module, name)
            if callable(value) and not (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__):
                LOGGER.warning("%s has no docstring", path)  # with `strict` the end of the build
            defined = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else path
            lines += [] if path == defined else [f'<a id="{path}"></a>', ""]
            lines += [f"::: {defined}", "    options:"]
            lines += [f"      heading: {path}", f"      toc_label: {name}", f"      heading_level: {level}", ""]
    return "\n".join(lines)


def reference_index(modules: list[ModuleType]) -> str:
    """Return the Markdown of the page that lists all public names."""
    lines = ["# API reference", "", "Every public name, from its docstring.", ""]
    for module in modules:
        summary = (module.__doc__ or "").strip().splitlines()[0]
        lines += [f"## [{module.__name__}]({module.__name__}.md)", "", summary, ""]
        for name in public_names(module):
            path = f"{module.__name__}.{name}"
            lines.append(f"- [`{path}`]({module.__name__}.md#{path})")
        lines.append("")
    return "\n".join(lines)


def home_page() -> str:
    """Return the Markdown of the first page, with the README's figures, to which other pages link."""
    _, heading, rest = (ROOT / "README.md").read_text().partition("## How fast\n")
    figures = LINK.sub(r"../\1", rest.partition("\n## ")[0])
    return f"{(ROOT / 'docs/index.md').read_text()}\n{heading}{figures}\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the anchors, and put the reference's pages in the place that the navigation keeps for them."""
    config.mdx_configs["toc"]["slugify"] = github_slug
    pages = [f"{REFERENCE}index.md", *({m.__name__: f"{REFERENCE}{m.__name__}.md"} for m in documented_modules())]
    for item in config.nav or []:
        for title, target in item.items():
            if target == REFERENCE:
                item[title] = pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands elsewhere: the reference, the root's pages, and every file that a page refers to."""
    modules = documented_modules()
    generated = {f"{REFERENCE}{module.__name__}.md": reference_page(module) for module in modules}
    generated[f"{REFERENCE}index.md"] = reference_index(modules)
    for repository_path, page in PAGES_OF_THE_ROOT.items():
        if page in GENERATED:
            generated[page] = (ROOT / repository_path).read_text()
    files.remove(files.src_uris["index.md"])
    generated["index.md"] = home_page()
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    for file in list(files.documentation_pages()):
        folder = posixpath.dirname(repository_path_of(file.src_uri))
        for target in LINK.findall(file.content_string):
            path = posixpath.normpath(posixpath.join(folder, target))
            outside = not path.startswith(("docs/", "../")) and path not in PAGES_OF_THE_ROOT
            if outside and (ROOT / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between places of the repository into links between places of the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(repository_path_of(source))

    def site_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        target = PAGES_OF_THE_ROOT.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(source) or os.curdir)

    return LINK.sub(site_link, markdown)


@functools.cache
def reference_targets() -> dict[str, str]:
    """Return where the docstring of each name stands: the name whole or, where no argument has it, its last part."""
    modules = documented_modules()
    targets = {
        f"{module.__name__}.{name}": f"{REFERENCE}{module.__name__}.html#{module.__name__}.{name}"
        for module in modules
        for name in public_names(module)
    }
    values = [getattr(module, name) for module in modules for name in public_names(module)]
    arguments = {word for value in values if inspect.isfunction(value) for word in inspect.signature(value).parameters}
    short = {path.rpartition(".")[2]: target for path, target in targets.items()}
    return targets | {name: target for name, target in short.items() if name not in arguments | OTHERS_WORDS}


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Make `code` that is a public name a link to its docstring, but in headings, links and blocks.

    In a table's cell a long name may be broken at its dots and underscores on a narrow screen (assets/site.css).
    """
    targets = reference_targets()
    folder = posixpath.dirname(page.url)

    def link(match: re.Match[str]) -> str:
        target = targets.get(match["name"] or "")
        return f'<a href="{posixpath.relpath(target, folder or os.curdir)}">{match[0]}</a>' if target else match[0]

    return CELL.sub(lambda cell: BREAK.sub(r"\g<0><wbr>", cell[0]), CODE.sub(link, html))


def repository_path_of(source: str) -> str:
    """Return where a page of the site stands in the repository."""
    for repository_path, page in PAGES_OF_THE_ROOT.items():
        if source == page and page in GENERATED:
            return repository_path
    return f"docs/{source}"

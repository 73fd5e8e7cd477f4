"""Each result file is named on a page and says what it is; the tables of docs/scale.md are what its code prints."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from pages.blocks import PAGES, ROOT, blocks_of, compiled

RESULTS = ROOT / "benchmarks" / "results"
SCALE = ROOT / "docs" / "scale.md"


def test_every_result_is_read_on_a_page_and_says_what_it_is() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for file in sorted(RESULTS.iterdir()):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[\w-]+\.(json|png)", file.name), file.name
        assert f"benchmarks/results/{file.name}" in pages, f"{file.name} is named on no page"
        if file.suffix == ".json":
            text = file.read_text()
            result = json.loads(text)
            assert result.get("command") or result.get("config"), f"{file.name}: no command"
            assert re.search(r"H100|H200|EPYC|Xeon", text), f"{file.name}: no hardware"
            assert re.search(r'"torch": "2\.', text), f"{file.name}: no versions"


@pytest.mark.skipif(not SCALE.exists(), reason="there is no such page")
def test_the_tables_are_what_the_code_prints() -> None:
    names: dict[str, object] = {}
    out = ""
    for block in blocks_of(SCALE.read_text(), "docs/scale.md"):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compiled(block), names)
            out = stream.getvalue()
        elif block.language == "text":
            assert block.code == out, f"{block}: put in its place\n{out}"

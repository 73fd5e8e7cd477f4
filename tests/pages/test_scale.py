"""The tables of docs/scale.md are what the code above them prints, and its formulas what is really exchanged."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from pages.blocks import ROOT, Block, blocks_of, compiled

PAGE = ROOT / "docs" / "scale.md"


def printed() -> tuple[list[tuple[Block, str]], dict[str, Any]]:
    """Return each table with what its code prints, and the names that the page makes."""
    found: list[tuple[Block, str]] = []
    names: dict[str, Any] = {}
    out = ""
    for block in blocks_of(PAGE.read_text(), "docs/scale.md"):
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
    assert f"{T:,.0f}" in PAGE.read_text()
    many = 2**20 * t  # so many GPUs that (W - 1) / W is 1
    alone, both = names["fsdp"](V, D, many), names["fsdp"](V / t, D, many // t) + names["tensor_parallel"](D, t, T)
    assert abs(both / alone - 1) < 0.003
    level = 6 * names["FLOPS"] / (6 * names["NETWORK"])  # V D (w + g) / NETWORK = 6 T D V / FLOPS
    assert 19_000 < level < 21_000

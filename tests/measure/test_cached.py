"""Measurements that later runs read again: by name, whole or as before, and no harm from what others wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowtide.head.kernels import configs
from lowtide.measure.cached import CachedTable
from lowtide.memory.planner import at_hand


@dataclass(frozen=True)
class Rate:
    speed: float
    of: str = "it"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CachedTable[Rate]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return CachedTable("rates.json", lambda fields: Rate(**fields))


def test_what_is_remembered_is_read(table: CachedTable[Rate], tmp_path: Path) -> None:
    assert table.read() == {}
    assert table.remember("a", Rate(1.5)) == tmp_path / "lowtide" / "rates.json" == table.file
    table.remember("b", Rate(2, "b"))
    table.remember("a", Rate(3))
    assert table.read() == {"a": Rate(3), "b": Rate(2, "b")}
    assert [file.name for file in table.file.parent.iterdir()] == ["rates.json"]


def test_entries_of_another_version_do_not_hide_the_others(table: CachedTable[Rate]) -> None:
    table.remember("good", Rate(1))
    told = json.loads(table.file.read_text())
    table.file.write_text(json.dumps({"old": {"pace": 3}, "list": [1], "number": 3, "less": {}, **told}))
    assert table.read() == {"good": Rate(1)}
    table.remember("new", Rate(2))
    assert json.loads(table.file.read_text()).keys() == {"good", "new"}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe\x00"])
def test_what_is_no_table_is_none(table: CachedTable[Rate], text: bytes) -> None:
    table.file.parent.mkdir()
    table.file.write_bytes(text)
    assert table.read() == {}
    table.remember("a", Rate(1))
    assert table.read() == {"a": Rate(1)}


def test_both_tables_of_the_library_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert configs.KEPT.file == tmp_path / "lowtide" / "gemm.json"
    assert at_hand.MEASURED.file == tmp_path / "lowtide" / "gpus.json"

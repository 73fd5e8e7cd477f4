"""Tile sizes: what a tuning run found goes before the table, the table before the default."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lowtide.head.kernels import configs
from lowtide.head.kernels.configs import GemmConfig

FOUND = GemmConfig(rows=64, stages=2)
OTHER = GemmConfig(columns=128)
IN_TABLE = GemmConfig(group=99)


@pytest.fixture(autouse=True)
def table(gemm_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "TABLE", {"known": IN_TABLE})


def test_tuned_before_table_before_default() -> None:
    assert configs.lookup("known") == IN_TABLE
    assert configs.lookup("unknown") == GemmConfig()
    configs.remember("known", FOUND)
    assert configs.lookup("known") == FOUND
    assert configs.lookup("unknown") == GemmConfig()


def test_a_later_process_reads_what_was_remembered(gemm_file: Path) -> None:
    assert configs.remember("a", FOUND) == gemm_file
    configs.remember("b", OTHER)
    configs.remember("a", OTHER)
    configs.remember("a", FOUND)
    configs.tuned.cache_clear()
    assert configs.tuned() == {"a": FOUND, "b": OTHER}


def test_what_is_remembered_holds_at_once_for_a_device_that_was_asked_for_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "unknown")
    device = torch.device("cuda", 0)
    assert configs.of_device(device) == GemmConfig()
    configs.remember("unknown", FOUND)
    assert configs.of_device(device) == FOUND
    assert configs.of_device(torch.device("cpu")) == GemmConfig()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"known": 3}', '{"known": {"rows": 1, "width": 2}}', '{"known": [1]}', "\udcff"],
)
def test_a_broken_file_is_ignored_and_written_anew(text: str, gemm_file: Path) -> None:
    gemm_file.parent.mkdir(parents=True)
    gemm_file.write_bytes(text.encode(errors="surrogateescape"))
    assert configs.lookup("known") == IN_TABLE
    configs.remember("unknown", FOUND)
    assert configs.lookup("unknown") == FOUND
    assert json.loads(gemm_file.read_text()) == {"unknown": asdict(FOUND)}


def test_the_file_is_whole_or_as_before(gemm_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs.remember("a", FOUND)
    before = gemm_file.read_bytes()
    seen: list[dict[str, object]] = []

    def cut_off(part: Path, target: Path) -> None:
        assert target == gemm_file
        assert part.parent == gemm_file.parent  # a rename is atomic within a file system only
        seen.append(json.loads(part.read_text()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            configs.remember("b", OTHER)
    assert seen == [{"a": asdict(FOUND), "b": asdict(OTHER)}]
    assert gemm_file.read_bytes() == before
    configs.remember("b", OTHER)
    assert [file.name for file in gemm_file.parent.iterdir()] == [gemm_file.name]


def test_without_a_setting_it_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert configs.KEPT.file == tmp_path / ".cache" / "lowtide" / "gemm.json"

"""Rows are printed and written one by one, results are dated and whole, what a peer raises is its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowtide.bench import harness
from lowtide.bench.harness import (
    OUT_OF_MEMORY,
    Row,
    begin,
    is_failure,
    reason_in,
    write_json,
)
from lowtide.errors import UnsupportedError
from promises import promise

pytestmark = promise("commands")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnsupportedError("not this"), "not this"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots"), OUT_OF_MEMORY),
        (AssertionError(), "AssertionError"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError("long " * 1000), f"RuntimeError: {'long ' * 37}l"),
    ],
)
def test_what_a_peer_raises_is_its_row(error: Exception, reason: str) -> None:
    row: Row = {}
    with reason_in(row):
        raise error
    unable = isinstance(error, UnsupportedError)
    assert row == {"failed": reason, **({"unsupported": True} if unable else {})}
    with pytest.raises(KeyboardInterrupt), reason_in(row):
        raise KeyboardInterrupt


def test_a_lack_of_memory_is_no_failure() -> None:
    assert is_failure("lowtide:all", {"failed": "RuntimeError"})
    assert not is_failure("lowtide:all", {"failed": f"{OUT_OF_MEMORY} at 3 GiB"})
    assert not is_failure("liger", {"failed": "RuntimeError"})


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "describe_machine", lambda _: {"gpu": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setenv("COMMIT", "abc")
    for end in ("h100", "h100-2", "h100-3"):
        file, result = begin(str(tmp_path / "new"), "head", "lowtide --output here -x", torch.device("cuda"))
        assert file.stem == f"{result['date']}-head-{end}"
        assert result["command"] == "lowtide -x"
        write_json(file, {"run": end})
        write_json(file, {"run": end, "more": 1})  # the same run may
        assert json.loads(file.read_text())["more"] == 1
    assert len(list((tmp_path / "new").iterdir())) == 3

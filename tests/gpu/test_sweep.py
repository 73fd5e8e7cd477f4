"""The sweep of the head on a GPU, small: every peer has a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from lowtide.bench.config import HEAD_PEERS
from lowtide.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.filterwarnings("ignore")  # of torch.compile and of peers
def test_every_peer_has_a_row(tmp_path: Path) -> None:
    lines = ["--tokens", "512", "1024", "--hidden", "none", "--vocab", "8192", "16384", "--reps", "1"]
    lines = ["--shape", "1024,512,8192", *lines, "--dtype", "bfloat16"]
    assert main(["bench", "sweep", *lines, "--output", str(tmp_path)]) == 0
    told = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert len(told["points"]) == 3
    for point in told["points"]:
        rows = {row["name"]: row for row in point["rows"]}
        assert set(rows) == set(HEAD_PEERS)
        for name in ("lowtide", "naive", "checkpoint-8", "torchtune-8"):
            assert rows[name]["tflops"] > 0, rows[name]
            assert rows[name]["busy_tflops"] > 0
            assert rows[name]["busy_share"] == pytest.approx(rows[name]["busy_limit_ms"] / rows[name]["busy_ms"])
            assert rows[name]["dx_error"] < 1e-2
        assert rows["lowtide"]["peak_mib"] < rows["naive"]["peak_mib"]
    assert list(tmp_path.glob("*-lines.png"))

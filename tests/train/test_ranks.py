"""Two ranks: each packs its own text, the losses stay fused under DDP, and both find their place again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file

Run = Callable[..., tuple[int, str, str]]


def on_two_ranks(*arguments: object) -> str:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lowtide.cli",
    ]
    ended = subprocess.run([*launch, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="two ranks on a CPU speak gloo")
def test_two_ranks_train_and_resume(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = tmp_path / "out"
    out = on_two_ranks(*tiny, "--output", output)
    assert out.count("held-out loss") == 1, "one rank speaks"
    assert re.search(r"losses +\d+ without logits, 0 with\s", out), out
    told = [json.loads((output / "checkpoint-6" / f"data_position_{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(t["streams"]) for t in told] == [2, 2]
    assert told[0]["streams"] != told[1]["streams"]
    uninterrupted = load_file(output / "model" / "model.safetensors")
    (output / "checkpoint-6").rename(tmp_path / "away")
    on_two_ranks("train", "--resume", "--output", output)
    resumed = load_file(output / "model" / "model.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    status, _, err = lowtide("train", "--resume", "--output", output, "--max-steps", 8)
    assert (status, err.count("\n")) == (2, 1)
    assert "expected 2 ranks" in err

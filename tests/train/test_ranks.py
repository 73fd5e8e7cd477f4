"""Two ranks: each packs its own conversations, both find their place again, and the step is that of one process."""

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

from distributed.train_ranks import shared
from lowtide.train.checkpoints import log_history

Run = Callable[..., tuple[int, str, str]]


# As `python -m lowtide`, and then: no group is left, and none of the threads that would outlive it.
MAIN = """
import pathlib, sys
import torch.distributed
from lowtide.cli import main
status = main(sys.argv[1:])
threads = {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}
assert not torch.distributed.is_initialized()
assert not {name for name in threads if "gloo" in name}, threads
sys.exit(status)
"""


def by_torchrun(*command: object) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launch, *map(str, command)], capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def by_forks(script: Path, *arguments: object) -> str:
    """The start of torch is paid once; the end of an interpreter with gloo's threads is that of torchrun's ranks."""
    ended = shared()(2, *arguments, script=script, FINALISE="1")
    assert ended.statuses == [0, 0], ended
    return "".join(ended.out)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="two ranks on a CPU speak gloo")
@pytest.mark.parametrize("start", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_process_does_and_resume(
    start: Callable[..., str], tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output, script = tmp_path / "out", tmp_path / "main.py"
    script.write_text(MAIN)
    size = ["--grad-accum", "2", "--max-steps", "4"]
    out = start(script, *chat_arguments, *size, "--output", output)
    assert out.count("held-out loss") == 1, "one rank speaks"
    assert re.search(r"losses +\d+ without logits, 0 with\s", out), out
    told = [json.loads((output / "checkpoint-4" / f"data_position_{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(t["streams"]) for t in told] == [2, 2]

    # the same rows as those of both ranks, in a batch of one: tokens of conversations are as uneven as they come
    status, alone, _ = lowtide(*chat_arguments, *size, "--batch-size", "4", "--output", tmp_path / "alone")
    assert status == 0
    curves = [log_history(folder / "checkpoint-4") for folder in (output, tmp_path / "alone")]
    for name in ("loss", "grad_norm", "eval_loss"):
        ranks, one = ([entry[name] for entry in curve if name in entry] for curve in curves)
        assert len(ranks) == len(one) > 0
        assert ranks == pytest.approx(one, rel=1e-5), name
    counts = [re.search(r"conversations +(.*)", text)[1] for text in (out, alone)]  # type: ignore[index]
    assert counts[0] == counts[1]

    uninterrupted = load_file(output / "model" / "model.safetensors")
    (output / "checkpoint-4").rename(tmp_path / "away")
    by_forks(script, "train", "--resume", "--output", output)
    resumed = load_file(output / "model" / "model.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)

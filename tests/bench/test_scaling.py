"""The scaling benchmark on two ranks of a CPU, and what it makes of processes that die."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed import train_ranks
from lowtide.errors import ArgumentValueError
from lowtide.measure.child import ChildResult

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scaling
from scaling import SCALING, ScalingConfig

STEPS = 2


def measured(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], str]:
    said: list[str] = []
    small: dict[str, Any] = {"tokens": 16, "steps": STEPS, "weights": "float32", "output": str(folder)}
    given = {"ranks": ("2",), "model": ("lowtide-small",), "way": ("lowtide",), **small, **options}
    return SCALING.run(ScalingConfig(**given), said.append).rows, "".join(said)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")
@pytest.mark.parametrize("start", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_ranks(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if start == "forks":
        monkeypatch.setattr(scaling, "run_command", train_ranks.run_command)
    (row, kept), said = measured(tmp_path, way=("lowtide", "lowtide:all"))
    assert "failed" not in row, row
    assert kept["losses"] == pytest.approx(row["losses"], rel=1e-5)
    assert kept["way"] == "lowtide:all"
    assert (row["ranks"], row["way"], row["model"]) == (2, "lowtide", "lowtide-small")
    assert len(row["times"]) == STEPS
    assert row["tokens_per_s_per_gpu"] == pytest.approx(16 / row["seconds"])
    assert row["losses"][0] == pytest.approx(math.log(1000), rel=0.1)
    assert said.count("lowtide-small") == 2
    (file,) = tmp_path.glob("*-scaling-cpu.json")
    told = json.loads(file.read_text())
    assert told["rows"] == [row, kept]
    assert told["machine"]["accelerate"]
    assert told["command"].startswith("python benchmarks/scaling.py --ranks 2 --model lowtide-small --way lowtide")
    assert (told["ranks"], told["parallel"], told["weights"]) == ([2], ["fsdp2"], "float32")
    (picture,) = tmp_path.glob("*-scaling-cpu-lowtide-small.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")
def test_strong_scaling_shares_the_same_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's loss is that of one rank with all sequences, whichever engine shards the model."""
    monkeypatch.setattr(scaling, "run_command", train_ranks.run_command)
    engines = ("fsdp2", "zero3" if find_spec("deepspeed") else "ddp")
    rows, said = measured(tmp_path, ranks=("1", "2"), strong=True, batch=2, parallel=engines)
    written, _ = measured(tmp_path, ranks=("1", "2"), strong=True, batch=2, parallel=engines, way=("checkpoint-8",))
    assert [row["losses"] for row in written] == [pytest.approx(rows[0]["losses"], rel=1e-5)] * 3
    assert [(row["ranks"], row["parallel"]) for row in rows] == [(1, None), *((2, engine) for engine in engines)], rows
    for row, line in zip(rows, said.splitlines()[1:], strict=False):
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["ranks"] * row["tokens_per_s_per_gpu"] * row["seconds"] == pytest.approx(2 * 16)
        assert f" {rows[0]['seconds'] / row['seconds'] / row['ranks']:.3f} " in line


def test_a_model_that_fails_is_a_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three models dies with a reason on one rank; the last one dies without a word."""

    def fake(command: Sequence[str], **_: Any) -> ChildResult:
        told = json.loads(command[-1])
        file = Path(told["file"])
        row = {"seconds": 2.0, "tokens_per_s_per_gpu": 8.0, "peak_gib": 1.0, "losses": [3.0]}
        if told["model"] == "a":
            file.write_text(json.dumps(row))
        if told["model"] == "b":
            file.with_suffix(".failed1").write_text("out of memory")
        return ChildResult(returncode=-9, seconds=1.0, peak_bytes=0, stderr="Traceback\nSignal 9")

    monkeypatch.setattr(scaling, "run_command", fake)
    rows, said = measured(tmp_path, ranks=("1",), model=("a", "b", "c"))
    assert [row.get("failed") for row in rows] == [None, "out of memory", "Signal 9"]
    assert "1.000" in said
    assert "out of memory" in said
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="way"):
        measured(tmp_path, way=("unsloth",))
    with pytest.raises(ArgumentValueError, match="policy"):
        measured(tmp_path, way=("stock:attention-mlp1",))
    with pytest.raises(ArgumentValueError, match="parallel: expected auto or ddp"):
        measured(tmp_path, parallel=("fsdp2", "tp"))
    with pytest.raises(ArgumentValueError, match="each of --ranks 1 2 with --strong, got 3"):
        measured(tmp_path, ranks=("1", "2"), strong=True, batch=3)
    assert not list(tmp_path.iterdir())


def test_rows_are_told_and_written_while_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way and model has processes of its own; a run cut short has what was known."""
    seen: list[int] = []
    row = {"seconds": 2.0, "tokens_per_s_per_gpu": 8.0, "peak_gib": 1.0, "losses": [3.0]}

    def fake(command: Sequence[str], **_: Any) -> ChildResult:
        files = list(tmp_path.glob("[!.]*.json"))
        seen.append(len(json.loads(files[0].read_text())["rows"]) if files else 0)
        Path(json.loads(command[-1])["file"]).write_text(json.dumps(row))
        return ChildResult(returncode=0, seconds=1.0, peak_bytes=0)

    monkeypatch.setattr(scaling, "run_command", fake)
    monkeypatch.setattr(scaling.Way, "check_installed", lambda _: None)
    rows, _ = measured(tmp_path, ranks=("1",), model=("a", "b"), way=("liger", "lowtide"))
    assert seen == [0, 1, 2, 3]
    assert [(row["way"], row["model"]) for row in rows] == [(w, m) for w in ("liger", "lowtide") for m in "ab"]

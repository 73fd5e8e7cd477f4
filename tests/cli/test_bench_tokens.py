"""``lowtide bench stats`` and ``lowtide bench divergence`` from arguments to files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cli.results import result
from lowtide.bench import config as configs
from lowtide.bench import token_run
from lowtide.bench.config import DivergenceBenchConfig, StatsBenchConfig
from lowtide.cli import main

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]
SHAPES = {"stats": "32,8,64", "divergence": "32,8,64,12"}


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


@pytest.mark.parametrize(
    ("benchmark", "works", "peers"),
    [
        ("stats",
         ["log-probability and entropy, forward", "log-probability and entropy, backward", "log-probability, forward",
          "log-probabilities of 8", "log-probability, no", "log-probability and entropy, no", "all statistics",
          "logsumexp and 8"],
         ["lowtide", "lowtide-trl-memory", "naive", "cce-exact"]),
        ("divergence", ["KL(teacher || student)", "KL(student || teacher)", "JSD(0.5)"],
         ["lowtide", "naive", "checkpoint", "liger-jsd"]),
    ],
)  # fmt: skip
def test_all_tables(
    benchmark: str, works: list[str], peers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [benchmark, "--shape", SHAPES[benchmark], "--dtype", "bfloat16", "--only", *peers]
    assert bench(*run, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    assert told["command"] == f"lowtide bench {' '.join(run[:3])} --only {' '.join(peers)} --warm 0 --reps 1" + (
        " --dtype bfloat16 --device cpu"
    )
    assert told["machine"]["torch"]
    assert {"trl", "liger-kernel"} <= set(told["machine"])
    assert {"commit", "date"} <= set(told)
    (shape,) = told["shapes"]
    assert (shape["N"], shape["D"], shape["V"], shape["dtype"]) == (32, 8, 64, "bfloat16")
    assert shape.get("teacher_D") == (12 if benchmark == "divergence" else None)
    assert len(shape["tables"]) == len(works)
    for table, work in zip(shape["tables"], works, strict=True):
        assert table["work"].startswith(work)
        assert table["limit_ms"] > 0
        assert [row["name"] for row in table["rows"]] == peers
        for row in table["rows"][:3]:
            assert {"ms", "limit_ms", "share", "spread", "peak_mib", "errors"} <= set(row)
        assert "failed" in table["rows"][3]
    assert next(tmp_path.glob("*.json")).stem.endswith(f"-{benchmark}-cpu")
    out = capsys.readouterr().out
    assert out.count("lowtide ") == len(works)
    assert "written: " in out


@pytest.mark.parametrize(("benchmark", "work"), [("stats", "logprob-forward"), ("divergence", "forward-kl")])
def test_errors_are_left_out_where_not_wanted(benchmark: str, work: str, tmp_path: Path) -> None:
    only = ["--only", "naive", "--work", work, "--no-error"]
    assert bench(benchmark, "--shape", SHAPES[benchmark], *only, *QUICK, "--output", tmp_path) == 0
    row = result(tmp_path)["shapes"][0]["tables"][0]["rows"][0]
    assert row["ms"] > 0
    assert "errors" not in row


def test_lowtides_own_failure_is_status_1_and_a_peers_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    peers = dict(configs.STATS_PEERS)
    monkeypatch.setattr(StatsBenchConfig, "known_peers", peers)
    run = ["stats", "--shape", SHAPES["stats"], "--work", "logprob", "--only", "lowtide", "naive", "--no-error"]
    run += [*QUICK, "--output"]
    peers["naive"] = dataclasses.replace(peers["naive"], build=fail)
    assert bench(*run, tmp_path / "a") == 0
    (table,) = result(tmp_path / "a")["shapes"][0]["tables"]
    assert table["rows"][1]["failed"] == "RuntimeError: broken"
    peers["lowtide"] = dataclasses.replace(peers["lowtide"], build=fail)
    assert bench(*run, tmp_path / "b") == 1


def test_what_is_known_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = token_run.stats_tasks

    def interrupted(works: Any, shape: Any, *rest: Any) -> Any:
        if shape.N == 33:
            raise KeyboardInterrupt
        return make(works, shape, *rest)

    monkeypatch.setattr(token_run, "stats_tasks", interrupted)
    run = ["stats", "--shape", "32,8,64", "33,8,64", "--work", "logprob-forward", "--only", "naive", *QUICK]
    assert bench(*run, "--output", tmp_path) == 130
    assert len(result(tmp_path)["shapes"][0]["tables"][0]["rows"]) == 1


def test_defaults_and_all() -> None:
    assert [str(shape) for shape in StatsBenchConfig().shapes] == ["qwen-4k (8192,4096,151936)"]
    assert [shape.name for shape in DivergenceBenchConfig().shapes] == ["llama-8b-to-1b"]
    assert len(StatsBenchConfig(shape=("all",)).shapes) == 5
    assert len(DivergenceBenchConfig(shape=("all",)).shapes) == 2
    assert StatsBenchConfig().command() == "lowtide bench stats"
    command = DivergenceBenchConfig(work=("jsd",), error=False, output="x").command()
    assert command == "lowtide bench divergence --work jsd --no-error"

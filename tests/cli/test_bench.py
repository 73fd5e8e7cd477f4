"""``lowtide bench`` from arguments to files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.results import result
from lowtide.bench import head as benchmark
from lowtide.bench import pictures
from lowtide.bench import tune as tuning
from lowtide.bench.config import HeadBenchConfig, TuneConfig
from lowtide.bench.peers import PEERS
from lowtide.bench.problem import SETTINGS
from lowtide.bench.shapes import SHAPES
from lowtide.cli import main
from lowtide.head.kernels.configs import GemmConfig

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]


def head(*arguments: object) -> int:
    return main(["bench", "head", *map(str, arguments)])


def test_everything_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    sweep = ["--sweep", "--workspace-mib", 0.05, 0.5, "--settings", "--tokens", 16, 32]
    only = ["--only", "lowtide", "naive", "liger", "--dtype", "bfloat16"]
    assert head("--shape", "64,16,256", *only, *sweep, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    assert told["command"].startswith("lowtide bench head --shape 64,16,256 --only lowtide naive liger --sweep")
    assert told["machine"]["torch"]
    assert "liger-kernel" in told["machine"]
    assert {"commit", "date", "warm", "reps"} <= set(told)
    (shape,) = told["shapes"]
    assert (shape["N"], shape["D"], shape["V"], shape["dtype"]) == (64, 16, 256, "bfloat16")
    lowtide, naive, liger = shape["table"]
    for row in (lowtide, naive):
        assert {"ms", "share", "peak_mib", "loss_error", "dx_error", "dw_error"} <= set(row)
    assert {"dx_floor", "dw_floor", "plan"} <= set(lowtide)
    assert liger == {"name": "liger", "setting": "mean", "tokens": 64, "failed": "runs on GPUs only"}
    assert [row["workspace_mib"] for row in shape["sweep"]] == [0.05, 0.5]
    assert {row["setting"] for row in shape["settings"]} == {setting.name for setting in SETTINGS}
    assert [row["tokens"] for row in shape["tokens"]] == [16, 16, 16, 32, 32, 32]
    assert [limit["tokens"] for limit in shape["limits"]] == [64] * (1 + len(SETTINGS)) + [16, 32]
    stem = next(tmp_path.glob("*.json")).stem
    assert stem.endswith("-head-cpu")
    pictures = {file.name for file in tmp_path.glob("*.png")}
    assert pictures == {f"{stem}-64-16-256.png", f"{stem}-64-16-256-tokens.png"}
    out = capsys.readouterr().out
    assert "runs on GPUs only" in out
    assert "of the floor" in out


def test_settings_alone_have_no_table_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--shape", "64,16,256", "--only", "lowtide", "--settings", "--no-table", "--no-error"]
    assert head(*run, *QUICK, "--output", tmp_path) == 0
    (shape,) = result(tmp_path)["shapes"]
    said = [limit["setting"] for limit in shape["limits"]]
    assert said == [row["setting"] for row in shape["settings"]] != []
    assert capsys.readouterr().out.count("bare GEMMs") == len(said)


def test_the_default_sweep_leaves_out_what_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = ["--shape", "32,8,4096", "--only", "lowtide", "--sweep", "--no-table", "--no-error"]
    assert head(*run, *QUICK, "--output", tmp_path) == 0
    (shape,) = result(tmp_path)["shapes"]
    rows = [row["plan"]["chunk_rows"] for row in shape["sweep"]]
    assert rows == sorted(set(rows))
    assert 2 <= len(rows) <= benchmark.SWEEP_POINTS
    assert "table" not in shape


def test_lowtides_own_failure_is_status_1_and_a_peers_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    run = ["--shape", "32,8,64", "--only", "lowtide", "naive", "--no-error", *QUICK, "--output"]
    naive, lowtide = PEERS["naive"], PEERS["lowtide"]
    monkeypatch.setitem(PEERS, "naive", dataclasses.replace(naive, build=fail))
    assert head(*run, tmp_path / "a") == 0
    assert result(tmp_path / "a")["shapes"][0]["table"][1]["failed"] == "RuntimeError: broken"
    monkeypatch.setitem(PEERS, "lowtide", dataclasses.replace(lowtide, build=fail))
    assert head(*run, tmp_path / "b") == 1


def test_what_is_known_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = benchmark.make_problem

    def interrupted(shape: Any, *args: Any, **kwargs: Any) -> Any:
        if shape.N == 33:
            raise KeyboardInterrupt
        return make(shape, *args, **kwargs)

    monkeypatch.setattr(benchmark, "make_problem", interrupted)
    run = ["--shape", "32,8,64", "33,8,64", "--only", "naive", "--no-error", *QUICK, "--output", tmp_path]
    assert head(*run) == 130
    (shape,) = result(tmp_path)["shapes"]
    assert len(shape["table"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "llama-1b"], "shape: expected three numbers C,D,V above 0, got 'llama-1b'"),
        (["--shape", "1,0,8"], "shape: expected three numbers"),
        (["--seconds", "0"], "seconds: expected a number above 0, got 0.0"),
        (["--seconds", "nan"], "seconds: expected a number above 0"),
        (["--reps", "0"], "reps: expected a whole number of at least 1"),
        (["--warm", "-1"], "warm: expected a whole number of at least 0"),
        (["--seed", str(2**32)], "seed: expected a whole number below 2**32"),
        ([], "device: expected a GPU that PyTorch can use, got none"),
    ],
)
def test_tune_without_a_gpu_or_with_bad_input_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "tune", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lowtide bench tune: {says}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("found", "status"), [(GemmConfig(), 0), (None, 1)])
def test_tune_takes_its_options_and_says_whether_it_found_anything(
    found: GemmConfig | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TuneConfig] = []

    def run(config: TuneConfig, say: Any) -> GemmConfig | None:
        asked.append(config)
        return found

    monkeypatch.setattr(tuning, "run", run)
    assert main(["bench", "tune", "--dry-run", "--seconds", "2.5", "--shape", "8,16,32"]) == status
    assert asked == [TuneConfig(dry_run=True, seconds=2.5, shape="8,16,32")]


@pytest.mark.parametrize("arguments", [["bench", "tail"], ["bench", "head", "--dtype", "int8"]])
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pictures_without_matplotlib_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda _: None)
    assert head("--sweep", *QUICK, "--output", tmp_path) == 2
    assert "lowtide[plot]" in capsys.readouterr().err


def test_a_command_says_what_it_did() -> None:
    config = HeadBenchConfig(shape=("llama-1b", "1,2,3"), sweep=True, error=False, reps=3, output="/somewhere")
    assert config.command() == "lowtide bench head --shape llama-1b 1,2,3 --sweep --no-error --reps 3"


def test_all_is_every_shape_and_every_number_of_tokens() -> None:
    config = HeadBenchConfig(shape=("all",), tokens=("all",))
    assert config.shapes == tuple(SHAPES.values())
    assert (config.token_counts[0], config.token_counts[-1]) == (1024, 262144)
    assert [shape.name for shape in HeadBenchConfig().shapes] == ["llama-1b"]
    assert len(HeadBenchConfig(shape=("llama-1b", "llama-1b")).shapes) == 1

"""``lowtide bench sweep`` from arguments to files, killed and gone on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")


from cli.results import result
from lowtide.bench import sweep
from lowtide.bench.config import SweepBenchConfig
from lowtide.bench.harness import Peer
from lowtide.bench.loss_peers import PEERS
from lowtide.bench.task import Bench
from lowtide.cli import main
from lowtide.measure import plots

SMALL = ["--shape", "20,6,90", "--tokens", "5", "20", "--hidden", "6", "12", "--vocab", "90", "33"]
QUICK = ["--only", "lowtide", "naive", "liger", "--warm", "0", "--reps", "1", "--device", "cpu"]
DONE = 1  # liger is requested by name, and does not run on a CPU
SIZES = [(20, 6, 90), (5, 6, 90), (20, 6, 33), (20, 12, 90)]  # where the lines cross, then by work


def bench(*arguments: object) -> int:
    return main(["bench", "sweep", *map(str, arguments)])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty plot: drawing takes longer than all else."""
    monkeypatch.setattr(sweep, "draw_sweep", lambda told, files: files.plot("lines", lambda at: at.write_text("")))


def sizes(told: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(point["N"], point["D"], point["V"]) for point in told["points"]]


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 2e-2), ("float32", 3e-6)])
def test_from_arguments_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, worst: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(sweep, "draw_panels", lambda *a, **k: (drawn.append(a[2]), plots.draw_panels(*a, **k)))
    assert bench(*SMALL, *QUICK, "--dtype", dtype, "--output", tmp_path) == DONE
    told = result(tmp_path)
    assert "--shape 20,6,90 --tokens 5 20 --hidden 6 12 --vocab 90 33" in told["command"]
    assert told["finished"] is True
    assert sizes(told) == SIZES
    for point in told["points"]:
        lowtide, naive, liger = point["rows"]
        assert "plan" in lowtide
        assert liger["failed"] == "runs on GPUs only"
        for row in (lowtide, naive):
            work = 6 * point["N"] * point["D"] * point["V"]
            assert row["tflops"] == pytest.approx(work / row["ms"] / 1e9)
            assert row["peak_mib"] >= point["gradients_mib"] > 0
            # against a wider dtype: of float32 products, an error of zero would be one against themselves
            assert 0 < row["dx_error"] < worst
            assert 0 < row["dw_error"] < worst
    stem = next(tmp_path.glob("*.json")).stem
    assert stem.endswith("-sweep-cpu")
    assert (tmp_path / f"{stem}-lines.png").stat().st_size > 50_000
    out = capsys.readouterr().out
    assert out.startswith("4 shapes, about ")
    ((_, rate), (_, memory), (_, errors)) = drawn[0].items()
    for panels in (rate, memory, errors):
        lines = [
            {line.name: [x for x, _ in line.points] for line in panel.lines if not line.dotted} for panel in panels
        ]
        assert [line["lowtide"] for line in lines] == [[5, 20], [6, 12], [33, 90]]
        assert [line["liger"] for line in lines] == [[], [], []]
    assert [x for x, _ in rate[0].lines[-1].points] == [5, 20]  # of the limit


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed_goes_on_with_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, measured = Bench.measure, []

    def counting(self: Bench, peer: Peer) -> Any:
        measured.append((self.problem.shape.N, peer.name))
        if len(measured) == 5:
            raise KeyboardInterrupt
        return measure(self, peer)

    run = [*SMALL, "--hidden", "none", *QUICK, "--no-error", "--output", tmp_path]
    monkeypatch.setattr(Bench, "measure", counting)
    assert bench(*run) == 130
    told = result(tmp_path)
    assert told["finished"] is False
    assert [len(point["rows"]) for point in told["points"]] == [3, 1]
    assert list(tmp_path.glob("*.png"))  # of what there is
    first = told["points"][0]
    assert bench(*run) == DONE
    told = result(tmp_path)  # the same file
    assert told["finished"] is True
    assert told["points"][0] == first
    assert [[row["name"] for row in point["rows"]] for point in told["points"]] == [["lowtide", "naive", "liger"]] * 3
    assert len(measured) == 5 + 5
    assert "continuing " in capsys.readouterr().out
    assert bench(*run) == DONE  # what is finished is not gone on with
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.usefixtures("undrawn")
def test_what_was_another_sweep_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = sweep._measure_shape

    def one_shape(run: Any, shape: Any) -> None:
        if run.result["points"]:
            raise KeyboardInterrupt
        measure(run, shape)

    lines = ["--tokens", "5", "20", "--hidden", "none", "--vocab", "none", *QUICK, "--only", "naive"]
    run = ["--shape", "20,6,90", *lines, "--no-error", "--output", tmp_path]
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "_measure_shape", one_shape)
        assert bench(*run) == 130
    (old,) = tmp_path.glob("*.json")
    before = old.read_text()
    assert bench(*run, "--reps", 2) == 0
    assert bench(*run, "--fresh") == 0
    assert old.read_text() == before
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.usefixtures("undrawn")
def test_no_shape_is_begun_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "estimate", lambda config, shape, *rest: 0.1 if shape.V == 90 and shape.D == 6 else 1e6)
    run = [*SMALL, *QUICK, "--only", "naive", "--no-error", "--output", tmp_path]
    assert bench(*run, "--seconds", 100) == 0
    told = result(tmp_path)
    assert sizes(told) == SIZES[:2]
    assert told["finished"] is False
    assert bench(*run) == 0  # the time that a run has does not make it another sweep
    assert sizes(result(tmp_path)) == SIZES


@pytest.mark.usefixtures("undrawn")
def test_a_device_that_no_longer_answers_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(PEERS, "naive", dataclasses.replace(PEERS["naive"], build=fail))
    run = [*SMALL, *QUICK, "--no-error", "--output", tmp_path]
    with monkeypatch.context() as broken:
        broken.setattr(sweep, "answers", lambda device: False)
        assert bench(*run) == 2
        assert "none, after naive" in capsys.readouterr().err
        assert [len(point["rows"]) for point in result(tmp_path)["points"]] == [2]
    assert bench(*run) == DONE  # a peer's failure is its row's
    assert [len(point["rows"]) for point in result(tmp_path)["points"]] == [3] * 4


def test_running_out_of_memory_is_no_failure_of_the_sweep() -> None:
    assert not sweep.SWEEP.failed({"name": "lowtide", "failed": "out of memory"})


def test_lines_are_powers_of_two_around_the_shape() -> None:
    config = SweepBenchConfig()
    assert (config.center.N, config.center.D, config.center.V) == (16384, 2048, 131072)
    assert config.sizes("tokens") == (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert config.sizes("vocab")[-1] == 524288
    assert len(config.shapes) == 3 * 7 - 2
    assert (config.shapes[0].N, config.shapes[0].D, config.shapes[0].V) == (16384, 2048, 131072)
    assert set(config.peers) == set(SweepBenchConfig.usual_peers)
    one_line = SweepBenchConfig(shape="3,5,7", hidden=("none",), vocab=("none",))
    assert [shape.N for shape in one_line.shapes] == [3, 1, 6, 12]

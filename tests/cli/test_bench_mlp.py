"""``lowtide bench mlp`` from arguments to files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.results import result
from lowtide.bench.mlp import MLP_PEERS, bare_layers, make_stack
from lowtide.bench.shapes import MLPS
from lowtide.cli import main
from lowtide.mlp import elementwise

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]


def bench(*arguments: object) -> int:
    return main(["bench", "mlp", *map(str, arguments)])


def test_rows_and_their_bytes(tmp_path: Path) -> None:
    run = ["--shape", "2,64,16,40,1", "2,64,16,40,3", "--skip", "compile", "--dtype", "float32", *QUICK]
    assert bench(*run, "--output", tmp_path) == 0
    told = result(tmp_path)
    D, F, N = 16, 40, 128
    for shape in told["shapes"]:
        assert (shape["tokens"], shape["D"], shape["F"]) == (N, D, F)
        rows = {row["name"]: row for row in shape["rows"]}
        assert list(rows) == ["lowtide-0", "lowtide-1", "lowtide-1-tiled", "liger", "naive"]
        # of a token and layer: its input, and what stands between the GEMMs
        assert rows["lowtide-0"]["kept_bytes"] == 4 * (D + 2 * F)
        assert rows["lowtide-1"]["kept_bytes"] == 4 * D
        assert rows["naive"]["kept_bytes"] == 4 * (D + 4 * F)
        assert rows["lowtide-1-tiled"]["cannot"] == "128 tokens are one tile"
        assert rows["liger"]["cannot"] == "runs on GPUs only"
        for name in ("lowtide-0", "lowtide-1", "naive"):
            row = rows[name]
            assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["ms"])
            assert row["over"] == pytest.approx(row["ms"] / row["limit_ms"] - 1)
            assert row["gemms"] == (11 if name == "lowtide-1" else 9)
            weights = 3 * D * F * 4 * shape["layers"]
            assert row["all_gb"] * 1e9 == pytest.approx(row["peak_mib"] * 2**20 + weights + N * D * 4)
            assert row["again_gb"] > row["all_gb"]
        assert rows["lowtide-1"]["peak_mib"] < rows["lowtide-0"]["peak_mib"] < rows["naive"]["peak_mib"] or (
            shape["layers"] == 1  # one layer's backward has nothing to gain
        )


@pytest.mark.parametrize("numbers", ["2,64,16,40,3", "1,8,48,60,2", "4,64,8,200,1"])
def test_the_peak_of_a_step_that_adds_to_gradients_is_the_sum_in_the_docs(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "PIECE", 1)
    assert bench("--shape", numbers, "--only", "lowtide-0", "lowtide-1", *QUICK, "--output", tmp_path) == 0
    (shape,) = result(tmp_path)["shapes"]
    N, D, F, L = (shape[name] for name in ("tokens", "D", "F", "layers"))
    X, B, w = 4 * N * D, 4 * N * F, 4 * D * F
    expected = (
        2 * (3 * L * w + X) + L * (2 * B + X) + max(B + w, 2 * w, 3 * w - B) + X,
        2 * (3 * L * w + X) + L * X + max(3 * B + w, 2 * B + 2 * w, B + 3 * w) + X,
    )
    few = 4 * 12 * F  # of some rows, between the GEMMs
    for row, size in zip(shape["rows"], expected, strict=True):
        assert size - few <= row["again_gb"] * 1e9 <= size + few


def test_the_limit_runs_as_many_gemms_as_its_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(MLPS.one("2,8,4,6,2"), torch.float32, torch.device("cpu"), 0)
    calls: list[str] = []
    for name in ("mm", "addmm"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=original, n=name, **k: (calls.append(n), f(*a, **k))[1])
    for gemms in (9, 11):
        calls.clear()
        bare_layers(stack, gemms)()
        assert len(calls) == 2 * gemms
        assert stack.shape.flops(gemms) == len(calls) * 2 * 16 * 4 * 6


def test_peers_compute_the_same() -> None:
    stack = make_stack(MLPS.one("2,8,16,24,2"), torch.float64, torch.device("cpu"), 0)
    values = {}
    for name in ("lowtide-0", "lowtide-1", "naive"):
        layer = MLP_PEERS[name].build(stack)
        stack.step(layer)
        values[name] = [stack.forward(layer).detach(), *(leaf.grad for leaf in stack.leaves)]
    for name in ("lowtide-0", "lowtide-1"):
        for got, expected in zip(values[name], values["naive"], strict=True):
            torch.testing.assert_close(got, expected)

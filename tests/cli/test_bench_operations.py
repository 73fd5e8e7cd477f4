"""``lowtide bench apply``, ``layers`` and ``mlp`` from arguments to files, on a CPU and small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cli.results import result
from lowtide.bench import apply, experts, layers
from lowtide.bench.config import LayersBenchConfig
from lowtide.bench.mlp import MLP_PEERS, make_stack
from lowtide.bench.shapes import APPLY_SHAPES, MLPS, ExpertsShape
from lowtide.cli import main
from lowtide.head.options import HeadOptions
from lowtide.mlp import elementwise

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_halved_and_gradients_are_right(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("apply", "--shape", "256,32,4096", "--dtype", dtype, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    (shape,) = told["shapes"]
    rows = {(row["function"], row["name"]): row for row in shape["rows"]}
    assert {name for name, _ in rows} == {"cross-entropy", "focal", "entropy", "top-k"}
    for (function, name), row in rows.items():
        naive = rows[function, "naive"]
        assert "failed" not in row
        if name == "two chunks":
            assert row["plan"]["chunks"] == 2
            assert row["of_naive"] <= 0.5
        if name != "naive":
            assert row["value_error"] < 1e-5
            for error in ("dx_error", "dw_error", "db_error"):
                assert row[error] <= 1.1 * naive[error] + 1e-6, (function, name, error)
    assert "cross-entropy" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["train", "grpo"])
def test_training_is_the_same_to_rounding(objective: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = ["--steps", 4, "--batch", 2, "--seq-len", 24]
    assert bench("apply", "--no-table", f"--{objective}", *sizes, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)[objective]
    other = "stock" if objective == "train" else "naive"
    assert len(told["linear_apply"]["losses"]) == len(told[other]["losses"]) == 4
    assert len(set(told[other]["losses"])) == 4, "something is learned"
    assert told["largest_difference"] < 1e-5


@pytest.mark.parametrize("N", [2, 3, 100, 1000])
def test_two_chunks_are_two(N: int) -> None:
    shape = dataclasses.replace(APPLY_SHAPES["64x512"], N=N, D=8, V=300)
    inputs = apply.make_inputs(shape, torch.float32, torch.device("cpu"), 0)
    options = apply.in_two_chunks(inputs)
    assert apply.plan_of(inputs, options).chunks == 2
    assert apply.plan_of(inputs, HeadOptions(workspace_mib=0.99 * options.workspace_mib)).chunks >= 2


def test_rows_and_their_bytes(tmp_path: Path) -> None:
    run = ["--shape", "2,64,16,40,1", "2,64,16,40,3", "--skip", "compile", "--dtype", "float32", *QUICK]
    assert bench("mlp", *run, "--output", tmp_path) == 0
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


def test_rows_of_experts(tmp_path: Path) -> None:
    shape = ["--shape", "64,16,24,4,2", "--dtype", "float32"]
    assert bench("experts", *shape, *QUICK, "--output", tmp_path) == 0
    (told,) = result(tmp_path)["shapes"]
    rows = {row["name"]: row for row in told["rows"]}
    assert list(rows) == ["lowtide-0", "lowtide-1", "liger", "grouped_mm", "eager"]
    assert rows["liger"]["cannot"] == "runs on GPUs only"
    D, F, K = 16, 24, 2
    order = 4 * K + 4 * 4 / 64
    assert rows["lowtide-0"]["kept_bytes"] == pytest.approx(4 * (D + 2 * K * F) + order, abs=1)
    assert rows["lowtide-1"]["kept_bytes"] == pytest.approx(4 * D + order, abs=1)
    for name in ("grouped_mm", "eager"):
        assert rows[name]["kept_bytes"] > 4 * (D + 2 * K * D + 4 * K * F)
    assert [rows[name]["gemms"] for name in ("lowtide-0", "lowtide-1", "eager")] == [6, 7, 6]


@pytest.mark.parametrize("oss", [False, True])
def test_peers_of_experts_agree(oss: bool) -> None:
    shape = ExpertsShape("gpt-oss-small" if oss else "small", 48, 16, 24, 4, 2)
    mixture = experts.make_mixture(shape, torch.float32, torch.device("cpu"), 0)
    results = []
    for name in ("lowtide-0", "lowtide-1", "grouped_mm", "eager"):
        y = experts.EXPERTS_PEERS[name].built(mixture)()
        results.append([y.detach(), *torch.autograd.grad(y, mixture.leaves, mixture.upstream)])
    for each in results[:-1]:
        for got, want in zip(each, results[-1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("numbers", ["2,64,16,40,3", "1,8,48,60,2", "4,64,8,200,1"])
def test_the_peak_of_a_step_that_adds_to_gradients_is_the_sum_in_the_docs(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "PIECE", 1)
    assert bench("mlp", "--shape", numbers, "--only", "lowtide-0", "lowtide-1", *QUICK, "--output", tmp_path) == 0
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
        stack.bare(gemms)()
        assert len(calls) == 2 * gemms


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


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_layers_from_arguments_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--only lowtide eager F.rms_norm liger --tokens 64 --hidden 48 --heads 2 --kv-heads 1 --head-dim 8"
    assert bench("layers", *options.split(), "--dtype", "bfloat16", *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    rows = {(row["op"], row["peer"]): row for row in told["rows"]}
    for op in ("norm", "add-norm", "rotary"):
        ours, eager = rows[op, "lowtide"], rows[op, "eager"]
        assert ours["error"] < 1.2 * eager["error"] + 1e-3
        assert ours["kept_mib"] < 0.1 * eager["kept_mib"] or op == "rotary"
        assert ours["ms"] > 0
        assert "failed" in rows[op, "liger"] or torch.cuda.is_available()
    assert "add-norm: 64 x 48, bfloat16" in capsys.readouterr().out


def test_what_each_operation_has_to_move() -> None:
    config = LayersBenchConfig(tokens=64, hidden=32, heads=4, kv_heads=2, head_dim=8)
    ops = layers.ops(config, torch.bfloat16, torch.device("cpu"))
    assert {name for op in ops.values() for name in op.peers} == set(config.known["names"])
    row = 64 * 32 * 2
    assert (ops["norm"].forward_bytes, ops["norm"].backward_bytes) == (2 * row, 3 * row)
    assert (ops["add-norm"].forward_bytes, ops["add-norm"].backward_bytes) == (4 * row, 4 * row)
    assert ops["rotary"].forward_bytes == 2 * 64 * 6 * 8 * 2

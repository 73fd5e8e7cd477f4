"""Tasks: the truth is autograd's in float64, peers that run here agree, a row says what fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cli.results import result
from lowtide.bench import task as tasks
from lowtide.bench.divergence import DIVERGENCE_PEERS, KINDS, DivergenceTask, divergence_task, make_pair
from lowtide.bench.harness import CannotError, Peer, Row
from lowtide.bench.head import LossBench, loss_task
from lowtide.bench.loss_peers import PEERS, TRL_TILE
from lowtide.bench.problem import PLAIN, SETTINGS, make_problem
from lowtide.bench.shapes import HEADS, PAIR_SHAPES, PAIRS, Shape
from lowtide.bench.stats import STATS_PEERS, WORKS, StatsTask, stats_task
from lowtide.bench.task import MOST_LOGITS, Bench, Task, Values, limit_rows, table_of, truth
from lowtide.bench.way import CHUNKED
from lowtide.cli import main
from support import relative_error

N, D, V, TEACHER_D = 75, 12, 130, 19


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ROWS", 32)


def stats(work: str, dtype: torch.dtype = torch.float32) -> StatsTask:
    return stats_task(make_problem(HEADS.one(f"{N},{D},{V}"), dtype, "cpu"), WORKS[work])


def divergence(kind: str, dtype: torch.dtype = torch.float32) -> DivergenceTask:
    student, teacher = make_pair(PAIRS.one(f"{N},{D},{V},{TEACHER_D}"), dtype, "cpu")
    return divergence_task(student, teacher, KINDS[kind])


def loss(name: str, dtype: torch.dtype = torch.float32) -> Task:
    setting = next(setting for setting in (PLAIN, *SETTINGS) if setting.name == name)
    dtype = torch.bfloat16 if setting.wide else dtype  # to which autocast casts
    return loss_task(make_problem(HEADS.one(f"{N},{D},{V}"), dtype, "cpu").in_setting(setting))


def loss_in_float64(task: Task, z: Tensor) -> Values:
    if (c := task.head.setting.softcap) is not None:
        z = 2 * c * torch.sigmoid(2 * z / c) - c
    return {"loss": F.cross_entropy(z, task.head.y, reduction="none")}


def stats_in_float64(task: StatsTask, z: Tensor) -> Values:
    all_of_them = torch.distributions.Categorical(logits=z)
    p, N = all_of_them.probs, len(z)
    logprob = all_of_them.log_prob(task.y.view(N, -1).T).T.view_as(task.y)
    values = {"logprob": logprob, "entropy": all_of_them.entropy(), "lse": z.exp().sum(1).log()}
    values |= {"mean_logit": z.sum(1) / V, "sum_sq_prob": (p @ p.T).diagonal()}
    values["topk"] = z.sort(1, descending=True).values[:, : task.work.topk]
    return {name: values[name] for name in task.names}


def divergence_in_float64(task: DivergenceTask, z: Tensor) -> Values:
    s = z.softmax(1)
    z_teacher = task.teacher.x.double() @ task.teacher.w.double().T
    t = z_teacher.softmax(1)
    if task.kind.name == "forward_kl":
        return {"value": F.kl_div(s.log(), t, reduction="none").sum(1)}
    if task.kind.name == "reverse_kl":
        return {"value": F.kl_div(t.log(), s, reduction="none").sum(1)}
    m = (s + t) / 2
    return {"value": sum(F.kl_div(m.log(), side, reduction="none").sum(1) for side in (s, t)) / 2}


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Values], dict[str, Peer]]] = {
    **{setting.name: (loss, loss_in_float64, PEERS) for setting in (PLAIN, *SETTINGS)},
    **dict.fromkeys(WORKS, (stats, stats_in_float64, STATS_PEERS)),
    **dict.fromkeys(KINDS, (divergence, divergence_in_float64, DIVERGENCE_PEERS)),
}
MEANS = {"loss": set(PEERS), "value": {"lowtide", "lowtide-float32"}}  # who returns the mean of a value
TOLERANCES = {"loss": (2e-6, 5e-6)}  # of value and gradients; of the others 1e-5


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Task, Values, Tensor | None, Tensor | None, dict[str, Peer]]:
    make, exact, peers = CASES[request.param]
    task = make(request.param)
    x, w = (leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in (task.head.x, task.head.w))
    values = exact(task, x @ w.T)
    if task.head.setting.grad:
        sum((task.upstream[name].double() * value).sum() for name, value in values.items()).backward()
    return task, {name: value.detach() for name, value in values.items()}, x.grad, w.grad, peers


def test_the_truth_is_autograds(case: Any) -> None:
    task, values, dx, dw, _ = case
    true = truth(task)
    assert set(true.values) == set(values) == set(task.names)
    for name, value in values.items():
        assert relative_error(true.values[name], value) < (1e-6 if name == "loss" else 2e-6)
    for got, expected in ((true.dx, dx), (true.dw, dw)):
        assert (got is None) == (expected is None)
        if got is not None:
            assert relative_error(got, expected) < 2e-6
    assert task.head.x.grad is None


def test_peers_that_run_here_agree(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # slow
    task, values, dx, dw, peers = case
    if task.head.setting.wide:
        pytest.skip("autocast's products are in bfloat16")
    ran = []
    for name, peer in peers.items():
        if name == "auto-chunker":
            continue  # which compiles
        try:
            function = peer.build(task)
        except (CannotError, ModuleNotFoundError):
            continue
        got = task.step(function)
        assert set(got) == set(values), name
        for value in values:
            mean = got[value].dim() == 0
            assert mean == (name in MEANS.get(value, ()) and task.head.setting.reduction == "mean"), name
            expected_value = values[value].mean() if mean else values[value]
            assert got[value].shape == expected_value.shape, name
            assert relative_error(got[value], expected_value) < TOLERANCES.get(value, (1e-5, 1e-5))[0], name
        for leaf, expected in ((task.head.x, dx), (task.head.w, dw)):
            assert (leaf.grad is None) == (expected is None), name
            if expected is not None:
                assert relative_error(leaf.grad, expected) < TOLERANCES.get(task.names[0], (1e-5, 1e-5))[1], name
        ran.append(name)
    assert {"lowtide", "naive"} <= set(ran)
    if task.head.setting.softcap is not None:
        assert set(ran) == {"lowtide", "lowtide-liger-memory", "naive", "compile"}
    elif task.names == ("loss",):
        assert {"lowtide-liger-memory", *(["trl"] if find_spec("trl") else [])} <= set(ran)
        assert not hasattr(F, "linear_cross_entropy") or {"torch", "torch-4096"} <= set(ran)
        gpu_alone = {"forward-triton-8", *(["forward-8"] if task.head.setting.reduction == "none" else [])}
        assert set(CHUNKED) - gpu_alone <= set(ran)
    else:
        assert "lowtide-trl-memory" in ran


@pytest.mark.parametrize("rows", [N, 32, 7])
def test_the_limit_runs_the_gemms_that_the_task_needs_and_no_more(case: Any, rows: int) -> None:
    task = case[0]
    with FlopCounterMode(display=False) as counter:
        task.bare(rows)()
    heads = (task.head, *task.others)
    assert counter.get_total_flops() == task.flops == sum(h.setting.gemms * 2 * N * len(h.w) * h.shape.D for h in heads)


def test_rows_are_2048_4096_and_all() -> None:
    assert limit_rows(16384, 2) == (2048, 4096, 16384)
    assert limit_rows(3000, 2) == (2048, 3000)
    assert limit_rows(1000, 2) == (1000,)
    assert limit_rows(262144, MOST_LOGITS // 5000) == (2048, 4096)
    assert limit_rows(8192, MOST_LOGITS) == (2048,)  # there is always one


def test_the_limit_is_a_time_for_each() -> None:
    limit = LossBench(make_problem(Shape("", 2100, 2, 3), torch.float32, "cpu"), error=False, warm=0, reps=1).limit
    assert set(limit) == {2048, 2100}
    assert all(ms > 0 for ms in limit.values())


def test_a_row_has_every_figure(case: Any) -> None:
    task, _, dx, dw, peers = case
    bench = Bench(task, error=True, warm=0, reps=2)
    row = bench.measure(peers["lowtide"])
    assert "failed" not in row
    assert row["share"] == pytest.approx(row["limit_ms"] / row["ms"])
    assert set(row["errors"]) == {*task.names, *(name for name, g in (("dx", dx), ("dw", dw)) if g is not None)}
    assert max(row["errors"].values()) < (1e-2 if task.head.setting.wide else 1e-5)
    assert bench.gradients_mib == pytest.approx(sum(g.numel() for g in (dx, dw) if g is not None) * 4 / 2**20)
    assert row["peak_mib"] >= bench.gradients_mib
    assert task.head.w.grad is None
    assert bench.limits()["rows"] == N
    json.dumps([bench.limits(), row], allow_nan=False)
    text = table_of(task).line(row)
    assert text.startswith("lowtide ")
    assert len(text.split()) == 4 + len(row["errors"])
    assert len(table_of(task).header.split()) == 7 + 2 * (len(task.names) + 2 * task.head.setting.grad)


def measured(function: Callable[[], Values], task: Task) -> Row:
    bench = Bench(task, error=True, warm=0, reps=1)
    return bench.measure(Peer("peer", lambda _: function))


def test_what_is_wrong_is_said() -> None:
    task = stats("logprob-entropy")
    x, w = task.head.x, task.head.w
    naive = STATS_PEERS["naive"].build(task)
    missing = measured(lambda: {"logprob": naive()["logprob"]}, task)
    assert missing["failed"] == "entropy: missing or not finite"
    assert set(missing["errors"]) == {"logprob", "dx", "dw"}
    broken = measured(lambda: {**naive(), "entropy": (x.sum(1) + w.sum()) * math.nan}, task)
    assert broken["failed"] == "entropy, dx, dw: missing or not finite"
    detached = measured(lambda: {name: x.sum(1) for name in task.names}, task)
    assert detached["failed"] == "dw: missing or not finite"
    wrong = measured(lambda: {**naive(), "entropy": 1.5 * naive()["entropy"]}, task)
    assert "failed" not in wrong
    assert wrong["errors"]["entropy"] > 0.1 < wrong["errors"]["dw"]
    assert wrong["errors"]["logprob"] < 1e-5

    def fails() -> Values:
        raise RuntimeError("first\nsecond")

    bench = Bench(task, error=False, warm=0, reps=1)
    failed = bench.measure(Peer("peer", lambda _: fails))
    assert failed == {"name": "peer", "failed": "RuntimeError: first"}
    assert table_of(task).line(failed) == f"{'peer':24}RuntimeError: first\n"
    assert "errors" not in bench.measure(STATS_PEERS["naive"])


def test_a_mean_is_compared_with_the_mean() -> None:
    task = divergence("jsd")
    naive = DIVERGENCE_PEERS["naive"].build(task)
    row = measured(lambda: {"value": naive()["value"].mean()}, task)
    assert "failed" not in row
    assert max(row["errors"].values()) < 1e-5
    assert measured(lambda: {"value": naive()["value"].sum()}, task)["errors"]["dw"] == pytest.approx(N - 1, rel=1e-3)


def test_naive_takes_more_than_its_logits_and_lowtide_in_bf16_has_errors() -> None:
    bench = Bench(stats("logprob-entropy", torch.bfloat16), error=True, warm=0, reps=1)
    naive, lowtide = bench.measure(STATS_PEERS["naive"]), bench.measure(STATS_PEERS["lowtide"])
    assert naive["peak_mib"] > bench.gradients_mib + 2 * N * V * 4 / 2**20
    assert 1e-4 < lowtide["errors"]["dw"] < 1e-2


@pytest.mark.parametrize(
    ("work", "name", "reason"),
    [
        ("logprob-entropy", "liger-grpo", "no entropy"),
        ("logprob-entropy", "cce-exact", "no entropy"),
        ("targets", "trl", "one target a token"),
        ("all-forward", "verl-style", "one target a token, and entropies"),
        ("logprob-entropy-backward", "compile", "runs once"),
        ("jsd", "liger-jsd", "GPUs only"),
        ("jsd", "liger-kl", "forward KL alone"),
    ],
)
def test_a_peer_says_what_it_cannot_do(work: str, name: str, reason: str) -> None:
    make, _, peers = CASES[work]
    with pytest.raises(CannotError, match=reason):
        peers[name].build(make(work))


def test_forward_is_no_part_of_backward_alone() -> None:
    task = stats("logprob-entropy-backward")
    calls = []
    naive = STATS_PEERS["naive"].build(task)
    run = task.run_of(lambda: calls.append(1) or naive())
    gradients = []
    for _ in range(2):
        run()
        gradients.append((task.head.x.grad, task.head.w.grad))
    assert calls == [1]
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_of_a_small_vocabulary_the_highest_logits_are_all() -> None:
    task = stats_task(make_problem(HEADS.one("3,4,5"), torch.float32, "cpu"), WORKS["topk-forward"])
    assert truth(task).values["topk"].shape == (3, 5)


def test_trls_tiles_are_as_large_as_lowtide_is_told() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    divergences = pytest.importorskip("trl.kernels.chunked_divergence")
    assert (kernels.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == TRL_TILE
    assert (divergences.TOKEN_CHUNK_SIZE, divergences.VOCAB_CHUNK_SIZE) == TRL_TILE


def test_the_teacher_is_like_the_student() -> None:
    """An independent one's logits would have no correlation, and a KL about as large as the logits' variance."""
    for text in (f"{N},{D},{V},{TEACHER_D}", f"{N},{TEACHER_D},{V},{D}"):
        student, teacher = make_pair(PAIRS.one(text), torch.float32, "cpu")
        with torch.no_grad():
            z, teacher_z = student.x @ student.w.T, teacher.x @ teacher.w.T
        assert not teacher.w.requires_grad
        assert teacher_z.std() == pytest.approx(z.std().item(), rel=0.2)
        assert 0.4 < torch.corrcoef(torch.stack([z.flatten(), teacher_z.flatten()]))[0, 1] < 0.9


def test_upstream_gradients_differ_by_value_and_have_both_signs() -> None:
    upstream = stats("logprob-entropy").upstream
    for g in upstream.values():
        assert g.min() < 0 < g.max()
    assert not torch.equal(upstream["logprob"], upstream["entropy"])
    assert stats("logprob-forward").upstream == {}


def test_names_of_pairs() -> None:
    pair = PAIR_SHAPES["llama-8b-to-1b"]
    assert PAIRS.one("llama-8b-to-1b") is pair
    assert str(pair) == "llama-8b-to-1b (8192,2048,128256,4096)"
    assert (pair.teacher.N, pair.teacher.D, pair.teacher.V) == (8192, 4096, 128256)
    assert str(PAIRS.one("5,6,7,8")) == "5,6,7,8"


@pytest.mark.parametrize(
    ("kind", "works", "peers"),
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
    kind: str, works: list[str], peers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [kind, "--shape", "32,8,64,12" if kind == "divergence" else "32,8,64", "--dtype", "bfloat16"]
    run += ["--only", *peers, "--warm", "0", "--reps", "1", "--device", "cpu"]
    assert main(["bench", *run, "--output", str(tmp_path)]) == 1  # the last one is for GPUs
    (shape,) = result(tmp_path)["shapes"]
    assert (shape["N"], shape["D"], shape["V"], shape["dtype"]) == (32, 8, 64, "bfloat16")
    assert shape.get("teacher_D") == (12 if kind == "divergence" else None)
    for table, work in zip(shape["tables"], works, strict=True):
        assert table["work"].startswith(work)
        assert table["limit_ms"] > 0
        assert [row["name"] for row in table["rows"]] == peers
        for row in table["rows"][:3]:
            assert {"ms", "limit_ms", "share", "spread", "peak_mib", "errors"} <= set(row)
        assert "failed" in table["rows"][3]
    assert capsys.readouterr().out.count("lowtide ") == len(works)

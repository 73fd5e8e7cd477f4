"""Tasks: the truth is autograd's in float64, peers that run here agree, the limit is the task's GEMMs, rows say why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowtide.bench import task as tasks
from lowtide.bench.harness import CannotError, Peer, Row
from lowtide.bench.head import LossBench, loss_task
from lowtide.bench.loss_peers import PEERS, TRL_TILE, liger_rows
from lowtide.bench.mlp import MLP_PEERS, make_stack
from lowtide.bench.problem import PLAIN, SETTINGS, make_problem
from lowtide.bench.shapes import HEADS, MLPS, Shape
from lowtide.bench.stats import STATS_PEERS, WORKS, StatsTask, stats_task
from lowtide.bench.task import MOST_LOGITS, Bench, Task, Values, limit_rows, table_of, truth
from support import relative_error

N, D, V = 75, 12, 130
USERS_FORMS = {"checkpoint-8", "checkpoint-compile-8", "torchtune-8"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ROWS", 32)


def stats(work: str, dtype: torch.dtype = torch.float32) -> StatsTask:
    return stats_task(make_problem(HEADS.one(f"{N},{D},{V}"), dtype, "cpu"), WORKS[work])


def loss(name: str, dtype: torch.dtype = torch.float32) -> Task:
    setting = next(setting for setting in (PLAIN, *SETTINGS) if setting.name == name)
    dtype = torch.bfloat16 if setting.wide else dtype  # to which autocast casts
    return loss_task(make_problem(HEADS.one(f"{N},{D},{V}"), dtype, "cpu").in_setting(setting))


def loss_in_float64(task: Task, z: Tensor) -> Values:
    if (c := task.head.setting.softcap) is not None:
        z = 2 * c * torch.sigmoid(2 * z / c) - c
    return {"loss": F.cross_entropy(z, task.head.y, reduction="none")}


def stats_in_float64(task: StatsTask, z: Tensor) -> Values:
    distribution = torch.distributions.Categorical(logits=z)
    p = distribution.probs
    values = {
        "logprob": distribution.log_prob(task.y.view(len(z), -1).T).T.view_as(task.y),
        "entropy": distribution.entropy(),
        "lse": z.exp().sum(1).log(),
        "mean_logit": z.sum(1) / V,
        "sum_sq_prob": (p @ p.T).diagonal(),
        "topk": z.sort(descending=True).values[:, : task.work.topk],
    }
    return {name: values[name] for name in task.names}


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Values], dict[str, Peer]]] = {
    **{setting.name: (loss, loss_in_float64, PEERS) for setting in (PLAIN, *SETTINGS)},
    **dict.fromkeys(WORKS, (stats, stats_in_float64, STATS_PEERS)),
}


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
        pytest.skip("autocast's GEMMs are in bfloat16")
    limit = 5e-6 if task.names == ("loss",) else 1e-5
    ran = set()
    for name, peer in peers.items():
        try:
            function = peer.built(task)
        except CannotError:
            continue
        got = task.step(function)
        assert set(got) == set(values), name
        for value in values:
            mean = got[value].dim() == 0
            assert mean == (value == "loss" and task.head.setting.reduction == "mean"), name
            assert relative_error(got[value], values[value].mean() if mean else values[value]) < limit, name
        for leaf, expected in ((task.head.x, dx), (task.head.w, dw)):
            assert (leaf.grad is None) == (expected is None), name
            if expected is not None:
                assert relative_error(leaf.grad, expected) < limit, name
        ran.add(name)
    assert {"lowtide", "naive"} <= ran
    if task.head.setting.softcap is not None:
        assert ran == {"lowtide", "lowtide-liger-memory", "naive", "compile"}
    elif task.names == ("loss",):
        assert {*USERS_FORMS, *(["trl"] if find_spec("trl") else [])} <= ran


@pytest.mark.parametrize("rows", [N, 7])
def test_the_limit_runs_the_gemms_that_the_task_needs_and_no_more(case: Any, rows: int) -> None:
    task = case[0]
    with FlopCounterMode(display=False) as counter:
        task.bare(rows)()
    assert counter.get_total_flops() == task.flops == task.head.setting.gemms * 2 * N * D * V


def test_rows_of_the_limit_are_2048_4096_and_all() -> None:
    assert limit_rows(16384, 2) == (2048, 4096, 16384)
    assert limit_rows(3000, 2) == (2048, 3000)
    assert limit_rows(262144, MOST_LOGITS // 5000) == (2048, 4096)
    assert limit_rows(8192, MOST_LOGITS) == (2048,)  # there is always one
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
    json.dumps([bench.limits(), row], allow_nan=False)
    assert len(table_of(task).line(row).split()) == 4 + len(row["errors"])


def measured(function: Callable[[], Values], task: Task) -> Row:
    return Bench(task, error=True, warm=0, reps=1).measure(Peer("peer", lambda _: function))


def test_what_is_wrong_is_said() -> None:
    task = stats("logprob-entropy")
    x, w = task.head.x, task.head.w
    naive = STATS_PEERS["naive"].build(task)
    missing = measured(lambda: {"logprob": naive()["logprob"]}, task)
    assert missing["failed"] == "entropy: missing or not finite"
    broken = measured(lambda: {**naive(), "entropy": (x.sum(1) + w.sum()) * math.nan}, task)
    assert broken["failed"] == "entropy, dx, dw: missing or not finite"
    wrong = measured(lambda: {**naive(), "entropy": 1.5 * naive()["entropy"]}, task)
    assert wrong["errors"]["entropy"] > 0.1 < wrong["errors"]["dw"]
    assert wrong["errors"]["logprob"] < 1e-5

    def fails() -> Values:
        raise RuntimeError("first\nsecond")

    failed = measured(fails, task)
    assert failed == {"name": "peer", "failed": "RuntimeError: first"}
    assert table_of(task).line(failed).split() == ["peer", "RuntimeError:", "first"]


def test_a_mean_is_compared_with_the_mean() -> None:
    task = loss("mean")
    naive = PEERS["naive"].build(task)
    assert max(measured(naive, task)["errors"].values()) < 1e-5
    wrong = measured(lambda: {"loss": N * naive()["loss"]}, task)
    assert wrong["errors"]["dw"] == pytest.approx(N - 1, rel=1e-3)


def test_naive_takes_more_than_its_logits_and_lowtide_in_bf16_has_errors() -> None:
    bench = Bench(stats("logprob-entropy", torch.bfloat16), error=True, warm=0, reps=1)
    naive, lowtide = bench.measure(STATS_PEERS["naive"]), bench.measure(STATS_PEERS["lowtide"])
    assert naive["peak_mib"] > bench.gradients_mib + 2 * N * V * 4 / 2**20
    assert 1e-4 < lowtide["errors"]["dw"] < 1e-2


@pytest.mark.parametrize(
    ("work", "name", "reason"),
    [
        ("logprob-entropy", "liger-grpo", "no entropy"),
        ("targets", "trl", "one target a token"),
        ("logprob-entropy-backward", "compile", "runs once"),
        ("mean", "liger", "GPUs only"),
        ("reduction none", "liger-sm90", "GPUs only"),
        ("soft cap 15", "trl", "without a soft cap"),
    ],
)
def test_a_peer_says_what_it_cannot_do(work: str, name: str, reason: str) -> None:
    make, _, peers = CASES[work]
    with pytest.raises(CannotError, match=reason):
        peers[name].build(make(work))


def test_a_package_that_is_missing_comes_with_what_to_install() -> None:
    def build(_: object) -> object:
        raise ModuleNotFoundError("No module named 'quack'")

    with pytest.raises(CannotError, match=r"ModuleNotFoundError: No module named 'quack'\. pip install quack-kernels"):
        Peer("quack", build, "quack-kernels").built(None)


def test_forward_is_no_part_of_backward_alone() -> None:
    task = stats("logprob-entropy-backward")
    calls: list[int] = []
    naive = STATS_PEERS["naive"].build(task)
    run = task.run_of(lambda: calls.append(1) or naive())  # type: ignore[func-returns-value]
    gradients = []
    for _ in range(2):
        run()
        gradients.append((task.head.x.grad, task.head.w.grad))
    assert calls == [1]
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_the_memory_of_liger_and_of_trl() -> None:
    """Liger was measured at 640 MiB above the inputs of llama-1b, 576 of which are gradients."""
    shape = HEADS.one("llama-1b")
    assert liger_rows(shape) * shape.V * 2 / 2**20 == 64
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    assert TRL_TILE[0] == kernels.TOKEN_CHUNK_SIZE
    assert TRL_TILE[1] == pytest.importorskip("trl.kernels.chunked_divergence").VOCAB_CHUNK_SIZE


def test_mlps_compute_the_same_and_the_limit_runs_their_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(MLPS.one("2,8,16,24,2"), torch.float64, torch.device("cpu"), 0)
    values = {}
    for name in ("lowtide-0", "lowtide-1", "naive"):
        layer = MLP_PEERS[name].build(stack)
        stack.step(layer)
        values[name] = [stack.forward(layer).detach(), *(leaf.grad for leaf in stack.leaves)]
    for name in ("lowtide-0", "lowtide-1"):
        for got, expected in zip(values[name], values["naive"], strict=True):
            torch.testing.assert_close(got, expected)
    for gemms in (9, 11):
        with FlopCounterMode(display=False) as counter:
            stack.bare(gemms)()
        assert counter.get_total_flops() == 2 * gemms * 2 * 16 * 16 * 24

"""The floor is what the roundings cost, by a second, dense computation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench import head, task
from lowtide.bench import problem as problems
from lowtide.bench.head import loss_task, rounding_floor
from lowtide.bench.problem import PLAIN, SETTINGS, Problem, Setting, make_problem
from lowtide.bench.shapes import HEADS
from lowtide.bench.task import Truth, truth
from support import relative_error as dense_error

SHAPE = HEADS.one("240,24,500")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (problems, head, task):
        monkeypatch.setattr(module, "ROWS", 37)


def plain(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Problem:
    return make_problem(SHAPE, dtype, "cpu", seed=seed)


def reference(problem: Problem) -> Truth:
    return truth(loss_task(problem))


def in_float64(problem: Problem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x = problem.x.detach().double().requires_grad_(problem.x.requires_grad)
    w = problem.w.detach().double().requires_grad_(problem.w.requires_grad)
    loss = F.cross_entropy(x @ w.T, problem.y, reduction="none")
    if problem.setting.grad:
        loss.backward(problem.g)
    return loss.detach(), x.grad, w.grad


def test_targets_are_drawn_from_the_model() -> None:
    """The mean of -log p of a draw is the entropy; of a random class it would be far more."""
    problem = make_problem(HEADS.one("6000,16,300"), torch.float32, "cpu", seed=3)
    logprob = (problem.x @ problem.w.T).detach().log_softmax(1)
    surprise = -logprob.gather(1, problem.y[:, None])[:, 0]
    entropy = -(logprob.exp() * logprob).sum(1)
    difference = surprise - entropy
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(len(difference))
    assert -logprob.mean() > surprise.mean() + 1


def dense_floor(problem: Problem, chunk_rows: int | None) -> tuple[float, float]:
    """The same roundings, whole matrices in float64."""
    x, w, y = problem.x.detach().double(), problem.w.detach().double(), problem.y[:, None]
    dtype = problem.dtype
    z = x @ w.T
    E = (z - z.gather(1, y)).exp()
    E.scatter_(1, y, 0.0)
    r = E.sum(1, keepdim=True)
    s = problem.g[:, None].double() / (1 + r)
    E = E.to(dtype).double()
    dx = (s * (E @ w - r * w[problem.y])).to(problem.x.dtype)
    E = E.scatter(1, y, (-r).to(dtype).double())
    scaled = (s * x).to(dtype).double()
    dw = torch.zeros_like(problem.w.detach())
    for at in problems.blocks(len(x), chunk_rows or len(x)):
        dw = (dw.double() + E[at].T @ scaled[at]).to(dw.dtype)
    _, true_dx, true_dw = in_float64(problem)
    assert true_dx is not None
    assert true_dw is not None
    return dense_error(dx, true_dx), dense_error(dw, true_dw)


@pytest.mark.parametrize("chunk_rows", [None, 120, 50])
@pytest.mark.parametrize("setting", [PLAIN, SETTINGS[1], SETTINGS[2]], ids=lambda setting: setting.name)
def test_the_floor_is_that_of_a_dense_emulation(setting: Setting, chunk_rows: int | None) -> None:
    problem = plain().in_setting(setting)
    floor = rounding_floor(problem, reference(problem), chunk_rows)
    dx, dw = dense_floor(problem, chunk_rows)
    assert floor["dx"] == pytest.approx(dx, rel=0.01)
    assert floor["dw"] == pytest.approx(dw, rel=0.01)


def test_the_floor_is_one_rounding_for_dx_and_three_for_dw() -> None:
    """bf16 keeps 8 bits: one rounding errs by about 1.65e-3 of the value, as root of the mean square."""
    problem = plain()
    floor = rounding_floor(problem, reference(problem), None)
    assert floor["dx"] == pytest.approx(1.65e-3, rel=0.1)
    assert floor["dw"] == pytest.approx(1.65e-3 * math.sqrt(3), rel=0.1)


def test_the_floor_grows_with_the_chunks_and_is_nothing_in_float32() -> None:
    problem = plain()
    true = reference(problem)
    errors = [rounding_floor(problem, true, rows)["dw"] for rows in (240, 60, 15)]
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] == pytest.approx(rounding_floor(problem, true, None)["dw"])
    exact = plain(torch.float32)
    floor = rounding_floor(exact, reference(exact), 60)
    assert 0 < floor["dx"] < 2e-6
    assert 0 < floor["dw"] < 2e-6


def test_the_precision_of_products_is_given_back() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        reference(plain())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")

"""Gradients that skip tiles of the softmax, by their kernels in Triton's interpreter: beside float64."""

import copy
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import HeadOptions
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

pytest.importorskip("triton")
from lowtide.skip import memory

COLUMNS = 256


def problem(N: int, D: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight and targets with a softmax as concentrated as a trained model's."""
    w = torch.randn(V, D) / math.sqrt(D)
    frequency = torch.randperm(V).float().add(1).reciprocal()
    w[:, 0] = frequency.log() + 2
    y = torch.multinomial(frequency, N, replacement=True)
    x = torch.randn(N, D) * 1.5 + 2 * w[y] * math.sqrt(D) / 4
    x[:, 0] = 1
    y[::11] = -100
    return x, w, y


def exact(x: Tensor, w: Tensor, y: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """Return loss and gradients in float64."""
    x, w = (t.double().requires_grad_() for t in (x, w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, y, **more)
    return (loss.detach(), *torch.autograd.grad(loss, (x, w)))


def relative(found: Tensor, right: Tensor) -> float:
    """Return the error of a gradient."""
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize(("N", "D", "V"), [(270, 24, 1300), (150, 264, 700)])
def test_errors(kernels: None, N: int, D: int, V: int) -> None:
    """The loss is exact, and both gradients are as near as asked, with most tiles left out."""
    x, w, y = problem(N, D, V)
    right = exact(x, w, y)
    parameter = w.requires_grad_()
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=HeadOptions(skip=0.02))
        grads = torch.autograd.grad(loss, (hidden, parameter))
        errors = [relative(found, one) for found, one in zip(grads, right[1:], strict=True)]
        report = lowtide.skip_report(parameter)
        assert loss.item() == pytest.approx(right[0].item(), rel=1e-5)
        assert max(errors) < 0.02
    assert report is not None
    assert report.share < 0.95


def test_options(kernels: None) -> None:
    """A bias, a scale, weights of classes and tokens, smoothing and ignored tokens: errors as asked."""
    N, D, V = 180, 40, 1100
    x, w, y = problem(N, D, V)
    b, q, t = torch.randn(V) * 0.3, torch.rand(V) + 0.5, torch.rand(N) + 0.5
    options = HeadOptions(skip=0.02)
    parameter, bias = w.requires_grad_(), b.requires_grad_()
    hidden, weight, linear_bias = (z.detach().double().requires_grad_() for z in (x, w, b))
    logits = (hidden @ weight.T + linear_bias) * 0.9
    each = torch.nn.functional.cross_entropy(logits, y, q.double(), reduction="none", label_smoothing=0.1)
    valid = y >= 0
    loss = (each * t)[valid].sum() / q[y[valid]].double().sum() + (
        1e-3 * (logits.logsumexp(1).square() * t)[valid].sum() / q[y[valid]].double().sum()
    )
    right = torch.autograd.grad(loss, (hidden, weight, linear_bias))
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        found = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=bias, weight=q, label_smoothing=0.1, z_loss=1e-3, logit_scale=0.9,
            token_weight=t, options=options,
        )  # fmt: skip
        grads = torch.autograd.grad(found, (hidden, parameter, bias))
        errors = [relative(one, other) for one, other in zip(grads, right, strict=True)]
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        assert max(errors) < 0.02
        assert errors[2] < 1e-5
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_softcap(kernels: None, reduction: str) -> None:
    """E then has a slope in it: what tiles are chosen by and what stands for them is of E, and the loss of its sums."""
    N, D, V, cap, scale = 200, 40, 1600, 3.0, 1.3
    x, w, y = problem(N, D, V)
    b, g = torch.randn(V) * 0.3, torch.randn(N)
    parameter, bias = w.requires_grad_(), b.requires_grad_()
    right_leaves = [z.detach().double().requires_grad_() for z in (x, w, b)]
    logits = cap * torch.tanh((right_leaves[0] @ right_leaves[1].T + right_leaves[2]) * scale / cap)
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    upstream = g if reduction == "none" else torch.ones(N)
    right = torch.autograd.grad((each * upstream).sum(), right_leaves)
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        found = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=bias, logit_scale=scale, softcap=cap, reduction=reduction,
            options=HeadOptions(skip=0.02),
        )  # fmt: skip
        grads = torch.autograd.grad(found, (hidden, parameter, bias), g if reduction == "none" else None)
        expected = each if reduction == "none" else each.sum()
        torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
        errors = [relative(one, other) for one, other in zip(grads, right, strict=True)]
        assert max(errors) < 0.02
        assert errors[2] < 1e-5
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95
    assert report.logit_error > 0


PER_TOKEN: list[Callable[..., Tensor]] = [
    lambda x, w, y, o: -lowtide.linear_logprobs(x, w, y, options=o),
    lambda x, w, y, o: -lowtide.linear_token_stats(x, w, y, want=("logprob",), options=o).logprob,  # type: ignore[operator]
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("losses", PER_TOKEN)
def test_a_value_for_each_token(kernels: None, losses: Callable[..., Tensor]) -> None:
    """What flows back is known in backward only, of both signs, and 0 at some tokens; a graph may be walked twice."""
    x, w, y = problem(150, 24, 1100)
    g = torch.randn(150)
    g[5::7], g[y < 0] = 0, torch.nan
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g.nan_to_num()).sum(), (right_x, right_w))
    parameter, options = w.requires_grad_(), HeadOptions(skip=0.02)
    for call in range(3):
        hidden = x.clone().requires_grad_()
        found = losses(hidden, parameter, y, options)
        torch.testing.assert_close(found.detach().double(), each.detach(), rtol=1e-5, atol=1e-5)
        for keep in (True, False) if call == 2 else (False,):
            grads = torch.autograd.grad(found, (hidden, parameter), g, retain_graph=keep)
            assert max(relative(one, other) for one, other in zip(grads, right, strict=True)) < 0.02
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95
    assert (report.calls, report.dense) == (3, 0)
    assert 0 <= report.dropped_mass < 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_several_calls_before_their_backward(kernels: None) -> None:
    """Each has its own tiles in its own order, also where that was renewed since; empty ones have gradients of 0."""
    x, w, y = problem(150, 24, 1100)
    g, parameter, parts = torch.randn(150), w.requires_grad_(), (slice(0, 70), slice(70, 70), slice(70, 150))
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))
    for turn in range(3):
        hidden, total = x.clone().requires_grad_(), torch.zeros_like(w)
        found = [
            lowtide.linear_logprobs(hidden[part], parameter, y[part], options=HeadOptions(skip=0.02)) for part in parts
        ]
        for part, one in zip(parts[:: -1 if turn % 2 else 1], found[:: -1 if turn % 2 else 1], strict=True):
            (one * g[part]).sum().backward(inputs=[hidden, parameter])
            total += parameter.grad
            parameter.grad = None
        assert relative(hidden.grad, right[0]) < 0.02
        assert relative(total, right[1]) < 0.02
    nothing = lowtide.linear_logprobs(hidden, parameter, y, options=HeadOptions(skip=0.02))
    grads = torch.autograd.grad(nothing, (hidden, parameter), torch.zeros(150))
    assert not any(grad.any() for grad in grads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(kernels: None, monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    """A recompute is a call that may decide otherwise than its forward, whose decision counts."""
    x, w, y = problem(60, 16, 500)
    g, parameter, options = torch.randn(60), w.requires_grad_(), HeadOptions(skip=0.02)
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))

    def logprobs(hidden: Tensor, target: Tensor) -> Tensor:
        return lowtide.linear_logprobs(hidden, parameter, target, options=options)

    for turn in range(3):
        hidden, parameter.grad = x.clone().requires_grad_(), None
        parts = zip(hidden.split(30), y.split(30), strict=True)
        found = torch.cat([checkpoint(logprobs, *part, use_reentrant=reentrant) for part in parts])
        if turn == 2:
            known = memory.known_of(parameter)
            assert known is not None
            monkeypatch.setattr(known, "begin", lambda: False)
        (found * g).sum().backward()
        assert relative(hidden.grad, right[0]) < 0.02
        assert relative(parameter.grad, right[1]) < 0.02
    assert lowtide.skip_report(parameter) is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_gradients_of_a_mean_that_backward_recomputes(kernels: None) -> None:
    """As of one whose gradients forward stores, and without anything stored."""
    x, w, y = problem(150, 24, 1100)
    right, parameter = exact(x, w, y), w.requires_grad_()
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        options = HeadOptions(skip=0.02, gradient="recompute")
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=options)
        grads = torch.autograd.grad(3 * loss, (hidden, parameter))
        assert loss.item() == pytest.approx(right[0].item(), rel=1e-5)
        assert max(relative(found / 3, one) for found, one in zip(grads, right[1:], strict=True)) < 0.02
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 1


def step(x: Tensor, w: Tensor, y: Tensor, skip: float = 0.02, **more: Any) -> tuple[Any, ...]:
    """Return a call's loss and gradients."""
    hidden = x.clone().requires_grad_()
    loss = lowtide.linear_cross_entropy(hidden, w, y, options=HeadOptions(skip=skip), **more)
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, w)))


def reported(w: Tensor) -> memory.Report:
    """Return the report of a weight that has had calls."""
    report = lowtide.skip_report(w)
    assert report is not None
    return report


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
def test_what_is_skipped_is_relative_to_the_gradients(
    kernels: None, monkeypatch: pytest.MonkeyPatch, gradient: str
) -> None:
    """Class weights that are all alike, or a scale that the weight makes up for, change neither tiles nor masses."""
    monkeypatch.setattr(memory, "FIRST", 1.0)
    (x, w, y), reports = problem(300, 24, 1100), []
    x, y = x[(y >= 0) & (y < 512)][:100], y[(y >= 0) & (y < 512)][:100]  # other tiles have no targets
    for scale, weight in ((1.0, 1.0), (16.0, 1024.0), (0.0625, 1.0)):
        parameter, q = (w / scale).requires_grad_(), torch.full((1100,), weight)
        hidden = x.clone().requires_grad_()
        options = HeadOptions(skip=0.3, gradient=gradient)
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, weight=q, logit_scale=scale, options=options)
        torch.autograd.grad(loss, (hidden, parameter))
        reports.append(reported(parameter)[:3])
    assert reports[0][0] < 0.95
    assert reports[1] == pytest.approx(reports[0], rel=1e-3)
    assert reports[2] == pytest.approx(reports[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize(("gradient", "compared"), [("forward", True), ("recompute", False)])
def test_what_the_gradient_of_the_logits_loses(
    kernels: None, monkeypatch: pytest.MonkeyPatch, gradient: str, compared: bool
) -> None:
    """It is reported of each call, with each option, and bounds what both gradients lose."""
    monkeypatch.setattr(memory.Remembered, "compares", compared)
    monkeypatch.setattr(memory, "FIRST", 1.0)
    N, D, V = 190, 264, 1100
    x, w, y = problem(N, D, V)
    b, q, t = torch.randn(V) * 0.3, torch.rand(V) + 0.5, torch.rand(N) + 0.5
    b[5], y[2:9:3], t[4::9] = -100, 5, 0  # a target so unlikely that the others' exponentials overflow beside it
    b[6], y[3:9:3] = -60, 6  # the squares alone would
    logits = (x.double() @ w.double().T).requires_grad_()
    z = (logits + b) * 0.9
    each = torch.nn.functional.cross_entropy(z, y, q.double(), reduction="none", label_smoothing=0.1)
    valid = y >= 0
    (right,) = torch.autograd.grad(((each + 1e-3 * z.logsumexp(1).square()) * t)[valid].sum(), logits)
    even = (t * valid)[:, None] * q * (0.9 * 0.1 / V)  # what smoothing subtracts, which is not in E

    parameter, options = w.clone().requires_grad_(), HeadOptions(skip=0.05, gradient=gradient)
    for _ in range(2):
        known = memory.known_of(parameter)
        order = None if known is None else known.order  # which the call may renew
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=b, weight=q, label_smoothing=0.1, z_loss=1e-3, logit_scale=0.9,
            token_weight=t, reduction="sum", options=options,
        )  # fmt: skip
        dx, dw = (grad.double() for grad in torch.autograd.grad(loss, (hidden, parameter)))
    x, w = x.double(), w.double()
    found = (dw @ torch.linalg.pinv(x)).T  # of dW = G^T X, with fewer tokens than hidden sizes
    lost = found - right
    report = reported(parameter)
    assert order is not None
    assert 0.01 < report.logit_error < 1
    assert report.logit_error == pytest.approx((lost.norm() / (right + even).norm()).item(), rel=1e-3)

    errors = (relative(dx, right @ w), relative(dw, right.T @ x))
    if compared:
        assert (report.input_error, report.weight_error) == pytest.approx(errors, rel=0.5)  # signs estimate them
    classes = order[1:].long()
    tiles = [lost[:, tile].sum(1) for tile in classes.split(COLUMNS)]
    assert torch.stack(tiles).abs().max() < 1e-4 * lost.abs().max()
    means = torch.cat([w[tile].mean(0).expand(len(tile), D) for tile in classes.split(COLUMNS)])
    assert relative(dx, found @ w) < 1e-4
    assert (dx - right @ w).norm() <= lost.norm() * torch.linalg.matrix_norm(w[classes] - means, 2) * 1.001
    assert (dw - right.T @ x).norm() <= lost.norm() * torch.linalg.matrix_norm(x, 2) * 1.001


@pytest.mark.parametrize("lies", ["columns", "wide", "transposed"])
def test_a_weight_in_any_order(kernels: None, lies: str) -> None:
    """Strides within rows and between them; a view made in each call is the same weight."""
    N, D, V = 90, 16, 600
    x, w, y = problem(N, D, V)
    store = torch.randn(V + 8, 2 * D)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "columns": lambda of: of[:V, D:],
        "wide": lambda of: of[8:, :D],
        "transposed": lambda of: of.view(-1)[: V * D].view(D, V).T,
    }
    views[lies](store).copy_(w)
    store.requires_grad_()
    right = exact(x, w, y)
    for _ in range(3):
        grads = step(x, views[lies](store), y)[1:]
    assert max(relative(found, one) for found, one in zip(grads, right[1:], strict=True)) < 0.02
    report = lowtide.skip_report(views[lies](store))
    assert report is not None
    assert (report.calls, report.dense) == (3, 0)


class Head(torch.nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return lowtide.linear_cross_entropy(x, self.weight, y, options=HeadOptions(skip=0.02))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")
def test_sharded_parameters(kernels: None) -> None:
    """FSDP2 gathers the same tensor in each step, whose report is there while it is gathered."""
    x, w, y = problem(60, 16, 500)
    model = Head(len(w[0]), len(w), bias=False)
    model.weight.data.copy_(w)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        right = exact(x, w, y)
        for _ in range(3):
            model.zero_grad()
            model(x, y).backward()
        assert isinstance(model.weight.grad, DTensor)
        assert relative(model.weight.grad.full_tensor(), right[2]) < 0.02
        assert lowtide.skip_report(model.weight) is None
        model.unshard()
        report = lowtide.skip_report(model.weight)
        assert report is not None
        assert (report.calls, report.dense) == (3, 0)
    finally:
        dist.destroy_process_group()


def test_a_weight_that_changes_its_size(kernels: None) -> None:
    """A parameter may get other memory, of more classes: its order begins anew."""
    x, w, y = problem(60, 16, 500)
    parameter = torch.nn.Parameter(w.clone())
    step(x, parameter, y)
    step(x, parameter, y)
    w = torch.cat((w, torch.randn(300, 16) / 4))
    parameter.data, y[1] = w.clone(), 790
    right = exact(x, w, y)
    for _ in range(2):
        found = step(x, parameter, y)
        assert max(relative(one, other) for one, other in zip(found[1:], right[1:], strict=True)) < 0.02


def test_what_is_asked_may_change(kernels: None) -> None:
    """The threshold falls with the error, and does not rise with it at once."""
    x, w, y = problem(60, 16, 500)
    parameter, before = w.requires_grad_(), math.inf
    for skip in (0.02, 0.2, 0.2, 0.01, 0.02):
        step(x, parameter, y, skip)
        threshold = reported(parameter).threshold
        assert threshold <= 2.01 * min(before, skip)
        before = threshold


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_batches_that_say_nothing(kernels: None) -> None:
    """Without tokens, and where numbers overflow, the threshold and the errors stay."""
    x, w, y = problem(60, 16, 500)
    parameter = w.clone().requires_grad_()
    step(x, parameter, y)
    step(x, parameter, y)
    before = reported(parameter)
    of_nan, some = x.clone().index_fill(0, torch.tensor(1), torch.nan), torch.full_like(y, -100)
    for hidden, targets in ((x * torch.nan, some), (x[:0], y[:0]), (of_nan, y)):
        found = step(hidden, parameter, targets, reduction="sum")
        assert not any(one.any() for one in found) or hidden is of_nan
        report = reported(parameter)
        assert report[3:6] == before[3:6]
        assert math.isnan(report.logit_error)


@pytest.mark.parametrize("steps", [0, 3, 10])
@pytest.mark.parametrize("rounding", [0.0, 0.3, 0.6])
@pytest.mark.parametrize(("grows", "power"), [(3.0, 1.0), (12.0, 1.0), (10.0, 1.2), (20.0, 1.3)])
def test_errors_come_near_what_is_accepted(grows: float, power: float, rounding: float, steps: float) -> None:
    """Within 16 comparisons, and never go beyond: also where few tiles can go, and beside bfloat16's own."""
    accepted = 5e-3
    threshold, errors = torch.tensor([memory.FIRST * accepted]), torch.zeros(2)
    may_grow = torch.tensor([memory.GROWS_AT_FIRST])
    for _ in range(16):
        lost = threshold[0]
        if steps:  # what can be left out is of so many sizes to each power of ten
            lost = 10 ** ((lost.log10() * steps).floor() / steps)
        errors = (lost**power * grows * torch.tensor([0.7, 1])).hypot(torch.tensor(rounding * accepted))
        assert errors.hypot(torch.tensor(memory.SHARED)).max() < accepted
        threshold, may_grow = memory.adapted(threshold, may_grow, errors, lost, accepted)
    assert steps or errors.hypot(torch.tensor(memory.SHARED)).max() > 0.8 * accepted


def test_errors_that_say_little() -> None:
    """Where nothing is lost the threshold stays small; it is above 0 where errors are too large."""
    accepted, grows = 5e-3, torch.tensor([memory.GROWS_AT_FIRST])
    found = first = torch.tensor([memory.FIRST * accepted])
    for _ in range(40):
        found, grows = memory.adapted(found, grows, torch.zeros(2), torch.zeros(()), accepted)
    assert found < 2 * memory.SMALL * first
    for _ in range(400):
        found, grows = memory.adapted(found, grows, torch.tensor([5e-3, 0]), found[0], accepted)
    assert found.item() == pytest.approx(memory.LEAST * accepted)


def test_calls_are_dense_where_skipping_does_not_pay() -> None:
    """But for one in many, and from the first ones on, in which the threshold is found; they follow when it pays."""
    known, skipped = memory.Remembered(5e-3, 0, 4, torch.device("cpu")), []
    for call in range(200):
        skipped.append(known.begin())
        if skipped[-1]:
            known.total = torch.tensor([90 if call < 100 else 30, 100], dtype=torch.int32)
            known.end(torch.zeros(3), None)
    assert all(skipped[:17])
    assert sum(skipped[25:100]) <= 3
    assert all(skipped[140:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_ignored_tokens_and_overflow(kernels: None) -> None:
    """Hidden states of ignored tokens do not matter, exponentials overflow, and tokens' weights have signs."""
    x, w, y = problem(150, 16, 700)
    x[3:9] *= 300
    t = torch.randn(150)
    right_x = x.double().requires_grad_()
    right_w = w.double().requires_grad_()
    each = torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none") * t
    right = torch.autograd.grad(each.sum() / (y >= 0).sum(), (right_x, right_w))
    x[y < 0] = torch.tensor([torch.nan, torch.inf]).repeat(8)
    parameter = w.clone().requires_grad_()
    for _ in range(3):
        found = step(x, parameter, y, 0.05, token_weight=t)
    assert max(relative(one, other) for one, other in zip(found[1:], right, strict=True)) < 0.05
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert 0 <= report.dropped_mass < 1


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("compute capability", lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, options=o)),
        ("compute capability", lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, softcap=30.0, options=o)),
        ("compute capability", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y[:, None], options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, support=y, options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_token_stats(x, w, y, options=o)),
        ("only the loss", lambda x, w, y, o: lowtide.linear_divergence(x, w, x, w, options=o)),
        ("only the loss", lambda x, w, y, o: lowtide.linear_apply(lambda z: z.sum(1), x, w, options=o)),
    ],
)  # fmt: skip
def test_elsewhere(why: str, call: Callable[..., Any]) -> None:
    """What cannot skip says so, by the option's name."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
        call(x, w, torch.tensor([1, 2, 3]), HeadOptions(skip=0.01))


@pytest.mark.parametrize(
    ("why", "weight", "more"),
    [
        ("gets no gradient", lambda w: w.detach(), {}),
        ("gets no gradient", lambda w: w.detach(), {"reduction": "none"}),
        ("a result of the call", lambda w: w * 1.0, {}),
    ],
)
def test_calls_that_cannot(kernels: None, why: str, weight: Callable[[Tensor], Tensor], more: dict[str, Any]) -> None:
    """Nor does a call on the right device fall back in silence; without gradients there is nothing to skip."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    options, y = HeadOptions(skip=0.01), torch.tensor([1, 2, 3])
    with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
        lowtide.linear_cross_entropy(x, weight(w), y, options=options, **more)
    with torch.no_grad():
        lowtide.linear_cross_entropy(x, weight(w), y, options=options, **more)
    assert lowtide.skip_report(w) is None


def test_wrong_options() -> None:
    """The range is in the message."""
    for wrong in (0, 1, -0.1, math.nan):
        with pytest.raises(ArgumentValueError, match="skip: expected a number above 0 and below 1"):
            HeadOptions(skip=wrong)
    with pytest.raises(ArgumentTypeError, match="skip: expected a relative error or None"):
        HeadOptions(skip="5e-3")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
def test_compiled_and_deterministic(kernels: None) -> None:
    """A compiler's graph ends before the call, and nothing refuses to be deterministic."""
    x, w, y = problem(60, 16, 500)
    weight, right = torch.nn.Parameter(w.clone()), exact(x, w, y)

    @torch.compile(backend="eager")
    def loss(hidden: Tensor) -> Any:
        return lowtide.linear_cross_entropy(hidden * 1.0, weight, y, options=HeadOptions(skip=0.02)) * 2

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            (grad,) = torch.autograd.grad(loss(x), weight)
    finally:
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
    assert relative(grad / 2, right[2]) < 0.02
    assert lowtide.skip_report(weight) is not None


def test_a_weight_is_forgotten(kernels: None) -> None:
    """What is remembered of it goes with it, and a copy has nothing of it."""
    x, w, y = problem(20, 16, 300)
    weight = torch.nn.Parameter(w)
    step(x, weight, y)
    step(x, weight, y)
    known = memory.known_of(weight)
    assert known is not None
    known = weakref.ref(known)
    assert lowtide.skip_report(copy.deepcopy(weight)) is None
    del weight
    assert known() is None


def test_a_call_without_skip_imports_nothing_of_it() -> None:
    """Its room is loaded by the first call that requests it."""
    code = """
import sys, torch, lowtide
x, w = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
lowtide.linear_cross_entropy(x, w, torch.arange(4)).backward()
assert not [name for name in sys.modules if name.startswith("lowtide.skip")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

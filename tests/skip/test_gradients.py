"""Gradients that skip tiles of the softmax, by their kernels in Triton's interpreter: beside float64."""

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import HeadOptions
from lowtide.errors import UnsupportedError

pytest.importorskip("triton")
from lowtide.skip import memory
from promises import promise
from support import every_pair, oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


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


CASES: dict[str, dict[str, Any]] = {
    "plain": {"N": 170, "V": 800},  # two chunks, the first of two rows of tiles
    "recomputed": {"gradient": "recompute", "V": 2900},
    "options": {"N": 170, "V": 800, "z_loss": 1e-3, "logit_scale": 0.9, "weights": True},
    "capped": {"softcap": 3.0, "logit_scale": 1.3, "reduction": "none"},
}


@promise("values", "options")
@pytest.mark.parametrize("name", [*list(CASES)[:3], pytest.param("capped", marks=pytest.mark.slow)])
def test_errors(kernels: None, name: str) -> None:
    """The loss is exact, and both gradients are as near as asked, with tiles left out; what is lost is reported."""
    choice = {"N": 32, "V": 1100} | CASES[name]
    N, D, V = choice.pop("N"), 16, choice.pop("V")
    x, w, y = problem(N, D, V)
    options = HeadOptions(skip=0.02, gradient=choice.pop("gradient", "auto"))
    if choice.pop("weights", False):
        choice |= {"weight": torch.rand(V) + 0.5, "token_weight": torch.rand(N) + 0.5}
    parameter, bias = w.requires_grad_(), (torch.randn(V) * 0.3).requires_grad_()
    true = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    right = oracle(true[0], true[1], y, linear_bias=true[2], **choice)
    upstream = torch.randn(right.shape)
    wanted = torch.autograd.grad(right, true, upstream.double())
    x[y < 0] = torch.nan
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, linear_bias=bias, options=options, **choice)
        grads = torch.autograd.grad(loss, (hidden, parameter, bias), upstream)
        torch.testing.assert_close(loss.detach().double(), right.detach(), rtol=1e-5, atol=1e-5)
        errors = [relative(found, one) for found, one in zip(grads, wanted, strict=True)]
        assert max(errors) < 0.02
        assert errors[2] < 1e-5
    report = reported(parameter)
    assert report.share < 0.95
    assert 0 < report.logit_error < 0.1
    assert (report.input_error, report.weight_error) == pytest.approx(errors[:2], rel=0.5)  # signs estimate them
    assert 0 <= report.dropped_mass < 1


@promise("checkpoint")
def test_inside_a_checkpoint(kernels: None) -> None:
    x, w, y = problem(32, 16, 800)
    g, parameter, options = torch.randn(32), w.requires_grad_(), HeadOptions(skip=0.02)
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))

    def logprobs(hidden: Tensor, target: Tensor) -> Tensor:
        return lowtide.linear_logprobs(hidden, parameter, target, options=options)

    for _ in range(2):
        hidden, parameter.grad = x.clone().requires_grad_(), None
        parts = zip(hidden.split(16), y.split(16), strict=True)
        found = torch.cat([checkpoint(logprobs, *part, use_reentrant=False) for part in parts])
        (found * g).sum().backward()
        assert relative(hidden.grad, right[0]) < 0.02
        assert relative(parameter.grad, right[1]) < 0.02


ELSEWHERE: list[tuple[str, Callable[..., Any]]] = [
    ("compute capability", lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, options=o)),
    ("compute capability", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, options=o)),
    ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y[:, None], options=o)),
    ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, support=y, options=o)),
    ("one target a token", lambda x, w, y, o: lowtide.linear_token_stats(x, w, y, options=o)),
    ("only the loss", lambda x, w, y, o: lowtide.linear_divergence(x, w, x, w, options=o)),
    ("only the loss", lambda x, w, y, o: lowtide.linear_apply(lambda z: z.sum(1), x, w, options=o)),
]
CANNOT: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("gets no gradient", lambda w: w.detach()),
    ("a result of the call", lambda w: w * 1.0),
]


@promise("errors")
def test_what_cannot_skip_says_so(request: pytest.FixtureRequest) -> None:
    """By the option's name; nor does a call on the right device fall back. Without gradients nothing is skipped."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    options, y = HeadOptions(skip=0.01), torch.tensor([1, 2, 3])
    for why, call in ELSEWHERE:
        with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
            call(x, w, y, options)
    request.getfixturevalue("kernels")
    for why, weight in CANNOT:
        with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
            lowtide.linear_cross_entropy(x, weight(w), y, options=options)
        with torch.no_grad():
            lowtide.linear_cross_entropy(x, weight(w), y, options=options)
    with pytest.raises(UnsupportedError, match="label smoothing bears on all"):
        lowtide.linear_cross_entropy(x, w, y, label_smoothing=0.1, options=options)
    assert lowtide.skip_report(w) is None


def test_a_value_for_each_token(kernels: None) -> None:
    """What flows back is known in backward only, of both signs, and 0 at some tokens; a graph may be walked twice."""
    x, w, y = problem(32, 16, 1600)
    g = torch.randn(32)
    g[5::7], g[y < 0] = 0, torch.nan
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g.nan_to_num()).sum(), (right_x, right_w))
    parameter, options = w.requires_grad_(), HeadOptions(skip=0.05)
    for call in range(2):
        hidden = x.clone().requires_grad_()
        found = -lowtide.linear_logprobs(hidden, parameter, y, options=options)
        torch.testing.assert_close(found.detach().double(), each.detach(), rtol=1e-5, atol=1e-5)
        for keep in (True, False) if call == 1 else (False,):
            grads = torch.autograd.grad(found, (hidden, parameter), g, retain_graph=keep)
            assert max(relative(one, other) for one, other in zip(grads, right, strict=True)) < 0.05
    report = reported(parameter)
    assert report.share < 1
    assert (report.calls, report.dense) == (2, 0)
    assert 0 <= report.dropped_mass < 1


def test_several_calls_before_their_backward(kernels: None) -> None:
    """Each has its own tiles in its own order, also where that was renewed since; empty ones have gradients of 0."""
    x, w, y = problem(48, 16, 800)
    g, parameter, parts = torch.randn(48), w.requires_grad_(), (slice(0, 20), slice(20, 20), slice(20, 48))
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))
    for turn in range(2):
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
    grads = torch.autograd.grad(nothing, (hidden, parameter), torch.zeros(48))
    assert not any(grad.any() for grad in grads)


def test_what_is_asked_may_change(kernels: None) -> None:
    """The threshold falls with the error, and does not rise with it at once."""
    x, w, y = problem(32, 16, 800)
    parameter, before, last = w.requires_grad_(), math.inf, 1.0
    for skip in (0.02, 0.2, 0.2, 0.01, 0.02):
        step(x, parameter, y, skip)
        threshold = reported(parameter).threshold
        assert threshold <= 2.01 * before * min(1, skip / last)
        before, last = threshold, skip


def test_batches_that_say_nothing(kernels: None) -> None:
    """Without tokens, and where numbers overflow, the threshold and the errors stay."""
    x, w, y = problem(32, 16, 800)
    parameter = w.clone().requires_grad_()
    step(x, parameter, y)
    step(x, parameter, y)
    before = reported(parameter)
    of_nan, some = x.clone().index_fill(0, torch.tensor(1), torch.nan), torch.full_like(y, -100)
    for hidden, targets in ((x * torch.nan, some), (x[:0], y[:0]), (of_nan, y)):
        found = step(hidden, parameter, targets, reduction="sum")
        assert not any(one.any() for one in found) or hidden is of_nan
        report = reported(parameter)
        assert report.threshold == before.threshold
        assert all(map(math.isnan, report[2:5]))
    step(x, parameter, y)
    assert all(error < 0.02 for error in reported(parameter)[3:5])


@every_pair(steps=[0, 3, 10], rounding=[0.0, 0.3, 0.6], growth=[(3.0, 1.0), (12.0, 1.0), (20.0, 1.3)])
def test_errors_come_near_what_is_accepted(growth: tuple[float, float], rounding: float, steps: float) -> None:
    """Within 16 comparisons, and never go beyond: also where few tiles can go, and beside bfloat16's own."""
    accepted, (grows, power) = 5e-3, growth
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


def test_signs_that_say_little() -> None:
    """A comparison that errs by 15% makes few calls err by more than is accepted, and those by little."""
    accepted, found = 5e-3, []
    known = memory.Remembered(accepted, 4, torch.device("cpu"))
    for _ in range(200):
        true = 12 * known.threshold * torch.tensor([0.7, 1])
        found.append(true.hypot(torch.tensor(memory.SHARED)).max() / accepted)
        lost = known.threshold[0].square()
        known.end(torch.stack((lost, lost, lost / lost)), true * (1 + 0.15 * torch.randn(2).clamp(-3, 3)))
    late = torch.stack(found[17:])
    assert 0.8 < late.mean() < 1
    assert late.max() < 1.15
    assert (late > 1).double().mean() < 0.1


def test_each_comparison_has_other_signs(kernels: None) -> None:
    """Or an error that they miss would be missed for good: calls that are alike are estimated anew."""
    (x, w, y), found = problem(32, 16, 1600), list[memory.Report]()
    parameter = w.requires_grad_()
    for _ in range(7):
        step(x, parameter, y, skip=0.5)
        found.append(reported(parameter))
    assert found[-1][:3] == found[-2][:3]
    assert found[-1].weight_error != pytest.approx(found[-2].weight_error, rel=1e-4)


def test_calls_are_dense_where_skipping_does_not_pay() -> None:
    """But for one in many, and from the first ones on, in which the threshold is found; they follow when it pays."""
    known, skipped = memory.Remembered(5e-3, 4, torch.device("cpu")), []
    for call in range(200):
        skipped.append(known.begin())
        if skipped[-1]:
            known.total = torch.tensor([90 if call < 100 else 30, 100], dtype=torch.int32)
            known.end(torch.zeros(3), None)
    assert all(skipped[:17])
    assert sum(skipped[25:100]) <= 3
    assert all(skipped[140:])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
def test_compiled_and_deterministic(kernels: None) -> None:
    """A compiler's graph ends before the call, and nothing refuses to be deterministic."""
    x, w, y = problem(32, 16, 800)
    weight, right = torch.nn.Parameter(w.clone()), exact(x, w, y)

    @torch.compile(backend="eager")
    def loss(hidden: Tensor) -> Any:
        return lowtide.linear_cross_entropy(hidden * 1.0, weight, y, options=HeadOptions(skip=0.02)) * 2

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            (grad,) = torch.autograd.grad(loss(x), weight)
    finally:
        torch.use_deterministic_algorithms(False)
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

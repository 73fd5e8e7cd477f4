"""Gradients that skip tiles of the softmax, on Hopper: errors as asked, the loss exact, no waits, no more memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions
from lowtide.head.backends import skips_ignored
from lowtide.skip import memory
from support import relative_error

ON_HOPPER = pytest.mark.skipif(
    not (torch.cuda.is_available() and skips_ignored(torch.device("cuda"))), reason="needs a Hopper GPU"
)
pytestmark = [*ON_GPU, ON_HOPPER]
SIZES = [(1000, 264, 5003), (4096, 1024, 32000), (3001, 896, 20000), (130, 2048, 9000)]  # N, D, V
ACCEPTED = 1e-2
CALLS = 14
FEW_TILES = 500


def problem(N: int, D: int, V: int, *, ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight and targets with a softmax as concentrated as a trained model's.

    One direction of the hidden states has the logarithms of the classes' frequencies, Zipf's; in the others a hidden
    state is near its target's row.
    """
    w = torch.randn(V, D, device="cuda") / D**0.5
    frequency = 1 / (torch.randperm(V, device="cuda") + 3.0)
    w[:, 0] = frequency.log() / 4 + 2
    y = frequency.multinomial(N, replacement=True)
    x = torch.randn(N, D, device="cuda") * 1.5 + w[y] * D**0.5 / 4
    x[:, 0] = 4
    if ignored:
        y[::9] = -100
    return x.bfloat16(), w.bfloat16(), y


def exact(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None = None, scale: float = 1.0, **more: Any) -> list[Tensor]:
    """Return loss and gradients in float64, from the narrow numbers."""
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    leaves += [] if b is None else [b.detach().double().requires_grad_()]
    logits = leaves[0] @ leaves[1].T
    logits = (logits if b is None else logits + leaves[2]) * scale
    loss = torch.nn.functional.cross_entropy(logits, y, **more)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check_errors(found: list[float], x: Tensor, w: Tensor) -> None:
    """Check calls' errors: of few tiles what each of them loses counts for much, and may change from call to call."""
    few = -(-len(x) // 128) * -(-len(w) // 256) < FEW_TILES
    assert max(found) < ACCEPTED * (1.2 if few else 1), found
    assert sum(error**2 for error in found) / len(found) < ACCEPTED**2, found


def check_dense(report: Any) -> None:
    """Check that calls skip, but where tiles are so few that each one is too large to be left out."""
    assert report.dense < 4 or report.logit_error == 0


def check(x: Tensor, w: Tensor, y: Tensor, right: list[Tensor], b: Tensor | None = None, **more: Any) -> Any:
    """Check some calls, and that the last ones skip tiles; return the report."""
    leaves = [t for t in (x, w, b) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    options, found = more.pop("options", HeadOptions(skip=ACCEPTED)), []
    for _ in range(CALLS):
        loss = lowtide.linear_cross_entropy(x, w, y, linear_bias=b, options=options, **more)
        grads = torch.autograd.grad(loss, leaves)
        assert loss.item() == pytest.approx(right[0].item(), rel=1e-4)
        found.append(max(relative_error(one, other) for one, other in zip(grads, right[1:], strict=True)))
    check_errors(found, x, w)
    report = lowtide.skip_report(w)
    assert report is not None
    return report


@pytest.mark.parametrize("size", SIZES)
def test_errors(size: tuple[int, int, int]) -> None:
    """Both gradients are as near as asked, and tiles are left out."""
    x, w, y = problem(*size)
    report = check(x, w, y, exact(x, w, y), options=HeadOptions(skip=ACCEPTED, workspace_mib=600))
    assert report.share < 0.9
    check_dense(report)


@pytest.mark.parametrize("workspace", [70, 100, 300])
def test_chunks(workspace: int) -> None:
    """Several chunks, the last one short."""
    x, w, y = problem(5000, 512, 9000)
    report = check(x, w, y, exact(x, w, y), options=HeadOptions(skip=ACCEPTED, workspace_mib=workspace))
    assert report.share < 0.9


def test_bias_and_scale() -> None:
    """The GEMM with a transform, a bias with its own exact gradient, smoothing and class weights."""
    x, w, y = problem(2000, 512, 8000)
    b, q = torch.randn(8000, device="cuda") * 0.2, torch.rand(8000, device="cuda") + 0.5
    b = b.bfloat16()
    right = exact(x, w, y, b.float(), 0.9, weight=q.double(), label_smoothing=0.1)
    check(
        x,
        w,
        y,
        right,
        b,
        weight=q,
        label_smoothing=0.1,
        logit_scale=0.9,
        options=HeadOptions(skip=ACCEPTED, workspace_mib=300),
    )


@pytest.mark.parametrize("size", SIZES[1:3])
def test_softcap(size: tuple[int, int, int]) -> None:
    """A tile is chosen by its entries times the cap's slope, and the loss is of its exponentials."""
    x, w, y = problem(*size)
    cap = 15.0
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    loss = torch.nn.functional.cross_entropy(cap * torch.tanh(leaves[0] @ leaves[1].T / cap), y)
    right = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    options = HeadOptions(skip=ACCEPTED, workspace_mib=600)
    report = check(x, w, y, right, options=options, softcap=cap)
    assert report.share < 0.95
    assert report.logit_error > 0 or len(x) * len(w) < FEW_TILES * 128 * 256


@pytest.mark.parametrize(
    ("size", "biased", "scale"), [(size, i % 2 == 0, (0.7, 1.0)[i % 2]) for i, size in enumerate(SIZES)]
)
def test_a_value_for_each_token(size: tuple[int, int, int], biased: bool, scale: float) -> None:
    """Log-probabilities, whose upstream gradients backward alone knows: of both signs, and 0 at some tokens."""
    x, w, y = problem(*size)
    x, b = x * 0.9 / scale, torch.randn(len(w), device="cuda").bfloat16() * 0.2 if biased else None
    g = torch.randn(len(x), device="cuda")
    g[7::11] = 0
    x[7] = torch.nan
    leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    right_leaves = [t.detach().double().requires_grad_() for t in leaves]
    logits = torch.nn.functional.linear(right_leaves[0].nan_to_num(), *right_leaves[1:]) * scale
    each = -torch.nn.functional.cross_entropy(logits, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), right_leaves)

    def call(options: HeadOptions | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        more = {"linear_bias": (*leaves, None)[2], "logit_scale": scale, "options": options}
        found = lowtide.linear_logprobs(leaves[0], leaves[1], y, **more)  # type: ignore[arg-type]
        return found.detach(), torch.autograd.grad(found.nan_to_num(), leaves, g)

    dense = [relative_error(one, other) for one, other in zip(call(None)[1], right, strict=True)]
    found_errors = []
    for _ in range(CALLS + 6):  # of the first 16 that skip each compares, from all of E
        found, grads = call(HeadOptions(skip=ACCEPTED, workspace_mib=600))
        counts = (torch.arange(len(x), device="cuda") != 7) & (y >= 0)
        torch.testing.assert_close(found[counts].double(), each.detach()[counts], rtol=2e-4, atol=2e-3)
        assert not found[y < 0].any()
        errors = [relative_error(one, other) for one, other in zip(grads, right, strict=True)]
        found_errors.append(max(errors[:2]))
        assert errors[2:] <= [1.3 * error for error in dense[2:]], "the bias's gradient skips nothing"
    check_errors(found_errors, x, w)
    report = lowtide.skip_report(leaves[1])
    assert report is not None
    assert report.share < 0.95
    check_dense(report)


def test_a_value_for_each_token_without_waits_or_memory() -> None:
    """The host never waits; the peak is that of a dense mean, and four bytes that forward saves for a row's tile."""
    x, w, y = problem(8192, 1024, 65536, ignored=False)
    x.requires_grad_()
    w.requires_grad_()
    g = torch.rand(8192, device="cuda") + 0.5

    def step(options: HeadOptions | None) -> None:
        lowtide.linear_logprobs(x, w, y, options=options).backward(g)

    def mean() -> None:
        lowtide.linear_cross_entropy(x, w, y).backward()

    step(None)
    mean()
    dense = peak_beyond_gradients(mean, x, w)
    for _ in range(20):
        step(HeadOptions(skip=ACCEPTED))
    with no_waits():
        for _ in range(2):
            step(HeadOptions(skip=ACCEPTED))
    saved = 4 * 8192 * 256
    assert peak_beyond_gradients(lambda: step(HeadOptions(skip=ACCEPTED)), x, w) <= dense * 1.02 + saved


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_what_the_gradient_of_the_logits_loses(reduction: str) -> None:
    """It is what dense gradients of the logits differ by, beside what bfloat16 loses in a dense call; and a bound."""
    N, D, V = 500, 1024, 20003
    x, w, y = problem(N, D, V)
    g = torch.ones(N, device="cuda") if reduction == "sum" else torch.randn(N, device="cuda")
    logits = (x.double() @ w.double().T).requires_grad_()
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    (right,) = torch.autograd.grad((each * g).sum(), logits)
    hidden, parameter = (t.float().requires_grad_() for t in (x, w))  # float32, so that dW is not rounded at the end
    x, w = x.double(), w.double()
    inverse = torch.linalg.pinv(x)

    def lost(options: HeadOptions | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the gradients of the logits, of x and of w are off by: G^T = dW X^-1, with N < D."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = lowtide.linear_cross_entropy(hidden, parameter, y, reduction=reduction, options=options)
        total = (loss * g).sum() if reduction == "none" else loss
        dx, dw = (t.double() for t in torch.autograd.grad(total, (hidden, parameter)))
        return (dw @ inverse).T - right, dx - right @ w, dw - right.T @ x

    own = [t.norm() for t in lost(None)]
    for _ in range(CALLS):
        known = memory.known_of(parameter)
        order = None if known is None else known.order  # which the call may renew
        of_logits, of_input, of_weight = lost(HeadOptions(skip=0.3, workspace_mib=600))
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert order is not None
    assert report.logit_error > 5 * own[0] / right.norm(), "too little is left out beside the roundings"
    of_tiles = (of_logits.norm().square() - own[0].square()).sqrt()
    assert report.logit_error == pytest.approx((of_tiles / right.norm()).item(), rel=0.03)

    varied = torch.cat([tile - tile.mean(0) for tile in w[order[1:].long()].split(256)])
    for error, rounded, beside in ((of_input, own[1], varied), (of_weight, own[2], x)):
        norm = torch.linalg.matrix_norm(beside.T @ beside, 2).sqrt()
        assert error.norm() <= report.logit_error * right.norm() * norm * 1.02 + 2 * rounded


def test_float32_parameters_under_autocast() -> None:
    """The ordered copy is narrow, the gradients are float32."""
    x, w, y = problem(3000, 512, 9000)
    x, w = x.float(), w.float()
    with torch.autocast("cuda", torch.bfloat16):
        report = check(x, w, y, exact(x, w, y), options=HeadOptions(skip=ACCEPTED, workspace_mib=300))
    assert report.share < 0.9


def test_the_same_bits() -> None:
    """The same calls have the same results."""
    x, w, y = problem(3000, 512, 9000)
    x.requires_grad_()
    runs = []
    for _ in range(2):
        parameter, found = w.clone().requires_grad_(), []
        for _ in range(6):
            options = HeadOptions(skip=ACCEPTED, workspace_mib=300)
            loss = lowtide.linear_cross_entropy(x, parameter, y, options=options)
            found += torch.autograd.grad(loss, (x, parameter))
        runs.append(found)
        del parameter
    assert all(map(torch.equal, *runs))


def test_no_waits_and_no_more_memory() -> None:
    """The host never waits for the device, and the peak is that of a dense call."""
    x, w, y = problem(8192, 1024, 65536, ignored=False)
    x.requires_grad_()
    w.requires_grad_()

    def step(options: HeadOptions | None) -> None:
        lowtide.linear_cross_entropy(x, w, y, options=options).backward()

    step(None)
    dense = peak_beyond_gradients(lambda: step(None), x, w)
    for _ in range(18):
        step(HeadOptions(skip=ACCEPTED))
    with no_waits():
        for _ in range(2):
            step(HeadOptions(skip=ACCEPTED))
    assert peak_beyond_gradients(lambda: step(HeadOptions(skip=ACCEPTED)), x, w) <= dense * 1.02
    gc.collect()


def test_dense_where_it_does_not_pay() -> None:
    """Flat distributions are computed whole after a few calls, but for one call in many."""
    torch.manual_seed(0)
    x, w = torch.randn(2048, 256, device="cuda").bfloat16(), torch.randn(20000, 256, device="cuda").bfloat16() / 16
    y = torch.randint(0, 20000, (2048,), device="cuda")
    x.requires_grad_()
    w.requires_grad_()
    for _ in range(40):
        lowtide.linear_cross_entropy(x, w, y, options=HeadOptions(skip=3e-3, workspace_mib=300)).backward()
    report = lowtide.skip_report(w)
    assert report is not None
    assert report.dense >= 15

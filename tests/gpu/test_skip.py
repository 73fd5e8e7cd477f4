"""Gradients that skip tiles of the softmax, on Hopper: errors as asked, the loss exact, no waits, no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from gpu.conftest import HOPPER, ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions
from promises import promise
from support import relative_error

pytestmark = [*ON_GPU, HOPPER, promise("values")]
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


def check_errors(found: list[float], x: Tensor, w: Tensor) -> Any:
    """Check calls' errors, and return the report.

    Of few tiles what each of them loses counts for much, and may change from call to call.
    """
    few = -(-len(x) // 128) * -(-len(w) // 256) < FEW_TILES
    assert max(found) < ACCEPTED * (1.2 if few else 1), found
    assert sum(error**2 for error in found) / len(found) < ACCEPTED**2, found
    report = lowtide.skip_report(w)
    assert report is not None
    return report


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
    return check_errors(found, x, w)


@pytest.mark.parametrize(
    ("size", "workspace"), [*((size, 600) for size in SIZES), *(((5000, 512, 9000), mib) for mib in (70, 300))]
)
def test_errors(size: tuple[int, int, int], workspace: int) -> None:
    """Both gradients are as near as asked, and tiles are left out; in several chunks too, the last one short."""
    x, w, y = problem(*size)
    report = check(x, w, y, exact(x, w, y), options=HeadOptions(skip=ACCEPTED, workspace_mib=workspace))
    assert report.share < 0.9
    check_dense(report)


def test_softcap() -> None:
    """A tile is chosen by its entries times the cap's slope, and the loss is of its exponentials."""
    x, w, y = problem(*SIZES[1])
    cap = 15.0
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    loss = torch.nn.functional.cross_entropy(cap * torch.tanh(leaves[0] @ leaves[1].T / cap), y)
    right = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    options = HeadOptions(skip=ACCEPTED, workspace_mib=600)
    report = check(x, w, y, right, options=options, softcap=cap)
    assert report.share < 0.95
    assert report.logit_error > 0


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
    report = check_errors(found_errors, x, leaves[1])
    assert report.share < 0.95
    check_dense(report)


@promise("host", "memory")
@pytest.mark.parametrize("each", [False, True])
def test_no_waits_and_no_more_memory(each: bool) -> None:
    """The peak is that of a dense mean; with a value for each token and four bytes that forward saves for a tile."""
    x, w, y = problem(8192, 1024, 65536, ignored=False)
    x.requires_grad_()
    w.requires_grad_()
    g = torch.rand(8192, device="cuda") + 0.5

    def mean(options: HeadOptions | None) -> None:
        lowtide.linear_cross_entropy(x, w, y, options=options).backward()

    def step() -> None:
        options = HeadOptions(skip=ACCEPTED)
        if each:
            lowtide.linear_logprobs(x, w, y, options=options).backward(g)
        else:
            mean(options)

    mean(None)
    dense = peak_beyond_gradients(lambda: mean(None), x, w)
    for _ in range(20):
        step()
    with no_waits():
        for _ in range(2):
            step()
    assert peak_beyond_gradients(step, x, w) <= dense * 1.02 + (4 * 8192 * 256 if each else 0)

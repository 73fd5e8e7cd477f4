"""What is linear_apply's own of autograd: several results, params, closures, autocast and random numbers in fn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply
from lowtide.errors import LowtideError
from support import assert_near, head, relative_error

SMALL = HeadOptions(workspace_mib=1e-6)
MODES: dict[str, dict[str, Any]] = {
    "token": {},
    "sum": {"out": "sum"},
    "sum, recomputed": {"out": "sum", "options": HeadOptions(gradient="recompute", workspace_mib=1e-6)},
}


@pytest.fixture(params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


def loss_fn(mode: dict[str, Any]) -> Callable[..., Tensor]:
    def fn(z: Tensor, y: Tensor, *rest: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y, reduction="none")
        for t in rest:
            loss = loss * t.sum(-1) if t.dim() > 1 else loss * t
        return loss.sum() if mode.get("out") == "sum" else loss

    return fn


@pytest.fixture
def calls() -> list[int]:
    return []


def test_results_that_do_not_depend_on_what_needs_a_gradient_need_none() -> None:
    x, w, _, _ = head(9, 5, 13)
    x.requires_grad_(False)
    w.requires_grad_(False)
    p = torch.rand((), requires_grad=True)
    a, b = linear_apply(lambda z, p: (z.sum(-1), z.sum(-1) * p), x, w, params=(p,))
    assert not a.requires_grad
    assert b.requires_grad


@pytest.mark.parametrize("used", [u for k in range(1, 4) for u in itertools.combinations(range(3), k)])
def test_several_sums_have_each_their_own_upstream_gradient(used: tuple[int, ...], calls: list[int]) -> None:
    x, w, b, y = head(40, 5, 13, dtype=torch.float64)

    def fn(z: Tensor, y: Tensor) -> Any:
        calls.append(len(z))
        p = z.softmax(-1)
        return F.cross_entropy(z, y, reduction="sum"), {"h": -(p * p.log()).sum(), "n": len(z)}, z.square().sum()

    nested = linear_apply(fn, x, w, y, linear_bias=b, out="sum", options=HeadOptions(workspace_mib=0.02))
    forward_calls = len(calls)
    got = [nested[0], nested[1]["h"], nested[2]]
    true = fn(F.linear(x, w, b), y)
    calls.pop()
    want = [true[0], true[1]["h"], true[2]]
    assert nested[1]["n"].item() == 40
    assert_near(got, want)
    factors = [1.0, -2.5, 0.3]
    g = torch.autograd.grad(sum(factors[i] * got[i] for i in used), (x, w, b))
    assert len(calls) > forward_calls, "one more run"
    e = torch.autograd.grad(sum(factors[i] * want[i] for i in used), (x, w, b))
    assert_near(g, e)


def test_one_sum_needs_no_second_run(calls: list[int]) -> None:
    x, w, b, y = head(40, 5, 13)

    def fn(z: Tensor, y: Tensor) -> Any:
        calls.append(len(z))
        return F.cross_entropy(z, y, reduction="sum"), (z.argmax(-1) == y).sum(), z.detach().square().sum()

    loss, right, _ = linear_apply(fn, x, w, y, linear_bias=b, out="sum")
    seen = list(calls)
    assert not right.requires_grad
    (loss / 40).backward()
    assert calls == seen


def test_autocast_is_the_same_on_recompute() -> None:
    """fn multiplies by a float32 matrix: in bfloat16 under autocast, then and in backward, not from a cache."""
    x, w, _, _ = head(30, 8, 17, bias=False)
    m = torch.randn(17, 6, requires_grad=True)
    seen = []

    def fn(z: Tensor, m: Tensor) -> Tensor:
        product = z @ m
        seen.append((product.dtype, torch.is_autocast_enabled("cpu")))
        return product.float().square().sum(-1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_apply(fn, x, w, params=(m,), options=HeadOptions(workspace_mib=0.01))
    before = len(seen)
    got = torch.autograd.grad(loss.sum(), (x, w, m))
    assert len(seen) > before
    assert set(seen) == {(torch.bfloat16, True)}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        z = F.linear(x.bfloat16().double(), w.bfloat16().double())
        want = torch.autograd.grad((z @ m.double()).square().sum(), (x, w, m))
    assert_near(got, want, 2e-2)


def test_a_cast_inside_autocast_is_that_of_every_piece() -> None:
    """Autocast keeps a parameter's low-precision copy: its graph must not be that of the first piece."""
    x, w, _, _ = head(64, 8, 17, bias=False)
    m = torch.randn(17, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_apply(lambda z, m: (z @ m).float().sum(), x, w, params=(m,), out="sum", options=SMALL)
    (got,) = torch.autograd.grad(loss, m)
    z = F.linear(x, w).double()
    assert relative_error(got, z.sum(0)[:, None].expand(17, 6)) < 2e-2


@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("workspace_mib", [None, 1e-6])
def test_random_numbers_are_the_same_on_recompute(out: str, workspace_mib: float | None) -> None:
    x, w, _, _ = head(20, 8, 17, dtype=torch.float64, bias=False)
    masks: list[Tensor] = []

    def fn(z: Tensor) -> Any:
        kept = torch.rand_like(z) < 0.5
        masks.append(kept)
        loss = (z * kept).logsumexp(-1)
        return (loss, loss * 2) if out == "token" else (loss.sum(), (2 * loss).sum())

    torch.manual_seed(5)
    one, two = linear_apply(fn, x, w, out=out, options=HeadOptions(workspace_mib=workspace_mib))
    after = torch.get_rng_state()
    drawn: list[Tensor] = []  # without those of the comparison that looks for coupled rows, which comes before
    while sum(map(len, drawn)) < 20:
        drawn.insert(0, masks.pop())
    assert sum(map(len, drawn)) == 20
    torch.manual_seed(5)
    expected = torch.cat([torch.rand(len(m), 17, dtype=torch.float64) < 0.5 for m in drawn])
    assert torch.equal(torch.cat(drawn), expected), "the random numbers are those that fn alone would have drawn"
    assert torch.equal(torch.get_rng_state(), after), "and the generator goes on as if it had run once"
    torch.rand(3)
    elsewhere = torch.get_rng_state()
    got = torch.autograd.grad((one + two).sum(), (x, w))
    assert torch.equal(torch.get_rng_state(), elsewhere), "backward leaves no trace"
    z = F.linear(x, w)
    want = torch.autograd.grad(3 * (z * expected).logsumexp(-1).sum(), (x, w))
    assert_near(got, want)


def test_params_that_are_no_leaves_and_pytrees_of_them() -> None:
    x, w, b, _ = head(9, 5, 13, dtype=torch.float64)
    base = torch.rand(13, dtype=torch.float64, requires_grad=True)
    other = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def fn(z: Tensor, p: Tensor, rest: dict[str, Any], power: int, nothing: None) -> Tensor:
        assert nothing is None
        return ((z * p) ** power).sum(-1) * rest["factors"][1] * rest["name"]

    params = (base.exp(), {"factors": [1, other.prod()], "name": 3}, 2, None)
    loss = linear_apply(fn, x, w, linear_bias=b, params=params, options=SMALL)
    got = torch.autograd.grad(loss.sum(), (x, w, b, base, other))
    true = ((F.linear(x, w, b) * base.exp()) ** 2).sum() * other.prod() * 3
    want = torch.autograd.grad(true, (x, w, b, base, other))
    assert_near(got, want)


def test_the_weight_itself_among_the_params() -> None:
    x, w, _, _ = head(9, 5, 13, dtype=torch.float64)
    loss = linear_apply(lambda z, w: z.sum(-1) * w.square().mean(), x, w, params=(w,)).sum()
    want = torch.autograd.grad(F.linear(x, w).sum() * w.square().mean(), (x, w))
    assert_near(torch.autograd.grad(loss, (x, w)), want)


@pytest.mark.parametrize("form", ["leaf", "no leaf", "a module's", "inside a graph", "detached"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_closed_over_tensor_that_needs_a_gradient(mode: dict[str, Any], form: str, frozen: bool) -> None:
    x, w, _, y = head(9, 5, 13)
    x.requires_grad_(not frozen)
    w.requires_grad_(not frozen)
    outside = torch.rand(7, 3, requires_grad=True)
    module = torch.nn.Linear(7, 3)
    closed = {
        "leaf": outside,
        "no leaf": outside.exp(),
        "a module's": module.weight,
        "inside a graph": torch.utils.checkpoint.checkpoint(torch.exp, outside, use_reentrant=False),
        "detached": outside.detach(),
    }[form]
    base = loss_fn(mode)
    fn = lambda z, y: base(z, y) * closed.sum()  # noqa: E731
    if form == "detached":
        linear_apply(fn, x, w, y, **mode)
        return
    with pytest.raises(ValueError, match=r"shape \[(7, 3|3, 7)\].*params") as caught:
        linear_apply(fn, x, w, y, **mode)
    assert isinstance(caught.value, LowtideError)
    with torch.no_grad():
        linear_apply(fn, x, w, y, **mode)


def test_a_closed_over_tensor_is_named_by_the_shape_of_its_leaf() -> None:
    """Also where one result alone knows it, and where it is the hidden states."""
    x, w, _, _ = head(9, 5, 13)
    outside, hidden = torch.rand(7, 3, requires_grad=True).sum(0), x.tanh()
    fns: dict[str, Callable[[Tensor], Any]] = {
        r"\[7, 3\]": lambda z: (z.sum(-1), outside.sum() * torch.ones(len(z))),
        r"\[9, 5\]": lambda z: z.sum(-1) * hidden.mean(),
    }
    for shape, fn in fns.items():
        with pytest.raises(ValueError, match=f"shape {shape}"):
            linear_apply(fn, hidden, w)


def test_what_fn_runs_with(mode: dict[str, Any]) -> None:
    """Gradients are on where there are any to take, and off under no_grad and in inference mode."""
    x, w, _, y = head(4, 5, 13)
    states: list[bool] = []

    def fn(z: Tensor, y: Tensor) -> Tensor:
        states.append(torch.is_grad_enabled())
        return loss_fn(mode)(z, y)

    linear_apply(fn, x, w, y, **mode)
    assert set(states) == {True}
    for context in (torch.no_grad, torch.inference_mode):
        states.clear()
        with context():
            linear_apply(fn, x, w, y, **mode)
        assert set(states) == {False}

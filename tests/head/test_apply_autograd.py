"""linear_apply as a citizen of autograd: subsets, retained graphs, hooks, checkpoints, autocast, random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide import HeadOptions, linear_apply
from lowtide.errors import LowtideError
from support import head, relative_error

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


def naive(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b), y, reduction="sum")


@pytest.fixture
def calls() -> list[int]:
    return []


def test_gradcheck(mode: dict[str, Any]) -> None:
    x, w, b, y = head((2, 5), 3, 7, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 1] = False
    a = torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    p = torch.rand(3, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def loss(*tensors: Tensor) -> Tensor:
        x, w, b, a, p, s = tensors
        fn = loss_fn(mode)
        return linear_apply(
            lambda z, y, a, p: fn(z, y, a) * p.prod(), x, w, y, a, linear_bias=b, params=(p,), mask=mask, softcap=2.0,
            logit_scale=s, **mode,
        )  # fmt: skip

    torch.autograd.gradcheck(loss, (x, w, b, a, p, scale))


@pytest.mark.parametrize("needed", [n for k in range(6) for n in itertools.combinations("xwbap", k)], ids="".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_subset_of_inputs_frozen(mode: dict[str, Any], needed: tuple[str, ...], dtype: torch.dtype) -> None:
    x, w, b, y = head(11, 6, 17, dtype=dtype)
    a, p = torch.rand(11, dtype=dtype), torch.rand(11, 3, dtype=dtype).sum(0)
    leaves = dict(zip("xwbap", (x, w, b, a, p), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    fn = loss_fn(mode)
    loss = linear_apply(
        lambda z, y, a, p: fn(z, y, a, p.to(z.dtype).prod()), x, w, y, a, linear_bias=b, params=(p,), **mode
    )
    assert loss.requires_grad == bool(needed)
    if not needed:
        return
    loss.sum().backward()
    full = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    each = F.cross_entropy(F.linear(full["x"], full["w"], full["b"]), y, reduction="none")
    (each * full["a"] * full["p"].prod()).sum().backward()
    for name, leaf in leaves.items():
        if name in needed:
            tolerance = {torch.float64: 1e-13, torch.bfloat16: 8e-3}[dtype]
            assert leaf.grad.dtype == dtype
            assert relative_error(leaf.grad, full[name].grad) < tolerance, name
        else:
            assert leaf.grad is None


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
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)
    factors = [1.0, -2.5, 0.3]
    g = torch.autograd.grad(sum(factors[i] * got[i] for i in used), (x, w, b))
    assert len(calls) > forward_calls, "one more run"
    e = torch.autograd.grad(sum(factors[i] * want[i] for i in used), (x, w, b))
    for a, c in zip(g, e, strict=True):
        torch.testing.assert_close(a, c)


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


@pytest.mark.parametrize("upstream", [1.0, -3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_retained_graph_gives_the_same_twice(mode: dict[str, Any], upstream: float, dtype: torch.dtype) -> None:
    x, w, b, y = head(9, 5, 13, dtype=dtype)
    p = torch.tensor(1.5, requires_grad=True)
    loss = linear_apply(loss_fn(mode), x, w, y, linear_bias=b, params=(p,), **mode).sum() * upstream
    leaves = (x, w, b, p)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)  # the caller's own: must not reach what the graph keeps
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(loss, leaves)
    for k, s, t in zip(kept, second, third, strict=True):
        assert k.isfinite().all()
        assert torch.equal(k, s)
        assert torch.equal(k, t)
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, leaves)


def test_hooks_fire_once_and_nothing_is_written_to_grad(mode: dict[str, Any]) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    p = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    fired: list[tuple[str, Any]] = []
    for name, leaf in (("x", x), ("w", w), ("b", b), ("p", p)):
        leaf.register_hook(lambda g, name=name, leaf=leaf: fired.append((name, leaf.grad)))
    loss = linear_apply(
        loss_fn(mode), x, w, y, linear_bias=b, params=(p,), **{**mode, "options": mode.get("options", SMALL)}
    )
    loss.sum().backward()
    assert sorted(name for name, _ in fired) == sorted("xwbp")
    assert all(grad is None for _, grad in fired)


def test_one_weight_in_two_heads_and_an_embedding(mode: dict[str, Any]) -> None:
    _, w, _, y = head((2, 6), 5, 13, dtype=torch.float64)
    hidden = F.embedding(y, w).tanh()
    fn = loss_fn(mode)
    loss = linear_apply(fn, hidden, w, y, **mode).sum() + 0.3 * linear_apply(fn, hidden * 2, w, y, **mode).sum()
    (got,) = torch.autograd.grad(loss, w)
    hidden = F.embedding(y, w).tanh()
    flat = hidden.view(-1, 5)
    (want,) = torch.autograd.grad(naive(flat, w, y.view(-1)) + 0.3 * naive(flat * 2, w, y.view(-1)), w)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(mode: dict[str, Any], reentrant: bool) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    fn = loss_fn(mode)
    runs: list[int] = []

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        runs.append(1)
        return linear_apply(fn, F.layer_norm(x, (5,)), w, y, linear_bias=b, **mode)

    loss = checkpoint(block, x, w, b, use_reentrant=reentrant)
    assert len(runs) == 1, "what fn saves is its own"
    loss.sum().backward()
    assert len(runs) <= 2
    want = torch.autograd.grad(naive(F.layer_norm(x, (5,)), w, y, b), (x, w, b))
    for leaf, e in zip((x, w, b), want, strict=True):
        torch.testing.assert_close(leaf.grad, e)


@pytest.mark.parametrize("kept", [(), ("mm", "addmm", "_log_softmax", "tanh")])
def test_inside_a_selective_checkpoint(mode: dict[str, Any], kept: tuple[str, ...]) -> None:
    x, w, _, y = head(9, 5, 13, dtype=torch.float64)
    fn = loss_fn(mode)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return linear_apply(fn, F.layer_norm(x, (5,)).tanh(), w, y, **mode).sum() * 2

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in [getattr(torch.ops.aten, name).default for name in kept]
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    expected = torch.autograd.grad(2 * naive(F.layer_norm(x, (5,)).tanh(), w, y), (x, w))
    got = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False, context_fn=contexts), (x, w))
    for plain, selective in zip(expected, got, strict=True):
        torch.testing.assert_close(plain, selective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, "the same"])
def test_autocast(mode: dict[str, Any], dtype: torch.dtype, weights: Any) -> None:
    """Operands are rounded to autocast's dtype; each gradient comes in the dtype of what it belongs to."""
    x, w, b, y = head(200, 24, 97)
    w = w.detach().to(dtype if weights == "the same" else weights).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_apply(loss_fn(mode), x, w, y, linear_bias=b, **mode).sum()
        plain = F.cross_entropy(F.linear(x, w, b).float(), y, reduction="sum")
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, (x, w, b))
    assert [g.dtype for g in got] == [x.dtype, w.dtype, b.dtype]
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    truth = b.detach().double().requires_grad_()
    expected = naive(*rounded, y, truth)
    assert relative_error(loss, expected) < 1e-6
    want = torch.autograd.grad(expected, (*rounded, truth))
    base = torch.autograd.grad(plain, (x, w, b))
    for g, e, n in zip(got, want, base, strict=True):
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


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
    for g, e in zip(got, want, strict=True):
        assert relative_error(g, e) < 2e-2


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
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


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
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_the_weight_itself_among_the_params() -> None:
    x, w, _, _ = head(9, 5, 13, dtype=torch.float64)
    loss = linear_apply(lambda z, w: z.sum(-1) * w.square().mean(), x, w, params=(w,)).sum()
    want = torch.autograd.grad(F.linear(x, w).sum() * w.square().mean(), (x, w))
    for g, e in zip(torch.autograd.grad(loss, (x, w)), want, strict=True):
        torch.testing.assert_close(g, e)


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


def test_a_closed_over_tensor_that_only_one_result_knows() -> None:
    x, w, _, _ = head(9, 5, 13)
    outside = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        linear_apply(lambda z: (z.sum(-1), outside.sum() * torch.ones(len(z))), x, w)


def test_hidden_states_that_are_closed_over_are_noticed() -> None:
    x, w, _, _ = head(9, 5, 13)
    hidden = x.tanh()
    with pytest.raises(ValueError, match=r"shape \[9, 5\]"):
        linear_apply(lambda z: z.sum(-1) * hidden.mean(), hidden, w)


def test_double_backward_is_an_error_that_names_the_way_out(mode: dict[str, Any]) -> None:
    x, w, _, y = head(9, 5, 13)
    loss = linear_apply(loss_fn(mode), x, w, y, **mode).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(dx, torch.autograd.grad(naive(x, w, y), x)[0])
    with pytest.raises(RuntimeError, match=r"second derivative.*fn\(") as caught:
        dx.square().sum().backward()
    assert isinstance(caught.value, LowtideError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out() -> None:
    x, w, _, y = head(4, 5, 13)
    x, w = x.detach(), w.detach()
    fn = loss_fn({})
    scale = torch.tensor(1.0)
    attempts = [
        lambda: torch.func.grad(lambda w: linear_apply(fn, x, w, y).sum())(w),
        lambda: torch.func.vmap(lambda x, y: linear_apply(fn, x, w, y))(x[None], y[None]),
        lambda: torch.func.jvp(lambda w: linear_apply(fn, x, w, y), (w,), (w,)),
        lambda: torch.func.jvp(lambda s: linear_apply(fn, x, w, y, params=(s,)), (scale,), (scale,)),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match=r"reverse-mode autograd.*fn\(") as caught:
            attempt()
        assert isinstance(caught.value, LowtideError)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scale, torch.ones(()))
        with pytest.raises(LowtideError, match="forward-mode"):
            linear_apply(fn, x, w, y, params=(dual,))


def test_what_is_changed_before_backward_is_noticed() -> None:
    for changed in ("w", "a", "p"):
        x, w, _, y = head(4, 5, 13)
        tensors = {"w": w, "a": torch.rand(4), "p": torch.rand(())}
        loss = linear_apply(loss_fn({}), x, w, y, tensors["a"], params=(tensors["p"],)).sum()
        with torch.no_grad():
            tensors[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_no_grad_and_inference_mode(mode: dict[str, Any]) -> None:
    x, w, _, y = head(4, 5, 13)
    states = []

    def fn(z: Tensor, y: Tensor) -> Tensor:
        states.append(torch.is_grad_enabled())
        return loss_fn(mode)(z, y)

    expected = linear_apply(fn, x, w, y, **mode).detach()
    assert set(states) == {True}
    states.clear()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = linear_apply(fn, x, w, y, **mode)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)
    assert set(states) == {False}


def test_a_step_on_fake_tensors(mode: dict[str, Any]) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.randn(9, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
        (2 * linear_apply(loss_fn(mode), x, w, torch.randint(0, 33, (9,)), **mode).sum()).backward()
    assert w.grad.shape == (33, 8)


def test_grad_scaler_in_float16() -> None:
    """What fn divides by stays above float16's smallest numbers until the scaler's factor has come."""
    x, w, _, y = head(64, 8, 40, dtype=torch.float16)
    for out in ("sum", "token"):
        loss = linear_apply(
            lambda z, y, out=out: F.cross_entropy(z, y, reduction="sum" if out == "sum" else "none") / 2.0**26,
            x, w, y, out=out,
        ).sum()  # fmt: skip
        got = torch.autograd.grad(loss * 2.0**20, (x, w))
        full = [t.detach().double().requires_grad_() for t in (x, w)]
        want = torch.autograd.grad(naive(*full, y) / 2.0**6, full)
        for g, e in zip(got, want, strict=True):
            assert relative_error(g, e) < 2e-3


def test_the_error_names_the_tensor_that_is_closed_over_and_not_what_it_was_made_of() -> None:
    x, w, _, _ = head(9, 5, 13)
    outside = torch.rand(7, 3, requires_grad=True).sum(0)
    with pytest.raises(ValueError, match=r"shape \[3\]"):
        linear_apply(lambda z: z.sum(-1) * outside.sum(), x, w)

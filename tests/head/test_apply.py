"""What is linear_apply's own: what a function may do and return, what is refused, params, compile, pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from lowtide import HeadOptions, linear_apply
from lowtide.errors import LowtideError
from promises import promise
from support import assert_near, assert_same_gradients, every_pair, head

pytestmark = [
    promise("options"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SMALL = HeadOptions(workspace_mib=0.003)


def focal(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    logp = -F.cross_entropy(z, y, reduction="none")
    return -((1 - logp.exp()) ** gamma) * logp


def focal_sum(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    return focal(z, y, gamma).sum()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile with this in place of inductor, and count the graphs."""
    counting = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return counting


def written_over(z: Tensor) -> Tensor:
    z.mul_(2).add_(1)
    return z


OF_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda z: z,
    "some columns": lambda z: z[:, 2:9:3],
    "columns and rows exchanged": lambda z: z.unsqueeze(1).expand(-1, 2, -1).transpose(1, 2),
    "written over": written_over,
    "written over in part": lambda z: torch.cat((written_over(z[:, :5]), z[:, 5:]), 1).logsumexp(-1),
    "checkpointed": lambda z: torch.utils.checkpoint.checkpoint(torch.logsumexp, z, -1, use_reentrant=False),
    "a head in the head": lambda z: linear_apply(lambda q: q.logsumexp(-1), z, torch.eye(13, dtype=z.dtype)),
}


@every_pair(name=OF_LOGITS, options=[None, SMALL], softcap=[None, 2], grad=[False, True], compiled=[False, False, True])
def test_views_of_the_logits_and_changes_in_place(
    name: str,
    options: HeadOptions | None,
    softcap: float | None,
    grad: bool,
    compiled: bool,
    counter: CompileCounterWithBackend,
) -> None:
    x, w, b, _ = head((3, 7), 5, 13, dtype=torch.float64)
    fn = OF_LOGITS[name]
    z = F.linear(x, w, b).view(21, 13)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    want = fn(z.clone())
    want = want.view(3, 7, *want.shape[1:])
    compiled &= name == "written over"
    with torch.set_grad_enabled(grad):
        got = linear_apply(fn, x, w, linear_bias=b, options=options, softcap=softcap, compile=compiled)
    torch.testing.assert_close(got, want)
    if grad:
        upstream = torch.randn_like(want)
        kept = upstream.clone()
        assert_near(*(torch.autograd.grad(out, (x, w, b), upstream) for out in (got, want)), 1e-10)
        assert torch.equal(upstream, kept), "of a view of the logits it is their gradient, and is not written over"


def test_each_sum_has_its_own_upstream_gradient_and_one_sum_needs_no_second_run() -> None:
    x, w, b, y = head(40, 5, 13, dtype=torch.float64)
    calls: list[int] = []

    def fn(z: Tensor, y: Tensor) -> Any:
        calls.append(len(z))
        p = z.softmax(-1)
        return (
            F.cross_entropy(z, y, reduction="sum"),
            {"h": -(p * p.log()).sum(), "n": (y >= 0).sum()},
            z.square().sum(),
        )

    found, true = linear_apply(fn, x, w, y, linear_bias=b, out="sum", options=SMALL), fn(F.linear(x, w, b), y)
    assert found[1]["n"].item() == 40
    got, want = ([t[0], t[1]["h"], t[2]] for t in (found, true))
    assert_near(got, want, 1e-12)
    for factors in ((1.0, 0.0, 0.0), (0.0, -2.5, 0.0), (1.0, -2.5, 0.3)):
        sums = [sum(f * t for f, t in zip(factors, of, strict=True) if f) for of in (got, want)]
        grads = (torch.autograd.grad(s, (x, w, b), retain_graph=True) for s in sums)
        assert_near(*grads, 1e-12)
    loss, right = linear_apply(lambda z, y: (fn(z, y)[0], (z.argmax(-1) == y).sum()), x, w, y, out="sum")
    seen = list(calls)
    assert not right.requires_grad
    (loss / 40).backward()
    assert calls == seen


def test_sums_of_narrow_results_are_summed_wide() -> None:
    x, w, _, _ = head(3000, 4, 9, bias=False)
    options = HeadOptions(workspace_mib=1e-6)
    ones = linear_apply(lambda z: torch.full((), float(len(z)), dtype=torch.float16), x, w, out="sum", options=options)
    assert (ones.dtype, ones.item()) == (torch.float16, 3000)


def test_autocast_is_the_same_on_recompute_and_for_every_piece() -> None:
    """fn multiplies by a float32 matrix, in bfloat16 under autocast, whose kept copy must be no piece's alone."""
    x, w, _, _ = head(30, 8, 17, bias=False)
    m = torch.randn(17, 6, requires_grad=True)
    seen = []

    def fn(z: Tensor, m: Tensor) -> Tensor:
        product = z @ m
        seen.append((product.dtype, torch.is_autocast_enabled("cpu")))
        return product.float().square().sum(-1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_apply(fn, x, w, params=(m,), options=HeadOptions(workspace_mib=1e-6))
    before = len(seen)
    got = torch.autograd.grad(loss.sum(), (x, w, m))
    assert len(seen) > before
    assert set(seen) == {(torch.bfloat16, True)}
    z = F.linear(x.bfloat16().double(), w.bfloat16().double())
    assert_near(got, torch.autograd.grad((z @ m.double()).square().sum(), (x, w, m)), 2e-2)


@every_pair(out=["token", "sum"], workspace_mib=[None, 1e-6])
def test_random_numbers_are_the_same_on_recompute(out: str, workspace_mib: float | None) -> None:
    x, w, _, _ = head(20, 8, 17, dtype=torch.float64, bias=False)
    masks: list[Tensor] = []

    def fn(z: Tensor) -> Any:
        kept = torch.rand_like(z) < 0.5
        masks.append(kept)
        loss = (z * kept).logsumexp(-1)
        return (loss, loss * 2) if out == "token" else (loss.sum(), (2 * loss).sum())

    one, two = linear_apply(fn, x, w, out=out, options=HeadOptions(workspace_mib=workspace_mib))
    drawn: list[Tensor] = []  # without those of the comparison that looks for coupled rows, which comes before
    while sum(map(len, drawn)) < 20:
        drawn.insert(0, masks.pop())
    torch.rand(3)
    elsewhere = torch.get_rng_state()
    got = torch.autograd.grad((one + two).sum(), (x, w))
    assert torch.equal(torch.get_rng_state(), elsewhere), "backward leaves no trace"
    want = torch.autograd.grad(3 * (F.linear(x, w) * torch.cat(drawn)).logsumexp(-1).sum(), (x, w))
    assert_near(got, want, 1e-12)


def test_params_are_pytrees_of_any_tensors_and_the_weight_itself() -> None:
    x, w, b, _ = head(9, 5, 13, dtype=torch.float64)
    base, other = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (13, 2))

    def fn(z: Tensor, p: Tensor, rest: dict[str, Any], power: int, nothing: None, w: Tensor) -> Tensor:
        return ((z * p) ** power).sum(-1) * rest["factors"][1] * rest["name"] * w.square().mean()

    params = (base.exp(), {"factors": [1, other.prod()], "name": 3}, 2, None, w)
    loss = linear_apply(fn, x, w, linear_bias=b, params=params, options=SMALL)
    true = ((F.linear(x, w, b) * base.exp()) ** 2).sum() * other.prod() * 3 * w.square().mean()
    assert_same_gradients(loss.sum(), true, (x, w, b, base, other), bound=1e-12)


@every_pair(
    form=["leaf", "no leaf", "a module's", "inside a graph"],
    mode=[{}, {"out": "sum"}, {"compile": True}],
    frozen=[False, True],
)
@promise("errors")
def test_a_closed_over_tensor_that_needs_a_gradient_is_refused(
    form: str, mode: dict[str, Any], frozen: bool, counter: CompileCounterWithBackend
) -> None:
    x, w, _, _ = (t.detach().requires_grad_(not frozen) if t.is_floating_point() else t for t in head(9, 5, 13))
    outside = torch.rand(7, 3, requires_grad=True)
    closed = {
        "leaf": outside,
        "no leaf": outside.exp(),
        "a module's": torch.nn.Linear(7, 3).weight,
        "inside a graph": torch.utils.checkpoint.checkpoint(torch.exp, outside, use_reentrant=False),
    }[form]

    def fn(z: Tensor) -> Tensor:
        loss = z.logsumexp(-1) * closed.sum()
        return loss.sum() if "out" in mode else loss

    with pytest.raises(ValueError, match=r"shape \[(7, 3|3, 7)\].*params") as caught:
        linear_apply(fn, x, w, **mode)
    assert isinstance(caught.value, LowtideError)
    with torch.no_grad():
        linear_apply(fn, x, w, **mode | {"compile": False})


COUPLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean over rows": lambda z, y: z - z.mean(0),
    "running sum": lambda z, y: z.logsumexp(-1).cumsum(0),
    "position": lambda z, y: torch.arange(len(z)),
    "divided by rows": lambda z, y: F.cross_entropy(z, y, reduction="none") / len(z),
    "one of two": lambda z, y: (z.sum(-1), {"a": z.logsumexp(-1) - z.logsumexp(-1).mean()}),
    "a nan of another": lambda z, y: z.sum(-1) + torch.where((y == 0).any(), torch.nan, 0.0),
}
NOT_ADDITIVE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda z, y: F.cross_entropy(z, y),
    "one of two": lambda z, y: (z.sum(), z.mean()),
    "constant": lambda z, y: z.sum() + 1,
}
INDEPENDENT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda z, y: torch.zeros(len(z)),
    "nan and inf": lambda z, y: (z.sum(-1) * torch.nan, z / 0, z.exp() * 1e300),
    "cancelling": lambda z, y: (z.softmax(-1) * (z.log_softmax(-1) - (z + 1e4).log_softmax(-1))).sum(-1),
    "a wild product": lambda z, y: (z * 1e6) @ torch.ones(z.shape[1], 7),
    "bfloat16": lambda z, y: (z.bfloat16() @ torch.ones(z.shape[1], 7, dtype=torch.bfloat16)).sum(-1),
    "top k": lambda z, y: z.topk(3)[1],
    "dropout": lambda z, y: F.dropout(z, 0.5).sum(-1),
    "as many draws as it takes": lambda z, y: torch.poisson(z.exp()),
    "infinite and random": lambda z, y: F.dropout(z, 0.3) / 0,
}


@promise("errors")
@pytest.mark.parametrize("N", [2, 5, 100])
@pytest.mark.parametrize(("out", "name"), [*(("token", n) for n in COUPLED), *(("sum", n) for n in NOT_ADDITIVE)])
def test_coupled_tokens_are_refused(out: str, name: str, N: int) -> None:
    x, w, b, y = head(N, 5, 13)
    y[:] = torch.arange(N).clamp(max=12)
    before = torch.get_rng_state()
    fn, says = (COUPLED, "depend on the other tokens") if out == "token" else (NOT_ADDITIVE, "does not add up")
    with pytest.raises(ValueError, match=says) as caught:
        linear_apply(fn[name], x, w, y, linear_bias=b, out=out)
    assert isinstance(caught.value, LowtideError)
    assert torch.equal(torch.get_rng_state(), before)


@every_pair(name=INDEPENDENT, N=[1, 2, 300], autocast=[False, True], out=["token", "sum"])
def test_nothing_else_is_refused(name: str, N: int, autocast: bool, out: str) -> None:
    x, w, b, y = head(N, 5, 37)
    fn = INDEPENDENT[name]

    def summed(z: Tensor, y: Tensor) -> Any:
        return pytree.tree_map(lambda t: t.sum(), fn(z, y))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_apply(summed if out == "sum" else fn, x, w, y, linear_bias=b, out=out)


def test_a_function_is_compared_once_for_its_code_and_shapes() -> None:
    """One that is made anew for each step is the same; masked rows, which may be NaN, take no part."""
    for V, compared in ((13, True), (13, False), (14, True)):
        rows: list[int] = []
        x, w, _, _ = head(1000, 5, V)
        mask = torch.arange(1000) % 4 > 0
        x = x.detach().where(mask[:, None], torch.nan)
        linear_apply(lambda z, rows=rows: (rows.append(len(z)), z.sum(-1))[1], x, w, mask=mask)
        assert (sum(rows) > 750) == compared


@promise("errors")
def test_results_whose_form_the_other_rows_change_are_refused() -> None:
    x, w, _, y = head(40, 5, 13)
    y[:] = 0
    y[-1] = 1
    options = HeadOptions(workspace_mib=1e-6)
    for fn in (
        lambda z, y: z[:, : 1 + y.max()],
        lambda z, y: z.argmax(-1) if y.max() else z.amax(-1),
        lambda z, y: (z.sum(-1),) if y.max() else [z.sum(-1)],
    ):
        with pytest.raises(ValueError, match="fn: expected"):
            linear_apply(lambda z, y, fn=fn: (torch.rand(1), fn(z, y))[1], x, w, y, options=options)
    with pytest.raises(ValueError, match="one structure, dtype and shape for all rows"):
        linear_apply(lambda z, y: [z.sum(-1)] * len(z), x, w, y)
    with pytest.raises(RuntimeError, match="shape") as caught:
        linear_apply(lambda z: z.view(4, 5, 13).sum(-1), x, w)
    assert any("any number of rows" in note for note in caught.value.__notes__)


@promise("compile")
@pytest.mark.parametrize("fn", [focal, focal_sum])
def test_the_function_is_compiled_once_for_any_number_of_rows(fn: Any, counter: CompileCounterWithBackend) -> None:
    _, w, b, _ = head(1, 8, 33)
    gamma, kwargs = torch.tensor(1.5, requires_grad=True), {"out": "token" if fn is focal else "sum", "compile": True}
    for leading, masked in (((23,), False), ((24,), True), ((1,), False), ((3, 19), True), ((0,), False)):
        x, _, _, y = head(leading, 8, 33)
        mask = torch.rand(leading) < 0.7 if masked else None
        options = HeadOptions(workspace_mib=0.02)
        loss = linear_apply(fn, x, w, y, linear_bias=b, params=(gamma,), mask=mask, options=options, **kwargs)
        kept = slice(None) if mask is None else mask
        want = fn(F.linear(x[kept], w, b).view(-1, 33), y[kept].view(-1), gamma).sum()
        assert_same_gradients(loss.sum(), want, (x, w, b, gamma), bound=1e-5)
    assert counter.frame_count <= 4, "with what needs a gradient and without; for one row and for none"

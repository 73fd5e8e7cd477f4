"""Functions of every kind: what they may do with their logits and arguments, and what they may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply
from support import assert_near, head

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SMALL = HeadOptions(workspace_mib=0.003)


def written_over(z: Tensor) -> Tensor:
    z.mul_(2).add_(1)
    return z


OF_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda z: z,
    "some columns": lambda z: z[:, 2:9:3],
    "one column": lambda z: z[:, 4],
    "columns and rows exchanged": lambda z: z.unsqueeze(1).expand(-1, 2, -1).transpose(1, 2),
    "written over": written_over,
    "written over in part": lambda z: torch.cat((written_over(z[:, :5]), z[:, 5:]), 1).logsumexp(-1),
    "checkpointed": lambda z: torch.utils.checkpoint.checkpoint(torch.logsumexp, z, -1, use_reentrant=False),
    "a head in the head": lambda z: linear_apply(lambda q: q.logsumexp(-1), z, torch.eye(13, dtype=z.dtype)),
}


@pytest.mark.parametrize("name", OF_LOGITS)
@pytest.mark.parametrize("options", [None, SMALL])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("grad", [False, True])
def test_views_of_the_logits_and_changes_in_place(
    name: str, options: HeadOptions | None, softcap: float | None, grad: bool
) -> None:
    x, w, b, _ = head((3, 7), 5, 13, dtype=torch.float64)
    fn = OF_LOGITS[name]
    z = F.linear(x, w, b).view(21, 13)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    want = fn(z.clone())
    want = want.view(3, 7, *want.shape[1:])
    with torch.set_grad_enabled(grad):
        got = linear_apply(fn, x, w, linear_bias=b, options=options, softcap=softcap)
    torch.testing.assert_close(got, want)
    if grad:
        upstream = torch.randn_like(want)
        kept = upstream.clone()
        assert_near(*(torch.autograd.grad(out, (x, w, b), upstream) for out in (got, want)))
        assert torch.equal(upstream, kept), "of a view of the logits it is their gradient, and is not written over"


@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("leading", [(3, 7), (2, 0)])
def test_a_change_in_place_by_what_is_trained_on_a_frozen_head(
    out: Literal["token", "sum"], leading: tuple[int, ...]
) -> None:
    x, w, _, _ = head(leading, 5, 13, dtype=torch.float64)
    temperature = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)

    def fn(z: Tensor, temperature: Tensor) -> Tensor:
        z /= temperature
        return z.logsumexp(-1) if out == "token" else z.logsumexp(-1).sum()

    got = linear_apply(fn, x.detach(), w.detach(), params=(temperature,), out=out, options=SMALL).sum()
    want = (F.linear(x, w).detach() / temperature).logsumexp(-1).sum()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, temperature) for value in (got, want)))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_changes_in_place_when_compiled(softcap: float | None) -> None:
    x, w, b, _ = head((3, 7), 5, 13, dtype=torch.float64)
    got, want = (
        linear_apply(written_over, x, w, linear_bias=b, options=SMALL, softcap=softcap, compile=flag)
        for flag in (True, False)
    )
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    assert_near(*(torch.autograd.grad(out, (x, w, b), upstream) for out in (got, want)))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_gradient_that_is_sparse(softcap: float | None) -> None:
    x, w, b, y = head((3, 7), 5, 13, dtype=torch.float64)
    got, want = (
        linear_apply(
            lambda z, y, sparse=sparse: torch.gather(z, 1, y[:, None], sparse_grad=sparse),
            x, w, y, linear_bias=b, options=SMALL, softcap=softcap,
        )
        for sparse in (True, False)
    )  # fmt: skip
    assert_near(*(torch.autograd.grad(out.exp().sum(), (x, w, b)) for out in (got, want)))


class Both(NamedTuple):
    one: Tensor
    two: dict[str, Any]


@pytest.mark.parametrize("options", [None, SMALL])
def test_arguments_that_come_back_as_results(options: HeadOptions | None) -> None:
    x, w, _, y = head((3, 7), 5, 13, dtype=torch.float64)
    a = torch.rand(3, 7, 2, dtype=torch.float64, requires_grad=True)
    p = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def fn(z: Tensor, y: Tensor, a: Tensor, p: Tensor) -> Both:
        return Both(a, {"p": p.expand(len(z), 4), "labels": y, "twice": [z, z], "nothing": None, "empty": ()})

    got = linear_apply(fn, x, w, y, a, params=(p,), options=options)
    assert isinstance(got, Both)
    assert torch.equal(got.two["labels"], y)
    assert (got.two["nothing"], got.two["empty"]) == (None, ())
    u, v, one, two = (torch.randn(3, 7, n, dtype=torch.float64) for n in (2, 4, 13, 13))
    total = (
        (got.one * u).sum() + (got.two["p"] * v).sum() + (got.two["twice"][0] * one + got.two["twice"][1] * two).sum()
    )
    got_grads = torch.autograd.grad(total, (x, w, a, p))
    want = torch.autograd.grad((F.linear(x, w) * (one + two)).sum(), (x, w))
    assert_near(got_grads, (*want, u, v.sum((0, 1))), 1e-12)


def test_a_module_is_refused_with_its_weights_shape_and_runs_on_params() -> None:
    x, w, _, _ = head((3, 7), 5, 13)
    module = torch.nn.Linear(13, 2)
    for fn, params in ((module, ()), (lambda z, m: m(z), (module,))):
        with pytest.raises(ValueError, match=r"shape \[(2, 13|2)\].*params"):
            linear_apply(fn, x, w, params=params)
    named = dict(module.named_parameters())
    got = linear_apply(
        lambda z, named: torch.func.functional_call(module, named, z), x, w, params=(named,), options=SMALL
    )
    want = module(F.linear(x, w))
    upstream = torch.randn_like(want)
    leaves = (x, w, *named.values())
    assert_near(*(torch.autograd.grad(out, leaves, upstream) for out in (got, want)), 1e-5)


@pytest.mark.parametrize("nothing", [None, (), {"a": None}])
@pytest.mark.parametrize("out", ["token", "sum"])
def test_functions_that_return_nothing(nothing: Any, out: str) -> None:
    x, w, _, _ = head((3, 7), 5, 13)
    for fn in (lambda z: nothing, lambda z: (torch.rand(len(z)), nothing)[1]):
        assert linear_apply(fn, x, w, out=out, options=SMALL) == nothing


def test_complex_results() -> None:
    x, w, _, _ = head((3, 7), 5, 13, dtype=torch.float64)
    got = linear_apply(lambda z: torch.complex(z[:, 0], z[:, 1]), x, w, options=SMALL)
    z = F.linear(x, w)
    want = torch.complex(z[..., 0], z[..., 1])
    upstream = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    assert_near(*(torch.autograd.grad(out, (x, w), upstream) for out in (got, want)))


def test_sums_without_a_gradient_and_sums_of_params_alone() -> None:
    x, w, _, _ = head((3, 7), 5, 13)
    p = torch.rand(4, requires_grad=True)
    count = linear_apply(lambda z: (z.argmax(-1) == 3).sum(), x, w, out="sum", options=SMALL)
    assert not count.requires_grad
    assert count == (F.linear(x, w).argmax(-1) == 3).sum()
    total = linear_apply(lambda z, p: p.sum() * len(z), x, w, params=(p,), out="sum", options=SMALL)
    dx, dw, dp = torch.autograd.grad(total, (x, w, p))
    assert (dx == 0).all()
    assert (dw == 0).all()
    torch.testing.assert_close(dp, torch.full((4,), 21.0))

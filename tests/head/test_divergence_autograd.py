"""linear_divergence as a citizen of autograd: subsets, hooks, retained graphs, checkpoints, autocast, products."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lowtide import HeadOptions, linear_divergence
from lowtide.errors import LowtideError
from lowtide.head import graph
from support import divergence_oracle, head, relative_error

KINDS = ("forward_kl", "reverse_kl", "jsd", "tv", "top k")


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def teacher(x: Tensor, V: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    dtype = x.dtype
    tx = torch.randn(*x.shape[:-1], 4, generator=g, dtype=torch.float64)
    return tx.to(dtype), torch.randn(V, 4, generator=g, dtype=torch.float64).to(dtype)


def run(kind: str, x: Tensor, w: Tensor, **kwargs: Any) -> Tensor:
    tx, tw = teacher(x, w.shape[0])
    if kind != "top k":
        return linear_divergence(x, w, tx, tw, kind=kind, beta=0.3, **kwargs)
    logprobs, ids = (tx.float() @ tw.float().T).log_softmax(-1).topk(3)
    return linear_divergence(x, w, None, None, kind="jsd", beta=0.3, teacher_topk=(ids, logprobs), **kwargs)


def oracle(kind: str, x: Tensor, w: Tensor, linear_bias: Tensor | None = None) -> Tensor:
    tx, tw = teacher(x, w.shape[0])
    return divergence_oracle(x, w, tx, tw, kind=kind, beta=0.3, linear_bias=linear_bias)


def test_gradcheck(kind: str) -> None:
    x, w, b, _ = head((2, 5), 3, 7, dtype=torch.float64)
    mask = torch.rand(2, 5) < 0.7
    torch.autograd.gradcheck(lambda x, w, b: run(kind, x, w, linear_bias=b, temperature=1.4, mask=mask), (x, w, b))


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop"])
@pytest.mark.parametrize("of", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck_of_each_tail(tail: str, of: str) -> None:
    x, w, b, _ = head(6, 3, 7, dtype=torch.float64)
    tx, tw = teacher(x, 7)
    logprobs, ids = (tx @ tw.T).log_softmax(-1).topk(3)
    torch.autograd.gradcheck(
        lambda x, w, b: linear_divergence(
            x, w, None, None, kind=of, linear_bias=b, teacher_topk=(ids, logprobs, tail), temperature=0.8
        ),
        (x, w, b),
    )


@pytest.mark.parametrize("needed", [n for k in range(4) for n in itertools.combinations("xwb", k)], ids="".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_subset_of_inputs_frozen(kind: str, needed: tuple[str, ...], dtype: torch.dtype) -> None:
    leaves = dict(zip("xwb", head(11, 6, 17, dtype=dtype)[:3], strict=True))
    whole = [leaf.detach().clone().requires_grad_() for leaf in leaves.values()]
    expected = torch.autograd.grad(run(kind, whole[0], whole[1], linear_bias=whole[2]).sum(), whole)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    value = run(kind, leaves["x"], leaves["w"], linear_bias=leaves["b"])
    assert value.requires_grad == bool(needed)
    if not needed:
        return
    value.sum().backward()
    for (name, leaf), e in zip(leaves.items(), expected, strict=True):
        if name in needed:
            torch.testing.assert_close(leaf.grad, e)
        else:
            assert leaf.grad is None


def test_no_gradient_goes_to_the_teacher() -> None:
    x, w, _, _ = head(9, 5, 13)
    tx, tw, tb, _ = head(9, 4, 13, seed=1)
    linear_divergence(x, w, tx, tw, teacher_bias=tb).sum().backward()
    assert x.grad is not None
    assert tx.grad is tw.grad is tb.grad is None
    assert not linear_divergence(x.detach(), w.detach(), tx, tw).requires_grad
    own = linear_divergence(x, w, x * 2, w)  # self-distillation: the weight is on both sides
    (dw,) = torch.autograd.grad(own.sum(), w)
    torch.testing.assert_close(
        dw, torch.autograd.grad(divergence_oracle(x, w, (x * 2).detach(), w.detach()).sum(), w)[0]
    )


def flops(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(("x_needs", "w_needs"), [(True, True), (True, False), (False, True)])
def test_only_the_products_that_are_needed(
    kind: str, x_needs: bool, w_needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "watched", lambda args: False)  # an operator's inside is hidden
    N, D, V = 40, 6, 70
    x, w, _, _ = head(N, D, V, bias=False)
    tx, tw = teacher(x, V)
    x.requires_grad_(x_needs)
    w.requires_grad_(w_needs)
    of_student, of_teacher = 2 * N * D * V, 2 * N * 4 * V
    if kind == "top k":
        logprobs, ids = (tx @ tw.T).log_softmax(-1).topk(3)
        value = lambda: linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs))  # noqa: E731
        of_teacher = 0
    else:
        value = lambda: linear_divergence(x, w, tx, tw, kind=kind)  # noqa: E731
    values: list[Tensor] = []
    assert flops(lambda: values.append(value())) == of_student + of_teacher
    upstream = (torch.arange(N) < 10).float()
    quarter = of_student * (1 + x_needs + w_needs) + of_teacher
    assert flops(lambda: values[0].backward(upstream)) == quarter / 4, "rows without a gradient are dropped on the CPU"
    with torch.no_grad():
        assert flops(value) == of_student + of_teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_retained_graph_gives_the_same_twice(kind: str, dtype: torch.dtype) -> None:
    x, w, b, _ = head(9, 5, 13, dtype=dtype)
    loss = run(kind, x, w, linear_bias=b).sin().sum()
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)
    second = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(loss, (x, w, b))
    for k, s, t in zip(kept, second, third, strict=True):
        assert torch.equal(k, s)
        assert torch.equal(k, t)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_hooks_fire_once_and_gradients_accumulate(kind: str) -> None:
    x, w, b, _ = head(9, 5, 13, dtype=torch.float64)
    fired: list[tuple[str, bool]] = []
    for name, leaf in (("x", x), ("w", w), ("b", b)):
        leaf.register_hook(lambda g, name=name, leaf=leaf: fired.append((name, leaf.grad is None)))
    for step in (1, 2):
        run(kind, x, w, linear_bias=b, options=HeadOptions(workspace_mib=1e-6)).sum().backward()
        assert sorted(fired) == sorted((n, first) for n in "xwb" for first in [True, False][:step])
    twice = w.grad.clone()
    w.grad = None
    run(kind, x, w, linear_bias=b).sum().backward()
    torch.testing.assert_close(twice, 2 * w.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_strided_inputs(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    for x, w in (
        (make(3, 9, 8)[:, :-2], make(29, 8)),
        (make(7, 3, 8).transpose(0, 1), make(8, 29).T),
        (make(3, 7, 16)[..., ::2], make(58, 8)[::2]),
        (make(1, 7, 8).expand(3, 7, 8), make(29, 8)),
    ):
        options = HeadOptions(workspace_mib=1e-6)
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        plain = x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_()
        got = torch.autograd.grad(run(kind, x, w, options=options).sum(), (x, w))
        want = torch.autograd.grad(run(kind, *plain, options=options).sum(), plain)
        for a, e in zip(got, want, strict=True):
            assert relative_error(a, e) <= (1e-12 if dtype == torch.float64 else 1e-2)
    tx = make(7, 3, 8).transpose(0, 1)
    tw = make(8, 29).T
    got, want = (linear_divergence(x, w, *t) for t in ((tx, tw), (tx.contiguous(), tw.contiguous())))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(kind: str, reentrant: bool) -> None:
    x, w, b, _ = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return run(kind, F.layer_norm(x, (5,)), w, linear_bias=b).sum()

    checkpoint(block, x, w, b, use_reentrant=reentrant).backward()
    want = torch.autograd.grad(block(x, w, b), (x, w, b))
    for leaf, e in zip((x, w, b), want, strict=True):
        torch.testing.assert_close(leaf.grad, e)


@pytest.mark.parametrize("keep", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_inside_a_selective_checkpoint(kind: str, keep: CheckpointPolicy) -> None:
    x, w, _, _ = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return run(kind, F.layer_norm(x, (5,)).tanh(), w).sin().sum() * 2

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return keep if "lowtide" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    expected = torch.autograd.grad(block(x, w), (x, w))
    got = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False, context_fn=contexts), (x, w))
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_autocast(kind: str, dtype: torch.dtype) -> None:
    x, w, b, _ = head(200, 24, 97)
    with torch.autocast("cpu", dtype=dtype):
        value, naive = run(kind, x, w, linear_bias=b), oracle(kind, x, w, b)
    assert value.dtype == torch.float32
    upstream = torch.rand(200)
    got = torch.autograd.grad(value, (x, w, b), upstream)
    assert [g.dtype for g in got] == [x.dtype, w.dtype, b.dtype]
    tx, tw = (t.to(dtype).double() for t in teacher(x, 97))
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    truth = b.detach().double().requires_grad_()
    expected = divergence_oracle(*rounded, tx, tw, kind=kind, beta=0.3, linear_bias=truth)
    assert relative_error(value, expected) < 1e-5
    want = torch.autograd.grad(expected, (*rounded, truth), upstream.double())
    base = torch.autograd.grad(naive, (x, w, b), upstream)
    for g, e, n in zip(got, want, base, strict=True):
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


def test_double_backward_is_an_error_that_names_the_way_out(kind: str) -> None:
    x, w, _, _ = head(9, 5, 13)
    (dx,) = torch.autograd.grad(run(kind, x, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*linear") as caught:
        dx.square().sum().backward()
    assert isinstance(caught.value, LowtideError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out() -> None:
    x, w, _, _ = head(4, 5, 13)
    x, w = x.detach(), w.detach()
    tx, tw = teacher(x, 13)
    attempts = [
        lambda: torch.func.grad(lambda w: linear_divergence(x, w, tx, tw).sum())(w),
        lambda: torch.func.vmap(lambda x: linear_divergence(x, w, tx, tw))(x[None]),
        lambda: torch.func.jvp(lambda w: linear_divergence(x, w, tx, tw), (w,), (w,)),
    ]
    for attempt in attempts:
        with pytest.raises(LowtideError, match=r"linear_divergence: expected reverse-mode autograd"):
            attempt()


def test_a_weight_changed_before_backward_is_noticed() -> None:
    for side in (0, 1):
        x, w, _, _ = head(4, 5, 13)
        tx, tw = teacher(x, 13)
        loss = linear_divergence(x, w, tx, tw).sum()
        with torch.no_grad():
            (w, tw)[side].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_no_grad_and_inference_mode(kind: str) -> None:
    x, w, _, _ = head(4, 5, 13)
    expected = run(kind, x, w).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            value = run(kind, x, w)
        assert not value.requires_grad
        assert torch.equal(value, expected)

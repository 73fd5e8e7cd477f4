"""linear_apply against the same function of float64 logits in full: values, gradients, chunks, dtypes, masks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply
from lowtide.head import apply as public
from support import head, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def everything(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> dict[str, Any]:
    """A function with results of many shapes and dtypes, which works on its logits in place."""
    z /= temperature
    logp = z.log_softmax(-1)
    chosen = logp.gather(-1, y[:, None])[:, 0]
    return {
        "token": chosen * a[:, 0],
        "row": (logp @ matrix, [None, logp[:, :2, None].expand(-1, -1, 3)]),
        "argmax": z.argmax(-1),
        "right": z.argmax(-1) == y,
        "detached": chosen.detach(),
    }


def summed(*args: Tensor) -> tuple[Tensor, ...]:
    found = everything(*args)
    return (found["token"].sum() + found["row"][0].square().sum(), found["right"].sum(), found["detached"].sum())


def naive(fn: Callable[..., Any], x: Tensor, w: Tensor, *args: Tensor, bias: Tensor | None, params: Any, mask: Any,
          out: str, softcap: float | None, logit_scale: Any) -> Any:  # fmt: skip
    """The specification: all logits at once, in the dtype of the inputs; masked rows left out."""
    z = F.linear(x, w, bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    leading = x.shape[:-1]
    keep = torch.ones(leading, dtype=torch.bool) if mask is None else mask
    rows = fn(z[keep], *(a[keep] for a in args), *params)
    if out == "sum":
        return rows

    def spread(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        return torch.zeros((*leading, *leaf.shape[1:]), dtype=leaf.dtype).masked_scatter(
            keep.view((*leading, *[1] * (leaf.dim() - 1))), leaf.contiguous()
        )

    return torch.utils._pytree.tree_map(spread, rows)


def leaves_of(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Set the rows of a chunk and of a piece."""

    def of(chunk_rows: int, piece_rows: int) -> None:
        plan_head = public.plan_head

        def planned(N: int, *args: Any, **kwargs: Any) -> Any:
            plan = plan_head(N, *args, **kwargs)
            return replace(plan, chunk_rows=chunk_rows, chunks=-(-N // chunk_rows), piece_rows=piece_rows)

        monkeypatch.setattr(public, "plan_head", planned)

    return of


OPTIONS: dict[str, list[Any]] = {
    "linear_bias": [False, True],
    "mask": ["none", "some", "one", "nothing"],
    "out": ["token", "sum"],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.5, "tensor", "trained"],
    "leading": [(), (1,), (13,), (2, 7), (2, 1, 5), (0,), (3, 0)],
    "workspace_mib": [None, 1e-6, 0.01],
    "gradient": ["auto", "recompute"],
    "accumulate": ["auto", "float32", "input"],
    "args": ["fixed", "trained", "strided"],
}


def check(case: dict[str, Any], dtype: torch.dtype, seed: int, D: int = 9, V: int = 23) -> None:
    torch.manual_seed(seed)
    leading = case["leading"]
    x, w, b, y = head(leading, D, V, dtype=dtype, seed=seed, bias=case["linear_bias"])
    a = torch.randn(*leading, 2, dtype=dtype)
    if case["args"] == "strided":
        a = torch.randn(2, *leading, dtype=dtype).movedim(0, -1)
    a.requires_grad_(case["args"] == "trained")
    temperature = torch.tensor(1.3, dtype=dtype, requires_grad=True)
    matrix = torch.randn(V, 4, dtype=dtype, requires_grad=True)
    mask = {"none": None, "some": torch.rand(leading) < 0.6, "nothing": torch.zeros(leading, dtype=torch.bool)}.get(
        case["mask"], torch.arange(max(1, x[..., 0].numel()))[: x[..., 0].numel()].view(leading) == 0
    )
    scale: Any = case["logit_scale"]
    if isinstance(scale, str):
        scale = torch.tensor(0.8, dtype=dtype, requires_grad=scale == "trained")
    fn = everything if case["out"] == "token" else summed
    got = linear_apply(
        fn, x, w, y, a, linear_bias=b, params=(temperature, matrix), mask=mask, out=case["out"],
        softcap=case["softcap"], logit_scale=scale,
        options=HeadOptions(
            workspace_mib=case["workspace_mib"], gradient=case["gradient"], accumulate=case["accumulate"]
        ),
    )  # fmt: skip
    tensors = [x, w, b, a, temperature, matrix, scale]
    full = [t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in tensors]
    true = naive(
        fn, full[0], full[1], y, full[3], bias=full[2], params=tuple(full[4:6]), mask=mask, out=case["out"],
        softcap=case["softcap"], logit_scale=full[6],
    )  # fmt: skip
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(true)
    total = expected = torch.zeros((), dtype=torch.float64)
    for g, e in zip(leaves_of(got), leaves_of(true), strict=True):
        if e is None:
            assert g is None
            continue
        assert g.shape == e.shape
        assert relative_error(g, e) <= TOLERANCE[dtype]
        if not e.is_floating_point():
            assert g.dtype == e.dtype
            assert torch.equal(g, e)
        elif e.requires_grad and torch.rand(()) < 0.8:  # now and then one is not used
            upstream = torch.randn_like(e)
            total, expected = total + (g * upstream).sum(), expected + (e * upstream).sum()
        assert not g.requires_grad or e.requires_grad
    if not total.requires_grad:
        return
    wanted = [i for i, t in enumerate(tensors) if isinstance(t, Tensor) and t.requires_grad]
    found = torch.autograd.grad(total, [tensors[i] for i in wanted], allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad(expected, [full[i] for i in wanted], allow_unused=True, materialize_grads=True)
    for i, g, e in zip(wanted, found, want, strict=True):
        assert g.dtype == dtype
        assert g.shape == e.shape
        assert relative_error(g, e) <= 3 * TOLERANCE[dtype], i
    if mask is not None:
        assert (found[wanted.index(0)][~mask] == 0).all()


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_every_pair_of_options(pair: tuple[str, str]) -> None:
    for seed, values in enumerate(itertools.product(*(OPTIONS[name] for name in pair))):
        choose = random.Random(seed)
        case = {name: choose.choice(values) for name, values in OPTIONS.items()}
        case |= dict(zip(pair, values, strict=True))
        check(case, torch.float64, seed)
        if seed % 2:
            check(case, torch.float32, seed)


@pytest.mark.parametrize("chunks", [1, 2, 7, 64])
@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_chunks_change_nothing_but_rounding(
    chunks: int, out: str, dtype: torch.dtype, in_chunks: Callable[[int, int], None]
) -> None:
    N, D, V = 131, 24, 77
    x, w, b, y = head(N, D, V, dtype=dtype)
    rows = -(-N // chunks)

    def fn(z: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y, reduction="none") + 0.1 * z.logsumexp(-1).square()
        return loss if out == "token" else loss.sum() / N

    in_chunks(rows, max(1, rows // 3))
    loss = linear_apply(fn, x, w, y, linear_bias=b, out=out)
    upstream = torch.rand(N) / N if out == "token" else torch.tensor(1.0)
    got = torch.autograd.grad((loss * upstream).sum(), (x, w, b))
    full = [t.detach().double().requires_grad_() for t in (x, w, b)]
    true = fn(F.linear(*full), y)
    want = torch.autograd.grad((true * upstream).sum(), full)
    plain = torch.autograd.grad((fn(F.linear(x, w, b).float(), y) * upstream).sum(), (x, w, b))
    assert relative_error(loss, true) < (1e-13 if dtype == torch.float64 else 2e-6)
    for g, e, p in zip(got, want, plain, strict=True):
        if dtype in TOLERANCE:
            assert relative_error(g, e) < TOLERANCE[dtype]
        else:
            assert relative_error(g, e) <= 1.05 * relative_error(p, e)


@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_accumulate_says_where_the_weights_gradient_is_summed(
    accumulate: str, in_chunks: Callable[[int, int], None]
) -> None:
    x, w, _, y = head(256, 16, 40, dtype=torch.bfloat16, bias=False)
    in_chunks(4, 2)
    errors = {}
    options = HeadOptions(accumulate=accumulate)
    loss = linear_apply(lambda z, y: F.cross_entropy(z, y, reduction="sum"), x, w, y, out="sum", options=options)
    (got,) = torch.autograd.grad(loss, w)
    full = [t.detach().double().requires_grad_() for t in (x, w)]
    (want,) = torch.autograd.grad(F.cross_entropy(F.linear(*full), y, reduction="sum"), full[1])
    errors = relative_error(got, want)
    assert errors < 3e-3 if accumulate == "float32" else errors > 4e-3
    assert errors < 3e-2


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("scale", [1.0, "trained"])
def test_masked_tokens_may_hold_anything(poison: float, out: str, scale: Any) -> None:
    x, w, b, y = head((3, 8), 5, 13)
    mask = torch.rand(3, 8) < 0.5
    args = torch.randn(3, 8)
    with torch.no_grad():
        x[~mask] = poison
        args[~mask] = poison
    y[~mask] = 10**6
    scale = torch.tensor(0.7, requires_grad=True) if scale == "trained" else scale

    def fn(z: Tensor, y: Tensor, a: Tensor) -> Tensor:
        loss = F.cross_entropy(z, y, reduction="none") * a
        return loss.sum() if out == "sum" else loss

    loss = linear_apply(fn, x, w, y, args, linear_bias=b, mask=mask, out=out, logit_scale=scale)
    if out == "token":
        assert (loss[~mask] == 0).all()
        upstream = torch.where(mask, 1.0, torch.nan)
        loss = (loss * upstream).where(mask, 0)
    loss.sum().backward()
    full = [t.detach().double().requires_grad_() for t in (x[mask], w, b)]
    value = scale if isinstance(scale, float) else scale.detach().double().requires_grad_()
    true = (F.cross_entropy(F.linear(*full) * value, y[mask], reduction="none") * args[mask]).sum()
    true.backward()
    assert relative_error(loss.sum(), true) < 1e-5
    assert (x.grad[~mask] == 0).all()
    if isinstance(scale, Tensor):
        assert relative_error(scale.grad, value.grad) < 1e-5
    for g, e in zip((x.grad[mask], w.grad, b.grad), (t.grad for t in full), strict=True):
        assert relative_error(g, e) < 1e-5


def test_results_as_wide_as_the_logits() -> None:
    """The identity: upstream gradients are those of the logits, and must not be written over."""
    x, w, b, _ = head((2, 9), 5, 13, dtype=torch.float64)
    z = linear_apply(lambda z: z, x, w, linear_bias=b)
    torch.testing.assert_close(z, F.linear(x, w, b))
    upstream = torch.randn_like(z)
    kept = upstream.clone()
    got = torch.autograd.grad(z, (x, w, b), upstream)
    want = torch.autograd.grad(F.linear(x, w, b), (x, w, b), upstream)
    assert torch.equal(upstream, kept)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


class HandsOn(torch.autograd.Function):
    """A function whose backward returns the logits' own memory, rows and columns exchanged."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return z.T if len(z) == z.shape[1] else torch.zeros_like(z)


def test_a_gradient_that_lies_in_the_logits_own_memory(in_chunks: Callable[[int, int], None]) -> None:
    in_chunks(11, 11)
    leaves = head(11, 5, 11, dtype=torch.float64)[:3]
    got = torch.autograd.grad(linear_apply(HandsOn.apply, leaves[0], leaves[1], linear_bias=leaves[2]).sum(), leaves)
    z = F.linear(*leaves)
    for g, e in zip(got, torch.autograd.grad(z, leaves, z.detach().T.contiguous()), strict=True):
        assert relative_error(g, e) < 1e-13


def test_upstream_gradients_of_any_strides() -> None:
    x, w, _, _ = head((3, 4, 2), 5, 13, dtype=torch.float64, bias=False)
    for use in (
        lambda z: z.sum(),
        lambda z: z.mean((0, 1)).square().sum(),
        lambda z: (z.transpose(0, 1) * torch.arange(13.0)).sum(),
        lambda z: z[1, ..., ::2].exp().sum(),
        lambda z: z.permute(3, 2, 0, 1).flatten().cumsum(0).sin().sum(),
    ):
        got = torch.autograd.grad(use(linear_apply(lambda z: z.softmax(-1), x, w)), (x, w))
        want = torch.autograd.grad(use(F.linear(x, w).softmax(-1)), (x, w))
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize("D", [1, 7, 8, 15, 16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_that_is_a_column_of_the_weight(D: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, where the copy of the weight is small beside the workspace."""
    plan_head = public.plan_head
    monkeypatch.setattr(public, "plan_head", lambda *a, **k: replace(plan_head(*a, **k), bias_column=True))
    x, w, b, y = head((3, 7), D, 13, dtype=torch.float64)
    a = torch.randn(3, 7, 2, dtype=torch.float64)
    temperature = torch.tensor(1.3, dtype=torch.float64)
    params = (temperature, torch.randn(13, 4, dtype=torch.float64))
    kwargs: dict[str, Any] = {"params": params, "mask": None, "out": "sum", "softcap": softcap, "logit_scale": 0.7}
    got = linear_apply(summed, x, w, y, a, linear_bias=b, **kwargs)[0]
    want = naive(summed, x, w, y, a, bias=b, **kwargs)[0]
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got, (x, w, b)), torch.autograd.grad(want, (x, w, b)), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("D", [5, 7, 8])
def test_a_bias_that_rules_a_class_out_is_a_column_too(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its -inf stands beside columns that pad the weight, and must not be multiplied with their zeros."""
    plan_head = public.plan_head
    monkeypatch.setattr(public, "plan_head", lambda *a, **k: replace(plan_head(*a, **k), bias_column=True))
    x, w, b, _ = head((3, 7), D, 13, dtype=torch.float64)
    with torch.no_grad():
        b[4] = -torch.inf
    got = linear_apply(lambda z: z.logsumexp(-1), x, w, linear_bias=b)
    want = F.linear(x, w, b).logsumexp(-1)
    torch.testing.assert_close(got, want)
    for g, e in zip(torch.autograd.grad(got.sum(), (x, w, b)), torch.autograd.grad(want.sum(), (x, w, b)), strict=True):
        torch.testing.assert_close(g, e)


def test_the_plan_says_where_a_copy_of_the_weight_is_small() -> None:
    def of(D: int, V: int, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> bool:
        return public.plan_head(32768, D, V, dtype, "cuda", function=True, **kwargs).bias_column

    assert of(768, 32000)
    assert not of(768, 32000, torch.float32)
    assert not of(4096, 128256)
    assert not of(768, 32000, options=HeadOptions(workspace_mib=8 * 32000 * 776 * 2 / 2**20 - 1))
    assert of(768, 32000, options=HeadOptions(workspace_mib=8 * 32000 * 776 * 2 / 2**20 + 1))
    assert not public.plan_head(32768, 768, 32000, torch.bfloat16, "cuda").bias_column


def test_a_vocabulary_of_two_and_hidden_states_of_one() -> None:
    for N, D, V in ((1, 1, 2), (2, 1, 1), (5, 3, 2)):
        x, w, b, _ = head(N, D, V, dtype=torch.float64)
        loss = linear_apply(lambda z: z.logsumexp(-1), x, w, linear_bias=b)
        got = torch.autograd.grad(loss.sum(), (x, w, b))
        want = torch.autograd.grad(F.linear(x, w, b).logsumexp(-1).sum(), (x, w, b))
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e)


def test_sums_of_narrow_results_are_summed_wide() -> None:
    x, w, _, _ = head(3000, 4, 9, bias=False)
    ones = linear_apply(lambda z: torch.full((), float(len(z)), dtype=torch.float16), x, w, out="sum",
                        options=HeadOptions(workspace_mib=1e-6))  # fmt: skip
    assert ones.dtype == torch.float16
    assert ones.item() == 3000
    count, share = linear_apply(lambda z: (len(z), len(z) / 4), x[:12], w, out="sum")
    assert (count.item(), share.item()) == (12, 3.0)
    assert count.dtype == torch.int64


def test_no_piece_of_a_single_row_unless_need_be() -> None:
    from lowtide.head.function.chunk import spans

    for total, most in itertools.product(range(1, 40), range(1, 12)):
        sizes = [part.stop - part.start for part in spans(total, most)]
        assert sum(sizes) == total
        assert max(sizes) <= most
        assert min(sizes) > 1 or most <= 2 or total == 1

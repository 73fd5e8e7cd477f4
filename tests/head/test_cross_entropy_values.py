"""linear_cross_entropy's value and gradients against `F.cross_entropy` in float64, every pair of options."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowtide import HeadOptions, linear_cross_entropy
from lowtide.head import reference
from lowtide.head.terms import cross_entropy as terms
from support import head, in_float64, oracle, relative_error

OPTIONS: dict[str, list[Any]] = {
    "linear_bias": [False, True],
    "weight": [False, True],
    "ignored": ["none", "some", "a class", "all but one"],
    "label_smoothing": [0.0, 0.1, 1.0],
    "z_loss": [0.0, 1e-2],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.5, "tensor"],
    "token_weight": [False, True],
    "num_items": [None, 7, 2.5, "tensor"],
    "shift": [False, True],
    "reduction": ["mean", "sum", "none"],
    "leading": [(13,), (2, 7), (2, 1, 5), (1, 3)],
    "workspace_mib": [None, 1e-6, 0.004],
    "gradient": ["auto", "recompute"],
    "accumulate": ["auto", "float32", "input"],
    "upstream": ["one", "random"],
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


def arguments(case: dict[str, Any], dtype: torch.dtype, seed: int, D: int = 9, V: int = 23) -> dict[str, Any]:
    x, w, b, y = head(case["leading"], D, V, dtype=dtype, seed=seed, bias=case["linear_bias"])
    g = torch.Generator().manual_seed(seed + 1)
    ignore_index = 5 if case["ignored"] == "a class" else -100
    if case["ignored"] == "some":
        y[torch.rand(y.shape, generator=g) < 0.4] = -100
    elif case["ignored"] == "all but one":
        y.view(-1)[:-1] = -100
    kwargs = {
        "input": x,
        "linear_weight": w,
        "target": y,
        "linear_bias": b,
        "weight": torch.rand(V, generator=g) + 0.1 if case["weight"] else None,
        "reduction": case["reduction"],
        "ignore_index": ignore_index,
        "label_smoothing": case["label_smoothing"],
        "z_loss": case["z_loss"],
        "softcap": case["softcap"],
        "logit_scale": torch.tensor(0.8) if case["logit_scale"] == "tensor" else case["logit_scale"],
        "token_weight": torch.rand(y.shape, generator=g) * 2 if case["token_weight"] else None,
        "num_items": torch.tensor(11) if case["num_items"] == "tensor" else case["num_items"],
        "shift": case["shift"],
    }
    if case["reduction"] != "mean":
        kwargs["num_items"] = None
    return kwargs


def check(case: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    kwargs = arguments(case, dtype, seed)
    options = HeadOptions(workspace_mib=case["workspace_mib"], gradient=case["gradient"], accumulate=case["accumulate"])
    loss = linear_cross_entropy(**kwargs, options=options)
    truth = in_float64(kwargs)
    expected = oracle(**truth)
    assert loss.shape == expected.shape
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    upstream = torch.ones_like(expected) if case["upstream"] == "one" else torch.randn_like(expected)
    names = [n for n in ("input", "linear_weight", "linear_bias") if kwargs[n] is not None]
    got = torch.autograd.grad(loss, [kwargs[n] for n in names], upstream.to(loss.dtype))
    want = torch.autograd.grad(expected, [truth[n] for n in names], upstream)
    assert relative_error(loss, expected) <= TOLERANCE[dtype] or (loss.isnan().all() and expected.isnan().all())
    for name, g, e in zip(names, got, want, strict=True):
        assert g.dtype == dtype
        assert relative_error(g, e) <= TOLERANCE[dtype], name


def random_case(seed: int, **fixed: Any) -> dict[str, Any]:
    choose = random.Random(seed)
    return {name: fixed.get(name, choose.choice(values)) for name, values in OPTIONS.items()}


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_every_pair_of_options(pair: tuple[str, str]) -> None:
    for seed, values in enumerate(itertools.product(*(OPTIONS[name] for name in pair))):
        case = random_case(seed, **dict(zip(pair, values, strict=True)))
        for dtype in TOLERANCE:
            check(case, dtype, seed)


@pytest.mark.slow
def test_the_whole_product_of_options() -> None:
    numbers = [n for n in OPTIONS if n not in ("leading", "workspace_mib", "gradient", "accumulate", "upstream")]
    for seed, values in enumerate(itertools.product(*(OPTIONS[name] for name in numbers))):
        check(random_case(seed, **dict(zip(numbers, values, strict=True))), torch.float64, seed)


@pytest.fixture(params=["dropped", "computed as zeros"])
def ignored_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways with ignored tokens, on the CPU: dropped as there, or computed as on every other device."""
    if request.param != "dropped":
        monkeypatch.setattr(terms, "drops_rows", lambda device: False)
    return request.param


def test_ignored_rows_dropped_or_computed(ignored_rows: str) -> None:
    for seed in range(150):
        for dtype in TOLERANCE:
            check(random_case(seed), dtype, seed)


@pytest.mark.parametrize(
    ("N", "D", "V"), [(1, 1, 1), (1, 3, 2), (37, 1, 50257), (5, 896, 3), (129, 33, 517), (4, 0, 9)]
)
def test_odd_shapes(N: int, D: int, V: int) -> None:
    for workspace in (None, 1e-6, 0.01):
        x, w, b, y = head(N, D, V, dtype=torch.float64, seed=N)
        kwargs = {"input": x, "linear_weight": w, "target": y, "linear_bias": b}
        loss = linear_cross_entropy(**kwargs, options=HeadOptions(workspace_mib=workspace))
        truth = in_float64(kwargs)
        expected = oracle(**truth)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad(loss, (x, w, b))
        want = torch.autograd.grad(expected, [truth[n] for n in ("input", "linear_weight", "linear_bias")])
        for g, e in zip(got, want, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-14)


def test_one_token_without_axes() -> None:
    x, w, b, y = head((), 7, 11, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction)
        assert loss.shape == ()
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w, b), y))


@pytest.mark.parametrize("empty", ["no tokens", "all ignored", "shift of one"])
@pytest.mark.parametrize("workspace_mib", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_to_score(empty: str, workspace_mib: float | None, dtype: torch.dtype, ignored_rows: str) -> None:
    x, w, b, y = head((0, 4) if empty == "no tokens" else (3, 1), 8, 17, dtype=dtype)
    if empty == "all ignored":
        y.fill_(-100)
    kwargs = {"linear_bias": b, "shift": empty == "shift of one", "options": HeadOptions(workspace_mib=workspace_mib)}

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        assert loss.requires_grad
        return list(torch.autograd.grad(loss, (x, w, b)))

    mean = linear_cross_entropy(x, w, y, **kwargs)
    assert mean.isnan()
    assert all((g == 0).all() for g in gradients(mean))
    for loss in (
        linear_cross_entropy(x, w, y, reduction="sum", **kwargs),
        linear_cross_entropy(x, w, y, num_items=3, **kwargs),
        linear_cross_entropy(x, w, y, num_items=torch.tensor(3), **kwargs),
    ):
        assert loss == 0
        assert all((g == 0).all() for g in gradients(loss))
    each = linear_cross_entropy(x, w, y, reduction="none", **kwargs)
    assert each.shape == ((3, 0) if empty == "shift of one" else y.shape)
    assert all((g == 0).all() for g in gradients(each.sum()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("gradient", ["auto", "recompute"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_ignored_tokens_may_hold_anything(reduction: str, gradient: str, poison: float, ignored_rows: str) -> None:
    x, w, b, y = head(20, 6, 31)
    y[::3] = -100
    dirty = x.detach().clone()
    dirty[::3] = poison
    dirty.requires_grad_()
    results = []
    for input in (x, dirty):
        loss = linear_cross_entropy(
            input, w, y, linear_bias=b, reduction=reduction, options=HeadOptions(gradient=gradient)
        )
        results.append((loss, *torch.autograd.grad(loss.sum(), (input, w, b))))
    for clean, got in zip(*results, strict=True):
        assert torch.equal(clean, got)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_bad_hidden_states_spoil_their_own_rows_only(poison: float) -> None:
    x, w, _, y = head(6, 5, 19)
    x = x.detach()
    x[2, 1] = poison
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, reduction="none")
    expected = F.cross_entropy(F.linear(x, w), y, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    (got,) = torch.autograd.grad(loss.sum(), x)
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4, 5]].isfinite().all()


def test_losses_of_thousands_of_nats_are_exact() -> None:
    x, w, b, y = head(9, 16, 40, dtype=torch.float64)
    kwargs = {"input": (x.detach() * 3000).requires_grad_(), "linear_weight": w, "target": y, "linear_bias": b}
    for dtype in (torch.float64, torch.float32):
        cast = {k: v if k == "target" else v.detach().to(dtype).requires_grad_() for k, v in kwargs.items()}
        truth = in_float64(cast)
        loss, expected = linear_cross_entropy(**cast), oracle(**truth)
        assert expected > 1000
        assert relative_error(loss, expected) < 1e-6
        got = torch.autograd.grad(loss, [cast["input"], cast["linear_weight"]])
        want = torch.autograd.grad(expected, [truth["input"], truth["linear_weight"]])
        assert all(relative_error(g, e) < 1e-5 for g, e in zip(got, want, strict=True))


def test_a_sure_model_has_the_gradient_of_what_is_left() -> None:
    """p - 1 at the target, taken literally, would be a rounding error where 1 - p is 1e-9."""
    _, w, _, y = head(8, 96, 30, dtype=torch.float32)
    w = F.normalize(w.detach()).requires_grad_()
    x = (30 * w.detach()[y]).requires_grad_()
    kwargs = {"input": x, "linear_weight": w, "target": y}
    truth = in_float64(kwargs)
    loss, expected = linear_cross_entropy(**kwargs), oracle(**truth)
    assert expected < 1e-4
    assert relative_error(loss, expected) < 1e-4
    got, want = torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, truth["input"])[0]
    assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace_mib", [None, 0.05])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_low_precision_errs_less_than_plain_pytorch(dtype: torch.dtype, workspace_mib: float, reduction: str) -> None:
    """The baseline is F.cross_entropy over logits of the same operands; both are held against float64."""
    x, w, b, y = head(300, 40, 211, dtype=dtype, bias=True)
    kwargs = {"input": x, "linear_weight": w, "target": y, "linear_bias": b, "reduction": reduction}
    truth = in_float64(kwargs)
    expected = oracle(**truth)
    want = torch.autograd.grad(expected.sum(), [truth[n] for n in ("input", "linear_weight", "linear_bias")])
    naive = F.cross_entropy(F.linear(x, w, b).float(), y, reduction=reduction)
    loss = linear_cross_entropy(**kwargs, options=HeadOptions(workspace_mib=workspace_mib))
    assert relative_error(loss, expected) < 1e-6 < relative_error(naive, expected)
    got = torch.autograd.grad(loss.sum(), (x, w, b))
    base = torch.autograd.grad(naive.sum(), (x, w, b))
    for g, n, e in zip(got, base, want, strict=True):
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


def test_fp16_gradients_survive_the_mean_over_many_tokens() -> None:
    """1 / N times a probability is below fp16's smallest number until GradScaler's factor has been applied."""
    x, w, _, y = head(2048, 16, 300, dtype=torch.float16, bias=False)
    kwargs = {"input": x, "linear_weight": w, "target": y}
    truth = in_float64(kwargs)
    scale = 2.0**13
    got = torch.autograd.grad(linear_cross_entropy(**kwargs) * scale, (x, w))
    want = torch.autograd.grad(oracle(**truth) * scale, (truth["input"], truth["linear_weight"]))
    assert all(relative_error(g, e) < 5e-4 for g, e in zip(got, want, strict=True))


def test_fp16_sums_that_pass_its_range_on_the_way() -> None:
    """4096 times a hidden state of 60 is 2e5, beyond fp16; their mean is not."""
    x, w, _, _ = head(4096, 4, 9, dtype=torch.float16, bias=False)
    x = (x.detach().abs() + 60).requires_grad_()
    w = (w.detach() * 1e-3).requires_grad_()
    kwargs = {"input": x, "linear_weight": w, "target": torch.zeros(4096, dtype=torch.long)}
    truth = in_float64(kwargs)
    got = torch.autograd.grad(linear_cross_entropy(**kwargs), (x, w))
    want = torch.autograd.grad(oracle(**truth), (truth["input"], truth["linear_weight"]))
    assert all(relative_error(g, e) < 5e-4 for g, e in zip(got[1:], want[1:], strict=True))


def test_low_precision_with_every_option() -> None:
    for seed in range(60):
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 8e-4)):
            case = random_case(seed, leading=(3, 70), ignored="some")
            kwargs = arguments(case, dtype, seed, D=24, V=97)
            truth = in_float64(kwargs)
            loss, expected = linear_cross_entropy(**kwargs), oracle(**truth)
            names = [n for n in ("input", "linear_weight", "linear_bias") if kwargs[n] is not None]
            got = torch.autograd.grad(loss.sum(), [kwargs[n] for n in names])
            want = torch.autograd.grad(expected.sum(), [truth[n] for n in names])
            assert relative_error(loss, expected) < 1e-5
            assert all(relative_error(g, e) < tolerance for g, e in zip(got, want, strict=True)), case


@pytest.mark.parametrize("shape", [(0,), (2, 3, 0), (2, 0)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_hidden_states_of_size_zero(shape: tuple[int, ...], reduction: str, frozen: bool) -> None:
    x = torch.zeros(shape, requires_grad=True)
    w, b = torch.zeros(9, 0, requires_grad=not frozen), torch.rand(9, requires_grad=not frozen)
    y = torch.zeros(shape[:-1], dtype=torch.long)
    loss = linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction)
    torch.testing.assert_close(loss, oracle(x, w, y, linear_bias=b, reduction=reduction))
    loss.sum().backward()


def test_numbers_of_numpy() -> None:
    x, w, _, y = head(9, 4, 30)
    plain = linear_cross_entropy(x, w, y, softcap=3.0, num_items=7, logit_scale=0.5, label_smoothing=0.25)
    numpy = linear_cross_entropy(
        x,
        w,
        y,
        softcap=np.float32(3),
        num_items=np.int64(7),
        logit_scale=np.float64(0.5),
        label_smoothing=np.float32(0.25),
        ignore_index=np.int64(-100),
        options=HeadOptions(workspace_mib=np.int64(3)),
    )
    assert torch.equal(plain, numpy)


def test_reference_is_the_specification() -> None:
    """The library's own plain-PyTorch twin against F.cross_entropy: two independent ways of writing the loss."""
    for seed in range(60):
        kwargs = in_float64(arguments(random_case(seed), torch.float64, seed))
        torch.testing.assert_close(reference.linear_cross_entropy(**kwargs), oracle(**kwargs), equal_nan=True)


def test_the_same_bits_from_run_to_run() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, y = head(400, 32, 500, dtype=dtype)
        runs = []
        for _ in range(3):
            loss = linear_cross_entropy(x, w, y, linear_bias=b, options=HeadOptions(workspace_mib=0.1))
            runs.append((loss, *torch.autograd.grad(loss, (x, w, b))))
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype(dtype: torch.dtype) -> None:
    x, w, _, y = head(9, 4, 30)
    for kwargs in ({}, {"shift": True}, {"ignore_index": 2**40, "shift": True}):
        assert torch.equal(linear_cross_entropy(x, w, y.to(dtype), **kwargs), linear_cross_entropy(x, w, y, **kwargs))

"""linear_cross_entropy's own: numbers far out, float16 and its scaler, class weights, memory of its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lowtide import HeadOptions, linear_cross_entropy
from lowtide.head.terms import cross_entropy as terms
from lowtide.measure.allocations import track_allocations
from support import assert_near, gemm_flop, head, in_float64, oracle, relative_error

MIB = 2**20


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype(dtype: torch.dtype) -> None:
    x, w, _, y = head(9, 4, 30)
    for kwargs in ({}, {"shift": True}, {"ignore_index": 2**40, "shift": True}):
        assert torch.equal(linear_cross_entropy(x, w, y.to(dtype), **kwargs), linear_cross_entropy(x, w, y, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_skips_a_step_with_infinities_and_goes_on(dtype: torch.dtype) -> None:
    x, w, _, y = head(30, 8, 40, dtype=dtype, bias=False)
    master = w.detach().float().requires_grad_()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000, backoff_factor=2.0**-114)
    optimizer = torch.optim.SGD([master], lr=0.1)
    before = master.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = linear_cross_entropy(x, master, y, token_weight=torch.full((30,), 30.0 * 8))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(master.detach(), before) == (step == 0)
    truth = [t.detach().half().double().requires_grad_() for t in (x, before)]
    (want,) = torch.autograd.grad(oracle(*truth, y, token_weight=torch.full((30,), 240.0)), truth[1])
    assert relative_error(before - master.detach(), 0.1 * want) < 2e-3


def test_token_weight_and_class_weight_get_no_gradient() -> None:
    x, w, _, y = head(9, 5, 13)
    token_weight, weight = torch.rand(9, requires_grad=True), torch.rand(13, requires_grad=True)
    linear_cross_entropy(x, w, y, token_weight=token_weight, weight=weight).backward()
    assert token_weight.grad is None
    assert weight.grad is None


def test_gradients_that_are_stored_outlive_a_checkpoint() -> None:
    """There is nothing to compute a second time."""
    x, w, _, y = head(9, 5, 13)

    def step() -> None:
        checkpoint(lambda x: linear_cross_entropy(F.layer_norm(x, (5,)), w, y), x, use_reentrant=False).backward()

    assert gemm_flop(step) == [3 * 2 * 9 * 5 * 13]


def test_shift_copies_no_hidden_states() -> None:
    x, w, _, y = head((2, 4096), 64, 50)
    with torch.no_grad(), track_allocations() as seen:
        linear_cross_entropy(x, w, y, shift=True, options=HeadOptions(workspace_mib=0.5))
    assert seen.largest_bytes < x.nbytes / 4


def test_float32_weights_are_copied_to_no_wider_dtype() -> None:
    """bf16 operands give float32 logits without a float32 weight."""
    x, w, _, y = head(64, 256, 5000, dtype=torch.bfloat16)
    with torch.no_grad(), track_allocations() as seen:
        linear_cross_entropy(x, w, y, options=HeadOptions(workspace_mib=1))
    assert seen.peak_bytes < 1.0 * MIB < w.nbytes


@pytest.mark.parametrize("ignored_tokens", ["auto", "skip", "drop", "compute"])
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
def test_ignored_tokens_are_dropped_or_computed(
    ignored_tokens: Any, gradient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b, y = head((3, 7), 12, 40)
    y[torch.rand(3, 7) < 0.5] = -100
    y[0, :2] = torch.tensor([-100, 1])
    rows: list[int] = []
    plan = terms.plan_cross_entropy

    def counting(head: Any, args: Any, n: int, *more: Any) -> Any:
        rows.append(n)
        return plan(head, args, n, *more)

    monkeypatch.setattr(terms, "plan_cross_entropy", counting)
    options = HeadOptions(ignored_tokens=ignored_tokens, gradient=gradient)
    truth = in_float64({"input": x, "linear_weight": w, "target": y, "linear_bias": b})
    want = torch.autograd.grad(oracle(**truth), [truth[n] for n in ("input", "linear_weight", "linear_bias")])
    with torch.no_grad():
        x[y == -100] = torch.nan
    loss = linear_cross_entropy(x, w, y, linear_bias=b, options=options)
    assert b is not None
    assert_near(torch.autograd.grad(loss, (x, w, b)), want, 1e-5)
    assert {*rows} == {y.numel() if ignored_tokens == "compute" else int((y != -100).sum())}

"""linear_divergence reduced to one number, with gradients that forward stores; soft caps; against float64 logits."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from lowtide import HeadOptions, linear_divergence, plan_divergence
from lowtide.errors import LowtideError
from lowtide.head import graph, reference
from lowtide.head.terms import divergence as divergence_terms
from support import divergence_of, head, relative_error

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3), ("jsd", 0.0), ("tv", 0.5)]
TAILS = ("bucket", "renormalise", "drop")
CAPS = [(None, None), (1.5, None), (None, 0.7), (2.0, 3.0)]
SMALL = HeadOptions(workspace_mib=0.004)  # one row or two at a time
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5}
every_kind = pytest.mark.parametrize(("kind", "beta"), KINDS)


@pytest.fixture(params=["dropped", "computed as zeros"])
def rows_of_no_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways with rows that count for nothing, on the CPU: dropped as there, or computed as on other devices."""
    if request.param != "dropped":
        monkeypatch.setattr(divergence_terms, "drops_rows", lambda device: False)


def make(dtype: torch.dtype, leading: Any = (3, 5), D: int = 9, V: int = 23) -> tuple[list[Tensor], list[Tensor]]:
    student, teacher = head(leading, D, V, dtype=dtype), head(leading, 4, V, dtype=dtype, seed=1)
    return list(student[:3]), [t.detach() for t in teacher[:3]]


def capped_logits(side: list[Tensor], cap: float | None, temperature: float) -> Tensor:
    z = F.linear(*side)
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


def reduced(value: Tensor, mask: Tensor | None, reduction: str, num_items: float | None = None) -> Tensor:
    value = value if mask is None else value.masked_fill(~mask, 0)
    if reduction == "none":
        return value
    kept = value.numel() if mask is None else mask.sum()
    return value.sum() / (1 if reduction == "sum" else num_items or kept)


def call(student: list[Tensor], teacher: list[Tensor], **kwargs: Any) -> Tensor:
    (x, w, b), (tx, tw, tb) = student, teacher
    return linear_divergence(x, w, tx, tw, linear_bias=b, teacher_bias=tb, **kwargs)


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def check(value: Tensor, expected: Tensor, leaves: list[Tensor], true: list[Tensor], near: float, case: Any) -> None:
    assert value.shape == expected.shape
    assert relative_error(value, expected) <= near, case
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
    want = torch.autograd.grad(expected, true, upstream)
    for g, e, leaf in zip(got, want, leaves, strict=True):
        assert g.dtype == leaf.dtype
        assert (g.double() - e).norm() <= near * e.norm() + 100 * torch.finfo(value.dtype).eps * upstream.norm(), case


@every_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_option_with_every_reduction(kind: str, beta: float, dtype: torch.dtype, rows_of_no_use: None) -> None:
    student, teacher = make(dtype)
    some = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    small, large = (1.0, 0.7) if dtype == torch.float64 else (0.7, 1.0)  # the temperatures of chunks
    for case in itertools.product(("none", "sum", "mean"), (None, some), CAPS, ((small, SMALL), (large, None))):
        reduction, mask, caps, (temperature, options) = case
        value = call(
            student, teacher, kind=kind, beta=beta, mask=mask, temperature=temperature, reduction=reduction,
            softcap=caps[0], teacher_softcap=caps[1], options=options,
        )  # fmt: skip
        true = doubled(student)
        log_s, log_t = (
            capped_logits(side, cap, temperature).log_softmax(-1)
            for side, cap in zip((true, doubled(teacher)), caps, strict=True)
        )
        expected = reduced(divergence_of(log_s, log_t, kind, beta), mask, reduction)
        check(value, expected, student, true, TOLERANCE[dtype], case)


@every_kind
@pytest.mark.parametrize("tail", TAILS)
def test_a_teachers_top_k(kind: str, beta: float, tail: str, rows_of_no_use: None) -> None:
    (x, w, b), teacher = make(torch.float64)
    logprobs, ids = F.linear(*teacher).log_softmax(-1).topk(4)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    for reduction, cap, options in itertools.product(("none", "sum", "mean"), (None, 1.5), (None, SMALL)):
        value = linear_divergence(
            x, w, None, None, kind=kind, beta=beta, temperature=0.7, linear_bias=b, mask=mask, softcap=cap,
            teacher_topk=(ids, logprobs, tail), reduction=reduction, options=options,
        )  # fmt: skip
        true = doubled([x, w, b])
        log_s = capped_logits(true, cap, 0.7).log_softmax(-1)
        chosen, known = log_s.gather(-1, ids), logprobs
        if tail == "renormalise":
            chosen, known = chosen.log_softmax(-1), known.log_softmax(-1)
        elif tail == "bucket":
            rest = log_s.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
            chosen = torch.cat((chosen, rest), -1)
            known = torch.cat((known, torch.log1p(-known.exp().sum(-1, keepdim=True))), -1)
        expected = reduced(divergence_of(chosen, known, kind, beta), mask, reduction)
        check(value, expected, [x, w, b], true, 1e-9, (reduction, cap))


@every_kind
def test_gradcheck(kind: str, beta: float) -> None:
    student, teacher = make(torch.float64, (2, 4), 3, 7)
    torch.autograd.gradcheck(
        lambda *leaves: call(list(leaves), teacher, kind=kind, beta=beta, reduction="mean", softcap=1.3), student
    )


def test_the_reference_has_the_same_arguments() -> None:
    (x, w, b), (tx, tw, tb) = make(torch.float64)
    mask = torch.arange(15).view(3, 5) % 4 != 0
    for (kind, beta), caps, reduction in itertools.product(KINDS, CAPS, ("none", "sum", "mean")):
        for num_items in (None, 7.5) if reduction == "mean" else (None,):
            kwargs = {
                "kind": kind, "beta": beta, "temperature": 1.4, "linear_bias": b, "teacher_bias": tb, "mask": mask,
                "softcap": caps[0], "teacher_softcap": caps[1], "reduction": reduction, "num_items": num_items,
            }  # fmt: skip
            got, want = (f(x, w, tx, tw, **kwargs) for f in (linear_divergence, reference.linear_divergence))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("num_items", [7.5, torch.tensor(7.5)])
@pytest.mark.parametrize("gradient", ["auto", "recompute"])
def test_num_items_takes_the_denominators_place(num_items: Any, gradient: Any) -> None:
    student, teacher = make(torch.float64)
    mask = torch.arange(15).view(3, 5) % 4 != 0
    options = HeadOptions(gradient=gradient)
    mean = call(student, teacher, mask=mask, reduction="mean", num_items=num_items, options=options)
    total = call(student, teacher, mask=mask, reduction="sum", options=options)
    torch.testing.assert_close(mean, total / 7.5)
    got, want = torch.autograd.grad(mean, student), torch.autograd.grad(total, student)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e / 7.5)


@pytest.mark.parametrize("gradient", ["auto", "recompute"])
@pytest.mark.parametrize("N", [0, 4])
def test_nothing_counts(gradient: Any, N: int, rows_of_no_use: None) -> None:
    student, teacher = make(torch.float32, N)
    mask = torch.zeros(N, dtype=torch.bool)
    kwargs: dict[str, Any] = {"mask": mask, "options": HeadOptions(gradient=gradient)}
    assert call(student, teacher, reduction="mean", **kwargs).isnan()
    values = [
        call(student, teacher, reduction="sum", **kwargs),
        call(student, teacher, reduction="mean", num_items=3, **kwargs),
    ]
    assert [value.item() for value in values] == [0, 0]
    for value in (*values, call(student, teacher, reduction="mean", **kwargs)):
        assert all((g == 0).all() for g in torch.autograd.grad(value, student))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@every_kind
def test_masked_tokens_may_hold_anything(poison: float, kind: str, beta: float, rows_of_no_use: None) -> None:
    student, teacher = make(torch.float32)
    mask = torch.arange(15).view(3, 5) % 3 != 0
    results = []
    for bad in (0.0, poison):
        x, tx = (t.detach().masked_fill(~mask[..., None], bad) for t in (student[0], teacher[0]))
        leaves = [x.requires_grad_(), *student[1:]]
        value = call(leaves, [tx, *teacher[1:]], kind=kind, beta=beta, mask=mask, reduction="mean", softcap=3.0)
        results.append((value, *torch.autograd.grad(value, leaves)))
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)


@pytest.mark.parametrize("needed", [n for k in range(4) for n in itertools.combinations((0, 1, 2), k)])
def test_every_subset_of_inputs_frozen(needed: tuple[int, ...]) -> None:
    student, teacher = make(torch.float64)
    whole = torch.autograd.grad(call(student, teacher, kind="jsd", reduction="mean"), student)
    cut = [t.detach().requires_grad_(i in needed) for i, t in enumerate(student)]
    value = call(cut, teacher, kind="jsd", reduction="mean")
    assert value.requires_grad == bool(needed)
    if needed:
        value.backward()
    for i, (leaf, expected) in enumerate(zip(cut, whole, strict=True)):
        assert (leaf.grad is not None) == (i in needed)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected)


def flops(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(("x_needs", "w_needs"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("topk", [False, True])
def test_each_product_once(x_needs: bool, w_needs: bool, topk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "watched", lambda args: False)  # an operator's inside is hidden
    N, D, V = 40, 6, 70
    (x, w, _), (tx, tw, _) = make(torch.float32, N, D, V)
    x.requires_grad_(x_needs)
    w.requires_grad_(w_needs)
    logprobs, ids = (tx @ tw.T).log_softmax(-1).topk(3)
    teacher = (None, None) if topk else (tx, tw)
    known = (ids, logprobs) if topk else None
    values: list[Tensor] = []
    run = lambda: values.append(linear_divergence(x, w, *teacher, teacher_topk=known, reduction="mean"))  # noqa: E731
    of_student, of_teacher = 2 * N * D * V, 0 if topk else 2 * N * 4 * V
    assert flops(run) == of_student * (1 + x_needs + w_needs) + of_teacher
    assert flops(lambda: values[0].backward()) == 0
    with torch.no_grad():
        assert flops(run) == of_student + of_teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_retained_graph_gives_the_same_twice(dtype: torch.dtype) -> None:
    student, teacher = make(dtype)
    loss = call(student, teacher, kind="jsd", reduction="mean").sin() * 3
    first = torch.autograd.grad(loss, student, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)
    second, third = torch.autograd.grad(loss, student, retain_graph=True), torch.autograd.grad(loss, student)
    for k, s, t in zip(kept, second, third, strict=True):
        assert torch.equal(k, s)
        assert torch.equal(k, t)
    value = call(student, teacher, reduction="mean")
    value.backward()
    with pytest.raises(RuntimeError, match=r"linear_divergence: expected one backward.*retain_graph"):
        value.backward()


def test_a_second_derivative_is_an_error() -> None:
    student, teacher = make(torch.float32)
    (dx,) = torch.autograd.grad(call(student, teacher, reduction="sum"), student[0], create_graph=True)
    with pytest.raises(LowtideError, match="second derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    student, teacher = make(torch.float64)

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return call([F.layer_norm(x, (9,)), w, b], teacher, kind="reverse_kl", reduction="mean")

    checkpoint(block, *student, use_reentrant=reentrant).backward()
    for leaf, e in zip(student, torch.autograd.grad(block(*student), student), strict=True):
        torch.testing.assert_close(leaf.grad, e)


def test_a_selective_checkpoint_that_keeps_what_the_operator_returned() -> None:
    """Backward meets the stored gradients first, and may not scale in place what is then looked up again."""
    student, teacher = make(torch.float64)

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return call([F.layer_norm(x, (9,)), w, b], teacher, reduction="mean")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "lowtide" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with set_checkpoint_early_stop(False):  # else it stops before the operator, whose results nobody saves
        loss = 3 * checkpoint(block, *student, use_reentrant=False, context_fn=contexts)
        got = torch.autograd.grad(loss, student)
    for g, e in zip(got, torch.autograd.grad(3 * block(*student), student), strict=True):
        torch.testing.assert_close(g, e)


def test_nothing_counts_in_fp16() -> None:
    """Its gradients are divided by the number of tokens in backward: 0 by 0."""
    student, teacher = make(torch.float16)
    value = call(student, teacher, mask=torch.zeros(3, 5, dtype=torch.bool), reduction="mean")
    assert value.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(value, student))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_low_precision_errs_no_more_than_a_recomputed_gradient(kind: str, beta: float, dtype: torch.dtype) -> None:
    """Also fp16's, whose mean over many tokens would sink below its smallest numbers before a scaler has seen it."""
    student, teacher = make(dtype, 200, 24, 97)
    true = doubled(student)
    log_s, log_t = (F.linear(*side).log_softmax(-1) for side in (true, doubled(teacher)))
    scale, denominator = 2.0**16, 2.0**26 if dtype == torch.float16 else 200.0
    want = torch.autograd.grad(divergence_of(log_s, log_t, kind, beta).sum() / denominator * scale, true)
    errors = {}
    for gradient in ("forward", "recompute"):
        value = call(
            student, teacher, kind=kind, beta=beta, reduction="mean", num_items=denominator,
            options=HeadOptions(gradient=gradient, workspace_mib=0.1),
        )  # fmt: skip
        got = torch.autograd.grad(value * scale, student)
        errors[gradient] = [relative_error(g, e) for g, e in zip(got, want, strict=True)]
    for stored, recomputed in zip(errors["forward"], errors["recompute"], strict=True):
        assert stored <= 1.5 * recomputed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    student, teacher = make(torch.float32, 50, 24, 97)
    with torch.autocast("cpu", dtype=dtype):
        one = call(student, teacher, kind="jsd", reduction="sum", softcap=4.0)
        each = call(student, teacher, kind="jsd", softcap=4.0).sum()
    assert one.dtype == torch.float32
    torch.testing.assert_close(one, each)
    for g, e in zip(torch.autograd.grad(one, student), torch.autograd.grad(each, student), strict=True):
        assert g.dtype == torch.float32
        assert relative_error(g, e) < 1e-2


def test_a_value_for_each_token_with_a_frozen_head_and_gradients_in_forward() -> None:
    """Asked for by name; a token to which nothing flows back, or that is masked, has a gradient of 0 whatever it is."""
    (x, w, b), teacher = make(torch.float64, 6)
    frozen = [x, w.detach(), b.detach()]
    with torch.no_grad():
        x[2], teacher[0][4] = torch.nan, torch.inf
    mask = torch.tensor([True, True, True, True, True, False])
    upstream = torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0, 7.0], dtype=torch.float64)
    got, want = (
        torch.autograd.grad(
            call(frozen, teacher, kind="jsd", mask=mask, options=HeadOptions(gradient=gradient)), x, upstream
        )[0]
        for gradient in ("forward", "recompute")
    )
    assert got.isfinite().all()
    torch.testing.assert_close(got, want)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "avg"}, ValueError, "reduction: expected 'mean', 'sum' or 'none', got 'avg'"),
    ({"num_items": 3}, ValueError, "num_items: expected None with reduction='none', got 3. Only a mean is divided."),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items: expected None with reduction='sum'"),
    ({"num_items": 0, "reduction": "mean"}, ValueError, "num_items: expected a finite number above 0, got 0"),
    ({"num_items": "a", "reduction": "mean"}, TypeError, "num_items: expected a number"),
    ({"num_items": torch.ones(2), "reduction": "mean"}, ValueError, "num_items: expected a number or a 0-d tensor"),
    ({"softcap": 0}, ValueError, "softcap: expected a finite number above 0, got 0"),
    ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap: expected a finite number above 0, got -1.0"),
    ({"softcap": "a"}, TypeError, "softcap: expected a number, got 'a'"),
    (
        {"options": HeadOptions(gradient="forward")},
        RuntimeError,
        "gradient: expected 'auto' or 'recompute' with reduction='none' and a head that is trained, got 'forward'",
    ),
]


@pytest.mark.parametrize(("change", "kind", "text"), BAD, ids=lambda value: None)
def test_bad_input(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}") as caught:
        call(*make(torch.float32), **change)
    assert isinstance(caught.value, LowtideError)


def test_a_cap_of_a_teacher_that_is_not_here() -> None:
    (x, w, _), _ = make(torch.float32)
    known = (torch.zeros(3, 5, 1, dtype=torch.long), torch.zeros(3, 5, 1))
    with pytest.raises(LowtideError, match="teacher_softcap: expected None with teacher_topk, got a float"):
        linear_divergence(x, w, None, None, teacher_topk=known, teacher_softcap=3.0)


def test_the_plan_says_what_runs() -> None:
    sizes: tuple[Any, ...] = (8192, 2048, 128256, 4096, torch.bfloat16, "cuda")
    mean = plan_divergence(*sizes, reduction="mean")
    each = plan_divergence(*sizes)
    assert (mean.gradient, each.gradient, mean.backend) == ("forward", "recompute", "row")
    both_and_gradient = mean.product_rows * 8 * 128256 + mean.chunk_rows * 2 * 128256
    assert both_and_gradient < mean.scratch_bytes < 1.1 * both_and_gradient < 1.1 * 2**30
    assert "logits exist of" in str(mean)
    for mib in (64, 256, 1024):
        assert plan_divergence(*sizes, HeadOptions(workspace_mib=mib)).scratch_bytes <= mib * 2**20
    for N, chunks in ((0, 0), (1, 1), (383, 1), (1100, 2), (8193, 4), (9000, 4)):
        few = plan_divergence(N, *sizes[1:], reduction="mean")
        assert (few.chunks, few.product_rows) == (chunks, min(max(N, 1), 384))
        assert sum(part.stop - part.start for part in few.slices()) == N
    for mib in (1, 5.5):
        small = plan_divergence(*sizes, HeadOptions(workspace_mib=mib))
        assert f"in {small.scratch_bytes / 2**20:.2f} MiB" in small.note
    float32 = plan_divergence(*sizes, HeadOptions(accumulate="float32"))
    assert (mean.accumulator_bytes, float32.accumulator_bytes) == (0, 128256 * 2048 * 4)
    frozen = plan_divergence(*sizes, HeadOptions(gradient="forward", accumulate="float32"), weight_frozen=True)
    assert (frozen.gradient, frozen.accumulator_bytes) == ("forward", 0)
    assert plan_divergence(100, 8, 50, None, torch.float32, "cpu", topk=5).backend == "torch"
    for kwargs, text in (
        ({"topk": 3}, "teacher_D: expected a size without topk, None with it, got 4"),
        ({"teacher_V": -1}, "teacher_V: expected a size of 0 or more, got -1"),
        ({"reduction": "avg"}, "reduction: expected"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_divergence(10, 8, 50, 4, torch.float32, "cpu", **kwargs)

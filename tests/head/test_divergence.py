"""What is linear_divergence's own: its kinds' limits, vocabularies of two sizes, a teacher's top k, what it plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contract.cases import arguments
from fuzz.references import divergence_of
from lowtide import HeadOptions, TeacherTopK, linear_divergence, plan_divergence
from lowtide.measure.allocations import track_allocations
from support import assert_near, divergence_oracle, head, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.0), ("jsd", 1.0), ("tv", 0.5)]
REVERSE = [("reverse_kl", 0.5), ("jsd", 1.0)]
TAILS = ("bucket", "renormalise", "drop")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, in Triton's interpreter; on a GPU `tests/gpu` runs them as users do."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu runs this path")
    from head.kernel_plans import use_kernels

    use_kernels(monkeypatch)


def make(
    dtype: torch.dtype, leading: Any = (3, 5), D: int = 9, V: int = 23, U: int | None = None, teacher_D: int = 4
) -> tuple[list[Tensor], list[Tensor]]:
    student, teacher = head(leading, D, V, dtype=dtype), head(leading, teacher_D, U or V, dtype=dtype, seed=1)
    return list(student[:3]), [t.detach() for t in teacher[:3]]


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def call(
    student: list[Tensor], teacher: list[Tensor], function: Callable[..., Tensor] = linear_divergence, **kwargs: Any
) -> Tensor:
    (x, w, b), (tx, tw, tb) = student, teacher
    return function(x, w, tx, tw, linear_bias=b, teacher_bias=tb, **kwargs)


def check_gradients(
    value: Tensor, expected: Tensor, leaves: list[Tensor], true: list[Tensor], tolerance: float
) -> None:
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
    want = torch.autograd.grad(expected, true, upstream)
    for g, e, leaf in zip(got, want, leaves, strict=True):
        assert g.dtype == leaf.dtype
        assert relative_error(g, e) <= tolerance


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_limits_of_the_jsd_are_the_two_kls(kind: str) -> None:
    """At beta 0 and 1 the KLs themselves; on the way there, the jsd over beta (1 - beta)."""
    kwargs = arguments("linear_divergence", leading=(6,))
    end, near = (0.0, 1e-8) if kind == "forward_kl" else (1.0, 1 - 1e-8)
    kl = linear_divergence(**{**kwargs, "kind": kind})
    assert torch.equal(linear_divergence(**{**kwargs, "kind": "jsd", "beta": end}), kl)
    jsd = linear_divergence(**{**kwargs, "kind": "jsd", "beta": near})
    torch.testing.assert_close(jsd / (near * (1 - near)), kl, rtol=1e-4, atol=0)


def with_classes(side: list[Tensor], count: int) -> list[Tensor]:
    """Return a side with so many classes more, of no probability: exp(-60) is nothing, and finite."""
    x, w, b = side
    more = max(count, 0)
    return [x, torch.cat((w, w.new_zeros(more, w.shape[1]))), torch.cat((b, b.new_full((more,), -60.0)))]


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize(("V", "U"), [(61, 45), (45, 61)])
@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_classes_that_one_side_lacks_have_probability_zero(
    kind: str, beta: float, V: int, U: int, by: str, request: pytest.FixtureRequest
) -> None:
    dtype = torch.float64 if by == "torch" else torch.float32
    if by == "kernels":
        request.getfixturevalue("kernels")
    student, teacher = make(dtype, (2, 5), 24, V, U, teacher_D=16)
    value = call(student, teacher, kind=kind, beta=beta, options=HeadOptions(workspace_mib=0.001))
    true = doubled(student)
    wide, others = with_classes(true, U - V), with_classes(doubled(teacher), V - U)
    forward, reverse = ((kind, beta) in named for named in ([("forward_kl", 0.5), ("jsd", 0.0)], REVERSE))
    if (forward and U > V) or (reverse and V > U):
        assert (value == torch.inf).all()
        if forward:  # the gradient of what is there
            (dx,) = torch.autograd.grad(value.sum(), student[0])
            s, t = (F.linear(*side).softmax(-1) for side in (wide, others))
            assert relative_error(dx, (s - t)[..., :V] @ true[1]) < TOLERANCE[dtype]
        return
    expected = call(wide, others, divergence_oracle, kind=kind, beta=beta)
    assert relative_error(value, expected) < TOLERANCE[dtype]
    check_gradients(value, expected, student, true, TOLERANCE[dtype])


@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_classes_that_both_sides_rule_out(by: str, request: pytest.FixtureRequest) -> None:
    """-inf on both sides is 0 log 0 / 0, not NaN."""
    if by == "kernels":
        request.getfixturevalue("kernels")
    dtype = torch.float64 if by == "torch" else torch.float32
    x, w, b, _ = head(7, 5, 13, dtype=dtype)
    tx, tw, tb, _ = head(7, 6, 13, dtype=dtype, seed=1)
    with torch.no_grad():
        b[::3] = tb[::3] = -torch.inf
    allowed = [v for v in range(13) if v % 3]
    for kind, beta in KINDS:
        value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b, teacher_bias=tb)
        cut = (x, w[allowed], tx, tw[allowed])
        expected = divergence_oracle(*cut, kind=kind, beta=beta, linear_bias=b[allowed], teacher_bias=tb[allowed])
        assert relative_error(value, expected) < TOLERANCE[dtype]
        got, want = torch.autograd.grad(value.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w))
        assert_near(got, want, TOLERANCE[dtype])


def test_logits_far_apart_underflow_to_nothing() -> None:
    x, w, _, _ = head(5, 8, 40)
    tx, tw, _, _ = head(5, 8, 40, seed=1)
    x, tx = (60 * x.detach()).requires_grad_(), 60 * tx.detach()
    for kind, beta in KINDS:
        truth = [t.detach().double().requires_grad_() for t in (x, w, tx, tw)]
        value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
        log_s, log_t = (truth[0] @ truth[1].T).log_softmax(-1), (truth[2] @ truth[3].T).log_softmax(-1).detach()
        expected = divergence_of(log_s, log_t, kind, beta)
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.autograd.grad(value.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_student_close_to_its_teacher(kind: str, beta: float) -> None:
    """Log-probabilities around -10 hold 1e-6 of rounding, and the divergence is 5e-5: it must not drown."""
    tx, tw, _, _ = head(50, 32, 4000)
    x, w = tx.detach().clone(), (tw * (1 + 0.004 * torch.randn_like(tw))).detach().requires_grad_()
    truth = [t.detach().double().requires_grad_() for t in (x, w, tx, tw)]
    value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
    expected = divergence_oracle(*truth, kind=kind, beta=beta)
    assert (value >= 0).all()
    assert kind == "tv" or expected.mean() < 6e-5
    assert relative_error(value, expected) < 3e-3
    same = linear_divergence(tx, tw, tx, tw, kind=kind, beta=beta)
    assert (same.abs() < 1e-7).all()


@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_a_teacher_of_another_dtype(by: str, request: pytest.FixtureRequest) -> None:
    if by == "kernels":
        request.getfixturevalue("kernels")
    student, teacher = make(torch.float32)[0], make(torch.bfloat16)[1]
    true, wide = doubled(student), doubled(teacher)
    value, expected = call(student, teacher), call(true, wide, divergence_oracle)
    assert relative_error(value, expected) < 1e-5
    check_gradients(value, expected, student, true, 1e-5)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_top_k_of_everything_is_the_teacher_itself(tail: str, kind: str, beta: float, dtype: torch.dtype) -> None:
    x, w, b, _ = head(15, 9, 23, dtype=dtype)
    tx, tw, _, _ = head(15, 4, 23, dtype=dtype, seed=1)
    logprobs, ids = F.log_softmax(tx.detach() @ tw.detach().T, -1).topk(23)
    few = linear_divergence(
        x, w, None, None, kind=kind, beta=beta, linear_bias=b, teacher_topk=TeacherTopK(ids, logprobs, tail)
    )
    whole = linear_divergence(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b)
    torch.testing.assert_close(few, whole)
    check_gradients(few, whole, [x, w, b], [x, w, b], 1e-5)


def test_ids_that_the_student_lacks() -> None:
    x, w, _, _ = head(4, 5, 7, dtype=torch.float64)
    ids = torch.tensor([[0, 9], [1, 2], [3, 7], [6, 5]])
    logprobs = torch.full((4, 2), 0.4, dtype=torch.float64).log()
    kl = linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs))
    assert (kl.isinf() == torch.tensor([True, False, True, False])).all()
    tv = linear_divergence(x, w, None, None, kind="tv", teacher_topk=(ids, logprobs, "drop"))
    s = (x @ w.T).softmax(-1)
    torch.testing.assert_close(tv[0], (s[0, 0] - 0.4).abs() / 2 + 0.2)
    assert torch.autograd.grad(tv.sum(), x)[0].isfinite().all()


def test_the_default_of_a_plain_tuple_is_the_bucket() -> None:
    x, w, _, _ = head(4, 5, 7)
    ids, logprobs = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.4).log()
    results = [
        linear_divergence(x, w, None, None, teacher_topk=t) for t in ((ids, logprobs), (ids, logprobs, "bucket"))
    ]
    assert torch.equal(*results)
    assert torch.equal(linear_divergence(x, w, None, None, teacher_topk=TeacherTopK(ids, logprobs)), results[0])


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


def test_a_value_for_each_token_with_a_frozen_head_and_gradients_in_forward() -> None:
    """Asked for by name; a token to which nothing flows back, or that is masked, has a gradient of 0 whatever it is."""
    (x, w, b), teacher = make(torch.float64, 6)
    frozen = [x, w.detach(), b.detach()]
    with torch.no_grad():
        x[2], teacher[0][4] = torch.nan, torch.inf
    mask = torch.tensor([True, True, True, True, True, False])
    upstream = torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0, torch.inf], dtype=torch.float64)
    got, want = (
        torch.autograd.grad(
            call(frozen, teacher, kind="jsd", mask=mask, options=HeadOptions(gradient=gradient)), x, upstream
        )[0]
        for gradient in ("forward", "recompute")
    )
    assert got.isfinite().all()
    torch.testing.assert_close(got, want)


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
    float32 = plan_divergence(*sizes, HeadOptions(accumulate="float32"))
    assert (mean.accumulator_bytes, float32.accumulator_bytes) == (0, 128256 * 2048 * 4)
    assert plan_divergence(100, 8, 50, None, torch.float32, "cpu", topk=5).backend == "torch"
    for kwargs, text in (
        ({"topk": 3}, "teacher_D: expected a size without topk, None with it, got 4"),
        ({"teacher_V": -1}, "teacher_V: expected a size of 0 or more, got -1"),
        ({"reduction": "avg"}, "reduction: expected"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_divergence(10, 8, 50, 4, torch.float32, "cpu", **kwargs)


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "none"), (torch.bfloat16, "mean")])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_the_workspace_is_kept_beside_a_larger_teacher(kind: str, dtype: torch.dtype, reduction: str) -> None:
    (x, w, b), (tx, tw, _, _) = make(dtype, (7, 8), 48, 4099)[0], head((7, 8), 64, 5001, dtype=dtype, seed=1)
    sizes = (56, 48, 4099, tx.shape[-1], dtype, "cpu", HeadOptions(workspace_mib=1))
    plan = plan_divergence(*sizes, teacher_V=5001, reduction=reduction)
    with track_allocations() as seen:
        value = linear_divergence(
            x, w, tx, tw, kind=kind, linear_bias=b, options=HeadOptions(workspace_mib=1), reduction=reduction,
            softcap=5.0, teacher_softcap=4.0, temperature=1.3,
        )  # fmt: skip
        value.sum().backward()
    beyond = seen.peak_bytes - sum(t.grad.nbytes for t in (x, w, b)) - plan.accumulator_bytes - plan.cast_bytes
    assert max(beyond, plan.scratch_bytes) <= 2**20


def test_vectors_of_any_strides(kernels: None) -> None:
    """An expanded upstream gradient, mask and bias have one number in memory, a column of a matrix every other one."""
    (x, w, b), (tx, tw, tb) = make(torch.float32, (2, 5), 24, 61, teacher_D=16)
    mask = torch.ones(1, dtype=torch.bool)
    strided = torch.stack((b.detach(), tb), 1)
    kwargs = {"linear_bias": strided[:, 0], "teacher_bias": b.new_full((1,), 0.7).expand(61)}
    got = linear_divergence(x, w, tx, tw, mask=mask.expand(2, 5), **kwargs)
    want = linear_divergence(x, w, tx, tw, linear_bias=b.detach(), teacher_bias=torch.full((61,), 0.7))
    assert torch.equal(got, want)
    flat = linear_divergence(x.view(10, 24), w, tx.view(10, 16), tw, mask=mask.expand(10), **kwargs)
    assert torch.equal(flat, want.view(10))
    ones = torch.autograd.grad(want, (x, w), torch.ones(2, 5))
    for g, e in zip(torch.autograd.grad(flat.sum(), (x, w)), ones, strict=True):
        assert torch.equal(g, e)

"""What is linear_divergence's own: its kinds' limits, vocabularies of two sizes, a teacher's top k, what it plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contract.cases import KINDS
from contract.references import divergence_of
from head.kernel_plans import use_kernels
from lowtide import HeadOptions, linear_divergence, plan_divergence
from promises import promise
from support import assert_same_gradients, divergence_oracle, doubled, head, relative_error

pytestmark = [promise("options"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
REVERSE = [("reverse_kl", 0.5), ("jsd", 1.0)]


@pytest.fixture(params=["torch", "kernels"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.dtype, float]:
    """What computes, plain PyTorch or the kernels in Triton's interpreter: in which dtype, and how near."""
    if request.param == "torch":
        return torch.float64, 1e-11
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu runs this path")
    use_kernels(monkeypatch)
    return torch.float32, 2e-5


def with_classes(w: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias with so many classes more, of no probability: exp(-60) is nothing, and finite."""
    more = max(count, 0)
    return torch.cat((w, w.new_zeros(more, w.shape[1]))), torch.cat((b, b.new_full((more,), -60.0)))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize(("V", "U"), [(61, 45), (45, 61)])
def test_classes_that_one_side_lacks_have_probability_zero(
    kind: str, beta: float, V: int, U: int, by: tuple[torch.dtype, float]
) -> None:
    dtype, near = by
    (x, w, b, _), (tx, tw, tb, _) = head((2, 5), 24, V, dtype=dtype), head((2, 5), 16, U, dtype=dtype, seed=1)
    options = HeadOptions(workspace_mib=0.001)
    given: dict[str, Any] = {"kind": kind, "beta": beta}
    value = linear_divergence(x, w, tx, tw, linear_bias=b, teacher_bias=tb, options=options, **given)
    true, others = doubled(x, w, b), doubled(tx, tw, tb)
    wide, teacher = with_classes(*true[1:], U - V), with_classes(*others[1:], V - U)
    forward, reverse = (kind, beta) in [("forward_kl", 0.5), ("jsd", 0.0)], (kind, beta) in REVERSE
    if (forward and U > V) or (reverse and V > U):
        assert (value == torch.inf).all()
        if forward:  # the gradient of what is there
            (dx,) = torch.autograd.grad(value.sum(), x)
            s, t = F.linear(true[0], *wide).softmax(-1), F.linear(others[0], *teacher).softmax(-1)
            assert relative_error(dx, (s - t)[..., :V] @ true[1]) < near
        return
    sides = true[0], wide[0], others[0], teacher[0]
    expected = divergence_oracle(*sides, linear_bias=wide[1], teacher_bias=teacher[1], **given)
    assert relative_error(value, expected) < near
    assert_same_gradients(value, expected, (x, w, b), true, near, torch.randn_like(expected))


def test_classes_that_both_sides_rule_out(by: tuple[torch.dtype, float]) -> None:
    """-inf on both sides is 0 log 0 / 0, not NaN."""
    dtype, near = by
    (x, w, b, _), (tx, tw, tb, _) = head(7, 5, 13, dtype=dtype), head(7, 6, 13, dtype=dtype, seed=1)
    with torch.no_grad():
        b[::3] = tb[::3] = -torch.inf
    allowed = [v for v in range(13) if v % 3]
    for kind, beta in KINDS:
        value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta, linear_bias=b, teacher_bias=tb)
        cut = (x, w[allowed], tx, tw[allowed])
        expected = divergence_oracle(*cut, kind=kind, beta=beta, linear_bias=b[allowed], teacher_bias=tb[allowed])
        assert relative_error(value, expected) < near
        assert_same_gradients(value.sum(), expected.sum(), (x, w), bound=near)


@promise("values")
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.usefixtures("by")
def test_logits_far_apart_and_a_student_close_to_its_teacher(kind: str, beta: float) -> None:
    """Log-probabilities around -10 hold 1e-6 of rounding, and the divergence is 5e-5: it must not drown."""
    x, w, tx, tw = (t.detach() for t in (*head(5, 8, 40)[:2], *head(5, 8, 40, seed=1)[:2]))
    x, tx = (60 * x).requires_grad_(), 60 * tx
    value = linear_divergence(x, w, tx, tw, kind=kind, beta=beta)
    logs = ((a.double() @ b.double().T).log_softmax(-1) for a, b in ((x, w), (tx, tw)))
    torch.testing.assert_close(value.double(), divergence_of(*logs, kind, beta), rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(value.sum(), x)[0].isfinite().all()

    tx, tw, _, _ = head(30, 32, 2000)
    w = (tw * (1 + 0.004 * torch.randn_like(tw))).detach()
    value = linear_divergence(tx, w, tx, tw, kind=kind, beta=beta)
    expected = divergence_oracle(*doubled(tx, w, tx, tw), kind=kind, beta=beta)
    assert (value >= 0).all()
    assert kind == "tv" or expected.mean() < 1e-4
    assert relative_error(value, expected) < 3e-3
    assert (linear_divergence(tx, tw, tx, tw, kind=kind, beta=beta).abs() < 1e-7).all()


@promise("dtypes")
def test_a_teacher_of_another_dtype(by: tuple[torch.dtype, float]) -> None:
    (x, w, b, _), (tx, tw, tb, _) = head((3, 5), 9, 23), head((3, 5), 4, 23, dtype=torch.bfloat16, seed=1)
    value = linear_divergence(x, w, tx, tw, linear_bias=b, teacher_bias=tb)
    true, (dtx, dtw, dtb) = doubled(x, w, b), doubled(tx, tw, tb)
    expected = divergence_oracle(true[0], true[1], dtx, dtw, linear_bias=true[2], teacher_bias=dtb)
    assert relative_error(value, expected) < 1e-5
    assert_same_gradients(value, expected, (x, w, b), true, 1e-5)


def test_ids_that_the_student_lacks_and_a_plain_tuple() -> None:
    x, w, _, _ = head(4, 5, 7, dtype=torch.float64)
    ids = torch.tensor([[0, 9], [1, 2], [3, 7], [6, 5]])
    logprobs = torch.full((4, 2), 0.4, dtype=torch.float64).log()
    kl = linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs))
    assert (kl.isinf() == torch.tensor([True, False, True, False])).all()
    assert torch.equal(kl, linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs, "bucket")))
    tv = linear_divergence(x, w, None, None, kind="tv", teacher_topk=(ids, logprobs, "drop"))
    s = (x @ w.T).softmax(-1)
    torch.testing.assert_close(tv[0], (s[0, 0] - 0.4).abs() / 2 + 0.2)
    assert torch.autograd.grad(tv.sum(), x)[0].isfinite().all()


def test_no_gradient_goes_to_the_teacher() -> None:
    x, w, _, _ = head(9, 5, 13, dtype=torch.float64)
    tx, tw, tb, _ = head(9, 4, 13, dtype=torch.float64, seed=1)
    linear_divergence(x, w, tx, tw, teacher_bias=tb).sum().backward()
    assert x.grad is not None
    assert tx.grad is tw.grad is tb.grad is None
    assert not linear_divergence(x.detach(), w.detach(), tx, tw).requires_grad
    own = linear_divergence(x, w, x * 2, w)  # self-distillation: the weight is on both sides
    want = divergence_oracle(x, w, (x * 2).detach(), w.detach())
    assert_same_gradients(own.sum(), want.sum(), [w], bound=1e-10)


@promise("plans")
def test_the_plan_says_what_runs() -> None:
    sizes: tuple[Any, ...] = (8192, 2048, 128256, 4096, torch.bfloat16, "cuda")
    mean, each = plan_divergence(*sizes, reduction="mean"), plan_divergence(*sizes)
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
    ):
        with pytest.raises(ValueError, match=text):
            plan_divergence(10, 8, 50, 4, torch.float32, "cpu", **kwargs)

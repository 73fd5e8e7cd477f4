"""linear_divergence's kernels from hidden states to gradients, by Triton's interpreter, against float64 autograd.

On a GPU `tests/gpu` runs them as users do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from distributed.pair_cases import input_grad, weight_grad
from lowtide import HeadOptions, linear_divergence
from lowtide.errors import LowtideError
from lowtide.head.backends import choose, why_not_row
from lowtide.head.engine import Chunks
from lowtide.head.plan import HeadPlan, plan_of
from lowtide.head.planner import Work
from lowtide.head.terms import divergence as divergence_terms
from support import divergence_of, divergence_oracle, head, relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2), ("tv", 0.5)]
CAPS = {"softcap": 2.5, "teacher_softcap": 1.5}
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of gradients


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels on the CPU, in chunks of 7 rows, with products that the CPU has; rows of no use computed as zeros."""
    used: list[str] = []
    make = divergence_terms.plan_both_sides

    def plans(head: Any, args: Any, n: int, wanted: Any, *, stored: bool) -> tuple[HeadPlan, HeadPlan]:
        found = make(head, args, n, wanted, stored=stored)
        used.append(found[0].backend)
        narrow = head.dtype != torch.float32
        gemms: dict[str, Any] = {"logits_gemm": "same", "backward_gemm": "same"}
        if narrow:
            gemms = {"logits_gemm": "blocks", "backward_gemm": "narrow"}
        rows = {"chunk_rows": 7, "chunks": -(-n // 7), "product_rows": 3 if narrow and any(wanted) else 7}
        changed = {"backend": "row", "block_rows": 11, **rows, **gemms}
        of_teacher = {**changed, "logits_gemm": "same" if args.teacher_dtype == torch.float32 else "blocks"}
        return replace(found[0], **changed), replace(found[1], **of_teacher)

    monkeypatch.setattr(divergence_terms, "plan_both_sides", plans)
    monkeypatch.setattr(divergence_terms, "drops_rows", lambda device: False)
    monkeypatch.setattr(divergence_terms, "Dense", None)  # nothing else may run
    monkeypatch.setattr(Chunks, "input_grad", input_grad)
    monkeypatch.setattr(Chunks, "weight_grad", weight_grad)
    return used


def case(
    dtype: torch.dtype, *, bias: bool = True, V: int = 61, U: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    x, w, b, _ = head((2, 5), 24, V, dtype=dtype, bias=bias)
    tx, tw, tb, _ = head((2, 5), 16, U or V, dtype=dtype, seed=1, bias=bias)
    return [t for t in (x, w, b) if t is not None], [t.detach() for t in (tx, tw, tb) if t is not None]


def call(student: list[Tensor], teacher: list[Tensor], function: Any = linear_divergence, **kwargs: Any) -> Tensor:
    value: Tensor = function(
        *student[:2],
        *teacher[:2],
        linear_bias=student[2] if len(student) > 2 else None,
        teacher_bias=teacher[2] if len(teacher) > 2 else None,
        **kwargs,
    )
    return value


@pytest.mark.parametrize(
    ("dtype", "bias", "temperature"),
    [(torch.float32, True, 0.5), *((dtype, *rest) for dtype in NEAR for rest in ((False, 1.0), (True, "tensor")))],
)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_values_and_gradients(
    dtype: torch.dtype, bias: bool, temperature: Any, kind: str, beta: float, kernels: list[str]
) -> None:
    student, teacher = case(dtype, bias=bias)
    kwargs = {
        "kind": kind,
        "beta": beta,
        "temperature": torch.tensor(1.7) if temperature == "tensor" else temperature,
        "mask": torch.arange(10).view(2, 5) % 4 != 1,
    }
    true = [t.detach().double().requires_grad_() for t in student]
    expected = call(true, [t.double() for t in teacher], divergence_oracle, **kwargs)
    value = call(student, teacher, **kwargs)
    assert kernels
    assert value.dtype == torch.float32
    assert relative_error(value, expected) < 1e-5
    upstream = torch.randn(2, 5)
    upstream[1, 2:5] = 0
    got = torch.autograd.grad(value, student, upstream)
    want = torch.autograd.grad(expected, true, upstream.double())
    rounding = 10 * torch.finfo(torch.float32).eps * upstream.norm().item()  # of terms that may all but cancel
    for g, e, leaf in zip(got, want, student, strict=True):
        assert g.dtype == leaf.dtype
        assert relative_error(g, e) < NEAR[dtype] + rounding / e.norm().item()


@pytest.mark.parametrize(
    ("dtype", "caps", "gradient"),
    [
        (torch.float32, {}, "auto"),
        (torch.float32, CAPS, "recompute"),
        (torch.bfloat16, {}, "recompute"),
        (torch.bfloat16, CAPS, "auto"),
        (torch.float16, {}, "auto"),
        (torch.float16, CAPS, "auto"),
        (torch.float16, CAPS, "recompute"),
    ],
)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_one_number(dtype: torch.dtype, caps: dict[str, float], gradient: Any, kind: str, beta: float) -> None:
    student, teacher = case(dtype)
    mask = torch.arange(10).view(2, 5) % 4 != 1
    common = {"kind": kind, "beta": beta, "temperature": 1.3, "options": HeadOptions(gradient=gradient), **caps}
    value = call(student, teacher, mask=mask, reduction="mean", **common)
    true = [t.detach().double().requires_grad_() for t in student]
    logps = []
    for (x, w, b), cap in ((true, "softcap"), ([t.double() for t in teacher], "teacher_softcap")):
        z = torch.nn.functional.linear(x, w, b)
        logps.append(((caps[cap] * torch.tanh(z / caps[cap]) if caps else z) / 1.3).log_softmax(-1))
    expected = divergence_of(*logps, kind, beta)[mask].mean()
    assert relative_error(value, expected) < 1e-5
    got, want = torch.autograd.grad(3 * value, student), torch.autograd.grad(3 * expected, true)
    for g, e, leaf in zip(got, want, student, strict=True):
        assert g.dtype == leaf.dtype
        assert relative_error(g, e) < NEAR[dtype]
    nothing = call(student, teacher, mask=mask & ~mask, reduction="mean", **common)
    assert nothing.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(nothing, student))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("dtype", NEAR)
def test_some_gradients_alone(wanted: tuple[int, ...], dtype: torch.dtype) -> None:
    student, teacher = case(dtype)
    whole = torch.autograd.grad(call(student, teacher, kind="jsd").sum(), student)
    cut = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(student)]
    got = torch.autograd.grad(call(cut, teacher, kind="jsd").sum(), [cut[i] for i in wanted])
    for i, g in zip(wanted, got, strict=True):
        assert torch.equal(g, whole[i])


def test_vectors_of_any_strides() -> None:
    """An expanded upstream gradient, mask and bias have one number in memory, a column of a matrix every other one."""
    (x, w, b), (tx, tw, tb) = case(torch.float32)
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


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize(("V", "U"), [(61, 45), (45, 61)])
def test_vocabularies_of_different_sizes(kind: str, beta: float, V: int, U: int) -> None:
    if (kind == "forward_kl" and U > V) or (kind == "reverse_kl" and V > U):
        pytest.skip("infinite")
    student, teacher = case(torch.float32, V=V, U=U)
    value = call(student, teacher, kind=kind, beta=beta)
    impossible = torch.full((abs(V - U),), -60.0, dtype=torch.float64)  # exp(-60) is nothing, and finite
    true = [t.detach().double().requires_grad_() for t in student]
    wide, others = list(true), [t.double() for t in teacher]
    short = wide if V < U else others
    short[1] = torch.cat((short[1], short[1].new_zeros(len(impossible), short[1].shape[1])))
    short[2] = torch.cat((short[2], impossible))
    expected = call(wide, others, divergence_oracle, kind=kind, beta=beta)
    assert relative_error(value, expected) < 2e-5
    upstream = torch.randn(2, 5)
    got = torch.autograd.grad(value, student, upstream)
    want = torch.autograd.grad(expected, true, upstream.double())
    for g, e in zip(got, want, strict=True):
        assert relative_error(g, e) < 2e-5


@pytest.mark.parametrize(("dtype", "poison"), [*((dtype, torch.nan) for dtype in NEAR), (torch.float32, torch.inf)])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_what_does_not_count_may_hold_anything(kind: str, beta: float, dtype: torch.dtype, poison: float) -> None:
    student, teacher = case(dtype)
    mask = torch.arange(10).view(2, 5) % 3 != 0
    upstream = torch.ones(2, 5)
    upstream[0, 1] = 0  # this one counts in forward, and nothing flows back to it
    results = []
    for bad in (0.0, poison):
        x, tx = student[0].detach().clone(), teacher[0].clone()
        x[~mask], tx[~mask], x[0, 1] = bad, bad, bad
        leaves = [x.requires_grad_(), *student[1:]]
        value = call(leaves, [tx, *teacher[1:]], kind=kind, beta=beta, mask=mask)
        results.append((value[mask & (upstream != 0)], *torch.autograd.grad(value, leaves, upstream)))
        assert (value[~mask] == 0).all()
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)


def test_no_tokens() -> None:
    x, w, b, _ = head(0, 24, 61)
    tx, tw, _, _ = head(0, 16, 61, seed=1)
    value = linear_divergence(x, w, tx, tw, linear_bias=b)
    assert value.shape == (0,)
    assert all((g == 0).all() for g in torch.autograd.grad(value.sum(), (x, w, b)))


def test_a_teacher_of_another_dtype() -> None:
    (x, w), (tx, tw) = case(torch.float32, bias=False)
    tx, tw = tx.bfloat16(), tw.bfloat16()
    value = linear_divergence(x, w, tx, tw)
    expected = divergence_oracle(x.double(), w.double(), tx.double(), tw.double())
    assert relative_error(value, expected) < 1e-5


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("asked", ["auto", "row", "torch"])
@pytest.mark.parametrize(
    ("device", "dtype", "topk", "against"),
    [
        (CUDA, torch.bfloat16, False, None),
        (CUDA, torch.float16, False, None),
        (CUDA, torch.float32, False, None),
        (CUDA, torch.float64, False, "computes in float32"),
        (CUDA, torch.bfloat16, True, "top k"),
        (CPU, torch.bfloat16, False, "NVIDIA GPUs"),
    ],
)
def test_which_backend_runs(
    asked: Any, device: torch.device, dtype: torch.dtype, topk: bool, against: str | None
) -> None:
    options, row = HeadOptions(backend=asked), why_not_row(device, dtype, 100, topk=topk)
    if asked == "row" and against:
        with pytest.raises(LowtideError, match=f"backend: expected 'auto' or 'torch', got 'row'.*{against}"):
            choose("divergence", options, row=row)
        return
    backend, reason = choose("divergence", options, row=row)
    assert backend == ("torch" if asked == "torch" or against else "row")
    assert (against or "") in reason or asked == "torch"
    with pytest.raises(LowtideError, match="backend: expected 'auto', 'row' or 'torch', got 'exp'"):
        choose("divergence", HeadOptions(backend="exp"), row=row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_plan_leaves_room_for_more_rows(dtype: torch.dtype) -> None:
    """Beside both sides' logits nothing of the vocabulary's width is there, so that a chunk has more rows."""
    V, U, D = 32000, 32100, 256
    plans = {}
    for backend in ("row", "torch"):
        work = Work(
            size=(65536, D, V), dtype=dtype, weight_dtype=dtype, device=CUDA, choice=(backend, ""), gradient="forward",
            weight_frozen=False, teacher=(D, U, dtype), options=HeadOptions(workspace_mib=600),
        )  # fmt: skip
        plans[backend], other = plan_of(work), plan_of(work, of_teacher=True)
        assert other.backend == plans[backend].backend == backend
        assert plans[backend].scratch_bytes <= 600 * 2**20
    row = plans["row"]
    assert row.chunk_rows >= 1.25 * plans["torch"].chunk_rows
    narrow = 0 if dtype == torch.float32 else row.chunk_rows * dtype.itemsize * V
    assert row.product_rows * 4 * (V + U) + narrow < row.scratch_bytes
    assert row.product_rows == row.chunk_rows if dtype == torch.float32 else 2 * row.product_rows <= row.chunk_rows
    assert row.backward_gemm == ("same" if dtype == torch.float32 else "narrow")


@pytest.mark.parametrize("factor", [2.0**-14, 1.0, 2.0**16])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_fp16_gradients_for_any_factor(reduction: str, factor: float) -> None:
    """Neither what multiplies the hidden states nor what is stored leaves fp16's range before the factor has come."""
    x, w, _, _ = head(10, 8, 33, dtype=torch.float16)
    teacher = torch.randn(10, 8).half()
    with torch.no_grad():
        x /= 2**12 if factor > 1 else 1
    value = linear_divergence(x, w, teacher, w.detach() / 2, temperature=0.25, reduction=reduction).sum()
    got = torch.autograd.grad(value * factor, (x, w))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    true = divergence_oracle(*exact, teacher.double(), w.detach().double() / 2, temperature=0.25).sum()
    for g, t in zip(got, torch.autograd.grad(true * factor, exact), strict=True):
        if t.abs().max() < 6e4:
            assert relative_error(g, t) < NEAR[torch.float16] + relative_error(t.half(), t)

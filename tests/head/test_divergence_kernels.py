"""linear_divergence's kernels from hidden states to gradients, by Triton's interpreter, against float64 autograd.

On a GPU `tests/gpu` runs them as users do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from head.kernel_plans import use_kernels
from lowtide import HeadOptions, linear_divergence
from lowtide.errors import LowtideError
from lowtide.head.backends import choose, why_not_row
from lowtide.head.plan import plan_of
from lowtide.head.planner import Work
from support import divergence_oracle, head, relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2), ("tv", 0.5)]
CAPS = {"softcap": 2.5, "teacher_softcap": 1.5}
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of gradients


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


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

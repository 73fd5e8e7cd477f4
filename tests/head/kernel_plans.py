"""The head by its Triton kernels where there is no GPU: in the interpreter, in chunks as small as a test's matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide.head.apply as face
from lowtide.head import divergence, token_stats
from lowtide.head.call import Gradients, Head, gradient_buffers
from lowtide.head.engine import Chunks
from lowtide.head.plan import HeadPlan
from lowtide.head.terms import cross_entropy
from lowtide.head.terms.divergence import Dense

CHUNK = 7  # rows


def use_kernels(patched: pytest.MonkeyPatch, schedule: str = "chunks", *, skips: bool = True) -> list[str]:
    """Have every call run by kernels, as on a GPU; return the list that gets each plan's backend.

    With ``skips`` as on Hopper: the exponential path's kernels end before ignored tokens, which are last.

    Float32 has the exponential path (in bfloat16 the interpreter's products are wrong), in that ``schedule``, and
    what it cannot do the row kernels. Buffers for gradients are full of NaN.
    """
    from lowtide.head.exponentials import losses
    from lowtide.head.kernels import gemm, gradient_gemms_hopper

    config = gemm.GemmConfig(rows=16, columns=32, depth=16, group=2, stages=1, warps=4)
    used: list[str] = []
    of_loss, of_stats, of_pair, of_apply = (
        cross_entropy.plan_cross_entropy, token_stats.plan_token_stats, divergence.plan_both_sides, face.plan_head,
    )  # fmt: skip

    def small(plan: HeadPlan, backend: str, dtype: torch.dtype, of_kind: str = schedule) -> HeadPlan:
        used.append(backend)
        narrow, blocks = dtype != torch.float32, of_kind == "blocks"
        gemms: dict[str, Any] = {
            "logits_gemm": "blocks" if narrow else "same", "backward_gemm": "narrow" if narrow else "same",
        }  # fmt: skip
        rows = {"chunk_rows": CHUNK, "chunks": -(-plan.rows // CHUNK), "block_rows": 11, "piece_rows": 3}
        if backend == "exp":
            return replace(
                plan, backend="exp", accumulate="input", schedule=of_kind, columns=24 if blocks else 10**6,
                product_rows=CHUNK if blocks else 3, **rows,
            )  # fmt: skip
        return replace(plan, backend=backend, **rows, **gemms)

    def loss_plan(head: Any, args: Any, n: int, wanted: Any, known: bool = False) -> HeadPlan:
        exp = head.dtype == torch.float32 and not (head.softcap is not None and args.label_smoothing)
        exp &= args.mask is None
        plan = of_loss(head, args, n, wanted, known)
        if not (exp or head.ranks.alone):
            return plan
        plan = small(plan, "exp" if exp else "row", head.dtype, "blocks" if known else schedule)
        if head.ranks.spread:
            return of_all_parts(plan, head.ranks.size)
        return plan if head.ranks.alone or not skips else replace(plan, product_rows=CHUNK)

    def of_all_parts(plan: HeadPlan, ranks: int) -> HeadPlan:
        """As many rows of each rank's part, in both passes alike: two chunks of two pieces."""
        rows = 2 * ranks
        pieces = rows if plan.schedule == "blocks" else ranks
        return replace(plan, chunk_rows=rows, product_rows=pieces, chunks=-(-plan.rows // rows))

    def pair_plans(head: Any, args: Any, n: int, wanted: Any, *, stored: bool) -> tuple[HeadPlan, HeadPlan]:
        student, teacher = of_pair(head, args, n, wanted, stored=stored)
        if args.teacher_weight is None or not head.ranks.alone:
            return student, teacher
        pieces = 3 if head.dtype != torch.float32 and any(wanted) else CHUNK
        student = replace(small(student, "row", head.dtype), product_rows=pieces)
        return student, replace(student, logits_gemm=small(teacher, "row", args.teacher_dtype).logits_gemm)

    def of_ranks(head: Head, *args: Any) -> Dense:
        assert not head.ranks.alone  # nothing but kernels may run
        return Dense(head, *args)

    def apply_plan(N: int, D: int, V: int, dtype: torch.dtype, *args: Any, **kwargs: Any) -> HeadPlan:
        return small(of_apply(N, D, V, dtype, *args, **kwargs), "torch", dtype)

    def stats_plan(head: Any, *args: Any) -> HeadPlan:
        plan = of_stats(head, *args)
        exp = head.dtype == torch.float32 and args[0].mask is None
        plan = small(plan, "exp", head.dtype, "blocks") if exp else plan
        return of_all_parts(plan, head.ranks.size) if exp and head.ranks.spread else plan

    def poisoned(*args: Any, **kwargs: Any) -> Gradients:
        into = gradient_buffers(*args, **kwargs)
        for buffer in (into.input_ND if args[1].index is None else None, into.weight_VD):
            if buffer is not None and args[2].chunks:
                buffer.fill_(torch.nan)
        return into

    patched.setattr(cross_entropy, "plan_cross_entropy", loss_plan)
    patched.setattr(token_stats, "plan_token_stats", stats_plan)
    patched.setattr(divergence, "plan_both_sides", pair_plans)
    patched.setattr(divergence, "Dense", of_ranks)
    patched.setattr(face, "plan_head", apply_plan)
    for module in (cross_entropy, token_stats, divergence):
        patched.setattr(module, "gradient_buffers", poisoned)
    patched.setattr(Head, "drops_tokens", False)
    for module in (cross_entropy, divergence):
        patched.setattr(module, "looks_at_numbers", lambda device: False)
    for module in (cross_entropy, token_stats):
        patched.setattr(
            module, "skips_tokens", lambda head, backend: skips and backend == "exp" and not head.ranks.spread
        )
    patched.setattr(cross_entropy, "ROWS_OF_STEP", CHUNK)
    patched.setattr(gradient_gemms_hopper, "input_grad", skipping_input_grad)
    patched.setattr(gradient_gemms_hopper, "weight_grad", skipping_weight_grad)
    patched.setattr(losses, "room_for", lambda *_: None)
    patched.setattr(gemm, "CONFIG", config)
    patched.setattr(Chunks, "input_grad", input_grad)
    patched.setattr(Chunks, "weight_grad", weight_grad)
    return used


def counted(used: Any, C: int) -> int:
    """Return how many of C rows are used."""
    return C if used.number is None else max(0, min(C, used.number.item() - used.first))


def skipping_input_grad(e_CV: Tensor, w_VD: Tensor, ends: Any, room: Any, used: Any) -> None:
    """Do what `gradient_gemms_hopper.input_grad` does; it is for Hopper's instructions."""
    rows, D = counted(used, len(e_CV)), w_VD.shape[1]
    product = e_CV[:rows] @ w_VD
    if ends.before is not None:
        product += ends.before[:rows]
    if ends.s is not None:
        lost, own = ends.rest[:rows, None], ends.w[ends.y[:rows].clamp(0, len(w_VD) - 1).long()]
        s = ends.s[:rows, None]
        product = ((product + torch.where(lost == 0, 0, lost * own)) * s).where(s != 0, 0)
    out = ends.out.as_strided((len(ends.out), D), (ends.out_stride, 1))
    out[slice(0, rows) if ends.to is None else ends.to[:rows]] = product.to(out.dtype)


def skipping_weight_grad(e_CV: Tensor, scaled_CD: Tensor, out_VD: Tensor, used: Any, *, add: bool) -> None:
    """Do what its `weight_grad` does, whose last step of 64 rows reads some that are not used: E is 0, S finite."""
    rows = counted(used, len(e_CV))
    read = slice(rows, -(-rows // 64) * 64)
    assert not e_CV[read].any()
    assert scaled_CD[read].isfinite().all()
    product = e_CV[:rows].T @ scaled_CD[:rows]
    out_VD.copy_(out_VD + product if add else product)


def input_grad(chunks: Chunks, g_CV: Tensor, factor_C: Tensor | None, out_CD: Tensor) -> None:
    """Narrow operands, a wide product: as on a GPU."""
    product = g_CV.float() @ chunks.weight_VD.float()
    out_CD.copy_(product if factor_C is None else product * factor_C[:, None])


def weight_grad(
    chunks: Chunks, g_CV: Tensor, factor_C: Tensor | None, x_CD: Tensor, total_VD: Tensor, first: bool
) -> None:
    x = (x_CD if factor_C is None else x_CD * factor_C[:, None]).to(g_CV.dtype)
    if first:
        total_VD.zero_()
    total_VD += g_CV.float().T @ x.float()


def use_set_kernels(patched: pytest.MonkeyPatch) -> list[str]:
    """Have sets of classes scored by kernels, in tiles of a few pairs and columns; return the list of those called.

    Float32 as above; another dtype's operands are rounded to float32 instead.
    """
    from lowtide.head import support
    from lowtide.head.kernels import support_rows

    used = list[str]()

    def counted(name: str) -> None:
        function = getattr(support_rows, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            used.append(name)
            return function(*args, **kwargs)

        patched.setattr(support_rows, name, call)

    for name in ("score", "input_grad", "weight_grad"):
        counted(name)
        patched.setattr(support_rows, name.upper(), (4, 16))
    patched.setattr(support_rows, "RUN", 4)
    patched.setattr(support, "support_backend", lambda head: ("row" if head.dtype == torch.float32 else "torch", ""))
    return used

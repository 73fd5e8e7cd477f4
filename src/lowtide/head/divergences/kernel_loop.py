"""`linear_divergence` on NVIDIA GPUs: between a chunk's products one kernel a direction, for a teacher's own head.

C rows of the chunk, V the student's vocabulary, U the teacher's. The kernels: `kernels.pair_rows`.
"""

import torch
from torch import Tensor

from lowtide.head.divergences.rows import DivergenceJob, Teacher, teacher_rows
from lowtide.head.divergences.terms import RowNumbers
from lowtide.head.gradients import Gradients, put_input_grad
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.kernels.exp_rows import add_column_sums
from lowtide.head.kernels.pair_rows import Logits, pair_gradient, pair_rows, pair_value_and_gradient
from lowtide.head.matmul import HeadMatmul
from lowtide.head.scaling import FP16_LIFT, factor_lift


class KernelPair:
    """Both directions of a chunk, as `TorchPair` has them; logits wide in float32."""

    def __init__(self, job: DivergenceJob, teacher: Teacher, plan: HeadPlan, teacher_plan: HeadPlan) -> None:
        self.job, self.teacher, self.plan = job, teacher, plan
        self.matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
        self.teacher_matmul = HeadMatmul(teacher.weight_VD, teacher_plan, teacher.dtype, job.wide)
        self.logits = Logits(job.bias_V, teacher.bias_V, job.scale, job.softcap, teacher.softcap)
        rows, V = plan.product_rows if plan.chunks else 0, padded(job.weight_VD.shape[0])
        self._buffer = job.input.new_empty(rows, V, dtype=job.wide)
        self._teacher_buffer = job.input.new_empty(rows, padded(teacher.weight_VD.shape[0]), dtype=job.wide)
        self._lift: Tensor | None = None
        self._narrow: Tensor | None = None  # a chunk's gradient; a wide one takes the logits' place

    def forward(self, x_CD: Tensor, index: Tensor | None, part: slice, kept_C: Tensor | None) -> RowNumbers:
        """Return the chunk's divergences, and what backward needs to know of its rows."""
        z_CV, teacher_CU = self._products(x_CD, index, part, kept_C)
        return pair_rows(z_CV, teacher_CU, self.job.kind, self.logits, kept_C=kept_C)

    def expect(self, factor: Tensor) -> None:
        """Choose the power of two by which fp16 factors of the hidden states are scaled up."""
        if self.job.dtype == torch.float16:
            self._lift = FP16_LIFT * factor_lift(factor, self.job.scale)

    def backward(
        self,
        x_CD: Tensor,
        rows: RowNumbers | None,
        factor_C: Tensor,
        into: Gradients,
        index: Tensor | None,
        part: slice,
        kept_C: Tensor | None,
    ) -> Tensor:
        """Add a chunk's part to ``into`` and return its values: see `Pair.backward`."""
        job = self.job
        factor_C = factor_C.contiguous()  # the upstream gradient of a sum is one number, expanded
        half = job.dtype == torch.float16
        lift_C = torch.empty_like(factor_C) if half else None
        narrow = job.dtype != job.wide
        if narrow and self._narrow is None:
            self._narrow = self._buffer.new_empty(self.plan.chunk_rows, self._buffer.shape[1], dtype=job.dtype)
        value_C, g_CV = self._gradient(x_CD, rows, factor_C, lift_C, index, part, kept_C)
        outside = factor_C if narrow else None
        if lift_C is not None:
            outside = factor_C * lift_C
        if into.bias_V is not None:
            add_column_sums(g_CV, torch.ones_like(factor_C) if outside is None else outside, into.bias_V)
        if into.input_ND is not None:
            put_input_grad(self.matmul, g_CV, outside, into, index, part)
        if into.weight_VD is not None:
            raised = outside if self._lift is None or outside is None else outside * self._lift
            self.matmul.weight_grad(g_CV, raised, x_CD, into.weight_VD, part.start == 0)
        return value_C

    def _gradient(
        self,
        x_CD: Tensor,
        rows: RowNumbers | None,
        factor_C: Tensor,
        lift_C: Tensor | None,
        index: Tensor | None,
        part: slice,
        kept_C: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's values and the gradient of its logits, both sides' products having existed in pieces."""
        C, V = x_CD.shape[0], self.job.weight_VD.shape[0]
        values, g_CV = [], (self._buffer if self._narrow is None else self._narrow)[:C, :V]
        for start in range(0, C, self.plan.product_rows):
            piece = slice(start, min(start + self.plan.product_rows, C))
            kept = None if kept_C is None else kept_C[piece]
            of_all = slice(part.start + piece.start, part.start + piece.stop)
            products = self._products(x_CD[piece], index, of_all, kept)
            factor = factor_C[piece] if self._narrow is None else None
            lift = None if lift_C is None else lift_C[piece]
            if rows is None:
                values.append(
                    pair_value_and_gradient(
                        *products, g_CV[piece], self.job.kind, self.logits, kept_C=kept, factor_C=factor, lift_C=lift
                    )
                )
            else:
                known = RowNumbers(*(x[piece] for x in rows))
                pair_gradient(
                    *products, g_CV[piece], known, self.job.kind, self.logits,
                    kept_C=kept, factor_C=factor, lift_C=lift,
                )  # fmt: skip
        return (torch.cat(values) if rows is None else rows.value), g_CV

    def finish(self, into: Gradients) -> None:
        """Take back, after the last chunk, by how much what multiplied x was raised."""
        if into.weight_VD is not None and self._lift is not None:
            into.weight_VD.div_(self._lift)

    def _products(
        self, x_CD: Tensor, index: Tensor | None, part: slice, kept_C: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return both sides' hidden states times their weights, which is all that is done to them here."""
        C = x_CD.shape[0]
        z_CV = self._buffer[:C, : self.job.weight_VD.shape[0]]
        teacher_CU = self._teacher_buffer[:C, : self.teacher.weight_VD.shape[0]]
        self.matmul.logits(x_CD, z_CV)
        self.teacher_matmul.logits(teacher_rows(self.teacher, index, part, kept_C), teacher_CU)
        return z_CV, teacher_CU

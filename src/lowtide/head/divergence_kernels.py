"""`linear_divergence` on NVIDIA GPUs: between a chunk's products one kernel a direction, for a teacher's own head.

C rows of the chunk, V the student's vocabulary, U the teacher's. The kernels: `kernels.pair_rows`.
"""

import torch
from torch import Tensor

from lowtide.head.divergence_rows import DivergenceJob, Teacher, teacher_rows
from lowtide.head.divergence_terms import RowNumbers
from lowtide.head.kernels.exp_rows import add_column_sums
from lowtide.head.kernels.pair_rows import pair_gradient_, pair_rows
from lowtide.head.matmul import HeadMatmul, narrow_view
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.schedules import FP16_LIFT, KERNEL_GRADIENT, Gradients, put_input_grad


class KernelPair:
    """Both directions of a chunk, as `TorchPair` has them; logits wide in float32."""

    def __init__(self, job: DivergenceJob, teacher: Teacher, plan: HeadPlan, teacher_plan: HeadPlan) -> None:
        self.job, self.teacher = job, teacher
        self.matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
        self.teacher_matmul = HeadMatmul(teacher.weight_VD, teacher_plan, teacher.dtype, job.wide)
        rows = plan.chunk_rows if plan.chunks else 0
        self._buffer = job.input.new_empty(rows, padded(job.weight_VD.shape[0]), dtype=job.wide)
        self._teacher_buffer = job.input.new_empty(rows, padded(teacher.weight_VD.shape[0]), dtype=job.wide)

    def forward(self, x_CD: Tensor, index: Tensor | None, part: slice, kept_C: Tensor | None) -> RowNumbers:
        """Return the chunk's divergences, and what backward needs to know of its rows."""
        job = self.job
        z_CV, teacher_CU = self._products(x_CD, index, part, kept_C)
        return pair_rows(
            z_CV,
            teacher_CU,
            job.kind,
            bias_V=job.bias_V,
            teacher_bias_U=self.teacher.bias_V,
            scale=job.scale,
            kept_C=kept_C,
        )

    def backward(
        self,
        x_CD: Tensor,
        rows: RowNumbers,
        factor_C: Tensor,
        into: Gradients,
        index: Tensor | None,
        part: slice,
        kept_C: Tensor | None,
    ) -> None:
        """Add a chunk's part to ``into``: see `TorchPair.backward`."""
        job, factor_C = self.job, factor_C.contiguous()  # the upstream gradient of a sum is one number, expanded
        z_CV, teacher_CU = self._products(x_CD, index, part, kept_C)
        narrow = job.dtype != job.wide
        half = job.dtype == torch.float16
        lift_C = torch.empty_like(rows.lse) if half else None
        pair_gradient_(
            z_CV,
            teacher_CU,
            rows,
            job.kind,
            gradient=KERNEL_GRADIENT[job.dtype],
            bias_V=job.bias_V,
            teacher_bias_U=self.teacher.bias_V,
            scale=job.scale,
            kept_C=kept_C,
            factor_C=None if narrow else factor_C,
            lift_C=lift_C,
        )
        outside = factor_C if narrow else None
        if lift_C is not None:
            outside = factor_C * lift_C
        g_CV = narrow_view(z_CV, job.dtype) if narrow else z_CV
        if into.bias_V is not None:
            counts = torch.ones_like(rows.lse) if outside is None else outside
            add_column_sums(g_CV, counts, into.bias_V)
        if into.input_ND is not None:
            put_input_grad(self.matmul, g_CV, outside, into.input_ND, index, part)
        if into.weight_VD is not None:
            # an fp16 gradient is stored so much too large; what multiplies x must not be as much too small
            raised = outside * FP16_LIFT if half and outside is not None else outside
            self.matmul.weight_grad(g_CV, raised, x_CD, into.weight_VD, part.start == 0)

    def finish(self, into: Gradients) -> None:
        """Take back, after the last chunk, by how much what multiplied x was raised."""
        if into.weight_VD is not None and self.job.dtype == torch.float16:
            into.weight_VD.mul_(1 / FP16_LIFT)

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

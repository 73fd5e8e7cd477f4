"""Cross entropy by unnormalised exponentials: two GEMMs a chunk beside the one that makes them, and thin kernels.

The GEMM that would write logits z writes E = exp(z - t) instead, t the target's logit, and its row sums r. Then
loss = log1p(r), and with s = g / (1 + r) and E_y = -r the gradients are dX = diag(s) (E W) and dW = E^T (diag(s) X):
see `kernels.exp_rows` for all the options, and docs/algorithm.md for the reasons.

Two schedules: with a chunk's E over the whole vocabulary, three GEMMs (6NDV operations); or row sums first, and E once
more in blocks of the vocabulary, four (8NDV), where memory is too short for chunks of enough rows, or where the
upstream gradient is known in backward only. Names: N tokens, C rows of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.blocks import aligned_rows, matmul_into, operand_rows, rebuild_in_blocks, slices
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.rows import take_rows
from lowtide.head.schedules import CrossEntropyJob, Rows

Settle = Callable[[], tuple[Tensor, Gradients]]


class ExpHead:
    """One call of the exponential path: what all its chunks share.

    Args:
        job: The call.
        rows: Its rows, all N of them.
        plan: Chunks and blocks.
    """

    def __init__(self, job: CrossEntropyJob, rows: Rows, plan: HeadPlan) -> None:
        from lowtide.head.kernels import configs, exp_logits, exp_logits_hopper, exp_rows, gemm

        self.job, self.rows, self.plan = job, rows, plan
        self.gemm, self.thin = exp_logits, exp_rows
        device = job.input.device
        self.programs = gemm.multiprocessors(device)
        self.transform = gemm.LogitTransform(job.bias_V, job.logit_scale, job.softcap)
        self.hopper = exp_logits_hopper if self.transform.is_plain and exp_logits_hopper.runs_on(device) else None
        self.config = (
            configs.GemmConfig(columns=exp_logits_hopper.COLUMNS.value) if self.hopper else configs.of_device(device)
        )
        self.weight_VD = operand_rows(job.weight_VD, job.dtype)
        V = self.weight_VD.shape[0]
        self.tiles = gemm.tiles_across(V, self.config)
        self.y_N = rows.target
        q = job.terms.class_weight
        self.total = None if q is None else q.sum()
        smoothing = job.terms.label_smoothing
        self.terms = exp_rows.RowTerms(
            bias_V=job.bias_V,
            scale=job.logit_scale,
            softcap=job.softcap,
            class_weight_V=q,
            total_class_weight=self.total,
            smoothing=smoothing,
            z_loss=job.terms.z_loss,
            uniform_D=_weighted_sum(q, self.weight_VD) if smoothing else None,
            uniform_bias=self._uniform_bias() if smoothing else None,
        )
        C = max(1, plan.chunk_rows, plan.sum_rows)
        self._numbers = torch.empty(7, C, dtype=torch.float32, device=device)
        self._integers = torch.empty(2, C, dtype=torch.int32, device=device)
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def run(self, loss_N: Tensor, settle: Settle | None, lse_N: Tensor, miss_N: Tensor) -> None:
        """Compute losses [N], logsumexps and ``lse - t``; with ``settle`` also the gradients.

        Args:
            loss_N: Takes the losses, token weights not applied.
            settle: Makes each row's factor [N] and the buffers for the gradients. It is called when the first GEMM is
                under way: the host should not keep the device waiting.
            lse_N: Takes the logsumexps.
            miss_N: Takes what the target's logits are below them.
        """
        if settle is not None and self.plan.schedule == "chunks":
            self._three_products(loss_N, settle, lse_N, miss_N)
            return
        self._sums(loss_N, lse_N, miss_N)
        if settle is not None:
            self.rebuild(*settle(), lse_N, miss_N)

    def _sums(self, loss_N: Tensor, lse_N: Tensor, miss_N: Tensor) -> None:
        """Row sums alone: one GEMM whose result is never stored."""
        rows = self.plan.sum_rows
        sums = self._sum_buffer(rows)
        for part in slices(self.plan.rows, rows):
            x_CD = self._input(part)
            y_C, reports = self.y_N[part], self._reports(part, loss_N, lse_N, miss_N)
            self.thin.target_logits(x_CD, self.weight_VD, y_C, reports, self.terms)
            self._exponentials(x_CD, self.weight_VD, reports.target_logit, y_C, sum_CP=sums)
            self._finish(sums, x_CD, y_C, None, reports)

    def _three_products(self, loss_N: Tensor, settle: Settle, lse_N: Tensor, miss_N: Tensor) -> None:
        job, plan = self.job, self.plan
        V, D = self.weight_VD.shape
        new = job.input.new_empty
        sums = self._sum_buffer(plan.chunk_rows)
        e_buffer = new(plan.chunk_rows, padded(V), dtype=job.dtype)
        factor_N: Tensor | None = None
        scaled: Tensor | None = None
        product: Tensor | None = None
        into, begun = Gradients(), False
        for part in plan.slices():
            C = part.stop - part.start
            x_CD, y_C = self._input(part), self.y_N[part]
            reports = self._reports(part, loss_N, lse_N, miss_N)
            e_CV = e_buffer[:C, :V]
            self.thin.target_logits(x_CD, self.weight_VD, y_C, reports, self.terms)
            self._exponentials(x_CD, self.weight_VD, reports.target_logit, y_C, sum_CP=sums, e_CV=e_CV)
            if factor_N is None:
                factor_N, into = settle()
                begun = self._begin_weight_grad(factor_N, into)
                scaled = None if into.weight_VD is None else new(plan.chunk_rows, D, dtype=job.dtype)
                product = None if into.input_ND is None else new(plan.product_rows, D, dtype=torch.float32)
            g_C = factor_N[part]
            scaled_CD = None if scaled is None else scaled[:C]
            self._finish(sums, x_CD, y_C, g_C, reports, e_CV=e_CV, scaled_CD=scaled_CD)
            if product is not None and into.input_ND is not None:
                self._input_grad(e_CV, product, into.input_ND[part], y_C, g_C, reports)
            if scaled_CD is not None and into.weight_VD is not None:
                matmul_into(e_CV.t(), scaled_CD, into.weight_VD, add=begun)
            if into.bias_V is not None:
                self.thin.add_column_sums(e_CV, reports.s, into.bias_V)
            begun = True
        if factor_N is None:  # there are no tokens
            self._begin_weight_grad(*settle())

    def rebuild(self, factor_N: Tensor, into: Gradients, lse_N: Tensor, miss_N: Tensor) -> None:
        """Compute the gradients from what `run` left, each row's loss multiplied with ``factor_N``.

        E once more, a block of the vocabulary at a time, normalised: its rows' sums are known.
        """
        begun = self._begin_weight_grad(factor_N, into)
        rebuild_in_blocks(_Rebuild(self, factor_N, lse_N, miss_N), self.plan, self.weight_VD, into, begun=begun)

    def _exponentials(
        self,
        x_CD: Tensor,
        w_VD: Tensor,
        reference_C: Tensor,
        y_C: Tensor,
        *,
        sum_CP: Tensor | None = None,
        e_CV: Tensor | None = None,
        coefficient_C: Tensor | None = None,
        first_class: int = 0,
    ) -> None:
        if self.hopper is not None:
            self.hopper.exp_logits_hopper(
                x_CD, w_VD, reference_C, y_C, self.programs, sum_CP=sum_CP, e_CV=e_CV, coefficient_C=coefficient_C,
                first_class=first_class,
            )  # fmt: skip
            return
        transform = self.transform.of_classes(slice(first_class, first_class + w_VD.shape[0]))
        self.gemm.exp_logits(
            x_CD, w_VD, reference_C, y_C, self.config, self.programs, transform=transform, sum_CP=sum_CP, e_CV=e_CV,
            coefficient_C=coefficient_C, first_class=first_class,
        )  # fmt: skip

    def _finish(
        self,
        sums: Tensor,
        x_CD: Tensor,
        y_C: Tensor,
        factor_C: Tensor | None,
        reports: Any,
        *,
        e_CV: Tensor | None = None,
        scaled_CD: Tensor | None = None,
    ) -> None:
        """Finish the rows; then do those again whose sums left the safe range, whose number the host never learns."""
        V, terms = self.weight_VD.shape[0], self.terms
        self.thin.finish_rows(sums, self.tiles, x_CD, y_C, factor_C, reports, terms, V, e_CV=e_CV, scaled_CD=scaled_CD)
        self.gemm.shifted_exp_logits(
            x_CD, self.weight_VD, reports.listed, reports.count, reports.highest, y_C, self.config, self.programs,
            sum_CP=sums, transform=self.transform, e_CV=e_CV,
        )  # fmt: skip
        self.thin.finish_rows(
            sums, self.tiles, x_CD, y_C, factor_C, reports, terms, V, e_CV=e_CV, scaled_CD=scaled_CD, shifted=True
        )

    def _input_grad(
        self, e_CV: Tensor, product: Tensor, out_CD: Tensor, y_C: Tensor, factor_C: Tensor, reports: Any
    ) -> None:
        """Write a chunk's gradient, as many rows at a time as ``product`` has."""
        of_rows = (e_CV, out_CD, y_C, reports.s, reports.rest, factor_C)
        for piece in slices(len(e_CV), len(product)):
            e, out, y, s, rest, g = of_rows if len(e_CV) <= len(product) else (x[piece] for x in of_rows)
            product_CD = product[: len(e)]
            matmul_into(e, self.weight_VD, product_CD, add=False)
            self.thin.finish_input_grad(product_CD, out, self.weight_VD, y, s, rest, g, self.terms)

    def _begin_weight_grad(self, factor_N: Tensor, into: Gradients) -> bool:
        """Put smoothing's part, the same for every row of logits, into the weight's and the bias's gradient.

        Returns:
            bool: Whether the weight's gradient holds something to be added to.
        """
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        if not self.terms.smoothing or not self.plan.chunks:
            return False
        factor_N = factor_N.where(self.y_N >= 0, 0)  # where nothing is kept the others are 0 / 0
        mean_D = torch.zeros(self.weight_VD.shape[1], dtype=torch.float32, device=factor_N.device)
        if into.weight_VD is not None:
            for part in self.plan.slices():
                self.thin.add_column_sums(self._input(part), factor_N[part], mean_D)
        put_even_part(self.terms, self.weight_VD.shape[0], factor_N.sum(), mean_D, into, self.job.dtype)
        return into.weight_VD is not None

    def _uniform_bias(self) -> Tensor:
        bias, q = self.job.bias_V, self.job.terms.class_weight
        if bias is None:
            return torch.zeros((), dtype=torch.float32, device=self.weight_VD.device)
        return bias.sum() if q is None else bias @ q

    def _input(self, part: slice) -> Tensor:
        """Return the chunk's hidden states in the operands' dtype, as TMA takes them."""
        return aligned_rows(take_rows(self.job.input, self.rows.index, part, self.job.dtype))

    def _reports(self, part: slice, loss_N: Tensor, lse_N: Tensor, miss_N: Tensor) -> Any:
        C = part.stop - part.start
        if C not in self._views:  # chunks have few lengths: the host makes the views of each once
            self._views[C] = (
                *self._numbers[:4, :C].unbind(), *self._integers[:, :C].unbind(),
                self._numbers[4, :1].view(torch.int32),
            )  # fmt: skip
        target, uniform, s, rest, highest, listed, count = self._views[C]
        return self.thin.Reports(
            target_logit=target, uniform_logit=uniform, loss=loss_N[part], lse=lse_N[part], miss=miss_N[part], s=s,
            rest=rest, highest=highest, listed=listed, count=count,
        )  # fmt: skip

    def _sum_buffer(self, rows: int) -> Tensor:
        return self.job.input.new_empty(max(1, rows), self.tiles, dtype=torch.float32)


class _Rebuild:
    """E for known sums: `Rebuilt` for cross entropy."""

    def __init__(self, head: ExpHead, factor_N: Tensor, lse_N: Tensor, miss_N: Tensor) -> None:
        self.head, self.factor_N, self.lse_N, self.miss_N = head, factor_N, lse_N, miss_N

    def begin(self, part: slice, scaled: Tensor | None) -> Tensor:
        head, C = self.head, part.stop - part.start
        self.part, self.x_CD, self.y_C = part, head._input(part), head.y_N[part]
        self.reports = head._reports(part, self.lse_N, self.lse_N, self.miss_N)
        self.reference_C, self.coefficient_C = head._numbers[5, :C], head._numbers[6, :C]
        head.thin.prepare_rows(
            self.lse_N[part], self.miss_N[part], self.x_CD, self.y_C, self.factor_N[part], self.reference_C,
            self.coefficient_C, self.reports, head.terms, head.weight_VD.shape[0], scaled_CD=scaled,
        )  # fmt: skip
        s_C: Tensor = self.reports.s
        return s_C

    def fill(self, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        self.head._exponentials(
            self.x_CD, w_BD, self.reference_C, self.y_C, e_CV=e_CB, coefficient_C=self.coefficient_C,
            first_class=first_class,
        )  # fmt: skip

    def finish(self, product_CD: Tensor, out_CD: Tensor) -> None:
        head, reports, factor_C = self.head, self.reports, self.factor_N[self.part]
        head.thin.finish_input_grad(
            product_CD, out_CD, head.weight_VD, self.y_C, reports.s, reports.rest, factor_C, head.terms
        )


def put_even_part(
    terms: Any, V: int, factor: Tensor, mean_D: Tensor, into: Gradients, dtype: torch.dtype, *, add: bool = False
) -> None:
    """Put what label smoothing takes from every class alike into the gradients: m (a / V) q times sums over rows.

    Args:
        terms: The loss, a `RowTerms`.
        V: Classes by which its smoothing is divided.
        factor: The sum of the rows' factors.
        mean_D: The sum of the hidden states times these, where the weight gets a gradient.
        into: Takes the gradients.
        dtype: Of the operands.
        add: Whether it is added to what ``weight_VD`` holds, which is overwritten otherwise.
    """
    q = terms.class_weight_V
    share = -terms.smoothing / V * (1.0 if terms.scale is None else terms.scale)
    if into.bias_V is not None:
        into.bias_V += factor * share if q is None else factor * share * q
    if into.weight_VD is not None:
        _outer(q, mean_D * share, into.weight_VD, dtype, add=add)


def _pieces(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of ``dtype`` that add up to ``x`` (float32), to all the digits that float32 has."""
    if dtype == x.dtype:
        return [x]
    first = x.to(dtype)
    second = (x - first.float()).to(dtype)
    return [first, second, (x - first.float() - second.float()).to(dtype)]


def _weighted_sum(q_V: Tensor | None, w_VD: Tensor) -> Tensor:
    """Return ``sum_v q_v w_v`` in float32, without a float32 copy of the weight."""
    V, D = w_VD.shape
    if not V:  # a rank without classes
        return w_VD.new_zeros(D, dtype=torch.float32)
    if q_V is None:
        weights = w_VD.new_ones(1, V)
    else:
        weights = torch.stack(_pieces(q_V, w_VD.dtype))
    out = w_VD.new_empty(len(weights), D, dtype=torch.float32)
    matmul_into(weights, w_VD, out, add=False)
    return out.sum(0)


def _outer(q_V: Tensor | None, x_D: Tensor, out_VD: Tensor, dtype: torch.dtype, *, add: bool) -> None:
    """Write or add ``q x^T`` to ``out_VD``, without a float32 copy of it: products of ``dtype``, summed in float32."""
    right = _pieces(x_D, dtype)
    if q_V is None:
        left = [x_D.new_ones(out_VD.shape[0], dtype=dtype)] * len(right)
    else:
        parts = _pieces(q_V, dtype)
        pairs = [(i, j) for i in range(len(parts)) for j in range(len(right)) if i + j < 3]
        left, right = [parts[i] for i, _ in pairs], [right[j] for _, j in pairs]
    matmul_into(torch.stack(left, 1), torch.stack(right), out_VD, add=add)

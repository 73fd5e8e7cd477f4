"""The loop over chunks of logits, for every function of them, on one rank and on many.

N tokens, n rows computed, C rows of a chunk, D hidden size, V vocabulary, V_r classes of it on this rank.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head, matmul_into
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.rows import Rows, slices

Numbers = dict[str, Tensor]
UpstreamOf = Callable[[Numbers, slice], Any]
_PRECISION = threading.Lock()  # held by who has changed the precision of the process


class Terms:
    """What is computed of a chunk of logits; a new function of them is one such class.

    ``z`` holds a chunk's logits [C, V_r], and where the vocabulary is sharded one more column, -inf, for the classes of
    other ranks. ``part`` are the chunk's rows among the n.
    """

    # of kernels and of what works beside its logits; a plain term leaves all of these:
    narrowed = False  # whether `gradient_` leaves the operands' dtype, in the first half of each row
    apart = False  # whether the gradient, in the operands' dtype, takes other memory than the logits': ``out``
    out: Tensor | None = None  # that memory, of the rows at hand: there may be logits of some of a chunk's rows only
    spare = False  # whether ``z`` always has that column more
    raw = False  # whether ``z`` is ``x @ w.T`` alone: a kernel adds the bias, scales and caps it itself
    lift: Tensor | None = None  # what the weight's gradient is multiplied with until the last chunk, for fp16
    mask: Callable[[Tensor, slice], object] | None = None  # writes -inf over logits of classes that rows lack

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return numbers of each row [C, ...], the same on every rank.

        ``z`` is left as it is for `gradient_`; where `both_` is overridden, nothing calls that after this.
        """
        raise NotImplementedError

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Any) -> Tensor | None:
        """Replace logits by the gradient with respect to ``x @ w.T + bias``; return what each row lacks.

        That is a factor [C], None: 1. ``g`` is the upstream gradient of ``known``, the `numbers` of these rows.
        """
        raise NotImplementedError

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """Return `numbers` and what `gradient_` does; a kernel that computes both at once overrides it."""
        numbers = self.numbers(z, part)
        return numbers, self.gradient_(z, part, numbers, upstream(numbers, part))


def run(
    head: Head,
    rows: Rows,
    plan: HeadPlan,
    terms: Terms,
    into: Gradients | None = None,
    *,
    upstream: UpstreamOf | None = None,
    known: Numbers | None = None,
) -> Numbers:
    """Return numbers of each row [n, ...], and with ``upstream`` add the gradients ``into`` their memory, by chunks.

    ``upstream`` gives the upstream gradient of a chunk's numbers. ``known`` are the numbers of all rows where an
    earlier pass has computed them.
    """
    chunks = Chunks(head, rows, plan, terms)
    found: list[tuple[Numbers, Tensor | None]] = []
    for part in chunks.parts or [slice(0, 0)]:
        x_CD = chunks.hidden(part)
        if upstream is None or into is None:
            found.append((terms.numbers(chunks.logits(x_CD, part), part), None))
        else:
            found.append((chunks.add_gradients(terms, x_CD, part, upstream, known, into), None))
    if into is not None and into.weight_VD is not None and terms.lift is not None:
        into.weight_VD.div_(terms.lift)
    return joined(found)[0]


class Chunks:
    """What all chunks of a pass share: memory for logits and, with `Terms.apart`, for their gradient; and the GEMMs.

    These have narrow operands and wide results, without a wide copy of the weight, as the plan chose them.
    """

    def __init__(self, head: Head, rows: Rows, plan: HeadPlan, terms: Terms) -> None:
        # not the terms: they may hold chunks themselves, and memory in a circle is not freed at once
        self.head, self.rows, self.plan, self.raw, self.mask = head, rows, plan, terms.raw, terms.mask
        whole = plan.backward_gemm != "blocks" or plan.logits_gemm == "out_dtype"
        # of other strides mm would copy it once a chunk
        weight_VD = head.weight_VD if 1 in head.weight_VD.stride() else head.weight_VD.contiguous()
        self.weight_VD = weight_VD.to(head.dtype) if whole else weight_VD
        self._block = weight_VD.new_empty(plan.block_rows, weight_VD.shape[1], dtype=head.wide)
        self.parts = list(slices(plan.rows, plan.chunk_rows))
        self._longest = max((part.stop - part.start for part in self.parts), default=0)
        self._piece = plan.product_rows or self._longest  # rows of which logits exist at a time
        self._columns = head.ranks.rows + (terms.spare or not head.ranks.alone)
        self._logits = weight_VD.new_empty(min(self._longest, self._piece), padded(self._columns), dtype=head.wide)
        self._gradient: Tensor | None = None

    def hidden(self, part: slice) -> Tensor:
        """Return a chunk's hidden states [C, D] in the operands' dtype, 0 in rows that do not count."""
        head, kept = self.head, self.rows.kept
        x_CD = head.ranks.begin_rows(head.input, self.rows.index, part, head.dtype).get()
        return x_CD if kept is None else x_CD.where(kept[part, None], 0)  # a NaN would reach the weight's gradient

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight, rounded to the operands' dtype, in blocks of rows of the wide dtype."""
        for part in slices(len(self.weight_VD), self.plan.block_rows):
            yield part, self._block[: part.stop - part.start].copy_(self.weight_VD[part].to(self.head.dtype))

    def logits(self, x_CD: Tensor, rows: slice) -> Tensor:
        """Return the logits of these rows' hidden states."""
        head, V = self.head, self.head.ranks.rows
        bias_V, scale, cap = (None, None, None) if self.raw else (head.bias_V, head.scale, head.softcap)
        z = self._logits[: len(x_CD), : self._columns]
        z_V, biased = z[:, :V], bias_V is not None
        if bias_V is not None:
            z_V.copy_(bias_V)
        if self.plan.logits_gemm == "blocks":
            wide_x = x_CD.to(head.wide)
            with multiplied_as_bf16() if self.plan.backward_gemm == "narrow" else nullcontext():
                for part, w in self._blocks():
                    matmul_into(wide_x, w.T, z_V[:, part], add=biased)
        else:
            matmul_into(x_CD, self.weight_VD.T, z_V, add=biased)
        if scale is not None:
            z_V.mul_(scale)
        if cap is not None:
            for part in slices(V, self.plan.columns):
                z_V[:, part].div_(cap).tanh_().mul_(cap)
        if self._columns > V:
            z[:, V:] = -torch.inf
        if self.mask is not None:
            self.mask(z, rows)
        return z

    def add_gradients(
        self, terms: Terms, x_CD: Tensor, part: slice, upstream: UpstreamOf, known: Numbers | None, into: Gradients
    ) -> Numbers:
        """Add a chunk's gradients, and return its numbers; what `Terms.gradient_` leaves is overwritten."""
        C, V = len(x_CD), self.head.ranks.rows
        if terms.apart and self._gradient is None:
            self._gradient = self._logits.new_empty(self._longest, padded(self._columns), dtype=self.head.dtype)
        found: list[tuple[Numbers, Tensor | None]] = []
        for rows in list(slices(C, self._piece)) or [slice(0, 0)]:
            of_all = slice(part.start + rows.start, part.start + rows.stop)
            z = self.logits(x_CD[rows], of_all)
            if self._gradient is not None:
                terms.out = self._gradient[rows, :V]
            if known is None:
                found.append(terms.both_(z, of_all, upstream))
            else:
                numbers = {name: x[of_all] for name, x in known.items()}
                found.append((numbers, terms.gradient_(z, of_all, numbers, upstream(numbers, of_all))))
        numbers, outside = joined(found)
        if C and not (into.input_ND is None and into.weight_VD is None and into.bias_V is None):
            g_CV = (z if self._gradient is None else self._gradient[:C])[:, :V]
            self.add_products(terms, g_CV, outside, x_CD, part, into)
        return numbers

    def add_products(
        self, terms: Terms, g_CV: Tensor, outside: Tensor | None, x_CD: Tensor, part: slice, into: Gradients
    ) -> None:
        """Add a chunk's products; across ranks the input's is summed during the weight's GEMM."""
        head, index, write = self.head, self.rows.index, None
        by_kernel = self.plan.backend == "row"  # its gradient may be narrow already
        if terms.narrowed or (by_kernel and g_CV.dtype != head.dtype):
            g_CV = narrow_view(g_CV, head.dtype)
        if into.bias_V is not None and not by_kernel:
            into.bias_V += g_CV.sum(0, dtype=head.wide) if outside is None else outside @ g_CV
        if self.plan.backward_gemm == "narrow" and g_CV.dtype != head.dtype:
            g_CV = narrow_in_place(g_CV, head.dtype)
        if into.bias_V is not None and by_kernel:
            from lowtide.head.kernels.exp_rows import add_column_sums

            weights = x_CD.new_ones(len(x_CD), dtype=head.wide) if outside is None else outside
            add_column_sums(g_CV, weights, into.bias_V)
        rounded = head.ranks.alone  # else it is summed over ranks before
        if into.input_ND is not None and rounded and index is None:
            self.input_grad(g_CV, outside, into.input_ND[part])
        elif into.input_ND is not None:
            product = x_CD.new_empty(x_CD.shape, dtype=into.input_ND.dtype if rounded else head.wide)
            self.input_grad(g_CV, outside, product)
            write = head.ranks.begin_sum(product, part, index, into.put_input)
            del product
        if into.weight_VD is not None:
            raised = outside if terms.lift is None or outside is None else outside * terms.lift
            self.weight_grad(g_CV, raised, x_CD, into.weight_VD, part.start == 0)
        if write is not None:
            write()

    def input_grad(self, g_CV: Tensor, factor_C: Tensor | None, out_CD: Tensor) -> None:
        """Write ``factor * (g @ weight)`` into ``out_CD``; None: 1."""
        wide = self.head.wide
        product = out_CD if out_CD.dtype == wide else torch.empty_like(out_CD, dtype=wide)
        if self.plan.backward_gemm == "blocks":
            product.zero_()
            for part, w in self._blocks():
                product.addmm_(g_CV[:, part], w)
        elif g_CV.is_cuda or g_CV.dtype == wide:
            matmul_into(g_CV, self.weight_VD, product, add=False)
        else:  # on a CPU products are no wider than their operands
            clear_beside(g_CV)
            product = g_CV @ self.weight_VD
        if factor_C is not None:
            torch.mul(product, factor_C[:, None], out=out_CD)
        elif product is not out_CD:
            out_CD.copy_(product)

    def weight_grad(self, g_CV: Tensor, factor_C: Tensor | None, x_CD: Tensor, total_VD: Tensor, first: bool) -> None:
        """Add ``g.T @ (factor * x)`` to ``total_VD``, which holds nothing yet where ``first`` is True."""
        x = (x_CD if factor_C is None else x_CD * factor_C[:, None]).to(g_CV.dtype)
        if total_VD.dtype == g_CV.dtype or (g_CV.is_cuda and total_VD.dtype == self.head.wide):
            matmul_into(g_CV.T, x, total_VD, add=not first)
            return
        for part in slices(len(total_VD), self.plan.block_rows):
            wide = self._block[: part.stop - part.start]
            if g_CV.dtype == self.head.wide:
                torch.mm(g_CV[:, part].T, x, out=wide)
            else:
                wide.copy_(g_CV[:, part].T @ x)
            total_VD[part].copy_(wide if first else wide.add_(total_VD[part]))


def joined(found: list[tuple[Numbers, Tensor | None]]) -> tuple[Numbers, Tensor | None]:
    """Return the numbers of all rows, and what they lack, from those of some rows each."""
    if len(found) == 1:
        return found[0]
    outsides = [outside for _, outside in found if outside is not None]
    numbers = {name: torch.cat([x[name] for x, _ in found]) for name in found[0][0]}
    return numbers, torch.cat(outsides) if outsides else None


def weight_lift(factor: Tensor, *others: Tensor | None) -> Tensor:
    """Return what fp16 hidden states times these factors are lifted by, so that they neither overflow nor underflow.

    It brings the largest product of the factors to 2**-2 where kernels have left 2**-14 beside them.
    """
    largest = factor.abs().amax() if factor.numel() else factor.new_ones(())
    for other in others:
        if other is not None:
            largest = largest * other.abs().amax()
    return (2.0**12 / largest.clamp(min=2.0**-100)).where(largest.isfinite(), 1)


def narrow_in_place(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``wide_CV`` rounded to ``dtype`` (half as wide), written over the first half of each of its own rows.

    Block after block, each as wide as all before it: block [a, 2a) is written to [a / 2, a), which has
    been read by then.
    """
    narrow_CV, start, stop = narrow_view(wide_CV, dtype), 0, 64
    while start < wide_CV.shape[1]:
        block = wide_CV[:, start:stop]
        narrow_CV[:, start:stop] = block if start else block.to(dtype)
        start, stop = stop, 2 * stop
    return narrow_CV


def narrow_view(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first half of each row's memory as [C, V] of ``dtype``, half as wide."""
    rows, V = wide_CV.shape
    length = wide_CV.stride(0)
    return torch.as_strided(wide_CV, (rows, length), (length, 1)).view(dtype)[:, :V]


def clear_beside(g_CV: Tensor) -> None:
    """Write 0 beside each row of a matrix whose rows have room there.

    oneDNN's GEMMs for CPUs with AMX read rows of bfloat16 in steps of 64 bytes, and multiply what stands beside the row
    by 0, which a NaN there survives.
    """
    (rows, V), length = g_CV.shape, g_CV.stride(0)
    stop = min(-(-V // 32) * 32, length)
    g_CV.as_strided((rows, max(0, stop - V)), (length, 1), g_CV.storage_offset() + V).zero_()


@contextmanager
def multiplied_as_bf16() -> Iterator[None]:
    """Have a CPU's float32 GEMMs round their operands to bfloat16, which these are already; the result is float32."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _PRECISION:
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before

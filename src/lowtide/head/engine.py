"""The loop over chunks of logits, for every function of them, on one rank and on many.

N tokens, n rows computed, C rows of a chunk, D hidden size, V vocabulary, V_r classes of it on this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.gradients import Gradients
from lowtide.head.matmul import HeadMatmul, finish_logits_, narrow_view
from lowtide.head.plan import HeadPlan
from lowtide.head.planner import padded
from lowtide.head.rows import Rows, take_rows

Numbers = dict[str, Tensor]
Upstream = Callable[[Numbers, slice], Any]


class Terms:
    """What is computed of a chunk of logits; a new function of them is one such class.

    ``z`` holds a chunk's logits [C, V_r], and where the vocabulary is sharded one more column, -inf, for the classes of
    other ranks. ``part`` are the chunk's rows among the n.
    """

    narrowed = False  # whether `gradient_` leaves the operands' dtype, in the first half of each row
    apart = False  # whether the gradient, in the operands' dtype, takes other memory than the logits': ``out``
    out: Tensor | None = None  # that memory, of the rows at hand: there may be logits of some of a chunk's rows only
    spare = False  # whether ``z`` always has that column more
    raw = False  # whether ``z`` is ``x @ w.T`` alone: a kernel adds the bias, scales and caps it itself
    lift: Tensor | None = None  # what the weight's gradient is multiplied with until the last chunk, for fp16

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return numbers of each row [C, ...], the same on every rank; ``z`` is left as it is for `gradient_`."""
        raise NotImplementedError

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Any) -> Tensor | None:
        """Replace logits by the gradient with respect to ``x @ w.T + bias``.

        Args:
            z: The logits.
            part: Their rows.
            known: What `numbers` returned for them.
            g: The upstream gradient of these numbers.

        Returns:
            Tensor | None: What each row's gradient is still to be multiplied with [C]; None: 1.
        """
        raise NotImplementedError

    def both_(self, z: Tensor, part: slice, upstream: Upstream) -> tuple[Numbers, Tensor | None]:
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
    upstream: Upstream | None = None,
    known: Numbers | None = None,
) -> Numbers:
    """Return numbers of each row [n, ...], and add the gradients, chunk by chunk.

    Args:
        head: The head.
        rows: Which tokens, in which order.
        plan: Chunks, the same on every rank.
        terms: What is computed.
        into: Takes the gradients, with ``upstream``.
        upstream: The upstream gradient of a chunk's numbers; None: numbers alone.
        known: Numbers of all rows from an earlier pass, of which the gradients are; None: they are computed.
    """
    chunks = Chunks(head, rows, plan, terms)
    found: list[tuple[Numbers, Tensor | None]] = []
    for part in chunks.parts or [slice(0, 0)]:
        x_CD = chunks.hidden(part)
        if upstream is None or into is None:
            numbers = terms.numbers(chunks.logits(x_CD), part)
        else:
            numbers, g_CV, outside = chunks.gradient(terms, x_CD, part, upstream, known)
            if len(x_CD):
                _add_products(chunks, terms, g_CV, outside, x_CD, part, into)
        found.append((numbers, None))
    if into is not None and into.weight_VD is not None and terms.lift is not None:
        into.weight_VD.div_(terms.lift)
    return joined(found)[0]


class Chunks:
    """What all chunks of a pass share: GEMMs, and memory for logits and, with `Terms.apart`, their gradient."""

    def __init__(self, head: Head, rows: Rows, plan: HeadPlan, terms: Terms) -> None:
        self.head, self.rows, self.plan, self.raw = head, rows, plan, terms.raw
        self.parts = list(head.ranks.chunks(plan))
        self.matmul = HeadMatmul(head.weight_VD, plan, head.dtype, head.wide)
        self.bias_V = None if terms.raw else head.bias_V
        if plan.bias_column and self.bias_V is not None:
            self.matmul.take_bias(self.bias_V.to(head.dtype))
            self.bias_V = None
        longest = max((part.stop - part.start for part in self.parts), default=0)
        self.pieces = plan.product_rows or longest  # rows of which logits exist at a time
        self.columns = head.ranks.rows + (terms.spare or not head.ranks.alone)
        self._logits = head.input.new_empty(min(longest, self.pieces), padded(self.columns), dtype=head.wide)
        self._longest = longest
        self._gradient: Tensor | None = None

    def hidden(self, part: slice) -> Tensor:
        """Return a chunk's hidden states [C, D] in the operands' dtype, 0 in rows that do not count."""
        head, kept = self.head, self.rows.kept
        if part.start == part.stop:
            return head.input.new_empty(0, head.input.shape[-1], dtype=head.dtype)
        index, ranks = self.rows.index, head.ranks
        if ranks.alone:
            x_CD = take_rows(head.input, index, part, head.dtype)
        else:
            x_CD = ranks.begin_rows(head.input, index, part, head.dtype).get()
        return x_CD if kept is None else x_CD.where(kept[part, None], 0)  # a NaN would reach the weight's gradient

    def logits(self, x_CD: Tensor) -> Tensor:
        """Return the logits of these hidden states."""
        head, V = self.head, self.head.ranks.rows
        z = self._logits[: len(x_CD), : self.columns]
        z_V = z if self.columns == V else z[:, :V]
        self.matmul.logits(x_CD, z_V, self.bias_V)
        if not self.raw:
            columns = (
                max(1, V) if head.softcap is None else self.plan.columns
            )  # on a CPU one operator is better than many
            finish_logits_(z_V, None, head.scale, head.softcap, columns)
        if self.columns > V:
            z[:, V:] = -torch.inf
        return z

    def gradient(
        self, terms: Terms, x_CD: Tensor, part: slice, upstream: Upstream, known: Numbers | None
    ) -> tuple[Numbers, Tensor, Tensor | None]:
        """Return a chunk's numbers, the gradient of its logits [C, V_r], and what its rows still lack."""
        C, V = len(x_CD), self.head.ranks.rows
        if terms.apart and self._gradient is None:
            self._gradient = self._logits.new_empty(self._longest, padded(self.columns), dtype=self.head.dtype)
        found: list[tuple[Numbers, Tensor | None]] = []
        for start in range(0, max(1, C), max(1, self.pieces)):
            stop = min(start + self.pieces, C)
            of_all = slice(part.start + start, part.start + stop)
            z = self.logits(x_CD[start:stop])
            if self._gradient is not None:
                terms.out = self._gradient[start:stop, :V]
            if known is None:
                found.append(terms.both_(z, of_all, upstream))
            else:
                numbers = {name: x[of_all] for name, x in known.items()}
                found.append((numbers, terms.gradient_(z, of_all, numbers, upstream(numbers, of_all))))
        if self._gradient is not None:
            g_CV = self._gradient[:C, :V]
        else:
            g_CV = z if self.columns == V else z[:, :V]
        numbers, outside = joined(found)
        return numbers, g_CV, outside


def joined(found: list[tuple[Numbers, Tensor | None]]) -> tuple[Numbers, Tensor | None]:
    """Return the numbers of all rows, and what they lack, from those of some rows each."""
    if len(found) == 1:
        return found[0]
    outsides = [outside for _, outside in found if outside is not None]
    numbers = {name: torch.cat([x[name] for x, _ in found]) for name in found[0][0]}
    return numbers, torch.cat(outsides) if outsides else None


def _add_products(
    chunks: Chunks, terms: Terms, g_CV: Tensor, outside: Tensor | None, x_CD: Tensor, part: slice, into: Gradients
) -> None:
    """Add a chunk's gradients; across ranks the sum of the input's runs beside the weight's GEMM.

    Args:
        chunks: The pass.
        terms: What was computed of the chunk.
        g_CV: The gradient of its logits; overwritten.
        outside: What each of its rows is still to be multiplied with [C]; None: 1.
        x_CD: Its hidden states.
        part: Its rows.
        into: Takes the gradients.
    """
    head, matmul, index, write = chunks.head, chunks.matmul, chunks.rows.index, None
    if into.input_ND is None and into.weight_VD is None and into.bias_V is None:
        return
    by_kernel = chunks.plan.backend == "row"  # its gradient may be narrow already
    if into.bias_V is not None and not by_kernel:
        into.bias_V += g_CV.sum(0) if outside is None else outside @ g_CV
    g_CV = narrow_view(g_CV, head.dtype) if terms.narrowed else matmul.operand(g_CV)
    if into.bias_V is not None and by_kernel:
        from lowtide.head.kernels.exp_rows import add_column_sums

        add_column_sums(g_CV, x_CD.new_ones(len(x_CD), dtype=head.wide) if outside is None else outside, into.bias_V)
    if into.input_ND is not None and head.ranks.alone and index is None and into.lift_N is None:
        matmul.input_grad(g_CV, outside, into.input_ND[part])
    elif into.input_ND is not None:
        rounded = head.ranks.alone and into.lift_N is None  # else summed over ranks, or lifted, before it is rounded
        product = x_CD.new_empty(x_CD.shape, dtype=into.input_ND.dtype if rounded else head.wide)
        matmul.input_grad(g_CV, outside, product)
        write = head.ranks.begin_sum(product, part, index)
        del product
        if head.ranks.alone:
            write(into)
            write = None  # its memory is free
    if into.weight_VD is not None:
        raised = outside if terms.lift is None or outside is None else outside * terms.lift
        matmul.weight_grad(g_CV, raised, x_CD, into.weight_VD, part.start == 0)
    if write is not None:
        write(into)


def gradient_buffers(
    head: Head, rows: Rows, plan: HeadPlan, wanted: tuple[bool, bool, bool], *, stored: bool = False
) -> Gradients:
    """Return memory for the gradients of input, weight and bias that are ``wanted``, not filled where chunks will.

    ``stored``: the upstream gradient is still to come, and with it a GradScaler's factor. An fp16 gradient is then
    lifted row by row, in the chunk that computes it; the exponential path's stays wide until it is stored.
    """
    x, (V, D), wide, into = head.input, head.weight_VD.shape, head.wide, Gradients()
    if wanted[0]:
        lifted, dtype = stored and x.dtype == torch.float16, x.dtype
        if lifted and plan.backend == "exp":
            dtype = wide
        elif lifted:
            into.lift_N = x.new_ones(head.tokens, dtype=wide)
        some = rows.index is not None and not head.ranks.spread  # the other hidden states are in no chunk
        into.input_ND = (x.new_zeros if some else x.new_empty)(head.tokens, D, dtype=dtype)
    if wanted[1]:
        dtype = wide if plan.accumulate == "float32" else head.weight_VD.dtype
        into.weight_VD = (x.new_empty if plan.chunks else x.new_zeros)(V, D, dtype=dtype)
    if wanted[2]:
        into.bias_V = x.new_zeros(V, dtype=wide)
    return into

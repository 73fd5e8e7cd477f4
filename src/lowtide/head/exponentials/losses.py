"""Cross entropy by unnormalised exponentials: two GEMMs per chunk besides the one that writes them, and thin kernels.

The GEMM that would write logits z writes E = exp(z - t) instead, t the target's logit, and its row sums r. Then
loss = log1p(r), and with s = g / (1 + r) and E_y = -r the gradients are dX = diag(s) (E W) and dW = E^T (diag(s) X):
see `kernels.exp_rows` for all the options, and docs/algorithm.md for the reasons. Ranks that share a vocabulary do the
same in `sharded`.

Two schedules: with a chunk's E over the whole vocabulary, three GEMMs (6NDV operations), `CrossEntropy.in_chunks`; or
row sums first, and E recomputed in blocks of the vocabulary, four (8NDV), `Exponentials.recompute`: where memory is too
short for chunks of enough rows, or where the upstream gradient is known in backward only. Names: n rows, C rows of a
chunk, D hidden size, V classes, B of a block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head, matmul_into
from lowtide.head.kernels import exp_rows, gemm, gradient_gemms_hopper, hopper
from lowtide.head.kernels.exp_logits import ExpRows, Listed, exp_tile, shifted_exp_logits
from lowtide.head.kernels.exp_rows import Reports, RowTerms, finish_input_grad
from lowtide.head.kernels.gemm import ALL, LogitTransform, Used, gemm_tiles, matrix
from lowtide.head.kernels.gradient_gemms_hopper import InputRows, Room, room_for
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.rows import Rows, rows_are_aligned, slices, take_rows
from lowtide.head.terms.loss import Loss, RowFactors
from lowtide.kernel_launch import power_of_2


@dataclass(kw_only=True)
class Chunk:
    """Some rows, and what is known of them."""

    part: slice  # among the n rows
    x_CD: Any  # hidden states; across ranks an exchange until they are needed
    y_C: Any = None  # int32 row of this rank's weight, more where another rank has the class, -1 where ignored
    rows: Any = None  # Reports
    entries: Any = None  # ExpRows, or a `stats.Gradient`: what a GEMM's results become entries by
    sums: Any = None  # of each row's E, in parts
    e_CV: Any = None
    of_input: Any = None  # s, y and rest: what dX = s (E W + rest w_y) needs of each row


class Exponentials:
    """A head in one direction of a call: sums of its chunks and what they give, and gradients in blocks of classes."""

    first_class = 0  # what targets call the first row of this rank's weight
    y_n: Tensor  # int32 rows of this rank's weight, -1 where ignored
    terms = RowTerms()
    smoothing: "Smoothing | None" = None
    searches: tuple[bool, ...] = (True, False)  # of rows that left the safe range: see `shifted_exp_logits`
    listed: Listed | None = None  # tiles of E that are computed, where others need not be

    def __init__(self, head: Head, plan: HeadPlan, rows: Rows) -> None:
        self.head, self.plan, self.index, self.count = head, plan, rows.index, rows.count
        self.weight_VD = aligned_rows(head.weight_VD, head.dtype)
        self.width = len(self.weight_VD)
        self.transform = LogitTransform(head.bias_V, head.scale, head.softcap)
        self.hopper = all(part is None for part in self.transform) and hopper.runs_on(head.input.device)
        self.tiles = gemm.tiles_across(self.width)

    def new(self, *shape: int) -> Tensor:
        """Return memory in float32."""
        return torch.empty(*shape, dtype=torch.float32, device=self.head.input.device)

    def chunks(self, rows: int) -> Iterable[Chunk]:
        """Return all rows, so many at a time, with their hidden states."""
        return (Chunk(part=part, x_CD=self.hidden(part)) for part in slices(self.plan.rows, rows))

    def hidden(self, part: slice) -> Tensor:
        """Return hidden states [C, D] as TMA takes them."""
        return aligned_rows(take_rows(self.head.input, self.index, part, self.head.dtype), self.head.dtype)

    def used(self, part: slice) -> Used:
        """Return how many of these rows the kernels compute."""
        return ALL if self.count is None else Used(self.count, part.start)

    def make_numbers(self, chunk: Chunk, found: Tensor) -> None:
        """Make memory for what will be known of a chunk's rows."""
        C, chunk.y_C = len(chunk.x_CD), self.y_n[chunk.part]
        (target, rest, highest), listed = self.new(3, C), torch.split(self.y_n.new_empty(C + 1), [C, 1])
        rows = chunk.rows = Reports._make((target, *found[:, chunk.part], rest, highest, *listed))
        chunk.of_input = rows.s, chunk.y_C, rest

    def write_target_logits(self, chunk: Chunk) -> None:
        """Write the logits of the targets that are here."""
        of_rows = chunk.rows.target_logit, chunk.rows.listed_count, self.used(chunk.part)
        target_logits(chunk.x_CD, self.weight_VD, chunk.y_C, self.transform, *of_rows)

    def write_exponentials(
        self, chunk: Chunk, w_BD: Tensor, e_CB: Tensor | None, rows: ExpRows, transform: LogitTransform
    ) -> None:
        """Write E of a chunk and some classes, or its sums."""
        used = self.used(chunk.part)
        if self.hopper:
            hopper.exp_logits_hopper(chunk.x_CD, w_BD, e_CB, rows, used=used, listed=self.listed)
        else:
            gemm_tiles(exp_tile, chunk.x_CD, w_BD, e_CB, rows, transform, used=used)

    def finish(self, chunk: Chunk, factor_C: Tensor | None = None, scaled_CD: Tensor | None = None) -> None:
        """Turn sums into losses and, with a factor, finish E and s x; then those rows that left the safe range."""
        terms, used, ranks = self.terms.rows(chunk.part), self.used(chunk.part), self.head.ranks
        C, D = chunk.x_CD.shape
        for shifted in (False, True):
            if shifted:
                self.shift(chunk, chunk.e_CV, self.searches)
            exp_rows.finish_rows[(C,)](
                matrix(chunk.sums), chunk.y_C, factor_C, matrix(chunk.x_CD), scaled_CD, matrix(chunk.e_CV), chunk.rows,
                used, self.transform, terms, C, RANKS=0 if ranks.alone else power_of_2(ranks.size), SHIFTED=shifted,
                BLOCK=exp_rows.block_of(D), num_warps=4,
            )  # fmt: skip
        if self.smoothing is not None:
            self.smoothing.add_to_loss(chunk, used)
            if factor_C is not None:
                self.smoothing.see(chunk, used)

    def shift(self, chunk: Chunk, e_CV: Tensor | None, searches: tuple[bool, ...]) -> None:
        """Do the listed rows again, relative to another reference; the host never learns how many they are."""
        rows = chunk.rows
        entries, listed = chunk.entries._replace(reference=rows.highest), (rows.listed, rows.listed_count)
        shifted_exp_logits(chunk.x_CD, self.weight_VD, e_CV, entries, listed, self.transform, find_highest=searches)

    @cached_property
    def room(self) -> Room:
        """Return where tiles of E W meet: no more than their product in float32 takes, or in blocks half of that."""
        rows = self.plan.product_rows // (1 if self.plan.schedule == "chunks" else 2)
        return room_for(self.head.input.device, rows * self.weight_VD.shape[1])

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients: in each block of classes one GEMM for the entries, and one for each gradient."""
        plan, (V, D), new = self.plan, self.weight_VD.shape, self.weight_VD.new_empty
        rows = min(plan.chunk_rows, plan.rows)
        e, scaled = new(rows, padded(plan.columns)), None if into.weight_VD is None else new(rows, D)
        for chunk in self.chunks(plan.chunk_rows):
            part, C = chunk.part, len(chunk.x_CD)
            scaled_CD = None if scaled is None else scaled[:C]
            self.prepare(chunk, scaled_CD)
            product_CD = None if into.input_ND is None else self.new(C, D)
            for block in slices(V, plan.columns):
                w_BD, e_CB = self.weight_VD[block], e[:C, : block.stop - block.start]
                self.fill(chunk, w_BD, e_CB, block)
                if product_CD is not None:
                    self.input_product(part, e_CB, w_BD, product_CD, add=block.start > 0)
                    if block.stop == V:
                        self.put_input(part, product_CD, chunk.of_input, into)
                self.add_to_head(part, e_CB, scaled_CD, chunk.of_input[0], into, block)
            del chunk, product_CD  # and their memory, before the next are made

    def prepare(self, chunk: Chunk, scaled_CD: Tensor | None) -> None:
        """Find what `fill` and the input's gradient need of a chunk; write s x into ``scaled_CD`` where given."""
        raise NotImplementedError

    def fill(self, chunk: Chunk, w_BD: Tensor, e_CB: Tensor, block: slice) -> None:
        """Write the gradient of the logits over each row's s, of a block of classes."""
        raise NotImplementedError

    def input_product(self, part: slice, e_CB: Tensor, w_BD: Tensor, out_CD: Tensor, *, add: bool) -> None:
        """Write ``E W`` (float32, contiguous) or add it; rows that are not used are left as they are."""
        if self.count is None:
            matmul_into(e_CB, w_BD, out_CD, add=add)
        else:
            ends = InputRows(out_CD, out_CD.stride(0), before=out_CD if add else None)
            gradient_gemms_hopper.input_grad(e_CB, w_BD, ends, self.room, self.used(part))

    def put_input(self, part: slice, product_CD: Tensor, of_input: Any, into: Gradients) -> None:
        """Write the input's gradient where it belongs, from ``E W`` of all classes."""
        out: Any = into.input_ND
        out, to_C = (out[part], None) if self.index is None else (out, self.index[part])
        self.finish_input(part, product_CD, of_input, out, to_C)

    def finish_input(
        self, part: slice, product_CD: Tensor, of_input: Any, out: Tensor, to_C: Tensor | None = None
    ) -> None:
        """Write the input's gradient from ``E W``: each row to its place ``to_C`` in ``out``; None: in order."""
        s_C, y, rest = of_input
        if self.smoothing is not None:
            self.smoothing.add_to_product(part, product_CD, s_C)
        used = self.used(part)
        finish_input_grad(product_CD, out, self.weight_VD, s_C, y, rest, self.first_class, to_C=to_C, used=used)

    def add_to_head(
        self, part: slice, e_CB: Tensor, scaled_CD: Tensor | None, s_C: Tensor, into: Gradients, block: slice
    ) -> None:
        """Add these rows' part of the gradients of weight and bias, of a block of classes."""
        used, add = self.used(part), part.start > 0
        if scaled_CD is not None and into.weight_VD is not None:
            out_BD = into.weight_VD[block]
            if self.count is None:
                matmul_into(e_CB.t(), scaled_CD, out_BD, add=add)
            else:
                gradient_gemms_hopper.weight_grad(e_CB, scaled_CD, out_BD, used, add=add)
        if into.bias_V is not None:
            exp_rows.add_column_sums(e_CB, s_C, into.bias_V[block], used)


class CrossEntropy(Exponentials):
    """A loss in either direction, its token weights left out.

    ``loss.y`` are int32 rows of this rank's weight, at least its rows where another rank has the class, -1 where
    ignored.
    """

    planes = 1  # of numbers that a tile of E leaves of each row: see `ExpRows`

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan) -> None:
        super().__init__(head, plan, loss.rows)
        self.y_n, own_n, spread = loss.y, loss.own_n, None
        if loss.label_smoothing:
            self.smoothing, a, new = Smoothing(head, loss, self.weight_VD), loss.label_smoothing, head.input.new_full
            own_n = new((len(self.y_n),), 1 - a, dtype=torch.float32) * (1 if own_n is None else own_n)
            spread = new((), a / loss.vocab, dtype=torch.float32) * (loss.vocab if loss.total is None else loss.total)
        self.terms = RowTerms(own_n, spread, float(loss.z_loss))

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """Return each row's "loss", "lse" and "miss", that minus the target's logit; with ``factors`` add gradients.

        ``factors`` is called while the first GEMM runs: the device should not wait for the host.
        """
        n = len(self.y_n)
        found = self.new(4, padded(n))[:, :n]  # of these and s
        numbers = dict(zip(("loss", "lse", "miss"), found, strict=False))
        if factors is not None and self.plan.schedule == "chunks" and self.plan.rows:
            self.in_chunks(factors, found)
        else:
            self.sums_alone(found)
            if factors is not None:
                self.gradients(*factors(), numbers)
        return numbers

    def sums_alone(self, found: Tensor) -> None:
        """Find the rows' numbers."""
        rows = min(self.plan.chunk_rows, self.plan.rows)
        sums = self.new(self.planes, rows, self.tiles)
        for chunk in self.chunks(rows):
            self.begin(chunk, found, sums, None)
            self.finish(chunk)
            del chunk  # and its memory, before the next is made

    def in_chunks(self, factors: RowFactors, found: Tensor) -> None:
        """Find the rows' numbers, and add the gradients: three GEMMs a chunk."""
        plan, (V, D), new = self.plan, self.weight_VD.shape, self.weight_VD.new_empty
        rows = plan.chunk_rows
        e, sums, scaled, product = new(rows, padded(V)), self.new(self.planes, rows, self.tiles), None, None
        for chunk in self.chunks(rows):
            part, C = chunk.part, len(chunk.x_CD)
            self.begin(chunk, found, sums, e)
            if part.start == 0:
                into = self.begin_gradients(*factors())
                scaled = None if into.weight_VD is None else new(rows, D)
                if into.input_ND is not None and (self.count is None or self.smoothing is not None):
                    product = self.new(min(rows, plan.product_rows), D)
            scaled_CD = None if scaled is None else scaled[:C]
            self.finish(chunk, self.factor_n[part], scaled_CD)
            if product is not None:
                for at in slices(C, plan.product_rows):
                    some, product_CD = slice(part.start + at.start, part.start + at.stop), product[: at.stop - at.start]
                    self.input_product(some, chunk.e_CV[at], self.weight_VD, product_CD, add=False)
                    self.put_input(some, product_CD, [x[at] for x in chunk.of_input], into)
            elif into.input_ND is not None:
                ends = self.ends(chunk, into.input_ND)
                gradient_gemms_hopper.input_grad(chunk.e_CV, self.weight_VD, ends, self.room, self.used(part))
            self.add_to_head(part, chunk.e_CV, scaled_CD, chunk.rows.s, into, slice(None))
            del chunk
        self.end_gradients(into)

    def begin(self, chunk: Chunk, found: Tensor, sums: Tensor, e: Tensor | None) -> None:
        """Write a chunk's E, into the memory ``e``, or sums alone; its numbers are to be ``found``."""
        C = len(chunk.x_CD)
        self.make_numbers(chunk, found)
        self.write_target_logits(chunk)
        chunk.sums, *stored = sums[:, :C]
        chunk.entries = ExpRows(chunk.rows.target_logit, chunk.y_C, None, 0, chunk.sums, self.tiles, *stored)
        chunk.e_CV = None if e is None else e[:C, : self.width]
        self.write_exponentials(chunk, self.weight_VD, chunk.e_CV, chunk.entries, self.transform)

    def ends(self, chunk: Chunk, input_ND: Tensor) -> InputRows:
        """Return what ends the rows of a chunk's input gradient in a kernel, where ignored tokens are last."""
        assert self.index is not None
        to_C, w_VD = self.index[chunk.part], self.weight_VD
        s_C, y_C, rest_C = chunk.of_input
        return InputRows(input_ND, input_ND.stride(0), to_C, s_C, y_C, rest_C, w_VD, w_VD.stride(0))

    def gradients(self, factor_n: Tensor, into: Gradients, known: dict[str, Tensor]) -> None:
        """Add the gradients, from E recomputed a block of the vocabulary at a time, normalised: its sums are known."""
        self.known = known
        self.begin_gradients(factor_n, into)
        self.recompute(into)
        self.end_gradients(into)

    def begin_gradients(self, factor_n: Tensor, into: Gradients) -> Gradients:
        """Take the rows' factors, and return the memory of the gradients."""
        self.factor_n = factor_n
        if self.smoothing is not None:
            self.smoothing.begin(factor_n, self.y_n)
        return into

    def end_gradients(self, into: Gradients) -> None:
        """Add what all rows have in common."""
        if self.smoothing is not None:
            self.smoothing.end(into)

    def prepare(self, chunk: Chunk, scaled_CD: Tensor | None) -> None:
        """See `Exponentials.prepare`."""
        part, used, known, (C, D) = chunk.part, self.used(chunk.part), self.known, chunk.x_CD.shape
        y_C, numbers = self.y_n[part], self.new(4, C)
        exp_rows.prepare_rows[(C,)](
            known["lse"][part], known["miss"][part], y_C, self.factor_n[part], matrix(chunk.x_CD), scaled_CD, numbers,
            used, self.transform, self.terms.rows(part), C, self.width, BLOCK=exp_rows.block_of(D), num_warps=4,
        )  # fmt: skip
        if self.smoothing is not None:
            self.smoothing.see(chunk, used)
        reference_C, coefficient_C, s_C, rest_C = numbers
        chunk.entries, chunk.of_input = ExpRows(reference_C, y_C, coefficient_C), (s_C, y_C, rest_C)

    def fill(self, chunk: Chunk, w_BD: Tensor, e_CB: Tensor, block: slice) -> None:
        """See `Exponentials.fill`."""
        rows = chunk.entries._replace(first_class=block.start)
        self.write_exponentials(chunk, w_BD, e_CB, rows, self.transform.of_classes(block))


class Smoothing:
    """Label smoothing's part, the same for every row, in plain PyTorch: it stays out of the wide GEMMs.

    In the logits' gradient it is ``- m g (a / V) q_v`` in the entry of class v: m the logit scale, g the row's factor,
    a the smoothing, q the class weights. With ``u = sum_v q_v w_v`` the loss loses ``(a / V) m x u``, dX ``m g (a / V)
    u``, and dW ``(a / V) q`` times the sum of all ``m g x``.
    """

    def __init__(self, head: Head, loss: Loss, weight_VD: Tensor) -> None:
        self.head, q_V, self.share = head, loss.class_weight, -loss.label_smoothing / loss.vocab
        self.q_V = head.input.new_ones(len(weight_VD), dtype=torch.float32) if q_V is None else q_V
        self.u_D = weighted_sum(self.q_V, weight_VD)
        self.sum_D = torch.zeros_like(self.u_D)

    @cached_property
    def as_class(self) -> tuple[Tensor, LogitTransform]:
        """Return u of all ranks' classes as the weight of one class, whose bias is ``sum_v q_v b_v``."""
        bias = self.q_V.new_zeros(()) if self.head.bias_V is None else self.head.bias_V @ self.q_V
        u = self.head.ranks.sum_of(torch.cat((self.u_D, bias[None])))
        return u[None, :-1], LogitTransform(u[-1:], self.head.scale)

    def add_to_loss(self, chunk: Chunk, used: Used) -> None:
        """Add the part of each row's loss."""
        (u_1D, transform), rows = self.as_class, chunk.rows
        logits, y_C = torch.empty_like(rows.loss), chunk.y_C.clamp(max=0)
        target_logits(chunk.x_CD, u_1D, y_C, transform, logits, rows.listed_count, used)
        rows.loss.add_(logits, alpha=self.share)

    def begin(self, factor_n: Tensor, y_n: Tensor) -> None:
        """Take the rows' factors, for the gradients."""
        even_n = factor_n.where(y_n >= 0, 0) * self.share
        self.even_n = even_n if self.head.scale is None else even_n * self.head.scale

    def see(self, chunk: Chunk, used: Used) -> None:
        """Add up a chunk's hidden states, by their rows' factors."""
        exp_rows.add_column_sums(chunk.x_CD, self.even_n[chunk.part], self.sum_D, used)

    def add_to_product(self, part: slice, product_CD: Tensor, s_C: Tensor) -> None:
        """Add the input's part to ``E W``, before this is multiplied by s."""
        product_CD.addr_((self.even_n[part] / s_C).where(s_C != 0, 0), self.u_D)

    def end(self, into: Gradients) -> None:
        """Add it to the gradients of weight and bias, without a float32 copy: in float32, rounded once."""
        if into.weight_VD is not None:
            torch.addcmul(into.weight_VD, self.q_V[:, None], self.sum_D, out=into.weight_VD)
        if into.bias_V is not None:
            into.bias_V += self.even_n.sum() * self.q_V


def target_logits(
    x_CD: Tensor, w_VD: Tensor, y_C: Tensor, transform: LogitTransform, logit_C: Tensor, count: Tensor, used: Used = ALL
) -> None:
    """Write rows' target logits, and 0 to the ``count`` of those that are listed."""
    C, D = x_CD.shape
    exp_rows.target_logits[(C,)](
        matrix(x_CD), matrix(w_VD), y_C, logit_C, count, used, transform, C, len(w_VD), BLOCK=exp_rows.block_of(D),
        num_warps=4,
    )  # fmt: skip


def aligned_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as TMA takes it: in ``dtype``, rows in order that start at multiples of 16 bytes."""
    if x.dtype == dtype and rows_are_aligned(x):
        return x
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)


def weighted_sum(q_V: Tensor, w_VD: Tensor) -> Tensor:
    """Return ``sum_v q_v w_v`` in float32, without a float32 copy of ``w_VD``."""
    parts, out = w_VD.new_empty(3, len(q_V)), q_V.new_zeros(3, w_VD.shape[1])
    for part in parts:  # which add up to it, to all the digits that float32 has
        q_V = q_V - part.copy_(q_V)
    if len(q_V):  # a rank may have no classes
        matmul_into(parts, w_VD, out, add=False)
    return out.sum(0)

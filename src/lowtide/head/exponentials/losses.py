"""Cross entropy by unnormalised exponentials: two GEMMs per chunk besides the one that writes them, and thin kernels.

The GEMM that would write logits z writes E = exp(z - t) instead, t the target's logit, and its row sums r. Then
loss = log1p(r), and with s = g / (1 + r) and E_y = -r the gradients are dX = diag(s) (E W) and dW = E^T (diag(s) X):
see `kernels.exp_rows` for all the options, and docs/algorithm.md for the reasons. Ranks that share a vocabulary do the
same in `sharded`.

Two schedules: with a chunk's E over the whole vocabulary, three GEMMs (6NDV operations); or row sums first, and E
recomputed in blocks of the vocabulary, four (8NDV), where memory is too short for chunks of enough rows, or where the
upstream gradient is known in backward only. Names: n rows, C rows of a chunk, D hidden size, V classes, B of a block.

Label smoothing's part of the gradients is the same for every row, ``- m g (a / V) q_v`` in the entry of class v: m the
logit scale, g the row's factor, a the smoothing, q the class weights. It stays out of the wide GEMMs, in plain PyTorch:
with ``u = sum_v q_v w_v`` the loss loses ``(a / V) m x u``, dX ``m g (a / V) u``, and dW ``(a / V) q`` times the sum of
all ``m g x``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.engine import matmul_into
from lowtide.head.kernels import exp_rows, gemm, gradient_gemms_hopper, hopper
from lowtide.head.kernels.exp_logits import ExpRows, exp_tile, shifted_exp_logits
from lowtide.head.kernels.exp_rows import Reports, RowTerms, finish_input_grad
from lowtide.head.kernels.gemm import ALL, LogitTransform, Used, gemm_tiles, matrix
from lowtide.head.kernels.gradient_gemms_hopper import InputRows, Room, room_for
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.rows import Rows, rows_are_aligned, slices, take_rows
from lowtide.head.terms.loss import Loss, RowFactors
from lowtide.kernel_launch import power_of_2


@dataclass(kw_only=True)
class Piece:
    """The rows of a chunk; where ranks share the vocabulary, some of them."""

    part: slice  # among the n rows
    at: slice  # among the chunk's
    x_CD: Any = None  # hidden states; across ranks an exchange until they are needed
    y_C: Any = None  # int32 row of this rank's weight, more where another rank has the class, -1 where ignored
    rows: Any = None  # Reports
    sums: Any = None  # of each row's E, in parts


class Exponentials:
    """A head in one direction of a call: what its chunks share."""

    def __init__(self, head: Head, plan: HeadPlan, rows: Rows) -> None:
        self.head, self.plan, self.index, self.count = head, plan, rows.index, rows.count
        self.weight_VD = aligned_rows(head.weight_VD, head.dtype)
        self.width = len(self.weight_VD)
        self.transform = LogitTransform(head.bias_V, head.scale, head.softcap)
        self.tiles = gemm.tiles_across(self.width)
        self._product: Tensor | None = None  # memory for a chunk's E W

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.head.input.device)

    def hidden(self, part: slice) -> Tensor:
        """Return hidden states [C, D] as TMA takes them."""
        return aligned_rows(take_rows(self.head.input, self.index, part, self.head.dtype), self.head.dtype)

    def chunks(self, rows: int) -> Iterator[Piece]:
        """Yield all rows, so many at a time, with their hidden states."""
        for part in slices(self.plan.rows, rows):
            yield Piece(part=part, at=slice(0, part.stop - part.start), x_CD=self.hidden(part))

    def used(self, part: slice) -> Used:
        """Return how many of these rows the kernels compute."""
        return ALL if self.count is None else Used(self.count, part.start)

    @cached_property
    def room(self) -> Room:
        """Return where tiles of E W meet: no more than their product in float32 takes, or in blocks half of that."""
        rows = self.plan.product_rows // (1 if self.plan.schedule == "chunks" else 2)
        return room_for(self.head.input.device, rows * self.weight_VD.shape[1])

    def input_product(self, part: slice, e_CB: Tensor, w_BD: Tensor, out_CD: Tensor, *, add: bool) -> None:
        """Write ``E W`` (float32, contiguous) or add it; rows that are not used are left as they are."""
        if self.count is None:
            matmul_into(e_CB, w_BD, out_CD, add=add)
        else:
            ends = InputRows(out_CD, out_CD.stride(0), before=out_CD if add else None)
            gradient_gemms_hopper.input_grad(e_CB, w_BD, ends, self.room, self.used(part))

    def weight_product(self, part: slice, e_CB: Tensor, scaled_CD: Tensor, out_BD: Tensor, *, add: bool) -> None:
        """Write ``E^T S`` or add it, over the rows that are used."""
        if self.count is None:
            matmul_into(e_CB.t(), scaled_CD, out_BD, add=add)
        else:
            gradient_gemms_hopper.weight_grad(e_CB, scaled_CD, out_BD, self.used(part), add=add)

    def add_to_head(
        self, part: slice, e_CB: Tensor, scaled_CD: Tensor | None, s_C: Tensor, into: Gradients, block: slice
    ) -> None:
        """Add these rows' part of the gradients of weight and bias, of a block of classes."""
        if scaled_CD is not None and into.weight_VD is not None:
            self.weight_product(part, e_CB, scaled_CD, into.weight_VD[block], add=part.start > 0)
        if into.bias_V is not None:
            exp_rows.add_column_sums(e_CB, s_C, into.bias_V[block], self.used(part))

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """Take up a chunk: return the s [C] of its rows, and write s x into ``scaled_CD`` where given."""
        raise NotImplementedError

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """Write the gradient of the logits over each row's s, of the classes from ``first_class`` on."""
        raise NotImplementedError

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """Write the input's gradient, given the product [C, D] (float32) of all entries and the weight.

        Each row to its place ``to_C`` in ``out``; None: in order.
        """
        raise NotImplementedError

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients in blocks of the vocabulary: one GEMM for the entries, one for each gradient."""
        plan, new, D = self.plan, self.weight_VD.new_empty, self.weight_VD.shape[1]
        rows = min(plan.chunk_rows, plan.rows)
        e = new(rows, padded(plan.columns))
        scaled = None if into.weight_VD is None else new(rows, D)
        for piece in self.chunks(plan.chunk_rows):
            self._recompute_chunk(piece, e, scaled, into)

    def _recompute_chunk(self, piece: Piece, e: Tensor, scaled: Tensor | None, into: Gradients) -> None:
        (C, D), part, V = piece.x_CD.shape, piece.part, self.width
        scaled_CD = None if scaled is None else scaled[:C]
        s_C = self.prepare(piece, scaled_CD)
        if into.input_ND is not None and self._product is None:
            self._product = self._new(C, D)
        product_CD = None if self._product is None else self._product[:C]
        for block in slices(V, self.plan.columns):
            w_BD, e_CB = self.weight_VD[block], e[:C, : block.stop - block.start]
            self.fill(piece, w_BD, e_CB, block.start)
            if product_CD is not None:
                self.input_product(part, e_CB, w_BD, product_CD, add=block.start > 0)
                if block.stop == V:
                    self._put_input(piece, product_CD, into)
            self.add_to_head(part, e_CB, scaled_CD, s_C, into, block)

    def _put_input(self, piece: Piece, product_CD: Tensor, into: Gradients) -> None:
        assert into.input_ND is not None
        self.finish_input(piece, product_CD, *self.places(into.input_ND, piece.part))

    def places(self, input_ND: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return where these rows of the input's gradient go: into what, and their places in it; None: in order."""
        return (input_ND[part], None) if self.index is None else (input_ND, self.index[part])


class CrossEntropy(Exponentials):
    """A loss in either direction, its token weights left out.

    ``loss.y`` are int32 rows of this rank's weight, at least its rows where another rank has the class, -1 where
    ignored.
    """

    _sums: Tensor  # of tiles of a chunk's E
    _s_C: Tensor  # of a chunk's rows: what scales their gradients
    _scaled: Tensor | None  # a chunk's s x
    _into: Gradients

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan) -> None:
        super().__init__(head, plan, loss.rows)
        plain = all(part is None for part in self.transform)
        self.hopper = plain and hopper.runs_on(head.input.device)
        self.y_n, own_n = loss.y, loss.own_n
        spread: Tensor | None = None
        self.u_D: Tensor | None = None  # with label smoothing
        if loss.label_smoothing:
            new, V, a = self.head.input.new_ones, loss.vocab, loss.label_smoothing
            self.share, self.q_V = -a / V, new(self.width, dtype=torch.float32)
            if loss.class_weight is not None:
                self.q_V = loss.class_weight
            own_n = (1 - a) * (new(len(self.y_n), dtype=torch.float32) if own_n is None else own_n)
            spread = new((), dtype=torch.float32) * a if loss.total is None else loss.total * (a / V)
            self.u_D = weighted_sum(self.q_V, self.weight_VD)
        self.terms = RowTerms(own_n, spread, float(loss.z_loss))
        self._of_stored: Tensor | None = None  # sums of rows of E as stored, of each tile, for a loss that skips some
        self._e: Tensor | None = None  # a chunk's E, whose sums and gradients are computed

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """Return each row's "loss", "lse" and "miss", that minus the target's logit; with ``factors`` add gradients.

        ``factors`` is called while the first GEMM runs: the device should not wait for the host.
        """
        plan, self._factors = self.plan, factors
        in_chunks = factors is not None and plan.schedule == "chunks"
        rows = min(plan.chunk_rows, plan.rows)
        if in_chunks:
            self._allocate(rows)
        found = self._new(3, len(self.y_n))
        for piece in self._begun(rows, found):
            if in_chunks:
                self._add_gradients(piece)
            else:
                self._finish(piece)
            del piece  # and with it its memory, when the next is made
        numbers = dict(zip(("loss", "lse", "miss"), found, strict=True))
        if in_chunks:
            self._take_factors()  # also where there are no tokens
            self._add_even_parts(self._into)
        elif factors is not None:
            del self._sums  # memory for the blocks
            self.gradients(*factors(), numbers)
        return numbers

    def _begun(self, rows: int, found: Tensor) -> Iterator[Piece]:
        """Yield chunks of so many rows with their E, or its sums alone; their numbers are to be ``found``."""
        self._sums = self._new(rows, self.tiles)
        for piece in self.chunks(rows):
            piece.y_C, piece.rows = self.y_n[piece.part], self._reports(piece, found)
            of_rows = piece.rows.target_logit, piece.rows.listed_count, self.used(piece.part)
            self.target_logits(piece.x_CD, piece.y_C, *of_rows)
            self._write_exponentials(piece)
            yield piece
            del piece

    def _allocate(self, rows: int) -> None:
        """Make a chunk's E of so many rows, whose gradients are computed too."""
        self._e, self._s_C = self.weight_VD.new_empty(rows, padded(self.width)), self._new(rows)

    def _reports(self, piece: Piece, found: Tensor) -> Reports:
        """Return memory for what will be known of a piece's rows."""
        C = piece.at.stop - piece.at.start
        target, rest, highest = self._new(3, C)
        s_C = target if self._e is None else self._s_C[piece.at]  # with sums alone none is written
        of_list = torch.split(self.y_n.new_empty(C + 1), [C, 1])
        return Reports._make((target, *found[:, piece.part], s_C, rest, highest, *of_list))

    def target_logits(self, x_CD: Tensor, y_C: Tensor, logit_C: Tensor, count: Tensor, used: Used = ALL) -> None:
        """Write rows' target logits, and 0 to the ``count`` of those that are listed."""
        C, D = x_CD.shape
        exp_rows.target_logits[(C,)](
            matrix(x_CD), matrix(self.weight_VD), y_C, logit_C, count, used, self.transform, C, self.width,
            BLOCK=exp_rows.block_of(D), num_warps=4,
        )  # fmt: skip

    def _write_exponentials(self, piece: Piece) -> None:
        C = len(piece.y_C)
        piece.sums = self._sums[:C]
        if self.width:
            rows = ExpRows(piece.rows.target_logit, piece.y_C, None, 0, *self._stored(C))
            self.exponentials(piece, self.weight_VD, self._e_of(piece.at), rows)

    def _e_of(self, at: slice) -> Tensor | None:
        """Return E of some of the chunk's rows; None where there is none, or this rank has no classes."""
        return None if self._e is None or not self.width else self._e[at, : self.width]

    def exponentials(self, piece: Piece, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows) -> None:
        """Write E of a chunk and some classes, or its sums."""
        used = self.used(piece.part)
        if self.hopper:
            hopper.exp_logits_hopper(piece.x_CD, w_VD, e_CV, rows, used=used)
            return
        transform = self.transform.of_classes(slice(rows.first_class, rows.first_class + len(w_VD)))
        gemm_tiles(exp_tile, piece.x_CD, w_VD, e_CV, rows, transform, used=used)

    def _finish(
        self, piece: Piece, factor_C: Tensor | None = None, e_CV: Tensor | None = None, scaled_CD: Tensor | None = None
    ) -> None:
        """Turn sums into losses and, with a factor, finish E and s x; then those rows that left the safe range."""
        (C, D), ranks = piece.x_CD.shape, self.head.ranks
        finish = partial(
            exp_rows.finish_rows[(C,)], matrix(piece.sums), piece.y_C, factor_C, matrix(piece.x_CD), scaled_CD,
            matrix(e_CV), piece.rows, self.used(piece.part), self.transform, self.terms.rows(piece.part), C,
            RANKS=0 if ranks.alone else power_of_2(ranks.size), BLOCK=exp_rows.block_of(D), num_warps=4,
        )  # fmt: skip
        finish(SHIFTED=False)
        self._shift(piece, e_CV)
        finish(SHIFTED=True)
        if self.u_D is not None:
            whole = self._whole_u
            mean_C = self._scaled_by(weighted_sum(whole[:-1], piece.x_CD.t()) + whole[-1]) * self.share
            piece.rows.loss.add_(mean_C.where(piece.y_C >= 0, 0))

    @cached_property
    def _whole_u(self) -> Tensor:
        """Return u, and behind it ``sum_v q_v b_v``, of all ranks' classes."""
        assert self.u_D is not None
        bias = self.q_V.new_zeros(()) if self.head.bias_V is None else self.head.bias_V @ self.q_V
        return self.head.ranks.sum_of(torch.cat((self.u_D, bias[None])))

    def _scaled_by(self, x: Tensor) -> Tensor:
        return x if self.transform.scale is None else x * self.transform.scale

    def _shift(self, piece: Piece, e_CV: Tensor | None, find_highest: tuple[bool, ...] = (True, False)) -> None:
        """Do the listed rows again, relative to another reference; the host never learns how many they are."""
        C, of_rows = len(piece.y_C), piece.rows
        rows = ExpRows(of_rows.highest, piece.y_C, None, 0, *self._stored(C))
        shifted_exp_logits(
            piece.x_CD, self.weight_VD, e_CV, rows, (of_rows.listed, of_rows.listed_count), self.transform,
            find_highest=find_highest,
        )  # fmt: skip

    def _stored(self, C: int) -> tuple[Any, ...]:
        """Return what takes the sums of a chunk's rows, as `ExpRows` has it."""
        return (self._sums[:C], self.tiles, *(() if self._of_stored is None else self._of_stored[:, :C]))

    def _take_factors(self) -> None:
        """The first time find the rows' factors, and make what takes the gradients."""
        if self._factors is None:
            return
        (self._factor_n, into), (rows, D) = self._factors(), (len(self._s_C), self.weight_VD.shape[1])
        self._factors, self._into, self._scaled, self._product = None, into, None, None
        self._begin_even_parts()
        if into.weight_VD is not None:
            self._scaled = self.weight_VD.new_empty(rows, D)
        if into.input_ND is not None and (self.count is None or self.u_D is not None or not self.head.ranks.alone):
            self._product = self._new(min(rows, self.plan.product_rows), D)

    def _add_gradients(self, piece: Piece) -> None:
        """Finish a chunk, and add its products with the weight and with the hidden states."""
        self._take_factors()
        into, e_CV, factor_C = self._into, self._e_of(piece.at), self._factor_n[piece.part]
        self._see_even_parts(piece)
        self._finish(piece, factor_C, e_CV, None if self._scaled is None else self._scaled[piece.at])
        if into.input_ND is not None:
            self._add_input(piece, e_CV, into.input_ND)
        self._add_weight(piece)

    def _add_weight(self, piece: Piece) -> None:
        C, stop = piece.at.stop, piece.part.stop
        e_CV, scaled_CD = self._e_of(slice(0, C)), None if self._scaled is None else self._scaled[:C]
        if e_CV is not None:
            self.add_to_head(slice(stop - C, stop), e_CV, scaled_CD, self._s_C[:C], self._into, slice(None))

    def ends(self, piece: Piece, s_C: Tensor, rest_C: Tensor, input_ND: Tensor) -> InputRows:
        """Return what ends the rows of a chunk's input gradient."""
        w_VD, (out, to_C) = self.weight_VD, self.places(input_ND, piece.part)
        return InputRows(out, out.stride(0), to_C, s_C, piece.y_C, rest_C, w_VD, w_VD.stride(0))

    def _input_rows(self, piece: Piece, e_CV: Tensor, ends: InputRows) -> None:
        """Write a chunk's input gradient by one kernel."""
        gradient_gemms_hopper.input_grad(e_CV, self.weight_VD, ends, self.room, self.used(piece.part))

    def _add_input(self, piece: Piece, e_CV: Any, input_ND: Tensor) -> None:
        """Write a chunk's input gradient, in blocks of the plan's rows."""
        s_C, rest_C = piece.rows.s, piece.rows.rest
        if self._product is None:
            self._input_rows(piece, e_CV, self.ends(piece, s_C, rest_C, input_ND))
            return
        for at in slices(len(e_CV), self.plan.product_rows):
            part = slice(piece.part.start + at.start, piece.part.start + at.stop)
            product_CD, (out, to_C) = self._product[: at.stop - at.start], self.places(input_ND, part)
            self.input_product(part, e_CV[at], self.weight_VD, product_CD, add=False)
            self.put_even_parts(product_CD, s_C[at], part)
            of_rows = s_C[at], piece.y_C[at], rest_C[at]
            finish_input_grad(product_CD, out, self.weight_VD, *of_rows, to_C=to_C, used=self.used(part))

    def gradients(self, factor_n: Tensor, into: Gradients, known: dict[str, Tensor]) -> None:
        """Add the gradients, from E recomputed a block of the vocabulary at a time, normalised: its sums are known."""
        self._factor_n, self.known = factor_n, known
        self._numbers = self._new(4 * self.plan.chunk_rows)
        self._begin_even_parts()
        self.recompute(into)
        self._add_even_parts(into)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        part, (C, D) = piece.part, piece.x_CD.shape
        piece.y_C, piece.rows = self.y_n[part], self._numbers[: 4 * C].view(4, C)
        exp_rows.prepare_rows[(C,)](
            self.known["lse"][part], self.known["miss"][part], piece.y_C, self._factor_n[part], matrix(piece.x_CD),
            scaled_CD, piece.rows, self.used(part), self.transform, self.terms.rows(part), C, self.width,
            BLOCK=exp_rows.block_of(D), num_warps=4,
        )  # fmt: skip
        self._see_even_parts(piece)
        s_C: Tensor = piece.rows[2]
        return s_C

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        reference_C, coefficient_C = piece.rows[:2]
        self.exponentials(piece, w_BD, e_CB, ExpRows(reference_C, piece.y_C, coefficient_C, first_class))

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """See `Exponentials.finish_input`."""
        of_rows = piece.rows[2], piece.y_C, piece.rows[3]
        self.put_even_parts(product_CD, piece.rows[2], piece.part)
        finish_input_grad(product_CD, out, self.weight_VD, *of_rows, to_C=to_C, used=self.used(piece.part))

    def _begin_even_parts(self) -> None:
        """Begin label smoothing's part of the gradients: of each row m g times the share, and the sum of those rows."""
        if self.u_D is not None:
            self._even_n = self._scaled_by(self._factor_n.where(self.y_n >= 0, 0)) * self.share
            self._even_D = torch.zeros_like(self.u_D)

    def _see_even_parts(self, piece: Piece) -> None:
        if self.u_D is not None:
            exp_rows.add_column_sums(piece.x_CD, self._even_n[piece.part], self._even_D, self.used(piece.part))

    def put_even_parts(self, product_CD: Tensor, s_C: Tensor, part: slice) -> None:
        """Add it to ``E W``, before this is multiplied by s."""
        if self.u_D is not None:
            product_CD.addr_((self._even_n[part] / s_C).where(s_C != 0, 0), self.u_D)

    def _add_even_parts(self, into: Gradients) -> None:
        """Add it to the gradients of weight and bias, without a float32 copy: in float32, rounded once."""
        if self.u_D is not None and into.weight_VD is not None:
            torch.addcmul(into.weight_VD, self.q_V[:, None], self._even_D, out=into.weight_VD)
        if self.u_D is not None and into.bias_V is not None:
            into.bias_V += self._even_n.sum() * self.q_V


def aligned_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as TMA takes it: in ``dtype``, rows in order that start at multiples of 16 bytes."""
    if x.dtype == dtype and rows_are_aligned(x):
        return x
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)


def weighted_sum(q_V: Tensor, w_VD: Tensor) -> Tensor:
    """Return ``sum_v q_v w_v`` in float32, without a float32 copy of ``w_VD``."""
    first = q_V.to(w_VD.dtype)  # and what adds up to it, to all the digits that float32 has
    second = (q_V - first).to(w_VD.dtype)
    parts = torch.stack((first, second, (q_V - first - second).to(w_VD.dtype)))
    out = q_V.new_zeros(3, w_VD.shape[1])
    if len(q_V):  # a rank may have no classes
        matmul_into(parts, w_VD, out, add=False)
    return out.sum(0)

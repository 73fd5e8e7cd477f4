"""Forward and backward of the gated MLP over tiles of tokens: the GEMMs in the order that needs the least memory.

C rows of a tile (all N tokens, or ``tile_tokens`` of them), D hidden size, F intermediate size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.mlp.call import SwigluCall, Wanted, of_both
from lowtide.mlp.elementwise import gated, gated_backward
from lowtide.mlp.low_rank import LowRank
from lowtide.mlp.packed import Packed, Weight
from lowtide.mlp.products import RowSum, Sum, multiply


def project_tiles(call: SwigluCall) -> tuple[Tensor, Tensor]:
    """Return gate and up [N, F]."""
    gate, up, _ = _projections(call)
    x_ND, dtype = _rows(call.input), call.saved_dtype
    tiles = call.tiles()
    if len(tiles) == 1:
        x = _operand(x_ND, call.dtype)
        return gate.output(x, None, 0).to(dtype), up.output(x, None, 0).to(dtype)
    shape = (call.tokens, call.down_shape[1])
    gate_NF, up_NF = (x_ND.new_empty(shape, dtype=dtype) for _ in range(2))
    for tile in tiles:
        x = _operand(x_ND[tile], call.dtype)
        for projection, out in ((gate, gate_NF[tile]), (up, up_NF[tile])):
            if dtype == call.dtype:
                projection.output(x, out, tile.start)
            else:
                out.copy_(projection.output(x, None, tile.start))
    return gate_NF, up_NF


def forward_tiles(call: SwigluCall, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Return the output [..., D] from gate and up [N, F], or if these are empty from the input."""
    saved = gate_NF.dim() == 2
    gate, up, down = _projections(call)
    x_ND = _rows(call.input)
    y = x_ND.new_empty(call.output_shape, dtype=call.dtype)
    y_ND = _rows(y)
    for tile in call.tiles():
        if saved:
            g, u = _part(gate_NF, tile), _part(up_NF, tile)
        else:
            x = _operand(_part(x_ND, tile), call.dtype)
            g, u = gate.output(x, None, tile.start), up.output(x, None, tile.start)
            del x
        p = torch.empty_like(g, dtype=call.dtype) if saved else g
        gated(g, u, call.activation, p)
        del g, u
        down.output(p, _part(y_ND, tile), tile.start)
        del p
    return y  # itself, not a view: FSDP2 warns of views that a module returns


def backward_tiles(
    call: SwigluCall, wanted: Wanted, upstream: Tensor, saved: list[Tensor], *, in_place: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's tensors in their shapes and dtypes, None for those that are not needed.

    ``upstream`` is the output's gradient [..., D]; ``saved`` gate and up [N, F], which may be overwritten ``in_place``,
    or empty tensors if forward saved neither. They are removed from the list before the last tile, so that their memory
    is freed once nothing else refers to them.
    """
    projections = _projections(call)
    tiles = call.tiles()
    sums = [
        Sum(t, call.wide if len(tiles) > 1 or t.dim() == 1 or i >= 6 else t.dtype) if flag and t is not None else None
        for i, (t, flag) in enumerate(zip(call.trained[1:], wanted[1:], strict=True))
    ]
    _give_sums(call, projections, sums)
    wanted = of_both(wanted, call.joined)
    has_saved = saved[0].dim() == 2
    x_ND, dy_ND = _rows(call.input), _rows(upstream)
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wanted.input else None
    for tile in tiles:
        sides = [_part(t, tile) for t in saved] if has_saved else []
        if tile is tiles[-1]:
            saved.clear()
        x, dy = _part(x_ND, tile), _part(dy_ND, tile)
        dx = None if dx_ND is None else _part(dx_ND, tile)
        _backward_tile(call, wanted, projections, (x, dy, dx), sides, tile.start, in_place=in_place)
    scales = (*[1.0] * 6, *[s for s in (call.gate_scale, call.up_scale, call.down_scale) for _ in range(2)])
    return (
        None if dx_ND is None else dx_ND.view(call.input.shape),
        *[None if total is None else total.finished(s) for total, s in zip(sums, scales, strict=True)],
    )


def _give_sums(call: SwigluCall, projections: "list[_Projection]", sums: Sequence[Sum | None]) -> None:
    """Give each projection the sums of its own gradients, gate and up of one projection their rows of that one's."""
    for i, (projection, rows) in enumerate(zip(projections, (*call.rows, None), strict=True)):
        of = i if rows is None else 0
        weight: Sum | RowSum | None = sums[of]
        bias: Sum | RowSum | None = sums[3 + of]
        b: Sum | RowSum | None = sums[7 + 2 * of]
        if rows is not None:
            weight, bias, b = [
                None if s is None else RowSum(s, rows) for s in (sums[of], sums[3 + of], sums[7 + 2 * of])
            ]
        projection.weight_sum, projection.bias_sum = weight, bias
        if projection.adapter is not None:
            projection.adapter.sums = sums[6 + 2 * of], b


def _backward_tile(
    call: SwigluCall,
    wanted: Wanted,
    projections: "list[_Projection]",
    rows: tuple[Tensor, Tensor, Tensor | None],
    sides: list[Tensor],
    start: int,
    *,
    in_place: bool,
) -> None:
    """Add one tile's part to every gradient; each buffer is freed after the last GEMM that reads it.

    ``rows`` are the tile's of x, dy and dx; ``sides`` gate and up, which are removed from it, or empty if they are to
    be recomputed; ``start`` is the tile's first row.
    """
    gate, up, down = projections
    x, dy, dx = rows
    dy = _operand(dy, call.dtype)
    if down.bias_sum is not None:
        down.bias_sum.add_rows(dy)
    if not wanted.projections:
        return
    if wanted.reads_input or not sides:
        x = _operand(x, call.dtype)
    if sides:
        u, g = sides.pop(), sides.pop()
        if g.dtype != call.dtype:
            g, u, in_place = g.to(call.dtype), u.to(call.dtype), True
    else:
        g, u = gate.output(x, None, start), up.output(x, None, start)
        in_place = True
    p: Tensor | None = None
    dgate: Tensor | None = None
    dup: Tensor | None = None
    if wanted.gate or wanted.up:
        dp = dy @ down.weight
        if down.adapter is not None:
            down.adapter.backward(dy, None, dp, start)
        dgate = None if not wanted.gate else g if in_place else torch.empty_like(g)
        dup = None if not wanted.up else u if in_place else torch.empty_like(u)
        p = dp if wanted.product else None
        gated_backward(g, u, dp, call.activation, dgate, dup, p)
        del dp
    elif wanted.product:
        p = g if in_place else torch.empty_like(g)
        gated(g, u, call.activation, p)
    del g, u
    if p is not None:
        if down.weight_sum is not None:
            down.weight_sum.add_product(dy.T, p)
        if down.adapter is not None:
            down.adapter.backward(dy, p, None, start)
    del p, dy
    if dgate is not None:
        gate.backward(dgate, x, dx, start, add=False)
    del dgate
    if dup is not None:
        up.backward(dup, x, dx, start, add=True)


class _Projection:
    """``x W^T + b`` and its adapter's part, during one pass, with the gradients that are needed."""

    def __init__(self, weight: Weight, bias: Tensor | None, adapter: LowRank | None, dtype: torch.dtype) -> None:
        self._stored, self._bias, self.adapter, self._dtype = weight, bias, adapter, dtype
        self._operand: Tensor | None = None
        self.weight_sum: Sum | RowSum | None = None
        self.bias_sum: Sum | RowSum | None = None

    @property
    def weight(self) -> Tensor:
        """Return W in the operands' dtype; cast when first read, so that the first GEMM need not wait for all casts.

        One in 4 bits is dequantised for each GEMM, and freed after it.
        """
        if isinstance(self._stored, Packed):
            return _operand(self._stored.dense(), self._dtype)
        if self._operand is None:
            self._operand = _operand(self._stored, self._dtype)
        return self._operand

    def output(self, x: Tensor, out: Tensor | None, start: int) -> Tensor:
        """Return the output of the rows from ``start`` on, in ``out`` if it is given."""
        bias, weight = self._bias, self.weight.T
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        # not F.linear, which a user may have replaced since the forward
        out = torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
        if self.adapter is not None:
            self.adapter.add_output(x, out, start)
        return out

    def backward(self, grad: Tensor, x: Tensor, dx: Tensor | None, start: int, *, add: bool) -> None:
        """Add the gradient [C, out] of the output to those of weight, bias and adapter; write or add it to ``dx``."""
        if self.weight_sum is not None:
            self.weight_sum.add_product(grad.T, x)
        if self.bias_sum is not None:
            self.bias_sum.add_rows(grad)
        if dx is not None:
            multiply(grad, self.weight, dx, add=add)
        if self.adapter is not None:
            self.adapter.backward(grad, x, dx, start)


def _projections(call: SwigluCall) -> "list[_Projection]":
    """Return gate, up and down."""
    seeds = (call.seed, call.seed + (not call.joined), call.seed + 2)  # of one projection there is one dropout
    found, dtype = [], call.low_rank_dtype
    for (weight, bias, a, b, scale, dropout), seed in zip(call.projections, seeds, strict=True):
        adapter = None if a is None or b is None else LowRank(a.to(dtype), b.to(dtype), scale, dropout, seed)
        found.append(_Projection(weight, bias, adapter, call.dtype))
    return found


def _rows(tensor: Tensor) -> Tensor:
    """Return [..., D] as [N, D], itself or a view where its strides allow."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _part(tensor: Tensor, tile: slice) -> Tensor:
    """Return the rows of a tile; if these are all, the tensor itself, which takes the host less time than a view."""
    return tensor if tile.stop - tile.start == tensor.shape[0] else tensor[tile]


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as a GEMM reads it without its own copy: in its dtype, with contiguous rows or columns."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    (rows, columns), (along, across) = tensor.shape, tensor.stride()
    readable = (across == 1 and along >= columns) or (along == 1 and across >= rows)
    return tensor if readable else tensor.contiguous()

"""Forward and backward of the gated MLP over tiles of tokens: the GEMMs in the order that holds the least at once.

C rows of a tile (all N tokens, or ``tile_tokens`` of them), D hidden size, F intermediate size.
"""

import math

import torch
from torch import Tensor

from lowtide.mlp.call import SwigluCall, Wanted
from lowtide.mlp.elementwise import gated, gated_backward
from lowtide.mlp.low_rank import LowRank
from lowtide.mlp.products import Sum, multiply


def project_tiles(call: SwigluCall) -> tuple[Tensor, Tensor]:
    """Return gate and up [N, F]."""
    weights = _Weights(call)
    x_ND = _rows(call.input)
    tiles = call.tiles()
    if len(tiles) == 1:
        return weights.projections(_operand(x_ND, call.dtype), None, None, 0)
    gate_NF, up_NF = (x_ND.new_empty((call.tokens, len(call.gate_weight)), dtype=call.dtype) for _ in range(2))
    for tile in tiles:
        weights.projections(_operand(x_ND[tile], call.dtype), gate_NF[tile], up_NF[tile], tile.start)
    return gate_NF, up_NF


def forward_tiles(call: SwigluCall, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Return the output [..., D] from gate and up [N, F], or where these are empty from the input."""
    kept = gate_NF.dim() == 2
    weights = _Weights(call)
    x_ND = _rows(call.input)
    y = x_ND.new_empty(call.output_shape, dtype=call.dtype)
    y_ND = _rows(y)
    for tile in call.tiles():
        if kept:
            gate, up = _part(gate_NF, tile), _part(up_NF, tile)
        else:
            gate, up = weights.projections(_operand(_part(x_ND, tile), call.dtype), None, None, tile.start)
        p = torch.empty_like(gate) if kept else gate
        gated(gate, up, call.activation, p)
        del gate, up
        weights.output(p, _part(y_ND, tile), tile.start)
        del p
    return y  # itself, not a view: FSDP2 warns of views that a module returns


def backward_tiles(
    call: SwigluCall, wanted: Wanted, upstream: Tensor, kept: list[Tensor], *, in_place: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's tensors in their shapes and dtypes, None where not wanted.

    Args:
        call: What was asked.
        wanted: Which.
        upstream: The output's gradient [..., D].
        kept: Gate and up [N, F], or empty tensors where forward kept neither. Taken out of the list before the last
            tile, so that they are let go where nobody else holds them.
        in_place: Whether these may be overwritten.
    """
    kept_any = kept[0].dim() == 2
    weights = _Weights(call)
    tiles = call.tiles()
    sums = [
        Sum(t, call.wide if len(tiles) > 1 or t.dim() == 1 or i >= 6 else t.dtype) if flag and t is not None else None
        for i, (t, flag) in enumerate(zip(call.trained[1:], wanted[1:], strict=True))
    ]
    weights.take_sums(sums[6:])
    x_ND, dy_ND = _rows(call.input), _rows(upstream)
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wanted.input else None
    for tile in tiles:
        sides = [_part(t, tile) for t in kept] if kept_any else []
        if tile is tiles[-1]:
            kept.clear()
        x, dy = _part(x_ND, tile), _part(dy_ND, tile)
        dx = None if dx_ND is None else _part(dx_ND, tile)
        _backward_tile(call, wanted, weights, sums[:6], x, dy, sides, dx, in_place, tile.start)
    weights.scale_sums()
    return (
        None if dx_ND is None else dx_ND.view(call.input.shape),
        *[None if total is None else total.finished() for total in sums],
    )


def _backward_tile(
    call: SwigluCall,
    wanted: Wanted,
    weights: "_Weights",
    sums: list[Sum | None],
    x: Tensor,
    dy: Tensor,
    sides: list[Tensor],
    dx: Tensor | None,
    in_place: bool,
    start: int,
) -> None:
    """Add one tile's part to every gradient; each buffer is let go after the last GEMM that reads it.

    ``sides`` are gate and up, which are taken out of it, or nothing where they are to be computed; ``start`` is the
    tile's first row.
    """
    gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = sums
    dy = _operand(dy, call.dtype)
    if down_bias is not None:
        down_bias.add_rows(dy)
    if not wanted.projections:
        return
    if wanted.reads_input or not sides:
        x = _operand(x, call.dtype)
    if sides:
        up, gate = sides.pop(), sides.pop()
    else:
        gate, up = weights.projections(x, None, None, start)
        in_place = True
    p: Tensor | None = None
    dgate: Tensor | None = None
    dup: Tensor | None = None
    if wanted.gate or wanted.up:
        dp = dy @ weights.down
        if weights.down_adapter is not None:
            weights.down_adapter.backward(dy, None, dp, start)
        dgate = None if not wanted.gate else gate if in_place else torch.empty_like(gate)
        dup = None if not wanted.up else up if in_place else torch.empty_like(up)
        p = dp if wanted.product else None
        gated_backward(gate, up, dp, call.activation, dgate, dup, p)
        del dp
    elif wanted.product:
        p = gate if in_place else torch.empty_like(gate)
        gated(gate, up, call.activation, p)
    del gate, up
    if down_weight is not None and p is not None:
        down_weight.add_product(dy.T, p)
    if weights.down_adapter is not None and p is not None:
        weights.down_adapter.backward(dy, p, None, start)
    del p, dy
    if dgate is not None:
        _add_side(dgate, x, gate_weight, gate_bias, None if dx is None else (weights.gate, dx), first=True)
        if weights.gate_adapter is not None:
            weights.gate_adapter.backward(dgate, x, dx, start)
    del dgate
    if dup is not None:
        _add_side(dup, x, up_weight, up_bias, None if dx is None else (weights.up, dx), first=False)
        if weights.up_adapter is not None:
            weights.up_adapter.backward(dup, x, dx, start)


def _add_side(
    grad: Tensor,
    x: Tensor,
    weight_sum: Sum | None,
    bias_sum: Sum | None,
    back: tuple[Tensor, Tensor] | None,
    *,
    first: bool,
) -> None:
    """Add what the gradient [C, F] of gate or up brings to the projection's weight and bias and to the input.

    ``back`` is the projection's weight, and the input's gradient.
    """
    if weight_sum is not None:
        weight_sum.add_product(grad.T, x)
    if bias_sum is not None:
        bias_sum.add_rows(grad)
    if back is not None:
        multiply(grad, *back, add=not first)


class _Weights:
    """The weights and biases in the operands' dtype: themselves, or under autocast their casts, one of each a call."""

    def __init__(self, call: SwigluCall) -> None:
        self._call = call
        self._gate: Tensor | None = None
        self._up: Tensor | None = None
        self._down: Tensor | None = None
        self.gate_adapter, self.up_adapter, self.down_adapter = LowRank.of(call)

    @property
    def gate(self) -> Tensor:
        """Return Wg; not cast before it is read, as the others, so that the first GEMM need not wait for all."""
        if self._gate is None:
            self._gate = _operand(self._call.gate_weight, self._call.dtype)
        return self._gate

    @property
    def up(self) -> Tensor:
        """Return Wu."""
        if self._up is None:
            self._up = _operand(self._call.up_weight, self._call.dtype)
        return self._up

    @property
    def down(self) -> Tensor:
        """Return Wd."""
        if self._down is None:
            self._down = _operand(self._call.down_weight, self._call.dtype)
        return self._down

    def projections(self, x_CD: Tensor, gate: Tensor | None, up: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Return gate and up [C, F] of the rows from ``start`` on, in the memory that is given, or in their own."""
        gate = _affine(x_CD, self.gate, self._call.gate_bias, gate)
        if self.gate_adapter is not None:
            self.gate_adapter.add_output(x_CD, gate, start)
        up = _affine(x_CD, self.up, self._call.up_bias, up)
        if self.up_adapter is not None:
            self.up_adapter.add_output(x_CD, up, start)
        return gate, up

    def output(self, p_CF: Tensor, y_CD: Tensor, start: int) -> None:
        """Write the down projection of ``act(gate) * up`` of the rows from ``start`` on."""
        _affine(p_CF, self.down, self._call.down_bias, y_CD)
        if self.down_adapter is not None:
            self.down_adapter.add_output(p_CF, y_CD, start)

    def take_sums(self, sums: list[Sum | None]) -> None:
        """Give the adapters where their gradients add up: of A and B, of gate, up and down in turn."""
        for i, adapter in enumerate((self.gate_adapter, self.up_adapter, self.down_adapter)):
            if adapter is not None:
                adapter.sums = (sums[2 * i], sums[2 * i + 1])

    def scale_sums(self) -> None:
        """Multiply what the adapters added up with their scales, once."""
        for adapter in (self.gate_adapter, self.up_adapter, self.down_adapter):
            if adapter is not None:
                adapter.scale_sums()


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return ``x W^T + b``, in ``out`` where there is one."""
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if out is None:  # not F.linear, which a user may have replaced since the forward
        return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _rows(tensor: Tensor) -> Tensor:
    """Return [..., D] as [N, D], itself or a view where its strides allow."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _part(tensor: Tensor, tile: slice) -> Tensor:
    """Return the rows of a tile: where it is all of them, what was given, which takes the host less than a view."""
    return tensor if tile.stop - tile.start == tensor.shape[0] else tensor[tile]


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as a GEMM reads it without a copy of its own: its dtype, rows or columns one after another."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    (rows, columns), (along, across) = tensor.shape, tensor.stride()
    read_as_it_is = (across == 1 and along >= columns) or (along == 1 and across >= rows)
    return tensor if read_as_it_is else tensor.contiguous()

"""Forward and backward of the gated MLP over tiles of tokens: the GEMMs in the order that holds the least at once.

C rows of a tile (all N tokens, or ``tile_tokens`` of them), D hidden size, F intermediate size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.mlp.call import SwigluCall, Wanted
from lowtide.mlp.elementwise import gated, gated_backward


def project_tiles(call: SwigluCall) -> tuple[Tensor, Tensor]:
    """Return gate and up [N, F]."""
    weights = _Weights(call, recompute=True)
    x_ND = _rows(call.input)
    gate_NF, up_NF = (x_ND.new_empty((call.tokens, len(call.gate_weight)), dtype=call.dtype) for _ in range(2))
    for tile in call.tiles():
        weights.projections(_operand(x_ND[tile], call.dtype), gate_NF[tile], up_NF[tile])
    return gate_NF, up_NF


def forward_tiles(call: SwigluCall, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Return the output [..., D] from gate and up [N, F], or where these are empty from the input."""
    kept = gate_NF.dim() == 2
    weights = _Weights(call, forward=not kept, output=kept)
    x_ND = _rows(call.input)
    y = x_ND.new_empty(call.output_shape, dtype=call.dtype)
    y_ND = _rows(y)
    for tile in call.tiles():
        if kept:
            gate, up = gate_NF[tile], up_NF[tile]
        else:
            gate, up = weights.projections(_operand(x_ND[tile], call.dtype), None, None)
        p = torch.empty_like(gate) if kept else gate
        gated(gate, up, call.activation, p)
        del gate, up
        _affine(p, weights.down, weights.down_bias, y_ND[tile])
        del p
    return y  # itself, not a view: FSDP2 warns of views that a module returns


def backward_tiles(
    call: SwigluCall, wanted: Wanted, upstream: Tensor, kept: list[Tensor], *, in_place: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of the call's tensors in their shapes and dtypes, empty where not wanted.

    Args:
        call: What was asked.
        wanted: Which.
        upstream: The output's gradient [..., D].
        kept: Gate and up [N, F], or empty tensors where forward kept neither. Taken out of the list before the last
            tile, so that they are let go where nobody else holds them.
        in_place: Whether these may be overwritten.
    """
    kept_any = kept[0].dim() == 2
    weights = _Weights(call, recompute=not kept_any and wanted.projections, wanted=wanted)
    tiles = call.tiles()
    sums = [
        _Sum(t, flag, call.wide if len(tiles) > 1 or t.dim() == 1 else t.dtype) if t is not None else None
        for t, flag in zip(call.trained[1:], wanted[1:], strict=True)
    ]
    x_ND, dy_ND = _rows(call.input), _rows(upstream)
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wanted.input else None
    for tile in tiles:
        sides = [t[tile] for t in kept] if kept_any else []
        if tile is tiles[-1]:
            kept.clear()
        dx = None if dx_ND is None else dx_ND[tile]
        _backward_tile(call, wanted, weights, sums, x_ND[tile], dy_ND[tile], sides, dx, in_place)
    dx = x_ND.new_empty(0) if dx_ND is None else dx_ND.view(call.input.shape)
    return (dx, *(x_ND.new_empty(0) if total is None else total.finished() for total in sums))


def _backward_tile(
    call: SwigluCall,
    wanted: Wanted,
    weights: "_Weights",
    sums: "list[_Sum | None]",
    x: Tensor,
    dy: Tensor,
    sides: list[Tensor],
    dx: Tensor | None,
    in_place: bool,
) -> None:
    """Add one tile's part to every gradient; each buffer is let go after the last GEMM that reads it.

    ``sides`` are gate and up, which are taken out of it, or nothing where they are to be computed.
    """
    gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = sums
    dy = _operand(dy, call.dtype)
    if wanted.down_bias and down_bias is not None:
        down_bias.add_rows(dy)
    if not wanted.projections:
        return
    if wanted.reads_input or not sides:
        x = _operand(x, call.dtype)
    if sides:
        up, gate = sides.pop(), sides.pop()
    else:
        gate, up = weights.projections(x, None, None)
        in_place = True
    p: Tensor | None = None
    dgate: Tensor | None = None
    dup: Tensor | None = None
    if wanted.gate or wanted.up:
        dp = dy @ weights.down
        dgate = None if not wanted.gate else gate if in_place else torch.empty_like(gate)
        dup = None if not wanted.up else up if in_place else torch.empty_like(up)
        p = dp if wanted.down_weight else None
        gated_backward(gate, up, dp, call.activation, dgate, dup, p)
        del dp
    elif wanted.down_weight:
        p = gate if in_place else torch.empty_like(gate)
        gated(gate, up, call.activation, p)
    del gate, up
    if down_weight is not None and p is not None:
        down_weight.add_product(dy.T, p)
    del p, dy
    if dgate is not None:
        _add_side(dgate, x, gate_weight, gate_bias, weights.gate, dx, first=True)
    del dgate
    if dup is not None:
        _add_side(dup, x, up_weight, up_bias, weights.up, dx, first=False)


def _add_side(
    grad: Tensor,
    x: Tensor,
    weight_sum: "_Sum | None",
    bias_sum: "_Sum | None",
    weight: Tensor,
    dx: Tensor | None,
    *,
    first: bool,
) -> None:
    """Add what the gradient [C, F] of gate or up brings to the projection's weight and bias and to the input."""
    if weight_sum is not None and weight_sum.wanted:
        weight_sum.add_product(grad.T, x)
    if bias_sum is not None and bias_sum.wanted:
        bias_sum.add_rows(grad)
    if dx is not None:
        multiply(grad, weight, dx, add=not first)


class _Weights:
    """The weights and biases in the operands' dtype: themselves, or under autocast their casts, one of each a call."""

    def __init__(
        self,
        call: SwigluCall,
        *,
        forward: bool = False,
        recompute: bool = False,
        output: bool = False,
        wanted: Wanted | None = None,
    ) -> None:
        projected = forward or recompute
        side = projected or (wanted is not None and wanted.input)
        through = forward or output or (wanted is not None and (wanted.gate or wanted.up))

        def cast(tensor: Tensor, needed: bool) -> Tensor:
            return _operand(tensor, call.dtype) if needed else tensor

        self.gate, self.up = cast(call.gate_weight, side), cast(call.up_weight, side)
        self.down = cast(call.down_weight, through)
        biases = (call.gate_bias, call.up_bias, call.down_bias)
        self.gate_bias, self.up_bias, self.down_bias = (
            bias.to(call.dtype) if bias is not None and (projected or output) else None for bias in biases
        )

    def projections(self, x_CD: Tensor, gate: Tensor | None, up: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return gate and up [C, F], in the memory that is given."""
        shape = (len(x_CD), len(self.gate))
        gate = x_CD.new_empty(shape) if gate is None else gate
        up = x_CD.new_empty(shape) if up is None else up
        _affine(x_CD, self.gate, self.gate_bias, gate)
        _affine(x_CD, self.up, self.up_bias, up)
        return gate, up


@dataclass
class _Sum:
    """A gradient that tiles add up to, in ``dtype``: for one tile the weight's own, for several and biases the wide."""

    of: Tensor
    wanted: bool
    dtype: torch.dtype
    total: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``, a weight's gradient."""
        first = self.total is None
        if self.total is None:
            self.total = torch.empty(self.of.shape, dtype=self.dtype, device=self.of.device)
        multiply(a, b, self.total, add=not first)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum of all rows, a bias's gradient."""
        part = rows.sum(0, dtype=self.dtype)
        self.total = part if self.total is None else self.total.add_(part)

    def finished(self) -> Tensor:
        """Return the sum in the dtype of what it is the gradient of, empty where it is not wanted."""
        total, self.total = self.total, None
        return self.of.new_empty(0) if total is None else total.to(self.of.dtype)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write or add ``a @ b`` into ``out``, of the operands' dtype or another."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out.add_(a @ b)
    else:
        out.copy_(a @ b)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _rows(tensor: Tensor) -> Tensor:
    """Return [..., D] as [N, D], a view where its strides allow."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as a GEMM reads it without a copy of its own: its dtype, rows or columns one after another."""
    tensor = tensor.to(dtype)
    (rows, columns), (along, across) = tensor.shape, tensor.stride()
    read_as_it_is = (across == 1 and along >= columns) or (along == 1 and across >= rows)
    return tensor if read_as_it_is else tensor.contiguous()

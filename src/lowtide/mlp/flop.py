"""The FLOP of the gated MLP's GEMMs, by formula: two per token and element of each weight that is read."""

from torch import Tensor

from lowtide.mlp.call import SwigluCall, Wanted


def projections_flop(call: SwigluCall) -> int:
    """Return the FLOP of gate and up."""
    return _flop(call, call.gate_weight, call.up_weight, call.gate_a, call.gate_b, call.up_a, call.up_b)


def forward_flop(call: SwigluCall, *, saved: bool) -> int:
    """Return the FLOP of the output from gate and up, or from the input if these are not ``saved``."""
    output = _flop(call, call.down_weight, call.down_a, call.down_b)
    return output if saved else output + projections_flop(call)


def backward_flop(call: SwigluCall, wanted: Wanted, *, saved: bool) -> int:
    """Return the FLOP of the gradients that are ``wanted``."""
    if not wanted.projections:
        return 0
    flop = 0 if saved else projections_flop(call)
    if wanted.gate or wanted.up:
        flop += _flop(call, call.down_weight, call.down_a, call.down_b)
    if wanted.down_weight:
        flop += _flop(call, call.down_weight)
    if wanted.product:
        flop += _of_adapter(call, call.down_a, call.down_b, wanted.down_a, wanted.down_b, through=False)
    for weight, a, b, of_weight, of_a, of_b in (
        (call.gate_weight, call.gate_a, call.gate_b, wanted.gate_weight, wanted.gate_a, wanted.gate_b),
        (call.up_weight, call.up_a, call.up_b, wanted.up_weight, wanted.up_a, wanted.up_b),
    ):
        flop += (of_weight + wanted.input) * _flop(call, weight)
        flop += _of_adapter(call, a, b, of_a, of_b, through=wanted.input)
    return flop


def _of_adapter(call: SwigluCall, a: Tensor | None, b: Tensor | None, of_a: bool, of_b: bool, *, through: bool) -> int:
    """Return the FLOP of an adapter's gradients, and with ``through`` of its part of the input's."""
    reads_b = of_b + (of_a or through)  # dy^T (x A^T); dy B
    reads_a = of_b + of_a + through  # x A^T; (dy B)^T x; (dy B) A
    return reads_a * _flop(call, a) + reads_b * _flop(call, b)


def _flop(call: SwigluCall, *weights: Tensor | None) -> int:
    return 2 * call.tokens * sum(weight.numel() for weight in weights if weight is not None)

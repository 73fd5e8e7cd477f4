"""The operations of the gated MLP's products, by formula: two for each token and each number of a weight it reads."""

from torch import Tensor

from lowtide.mlp.call import SwigluCall, Wanted


def projections_flop(call: SwigluCall) -> int:
    """Return the FLOP of gate and up."""
    return _flop(call, call.gate_weight, call.up_weight, call.gate_a, call.gate_b, call.up_a, call.up_b)


def forward_flop(call: SwigluCall, *, kept: bool) -> int:
    """Return the FLOP of the output from gate and up, or where these are not ``kept`` from the input."""
    output = _flop(call, call.down_weight, call.down_a, call.down_b)
    return output if kept else output + projections_flop(call)


def backward_flop(call: SwigluCall, wanted: Wanted, *, kept: bool) -> int:
    """Return the FLOP of the gradients that are ``wanted``."""
    if not wanted.projections:
        return 0
    found = 0 if kept else projections_flop(call)
    if wanted.gate or wanted.up:
        found += _flop(call, call.down_weight, call.down_a, call.down_b)
    if wanted.down_weight:
        found += _flop(call, call.down_weight)
    if wanted.product:
        found += _of_adapter(call, call.down_a, call.down_b, wanted.down_a, wanted.down_b, through=False)
    for weight, a, b, of_weight, of_a, of_b in (
        (call.gate_weight, call.gate_a, call.gate_b, wanted.gate_weight, wanted.gate_a, wanted.gate_b),
        (call.up_weight, call.up_a, call.up_b, wanted.up_weight, wanted.up_a, wanted.up_b),
    ):
        found += (of_weight + wanted.input) * _flop(call, weight)
        found += _of_adapter(call, a, b, of_a, of_b, through=wanted.input)
    return found


def _of_adapter(call: SwigluCall, a: Tensor | None, b: Tensor | None, of_a: bool, of_b: bool, *, through: bool) -> int:
    """Return the FLOP of an adapter's gradients, and with ``through`` of its part of its input's."""
    reads_b = of_b + (of_a or through)  # dy^T (x A^T); dy B
    reads_a = of_b + of_a + through  # x A^T; (dy B)^T x; (dy B) A
    return reads_a * _flop(call, a) + reads_b * _flop(call, b)


def _flop(call: SwigluCall, *weights: Tensor | None) -> int:
    return 2 * call.tokens * sum(weight.numel() for weight in weights if weight is not None)

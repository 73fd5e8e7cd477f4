"""The gated MLP with low-rank adapters on its projections, which keeps no more for backward than without."""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import operand_dtype
from lowtide.mlp.call import SwigluCall
from lowtide.mlp.operators import run
from lowtide.mlp.swiglu import check_level, check_tile


class Adapter(NamedTuple):
    """An adapter of a projection: ``x W^T`` becomes ``x W^T + scale (drop(x) A^T) B^T``."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r], of the dtype of a
    scale: float
    dropout: float  # the probability that a number of x is dropped, and the others are divided by what is left of 1


class _Parts(NamedTuple):
    """What stands for no adapter."""

    a: None
    b: None
    scale: float
    dropout: float


class Projection(NamedTuple):
    """A projection of the MLP, and what is added to it."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    adapter: Adapter | None = None


def adapted_mlp(
    input: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    activation: str,
    checkpoint_level: int,
    tile_tokens: int | None = None,
) -> Tensor:
    """Return ``(act(gate(x)) * up(x))`` through ``down``: `lowtide.swiglu_mlp` with adapters.

    The adapters' products are added to those of the weights in place. Kept for backward is what `swiglu_mlp` keeps with
    frozen weights: at level 0 gate and up, and the input where an adapter of theirs is trained; at level 1 the input.
    What is of the adapters' rank is computed again. A frozen weight costs no product in backward. Adapters of another
    dtype than the input, as float32 ones in a bfloat16 model, are multiplied in theirs, outside autocast.

    Dropout draws a number from the CPU's default generator, which decides what each pass drops; nothing of it is kept.

    Args:
        input: x [..., D].
        gate: [F, D]. Not checked, like all that follows: made from modules that were looked at.
        up: [F, D].
        down: [D, F].
        activation: As `swiglu_mlp` has it.
        checkpoint_level: The same; an attribute that users set, and so checked.
        tile_tokens: The same.

    Returns:
        Tensor: [..., D], in the dtype of ``input``, or autocast's.
    """
    adapters = [projection.adapter for projection in (gate, up, down)]
    # Made here and not one for all calls: see `SwigluCall.plain`.
    of_gate, of_up, of_down = (_Parts(None, None, 1.0, 0.0) if adapter is None else adapter for adapter in adapters)
    first = next((adapter.a for adapter in adapters if adapter is not None), input)
    dropped = any(adapter is not None and adapter.dropout for adapter in adapters)
    return run(
        SwigluCall(
            input,
            gate.weight,
            up.weight,
            down.weight,
            gate.bias,
            up.bias,
            down.bias,
            dtype=operand_dtype(input),
            activation=activation,
            checkpoint_level=check_level(checkpoint_level),
            tile_tokens=check_tile(tile_tokens),
            gate_a=of_gate.a,
            gate_b=of_gate.b,
            up_a=of_up.a,
            up_b=of_up.b,
            down_a=of_down.a,
            down_b=of_down.b,
            low_rank_dtype=operand_dtype(first),
            gate_scale=of_gate.scale,
            up_scale=of_up.scale,
            down_scale=of_down.scale,
            gate_dropout=of_gate.dropout,
            up_dropout=of_up.dropout,
            down_dropout=of_down.dropout,
            seed=int(torch.randint(2**48, (), device="cpu")) if dropped else 0,
        )
    )

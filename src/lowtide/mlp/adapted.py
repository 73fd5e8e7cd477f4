"""The gated MLP with low-rank adapters on its projections, which saves no more for backward than without."""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import operand_dtype
from lowtide.mlp.call import SwigluCall
from lowtide.mlp.operators import run
from lowtide.mlp.swiglu import check_level, check_tile


class Adapter(NamedTuple):
    """An adapter of a projection: ``x W^T`` becomes ``x W^T + scale (drop(x) A^T) B^T``."""

    a: Tensor | None  # [r, in]; None: no adapter
    b: Tensor | None  # [out, r], of the dtype of a
    scale: float
    dropout: float  # the probability p that an element of x is dropped; the others are divided by 1 - p


class Projection(NamedTuple):
    """A projection of the MLP."""

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

    The adapters' outputs are added to those of the weights in place. It saves for backward what `swiglu_mlp` saves with
    frozen weights: at level 0 gate and up, and the input if an adapter of theirs is trained; at level 1 the input.
    Activations of the adapters' rank are recomputed. A frozen weight costs no GEMM in backward. Adapters of another
    dtype than the input, such as float32 in a bfloat16 model, are multiplied in theirs, outside autocast.

    Dropout takes its seed from the CPU's default generator, the same for every pass; no mask is saved.

    Args:
        input: x [..., D].
        gate: [F, D]. Not checked, as all that follow: the caller made it from modules that it had checked.
        up: [F, D].
        down: [D, F].
        activation: As in `swiglu_mlp`.
        checkpoint_level: The same; checked, since users set it as an attribute.
        tile_tokens: The same, checked too.

    Returns:
        Tensor: [..., D], in the dtype of ``input``, or autocast's.
    """
    # Its own record for each call: see `SwigluCall.plain`.
    adapters = [Adapter(None, None, 1.0, 0.0) if p.adapter is None else p.adapter for p in (gate, up, down)]
    of_gate, of_up, of_down = adapters
    first = next((adapter.a for adapter in adapters if adapter.a is not None), input)
    dropped = any(adapter.dropout for adapter in adapters)
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

"""The experts of a layer, which save gate and up for backward, or none of their activations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.mlp.expert_call import (
    ExpertsCall,
    ExpertsWanted,
    Form,
    backward_flop,
    forward_flop,
    projections_flop,
)
from lowtide.mlp.expert_passes import backward_rows, forward_rows, project_rows
from lowtide.mlp.groups import sorted_by_expert
from lowtide.mlp.operators import Flop, Operators, Passes
from lowtide.mlp.swiglu import check_level

# Gate and up [S, 2F], and the output [T, D].
_EXPERTS = Operators(
    "experts", "fused experts", "run the stock experts: lowtide.unpatch(model)", (ExpertsCall, ExpertsWanted),
    ("saved",), Passes(project_rows, forward_rows, backward_rows), Flop(projections_flop, forward_flop, backward_flop),
)  # fmt: skip


def experts_mlp(
    input: Tensor,
    ids: Tensor,
    routing: Tensor,
    weights: Sequence[Tensor | None],
    *,
    form: Form,
    transposed: bool,
    dtype: torch.dtype,
    checkpoint_level: int,
) -> Tensor:
    """Return ``y_t = sum over k of r_tk (h_tk Wd_e + bd_e)`` with ``h = act(g) (u + shift)``, a mixture's experts.

    e is the expert ``ids[t, k]``, and gate and up are ``x_t Wgu_e + bgu_e``: see `Form`. The rows, one for each of T
    tokens and its K experts, are sorted by expert, and each GEMM is one grouped GEMM over all experts. In bfloat16,
    with D the hidden size and F the experts' width, level 0 saves gate and up, 4 K F bytes per token, and level 1
    recomputes them; both save the input, the routing and 4 K bytes of order. Never saved are the rows of the input,
    h, and the experts' outputs: the routing weight's gradient is ``h . (Wd dy)``, and backward has both.

    Args:
        input: x [T, D].
        ids: [T, K], integers. Pairs with an id of E or more add nothing.
        routing: r [T, K], floating point of any dtype.
        weights: Wgu [E, 2F, D], Wd [E, D, F], bgu [E, 2F] and bd [E, D]; a bias may be None.
        form: What is between the GEMMs.
        transposed: The weights are [E, D, 2F] and [E, F, D].
        dtype: Of the GEMMs' operands.
        checkpoint_level: 0 or 1.

    Returns:
        Tensor: y [T, D], in the dtype of ``input``, summed over a token's experts in float32.

    Raises:
        ArgumentValueError: A ``checkpoint_level`` that is neither.
        UnsupportedError: Double backward.

    Note:
        The shapes are not checked: the caller has done so. Without CUDA, bfloat16, or sizes of whole 16 bytes a GEMM is
        a loop over the experts with rows, for which the host waits for a GPU.

    References:
        Guo et al., SonicMoE, arXiv:2512.14080, for the routing weight's gradient without the experts' outputs.
    """
    gate_up, down, gate_up_bias, down_bias = weights
    assert gate_up is not None
    assert down is not None
    order, ends = sorted_by_expert(ids.detach(), gate_up.shape[0])
    tensors = (input, routing, gate_up, down, gate_up_bias, down_bias, ids, order, ends)
    return _EXPERTS.run(ExpertsCall(*tensors, dtype, check_level(checkpoint_level), transposed, *form))

"""The gradients of a head as chunks add them up: their memory, and where a chunk's rows go."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.head.head_plan import HeadPlan
from lowtide.head.matmul import HeadMatmul
from lowtide.head.scaling import lift_of_rows


@dataclass(kw_only=True)
class Gradients:
    """What a pass adds up, each None where nobody needs it."""

    input_ND: Tensor | None = None
    lift_N: Tensor | None = None  # [N] wide: what each row of ``input_ND`` was multiplied with; None: nothing
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None

    def put_input(self, rows: slice | Tensor, wide_CD: Tensor) -> None:
        """Write rows of the input's gradient, lifted where that is wanted: then ``wide_CD`` is changed in place."""
        assert self.input_ND is not None
        if self.lift_N is not None:
            lift_C = lift_of_rows(wide_CD)
            self.lift_N[rows] = lift_C
            wide_CD.mul_(lift_C[:, None])
        if isinstance(rows, slice):
            self.input_ND[rows].copy_(wide_CD)
        else:
            self.input_ND.index_copy_(0, rows, wide_CD.to(self.input_ND.dtype))


def gradient_buffers(
    input: Tensor,
    weight_VD: Tensor,
    wide: torch.dtype,
    plan: HeadPlan,
    wanted: tuple[bool, bool, bool],
    *,
    some_rows: bool,
    stored: bool = False,
) -> Gradients:
    """Return memory for the gradients of input, weight and bias that are ``wanted``, not filled where chunks will.

    Args:
        input: Hidden states [..., D].
        weight_VD: The head's weight.
        wide: dtype of the logits and of every sum.
        plan: Says in which dtype the weight's gradient adds up, and whether there is any chunk.
        wanted: For each of the three, in this order.
        some_rows: Whether some of the hidden states are in no chunk; theirs is 0.
        stored: Whether the upstream gradient is still to come, and with it a GradScaler's factor. An fp16 gradient is
            then lifted row by row, in the chunk that computes it; the exponential path's stays wide until it is stored.
    """
    (V, D), device, into = weight_VD.shape, input.device, Gradients()
    if wanted[0]:
        make, dtype, N = torch.zeros if some_rows else torch.empty, input.dtype, math.prod(input.shape[:-1])
        if stored and dtype == torch.float16 and plan.backend == "exp":
            dtype = wide
        elif stored and dtype == torch.float16:
            into.lift_N = torch.ones(N, dtype=wide, device=device)
        into.input_ND = make(N, D, dtype=dtype, device=device)
    if wanted[1]:
        dtype = wide if plan.accumulate == "float32" else weight_VD.dtype
        into.weight_VD = torch.empty(V, D, dtype=dtype, device=device)
        if not plan.chunks:
            into.weight_VD.zero_()
    if wanted[2]:
        into.bias_V = torch.zeros(V, dtype=wide, device=device)
    return into


def put_input_grad(
    matmul: HeadMatmul, g_CV: Tensor, factor_C: Tensor | None, into: Gradients, index: Tensor | None, part: slice
) -> None:
    """Write the input's gradient of a chunk, as `HeadMatmul.input_grad` gives it, to its rows among all N tokens."""
    out_ND = into.input_ND
    assert out_ND is not None
    if index is None and into.lift_N is None:
        matmul.input_grad(g_CV, factor_C, out_ND[part])
        return
    dtype = out_ND.dtype if into.lift_N is None else matmul.wide
    chunk = out_ND.new_empty(g_CV.shape[0], out_ND.shape[1], dtype=dtype)
    matmul.input_grad(g_CV, factor_C, chunk)
    into.put_input(part if index is None else index[part], chunk)

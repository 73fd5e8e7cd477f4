"""The MLP as most models train it, in one node: dense weights of the input's dtype, all trained, no bias, one tile.

N tokens, D hidden size, F intermediate size. What `lowtide.mlp.call` does with options is here in the order in which it
runs: a short step waits for the host, which this takes a third of the time.
"""

from typing import Any, cast

import torch
from torch import Tensor

from lowtide.graph import is_last_backward, node, undisturbed, watched
from lowtide.mlp.call import rows_of
from lowtide.mlp.elementwise import gated, gated_backward


def is_dense(*tensors: Any) -> bool:
    """Return whether the node computes with x and these weights: all trained, and no hook sees what it saves.

    A checkpoint is such a hook, which would recompute the output too: see `lowtide.mlp.operators.Operators.run`.
    """
    if not torch.is_grad_enabled() or watched(tensors):
        return False
    dtype, hooks = tensors[0].dtype, cast(Any, torch._C._autograd)
    dense = all(isinstance(t, Tensor) and t.requires_grad and t.dtype == dtype for t in tensors)  # in 4 bits: no tensor
    return dense and hooks._top_saved_tensors_default_hooks(True) is None


def _forward(ctx: Any, x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, activation: str, level: int) -> Any:
    y = x.new_empty((*x.shape[:-1], len(down_DF)))  # itself, not a view: FSDP2 warns of views that a module returns
    with undisturbed(x.device):
        x_ND = rows_of(x)
        gate_NF, up_NF = torch.mm(x_ND, gate_FD.T), torch.mm(x_ND, up_FD.T)
        product_NF = gate_NF if level else torch.empty_like(gate_NF)
        gated(gate_NF, up_NF, activation, product_NF)
        torch.mm(product_NF, down_DF.T, out=rows_of(y))
    ctx.activation = activation
    ctx.save_for_backward(x, gate_FD, up_FD, down_DF, *(() if level else (gate_NF, up_NF)))
    return y


def _backward(ctx: Any, dy: Tensor) -> Any:
    """Return the gradients; each buffer is freed after the last GEMM that reads it."""
    x, gate_FD, up_FD, down_DF, *saved = ctx.saved_tensors
    in_place = not saved or is_last_backward()
    ctx.maybe_clear_saved_tensors()  # in the last backward, to free what was saved before the node ends
    with undisturbed(x.device):
        x_ND, dy_ND = rows_of(x), rows_of(dy)
        dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
        gate_NF, up_NF = saved or (torch.mm(x_ND, gate_FD.T), torch.mm(x_ND, up_FD.T))
        saved.clear()
        product_NF = torch.mm(dy_ND, down_DF)  # first its gradient
        dgate_NF, dup_NF = (gate_NF, up_NF) if in_place else (torch.empty_like(gate_NF), torch.empty_like(up_NF))
        gated_backward(gate_NF, up_NF, product_NF, ctx.activation, dgate_NF, dup_NF, product_NF)
        del gate_NF, up_NF
        ddown_DF = torch.mm(dy_ND.T, product_NF)
        del product_NF
        dgate_FD = torch.mm(dgate_NF.T, x_ND)
        torch.mm(dgate_NF, gate_FD, out=dx_ND)
        del dgate_NF
        dup_FD = torch.mm(dup_NF.T, x_ND)
        torch.addmm(dx_ND, dup_NF, up_FD, out=dx_ND)
    return (dx_ND.view(x.shape), dgate_FD, dup_FD, ddown_DF), (x, gate_FD, up_FD, down_DF)


def dense_node(twice: str) -> Any:
    """Return the node, called as ``apply(x, gate [F, D], up [F, D], down [D, F], activation, checkpoint_level)``."""
    return node("SwigluMlp", "swiglu_mlp", _forward, _backward, twice)

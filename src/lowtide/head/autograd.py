"""The head in autograd's graph: gradients stored by forward and scaled in backward, or rebuilt there."""

from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.head import operators
from lowtide.head.graph import in_places, is_last_backward
from lowtide.head.operators import Call, Stored, Wanted
from lowtide.head.registration import tensor_fields, wanted_gradients
from lowtide.head.scaling import scaled

_TRAINED = tuple(map(Call._fields.index, ("input", "linear_weight", "linear_bias")))
_TENSORS = tensor_fields(Call)

FREED = (
    "lowtide.linear_cross_entropy: expected one backward through this graph, got a second after its gradients were"
    " freed. Pass retain_graph=True to the first one."
)


def cross_entropy(call: Call, *, recompute: bool) -> Tensor:
    """Return the loss of ``call``, a scalar or [N], connected to whichever of its tensors need a gradient.

    Args:
        call: What was asked, validated.
        recompute: Whether backward rebuilds the logits, or forward stores the gradients.
    """
    wanted = Wanted(*(tensor is not None and tensor.requires_grad for tensor in call.trained))
    loss: Tensor
    if not (torch.is_grad_enabled() and any(wanted)):
        loss = operators.run(*call, *Wanted(False, False, False), False)[0]
    elif recompute:
        loss = _Recomputed.apply(*call)  # type: ignore[no-untyped-call]
    else:
        loss = _Stored.apply(wanted, *call)  # type: ignore[no-untyped-call]
    return loss


class _Stored(torch.autograd.Function):
    """Forward stores the gradients; backward multiplies them with the upstream one.

    They are kept as attributes, not by save_for_backward: torch.utils.checkpoint would drop them there and compute
    everything a second time, and they are the smaller thing to keep.
    """

    @staticmethod
    def forward(ctx: Any, wanted: Wanted, *args: Any) -> Tensor:
        call = Call(*args)
        stored = Stored(*operators.run(*call, *wanted, False))
        ctx.wanted, ctx.per_token = wanted, call.reduction == "none"
        ctx.bias_dtype = None if call.linear_bias is None else call.linear_bias.dtype
        ctx.stored = stored[1:6]
        # for graphs of the gradients: no second derivative may pass by. In memory until backward, as the gradients are
        ctx.sources = () if torch.compiler.is_compiling() else call.trained
        # a dispatch mode, such as that of selective checkpointing, may have kept what the operator returned
        ctx.shared = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
        return stored.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.stored is None:
            raise UnsupportedError(FREED)
        dx, dw, db, input_factor, weight_factor = ctx.stored
        last = is_last_backward()
        in_place, sources = last and not ctx.shared, ctx.sources
        if last:
            ctx.stored, ctx.sources = None, ()
        needs = Wanted(*(ctx.needs_input_grad[1 + i] for i in _TRAINED))
        grads: list[Tensor | None] = [None, None, None]
        with torch.no_grad():
            if ctx.wanted.input and needs.input:
                factor = upstream
                if ctx.per_token:  # an ignored token stays 0 whatever comes from above
                    factor = (upstream * input_factor).where(input_factor != 0, 0)
                elif input_factor.dim() == 0:
                    factor = upstream * input_factor
                grads[0] = scaled(dx, factor, in_place)
            if ctx.wanted.weight and needs.weight:
                grads[1] = scaled(dw, upstream * weight_factor if weight_factor.dim() == 0 else upstream, in_place)
            if ctx.wanted.bias and needs.bias:
                grads[2] = (db * upstream).to(ctx.bias_dtype)
        return None, *in_places(grads, _TRAINED, len(Call._fields), (*sources, upstream))


class _Recomputed(torch.autograd.Function):
    """Forward stores nothing but the inputs; backward builds the logits once more."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        call = Call(*args)
        stored = Stored(*operators.run(*call, *Wanted(False, False, False), True))
        ctx.save_for_backward(*(call[i] for i in _TENSORS), stored.lse, stored.miss)
        ctx.scalars = [None if i in _TENSORS else field for i, field in enumerate(call)]
        return stored.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        fields = list(ctx.scalars)
        *tensors, lse, miss = ctx.saved_tensors
        for i, tensor in zip(_TENSORS, tensors, strict=True):
            fields[i] = tensor
        call = Call(*fields)
        wanted = Wanted(*(ctx.needs_input_grad[i] for i in _TRAINED))
        with torch.no_grad():
            found = operators.run_backward(*call, *wanted, upstream, lse, miss)
        grads = wanted_gradients(found, wanted, call.linear_bias)
        return tuple(in_places(grads, _TRAINED, len(Call._fields), (*call.trained, upstream)))

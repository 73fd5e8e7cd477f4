"""The head in autograd's graph: gradients stored by forward and scaled in backward, or rebuilt there."""

from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.head import operators
from lowtide.head.call import Wanted
from lowtide.head.graph import in_places, refuse_batched, save_for_recompute, saved_for_recompute
from lowtide.head.operators import Call, Stored
from lowtide.head.registration import tensor_fields, wanted_gradients
from lowtide.head.stored import keep, multiplied

_TRAINED = tuple(map(Call._fields.index, ("input", "linear_weight", "linear_bias")))
_TENSORS = tensor_fields(Call)


class Engine(Protocol):
    """What computes: `operators`, or something in its place."""

    def run(self, *args: Any) -> Stored:
        """As `operators.run`."""

    def run_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `operators.run_backward`."""


def cross_entropy(call: Call, *, recompute: bool, engine: Engine | None = None) -> Tensor:
    """Return the loss of ``call``, a scalar or [N], connected to whichever of its tensors need a gradient.

    Args:
        call: What was asked, validated.
        recompute: Whether backward rebuilds the logits, or forward stores the gradients.
        engine: What computes; None: `operators`.
    """
    wanted = Wanted(*(tensor is not None and tensor.requires_grad for tensor in call.trained))
    loss: Tensor
    if not (torch.is_grad_enabled() and any(wanted)):
        loss = _engine(engine).run(*call, *Wanted(False, False, False), False)[0]
    elif recompute:
        loss = _Recomputed.apply(engine, *call)  # type: ignore[no-untyped-call]
    else:
        loss = _Stored.apply(engine, wanted, *call)  # type: ignore[no-untyped-call]
    return loss


def _engine(engine: Engine | None) -> Engine:
    return operators if engine is None else engine


class _Stored(torch.autograd.Function):
    """Forward stores the gradients; backward multiplies them with the upstream one."""

    @staticmethod
    def forward(ctx: Any, engine: Engine | None, wanted: Wanted, *args: Any) -> Tensor:
        call = Call(*args)
        found = Stored(*_engine(engine).run(*call, *wanted, False))
        keep(ctx, found.gradients, wanted, call.trained, per_token=call.reduction == "none")
        return found.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        refuse_batched("linear_cross_entropy", upstream)
        needs = Wanted(*(ctx.needs_input_grad[2 + i] for i in _TRAINED))
        grads, sources = multiplied(ctx, upstream, needs, "linear_cross_entropy")
        return None, None, *in_places(grads, _TRAINED, len(Call._fields), (*sources, upstream))


class _Recomputed(torch.autograd.Function):
    """Forward stores nothing but the inputs; backward builds the logits once more."""

    @staticmethod
    def forward(ctx: Any, engine: Engine | None, *args: Any) -> Tensor:
        call = Call(*args)
        ctx.engine = engine
        stored = Stored(*_engine(engine).run(*call, *Wanted(False, False, False), True))
        save_for_recompute(ctx, *(call[i] for i in _TENSORS), stored.lse, stored.miss)
        ctx.scalars = [None if i in _TENSORS else field for i, field in enumerate(call)]
        return stored.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        refuse_batched("linear_cross_entropy", upstream)
        fields = list(ctx.scalars)
        *tensors, lse, miss = saved_for_recompute(ctx, "linear_cross_entropy")
        for i, tensor in zip(_TENSORS, tensors, strict=True):
            fields[i] = tensor
        call = Call(*fields)
        wanted = Wanted(*(ctx.needs_input_grad[1 + i] for i in _TRAINED))
        with torch.no_grad():
            found = _engine(ctx.engine).run_backward(*call, *wanted, upstream, lse, miss)
        grads = wanted_gradients(found, wanted, call.linear_bias)
        return None, *in_places(grads, _TRAINED, len(Call._fields), (*call.trained, upstream))

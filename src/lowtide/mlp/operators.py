"""`lowtide.swiglu_mlp` as registered operators and in autograd's graph.

`torch.ops.lowtide.swiglu` computes the output, and keeps gate and up where it is told to;
`torch.ops.lowtide.swiglu_backward` computes every gradient. Both begin with the fields of `SwigluCall`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.head.graph import differentiable_once, is_last_backward
from lowtide.head.registration import held_elsewhere, schema_of, tensor_fields, undisturbed, watched
from lowtide.mlp.call import SwigluCall, Wanted
from lowtide.mlp.passes import backward_tiles, forward_tiles

WRITTEN_OUT = (
    "torch.nn.functional.linear(torch.nn.functional.silu(torch.nn.functional.linear(input, gate_weight))"
    " * torch.nn.functional.linear(input, up_weight), down_weight)"
)
TWICE = (
    "lowtide.swiglu_mlp: expected to be differentiated once, got a second derivative. Its gradients are computed"
    f" without a graph of their own; for second derivatives write it out: {WRITTEN_OUT}."
)

_TENSORS = tensor_fields(SwigluCall)
_CALL = schema_of(SwigluCall)
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)
_SEVERAL = ", ".join(["Tensor"] * len(Wanted._fields))
assert tuple(Wanted._fields) == tuple(SwigluCall._fields[i] for i in _TENSORS)


@torch.library.custom_op("lowtide::swiglu", mutates_args=(), schema=f"({_CALL}, bool keep) -> (Tensor, Tensor, Tensor)")
def swiglu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output [..., D], and gate and up [N, F] where they are to be kept, else empty."""
    *fields, keep = args
    return _forward(SwigluCall(*fields), keep)


@swiglu.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, keep = args
    call = SwigluCall(*fields)
    y = call.input.new_empty((*call.input.shape[:-1], call.down_weight.shape[0]), dtype=call.dtype)
    kept = (call.tokens, call.gate_weight.shape[0]) if keep else (0,)
    return y, y.new_empty(kept), y.new_empty(kept)


@torch.library.custom_op(
    "lowtide::swiglu_backward",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, Tensor upstream, Tensor gate, Tensor up) -> ({_SEVERAL})",
)
def swiglu_backward(*args: Any) -> tuple[Tensor, ...]:
    """Compute the gradients that are wanted from the output's, and from what forward kept."""
    call, wanted, upstream, gate, up = _split(args)
    return _backward(call, wanted, upstream, gate, up, in_place=False)


@swiglu_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, wanted, *_ = _split(args)
    return tuple(
        call.input.new_empty(0) if t is None or not flag else t.new_empty(t.shape)
        for t, flag in zip(call.trained, wanted, strict=True)
    )


def _split(args: Sequence[Any]) -> tuple[SwigluCall, Wanted, Tensor, Tensor, Tensor]:
    fields, flags = len(SwigluCall._fields), len(Wanted._fields)
    upstream, gate, up = args[fields + flags :]
    return SwigluCall(*args[:fields]), Wanted(*args[fields : fields + flags]), upstream, gate, up


def _forward(call: SwigluCall, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), undisturbed(call.input.device):
        return forward_tiles(call, keep)


def _backward(
    call: SwigluCall, wanted: Wanted, upstream: Tensor, gate: Tensor, up: Tensor, *, in_place: bool
) -> tuple[Tensor, ...]:
    with torch.no_grad(), undisturbed(call.input.device):
        return backward_tiles(call, wanted, upstream, gate, up, in_place=in_place)


def run(call: SwigluCall) -> Tensor:
    """Return the output, connected to whichever of the tensors need a gradient."""
    trained = any(t is not None and t.requires_grad for t in call.trained)
    if torch.is_grad_enabled() and trained:
        y: Tensor = _SwigluMlp.apply(*call)  # type: ignore[no-untyped-call]
        return y
    return _run(call, keep=False)[0]


def _run(call: SwigluCall, *, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run `swiglu`: as an operator where something watches operators, else without that detour."""
    if watched(call):
        found: tuple[Tensor, Tensor, Tensor] = swiglu(*call, keep)
        return found
    return _forward(call, keep)


class _SwigluMlp(torch.autograd.Function):
    """Level 0 saves gate and up, and the input where a weight's gradient will read it; level 1 the input alone."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        call = SwigluCall(*args)
        wanted = Wanted(*(ctx.needs_input_grad[i] for i in _TENSORS))
        keep = call.checkpoint_level == 0 and wanted.projections
        y, gate, up = _run(call, keep=keep)
        tensors = list(call.trained)
        ctx.input_kept = not keep or wanted.reads_input
        if not ctx.input_kept:
            tensors[0] = call.input.new_empty(()).expand(call.input.shape)  # its shape and dtype: one number in memory
        ctx.save_for_backward(*tensors, gate, up)
        ctx.scalars = [None if i in _TENSORS else field for i, field in enumerate(call)]
        # a dispatch mode, such as that of selective checkpointing, may have kept what the operator returned
        ctx.shared = held_elsewhere()
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        *tensors, gate, up = ctx.saved_tensors
        if torch.is_grad_enabled() and not (ctx.input_kept or torch.compiler.is_compiling()):
            raise UnsupportedError(TWICE)  # the input is not there for a derivative by it to be refused later
        fields = list(ctx.scalars)
        for i, tensor in zip(_TENSORS, tensors, strict=True):
            fields[i] = tensor
        call = SwigluCall(*fields)
        wanted = Wanted(*(ctx.needs_input_grad[i] for i in _TENSORS))
        args = (*call, *wanted, upstream, gate, up)
        if watched(args):
            with torch.no_grad():
                found = swiglu_backward(*args)
        else:
            found = _backward(call, wanted, upstream, gate, up, in_place=is_last_backward() and not ctx.shared)
        grads = [g if flag else None for g, flag in zip(found, wanted, strict=True)]
        placed: list[Tensor | None] = [None] * len(fields)
        for i, grad in zip(_TENSORS, differentiable_once(grads, (*tensors, upstream), TWICE), strict=True):
            placed[i] = grad
        return tuple(placed)

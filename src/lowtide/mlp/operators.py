"""`lowtide.swiglu_mlp` as registered operators and in autograd's graph.

`torch.ops.lowtide.swiglu_projections` computes gate and up, `torch.ops.lowtide.swiglu` the output, and
`torch.ops.lowtide.swiglu_backward` every gradient. All begin with the fields of `SwigluCall`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.graph import (
    Operator,
    held_elsewhere,
    is_last_backward,
    node,
    samples_of,
    schema_of,
    tensor_fields,
    undisturbed,
    watched,
)
from lowtide.mlp.call import SwigluCall, Wanted, backward_flop, forward_flop, projections_flop
from lowtide.mlp.passes import backward_tiles, forward_tiles, project_tiles

WRITTEN_OUT = (
    "torch.nn.functional.linear(torch.nn.functional.silu(torch.nn.functional.linear(input, gate_weight))"
    " * torch.nn.functional.linear(input, up_weight), down_weight)"
)
TWICE = (
    "lowtide.swiglu_mlp: expected to be differentiated once, got a second derivative. For those write it out:"
    f" {WRITTEN_OUT}."
)
_WRITTEN_TO = (
    "lowtide.swiglu_mlp: expected the same weights in backward as in forward, since checkpoint_level=1 recomputes gate "
    "and up; got one written to through .data. Write after backward, or use checkpoint_level=0."
)

_CALL = schema_of(SwigluCall)
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)
_SEVERAL = ", ".join(["Tensor"] * len(Wanted._fields))
assert tuple(Wanted._fields) == tuple(SwigluCall._fields[i] for i in tensor_fields(SwigluCall))


# Forward's two run under no_grad or in an autograd node: they record no graph.
def _project(call: SwigluCall) -> tuple[Tensor, Tensor]:
    with undisturbed(call.input.device):
        return project_tiles(call)


def _forward(call: SwigluCall, gate: Tensor, up: Tensor) -> Tensor:
    with undisturbed(call.input.device):
        return forward_tiles(call, gate, up)


def _backward(
    call: SwigluCall, wanted: Wanted, upstream: Tensor, saved: list[Tensor], *, in_place: bool
) -> tuple[Tensor | None, ...]:
    with torch.no_grad(), undisturbed(call.input.device):
        return backward_tiles(call, wanted, upstream, saved, in_place=in_place)


def _fake_projections(*fields: Any) -> tuple[Tensor, Tensor]:
    call = SwigluCall(*fields)
    shape = (call.tokens, call.down_shape[1])
    gate, up = (call.input.new_empty(shape, dtype=call.saved_dtype) for _ in range(2))
    return gate, up


def _fake_output(*args: Any) -> Tensor:
    call = SwigluCall(*args[:-2])
    return call.input.new_empty(call.output_shape, dtype=call.dtype)


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    call, wanted, upstream, gate, up = _split(args)
    found = _backward(call, wanted, upstream, [gate, up], in_place=False)
    return tuple(call.input.new_empty(0) if grad is None else grad for grad in found)


def _fake_gradients(*args: Any) -> tuple[Tensor, ...]:
    call, wanted, *_ = _split(args)
    return tuple(
        call.input.new_empty(0) if t is None or not flag else t.new_empty(t.shape)
        for t, flag in zip(call.trained, wanted, strict=True)
    )


def _split(args: Sequence[Any]) -> tuple[SwigluCall, Wanted, Tensor, Tensor, Tensor]:
    fields, flags = len(SwigluCall._fields), len(Wanted._fields)
    upstream, gate, up = args[fields + flags :]
    return SwigluCall(*args[:fields]), Wanted(*args[fields : fields + flags]), upstream, gate, up


def _backward_flop(*args: Any) -> int:
    call, wanted, _upstream, gate, _up = _split(args)
    return backward_flop(call, wanted, saved=gate.dim() == 2)


# Gate and up [N, F].
_PROJECTIONS = Operator(
    "swiglu_projections", f"({_CALL}) -> (Tensor, Tensor)", lambda *fields: _project(SwigluCall(*fields)),
    _fake_projections, lambda *fields: projections_flop(SwigluCall(*fields)),
)  # fmt: skip
# The output [..., D] from gate and up, or if these are empty from the input.
_SWIGLU = Operator(
    "swiglu", f"({_CALL}, Tensor gate, Tensor up) -> Tensor",
    lambda *args: _forward(SwigluCall(*args[:-2]), *args[-2:]), _fake_output,
    lambda *args: forward_flop(SwigluCall(*args[:-2]), saved=args[-1].dim() == 2),
)  # fmt: skip
# The gradients that are needed, from the output's and from what forward saved.
_SWIGLU_BACKWARD = Operator(
    "swiglu_backward", f"({_CALL}, {_WANTED}, Tensor upstream, Tensor gate, Tensor up) -> ({_SEVERAL})", _gradients,
    _fake_gradients, _backward_flop,
)  # fmt: skip


def run(call: SwigluCall) -> Tensor:
    """Return the output, connected to whichever of the tensors need a gradient.

    In autograd's graph this is two nodes. The first saves what backward needs, and computes the gradients; the second
    computes the output and saves nothing. A checkpoint recomputes until the last tensor is saved that backward needs:
    it stops between the two, before the down projection, at level 1 before any GEMM.
    """
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in call.trained):
        none = call.input.new_empty(0)
        y: Tensor = _SWIGLU(*call, none, none)
        return y
    # As one argument each, which takes the host less time; the call's tensors belong to the first node alone.
    scalars: Sequence[Any] = (call.scalars,)
    fields: Sequence[Any] = (call,)
    if torch.compiler.is_compiling():
        # before the first node: torch.compile(dynamic=True)'s variables for numbers belong to the first that reads them
        scalars, fields = call.scalars, [field.detach() if isinstance(field, Tensor) else field for field in call]
    stand_in, gate, up = _NODE.apply(*call.trained, *scalars)  # type: ignore[no-untyped-call]
    output: Tensor = _Output.apply(stand_in, gate, up, *fields)  # type: ignore[no-untyped-call]
    return output


class _Output(torch.autograd.Function):
    """The output; its gradient goes to the stand-in unmodified."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, gate: Tensor, up: Tensor, *fields: Any) -> Tensor:  # noqa: ARG004
        ctx.count = len(fields)
        ctx.set_materialize_grads(False)
        y: Tensor = _SWIGLU(*(fields[0] if len(fields) == 1 else fields), gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        return upstream, None, None, *[None] * ctx.count


def _save(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Save for backward: level 0 gate and up, and the input if a weight's gradient will read it; level 1 the input.

    Returns a tensor of the output's shape without its own memory, gate and up.
    """
    count = len(Wanted._fields)
    ctx.scalars = args[count] if len(args) == count + 1 else args[count:]
    call = SwigluCall.joined_from(args[:count], ctx.scalars)
    wanted = Wanted(*ctx.needs_input_grad[:count])
    keep = call.checkpoint_level == 0 and wanted.projections
    if keep:
        gate, up = _PROJECTIONS(*call)
    else:
        gate, up = call.input.new_empty(0), call.input.new_empty(0)  # two: an output is returned once
    tensors = list(call.trained)
    ctx.input_saved = wanted.reads_input if keep else wanted.projections
    if not ctx.input_saved:
        tensors[0] = call.input.new_empty(()).expand(call.input.shape)  # its shape and dtype: one element in memory
    # Samples: the version of a weight does not show a write through .data.
    ctx.samples = samples_of(() if keep or not wanted.projections else call.recomputed_from)
    ctx.save_for_backward(*tensors, *((gate, up) if keep else ()))  # a hook takes the host time for each
    ctx.mark_non_differentiable(gate, up)
    # a dispatch mode, such as that of selective checkpointing, may hold what the operator returned
    ctx.shared = held_elsewhere()
    return call.input.new_empty((), dtype=call.dtype).expand(call.output_shape), gate, up


def _gradients_of(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    """Return every gradient from what was saved, and what they depend on: None if the input was not saved."""
    count = len(Wanted._fields)
    tensors = list(ctx.saved_tensors)  # once: a checkpoint gives them no second time
    saved, tensors = tensors[count:], tensors[:count]
    if ctx.samples.changed():
        raise UnsupportedError(_WRITTEN_TO)
    call = SwigluCall.joined_from(tensors, ctx.scalars)
    wanted = Wanted(*ctx.needs_input_grad[:count])
    saved = saved or [call.input.new_empty(0)] * 2
    if watched((*tensors, upstream, *saved)):
        found = _SWIGLU_BACKWARD.registered(*call, *wanted, upstream, *saved)
    else:
        last = is_last_backward()
        ctx.maybe_clear_saved_tensors()  # in the last backward, to free gate and up before the node ends
        found = _backward(call, wanted, upstream, saved, in_place=last and not ctx.shared)
    grads = [g if flag else None for g, flag in zip(found, wanted, strict=True)]
    return grads, tensors if ctx.input_saved else None


_NODE = node("SwigluMlp", "swiglu_mlp", _save, _gradients_of, TWICE)

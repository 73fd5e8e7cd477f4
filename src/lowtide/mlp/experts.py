"""The experts of a layer, which save gate and up for backward, or none of their activations.

`torch.ops.lowtide.experts_projections` computes gate and up, `torch.ops.lowtide.experts` the output, and
`torch.ops.lowtide.experts_backward` every gradient. All begin with the fields of `ExpertsCall`.
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
from lowtide.mlp.swiglu import check_level

_TWICE = (
    "lowtide: expected fused experts to be differentiated once, got a second derivative. For those run the stock"
    " experts: lowtide.unpatch(model)."
)
_WRITTEN_TO = (
    "lowtide: expected the same weights of experts in backward as in forward, since checkpoint_level=1 recomputes gate "
    "and up; got one written to through .data. Write after backward, or use checkpoint_level=0."
)
_TENSORS = len(tensor_fields(ExpertsCall))
_WANTED = len(ExpertsWanted._fields)
_FIELDS = len(ExpertsCall._fields)


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
    return _run(ExpertsCall(*tensors, dtype, check_level(checkpoint_level), transposed, *form))


def _run(call: ExpertsCall) -> Tensor:
    """Return the output, as two nodes of autograd's graph: see `lowtide.mlp.operators.run`."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in call.trained):
        y: Tensor = _EXPERTS(*call, call.input.new_empty(0))
        return y
    fields: list[Any] = [call]
    if torch.compiler.is_compiling():
        fields = [field.detach() if isinstance(field, Tensor) else field for field in call]
    stand_in, gate_up = _NODE.apply(*call)  # type: ignore[no-untyped-call]
    output: Tensor = _Output.apply(stand_in, gate_up, *fields)  # type: ignore[no-untyped-call]
    return output


def _project(*fields: Any) -> Tensor:
    call = ExpertsCall(*fields)
    with undisturbed(call.input.device):
        return project_rows(call)


def _forward(*args: Any) -> Tensor:
    call = ExpertsCall(*args[:-1])
    with undisturbed(call.input.device):
        return forward_rows(call, args[-1])


def _backward(
    call: ExpertsCall, wanted: ExpertsWanted, upstream: Tensor, saved: list[Tensor], *, in_place: bool
) -> tuple[Tensor | None, ...]:
    with torch.no_grad(), undisturbed(call.input.device):
        return backward_rows(call, wanted, upstream, saved, in_place=in_place)


def _split(args: Sequence[Any]) -> tuple[ExpertsCall, ExpertsWanted, Tensor, Tensor]:
    upstream, gate_up = args[_FIELDS + _WANTED :]
    return ExpertsCall(*args[:_FIELDS]), ExpertsWanted(*args[_FIELDS : _FIELDS + _WANTED]), upstream, gate_up


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    call, wanted, upstream, gate_up = _split(args)
    found = _backward(call, wanted, upstream, [gate_up], in_place=False)
    return tuple(call.input.new_empty(0) if grad is None else grad for grad in found)


def _fake_projections(*fields: Any) -> Tensor:
    call = ExpertsCall(*fields)
    return call.input.new_empty((call.rows, 2 * call.width), dtype=call.dtype)


def _fake_output(*args: Any) -> Tensor:
    call = ExpertsCall(*args[:-1])
    return call.input.new_empty(call.input.shape)


def _fake_gradients(*args: Any) -> tuple[Tensor, ...]:
    call, wanted, *_ = _split(args)
    return tuple(
        call.input.new_empty(0) if t is None or not flag else t.new_empty(t.shape)
        for t, flag in zip(call.trained, wanted, strict=True)
    )


def _backward_flop(*args: Any) -> int:
    call, wanted, _, gate_up = _split(args)
    return backward_flop(call, wanted, saved=gate_up.dim() == 2)


_CALL = schema_of(ExpertsCall)
_FLAGS = ", ".join(f"bool {name}_grad" for name in ExpertsWanted._fields)
_SEVERAL = ", ".join(["Tensor"] * _WANTED)
# Gate and up [S, 2F].
_PROJECTIONS = Operator(
    "experts_projections", f"({_CALL}) -> Tensor", _project, _fake_projections,
    lambda *fields: projections_flop(ExpertsCall(*fields)),
)  # fmt: skip
# The output [T, D] from gate and up, or if these are empty from the input.
_EXPERTS = Operator(
    "experts", f"({_CALL}, Tensor saved) -> Tensor", _forward, _fake_output,
    lambda *args: forward_flop(ExpertsCall(*args[:-1]), saved=args[-1].dim() == 2),
)  # fmt: skip
# The gradients that are needed, from the output's and from what forward saved.
_EXPERTS_BACKWARD = Operator(
    "experts_backward", f"({_CALL}, {_FLAGS}, Tensor upstream, Tensor saved) -> ({_SEVERAL})", _gradients,
    _fake_gradients, _backward_flop,
)  # fmt: skip


class _Output(torch.autograd.Function):
    """The output; its gradient goes to the stand-in unmodified."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, gate_up: Tensor, *fields: Any) -> Tensor:  # noqa: ARG004
        ctx.count = len(fields)
        ctx.set_materialize_grads(False)
        y: Tensor = _EXPERTS(*(fields[0] if len(fields) == 1 else fields), gate_up)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        return upstream, None, *[None] * ctx.count


def _save(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Save for backward: level 0 gate and up, and the input if a weight's gradient will read it; level 1 the input.

    Returns a tensor of the output's shape without its own memory, and gate and up.
    """
    call = ExpertsCall(*args)
    wanted = ExpertsWanted(*ctx.needs_input_grad[:_WANTED])
    keep = call.checkpoint_level == 0 and wanted.projections
    gate_up = _PROJECTIONS(*call) if keep else call.input.new_empty(0)
    tensors: list[Any] = list(call[:_TENSORS])
    ctx.input_saved = wanted.gate_up if keep else wanted.projections
    if not ctx.input_saved:
        tensors[0] = call.input.new_empty(()).expand(call.input.shape)  # its shape and dtype: one element in memory
    ctx.samples = samples_of(() if keep or not wanted.projections else (call.gate_up, call.gate_up_bias))
    ctx.save_for_backward(*tensors, gate_up)
    ctx.mark_non_differentiable(gate_up)
    ctx.scalars = call[_TENSORS:]
    ctx.shared = held_elsewhere()
    return call.input.new_empty(()).expand(call.input.shape), gate_up


def _gradients_of(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    """Return every gradient from what was saved, and what they depend on: None if the input was not saved."""
    *tensors, gate_up = ctx.saved_tensors
    saved = [gate_up]
    del gate_up
    if ctx.samples.changed():
        raise UnsupportedError(_WRITTEN_TO)
    call = ExpertsCall(*tensors, *ctx.scalars)
    wanted = ExpertsWanted(*ctx.needs_input_grad[:_WANTED])
    if watched((*tensors, upstream, *saved)):
        found = _EXPERTS_BACKWARD.registered(*call, *wanted, upstream, *saved)
    else:
        last = is_last_backward()
        ctx.maybe_clear_saved_tensors()  # in the last backward, to free gate and up before the node ends
        found = _backward(call, wanted, upstream, saved, in_place=last and not ctx.shared)
    return [g if flag else None for g, flag in zip(found, wanted, strict=True)], (
        tensors[:_WANTED] if ctx.input_saved else None
    )


_NODE = node("ExpertsMlp", "fused experts", _save, _gradients_of, _TWICE)

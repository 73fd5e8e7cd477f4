"""An MLP whose projections backward reads or recomputes, as registered operators and in autograd's graph.

The projections are what is before the activation: gate and up.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import message
from lowtide.graph import (
    Operator,
    held_elsewhere,
    is_last_backward,
    node,
    schema_of,
    tensor_fields,
    undisturbed,
    watched,
)


class Passes(NamedTuple):
    """What a kind of MLP computes. Forward's two record no graph: they run under no_grad or in an autograd node."""

    project: Callable[..., Any]  # the projections of a call: a tensor, or a tuple of several
    output: Callable[..., Tensor]  # the output of a call from these, or if they are empty from the input
    gradients: Callable[..., tuple[Tensor | None, ...]]  # see `lowtide.mlp.passes.backward_tiles`


class Flop(NamedTuple):
    """The FLOP of `Passes`; of the last two with ``saved``, whether forward saved the projections."""

    project: Callable[..., int]
    output: Callable[..., int]
    gradients: Callable[..., int]


class Operators:
    """The operators of a kind of MLP, and its nodes in autograd's graph.

    `torch.ops.lowtide.NAME_projections` computes the projections, `torch.ops.lowtide.NAME` the output, and
    `torch.ops.lowtide.NAME_backward` every gradient that is needed. All begin with the fields of the call.

    Args:
        name: Of the operators.
        public: The function's name, for errors.
        instead: What to do for second derivatives.
        types: The class of a call and that of the flags of the gradients that are needed, such as
            `lowtide.mlp.call.SwigluCall` and `lowtide.mlp.call.Wanted`.
        projections: The names of the operators' arguments for the projections, one or more.
        passes: What they compute.
        flop: Its FLOP.
    """

    def __init__(
        self, name: str, public: str, instead: str, types: tuple[Any, Any], projections: Sequence[str],
        passes: Passes, flop: Flop,
    ) -> None:  # fmt: skip
        call, wanted = self._call, self._wanted = types
        self._passes, self._flop, self._count = passes, flop, len(projections)
        self._fields, self._flags, self._tensors = len(call._fields), len(wanted._fields), len(tensor_fields(call))
        fields, held = schema_of(call), ", ".join(f"Tensor {one}" for one in projections)
        flags = ", ".join(f"bool {one}_grad" for one in wanted._fields)
        several, grads = (", ".join(["Tensor"] * count) for count in (self._count, self._flags))
        self._project = Operator(
            f"{name}_projections", f"({fields}) -> " + (f"({several})" if self._count > 1 else several),
            self._projected, self._fake_projections, lambda *args: flop.project(call(*args)),
        )  # fmt: skip
        self._output = Operator(
            name, f"({fields}, {held}) -> Tensor", self._forward, self._fake_output,
            lambda *args: flop.output(call(*args[: self._fields]), saved=args[-1].dim() == 2),
        )  # fmt: skip
        self._gradients = Operator(
            f"{name}_backward", f"({fields}, {flags}, Tensor upstream, {held}) -> ({grads})", self._backward,
            self._fake_gradients, self._backward_flop,
        )  # fmt: skip
        twice = message(public, "to be differentiated once", "a second derivative", f"For those {instead}.")
        self._first = node(f"{name.title()}Mlp", public, self._save, self._gradients_of, twice)
        self._second = _output_node(self._output, self._count)

    def run(self, call: Any) -> Tensor:
        """Return the output, connected to whichever of the tensors need a gradient.

        In autograd's graph this is two nodes. The first saves what backward needs, and computes the gradients; the
        second computes the output and saves nothing. A checkpoint recomputes until the last tensor is saved that
        backward needs: it stops between the two, before the down projection, at level 1 before any GEMM.
        """
        if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in call.trained):
            none = call.input.new_empty(0)
            y: Tensor = self._output(*call, *[none] * self._count)
            return y
        # As one argument each, which takes the host less time; the call's tensors belong to the first node alone.
        scalars: Sequence[Any] = (call.scalars,)
        fields: Sequence[Any] = (call,)
        if torch.compiler.is_compiling():
            # before the first node: torch.compile(dynamic=True)'s variables for numbers belong to the first reader
            scalars, fields = call.scalars, [field.detach() if isinstance(field, Tensor) else field for field in call]
        stand_in, *held = self._first.apply(*call.tensors, *scalars)  # type: ignore[no-untyped-call]
        output: Tensor = self._second.apply(stand_in, *held, *fields)  # type: ignore[no-untyped-call]
        return output

    def _save(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        """Save for backward: level 0 the projections, and the input if a weight's gradient reads it; level 1 the input.

        Returns a tensor of the output's shape without its own memory, and the projections.
        """
        tensors = list(args[: self._tensors])
        ctx.scalars = args[self._tensors] if len(args) == self._tensors + 1 else args[self._tensors :]
        call = self._call.joined_from(tensors, ctx.scalars)
        wanted = self._wanted(*ctx.needs_input_grad[: self._flags])
        keep = call.checkpoint_level == 0 and wanted.projections
        if keep:
            made = self._project(*call)
            held = made if isinstance(made, tuple) else (made,)
        else:
            held = tuple(call.input.new_empty(0) for _ in range(self._count))  # several: an output is returned once
        ctx.input_saved = wanted.reads_input if keep else wanted.projections
        if not ctx.input_saved:
            tensors[0] = call.input.new_empty(()).expand(call.input.shape)  # its shape and dtype: one element in memory
        ctx.save_for_backward(*tensors, *(held if keep else ()))  # a hook takes the host time for each
        ctx.mark_non_differentiable(*held)
        # a dispatch mode, such as that of selective checkpointing, may hold what the operator returned
        ctx.shared = held_elsewhere()
        return call.input.new_empty((), dtype=call.output_dtype).expand(call.output_shape), *held

    def _gradients_of(self, ctx: Any, upstream: Tensor, *_: Any) -> Any:
        """Return every gradient from what was saved, and what they depend on: None if the input was not saved."""
        tensors = list(ctx.saved_tensors)  # once: a checkpoint gives them no second time
        saved, tensors = tensors[self._tensors :], tensors[: self._tensors]
        call = self._call.joined_from(tensors, ctx.scalars)
        wanted = self._wanted(*ctx.needs_input_grad[: self._flags])
        saved = saved or [call.input.new_empty(0)] * self._count
        if watched((*tensors, upstream, *saved)):
            found = self._gradients.registered(*call, *wanted, upstream, *saved)
        else:
            last = is_last_backward()
            ctx.maybe_clear_saved_tensors()  # in the last backward, to free what was saved before the node ends
            found = self._found(call, wanted, upstream, saved, in_place=last and not ctx.shared)
        grads = [g if flag else None for g, flag in zip(found, wanted, strict=True)]
        return grads, tensors if ctx.input_saved else None

    def _projected(self, *fields: Any) -> Any:
        call = self._call(*fields)
        with undisturbed(call.input.device):
            return self._passes.project(call)

    def _forward(self, *args: Any) -> Tensor:
        call = self._call(*args[: self._fields])
        with undisturbed(call.input.device):
            return self._passes.output(call, *args[self._fields :])

    def _found(
        self, call: Any, wanted: Any, upstream: Tensor, saved: list[Tensor], *, in_place: bool
    ) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), undisturbed(call.input.device):
            return self._passes.gradients(call, wanted, upstream, saved, in_place=in_place)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        call, wanted, upstream, *saved = self._split(args)
        found = self._found(call, wanted, upstream, saved, in_place=False)
        return tuple(call.input.new_empty(0) if grad is None else grad for grad in found)

    def _split(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the call, which gradients are needed, and the rest of the arguments of the operator for backward."""
        end = self._fields + self._flags
        return self._call(*args[: self._fields]), self._wanted(*args[self._fields : end]), *args[end:]

    def _backward_flop(self, *args: Any) -> int:
        call, wanted, *_, last = self._split(args)
        return self._flop.gradients(call, wanted, saved=last.dim() == 2)

    def _fake_projections(self, *fields: Any) -> Any:
        call = self._call(*fields)
        made = tuple(call.input.new_empty(call.projections_shape, dtype=call.saved_dtype) for _ in range(self._count))
        return made if len(made) > 1 else made[0]

    def _fake_output(self, *args: Any) -> Tensor:
        call = self._call(*args[: self._fields])
        y: Tensor = call.input.new_empty(call.output_shape, dtype=call.output_dtype)
        return y

    def _fake_gradients(self, *args: Any) -> tuple[Tensor, ...]:
        call, wanted, *_ = self._split(args)
        return tuple(
            call.input.new_empty(0) if t is None or not flag else t.new_empty(t.shape)
            for t, flag in zip(call.trained, wanted, strict=True)
        )


def _output_node(operator: Operator, count: int) -> type[torch.autograd.Function]:
    """Return the node of the output from ``count`` projections; its gradient goes to the stand-in unmodified."""

    def forward(ctx: Any, _: Tensor, *args: Any) -> Any:
        ctx.count = len(args)
        ctx.set_materialize_grads(False)
        held, fields = args[:count], args[count:]
        return operator(*(fields[0] if len(fields) == 1 else fields), *held)

    def backward(ctx: Any, upstream: Tensor | None) -> Any:
        return upstream, *[None] * ctx.count

    both = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("MlpOutput", (torch.autograd.Function,), both)

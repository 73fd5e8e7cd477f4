"""An MLP whose projections backward reads or recomputes, as registered operators and in autograd's graph.

The projections are what is before the activation: gate and up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import message
from lowtide.graph import Operator, held_elsewhere, is_last_backward, node, schema_of, undisturbed, watched


class Operators:
    """The operators of a kind of MLP, and its nodes in autograd's graph.

    `torch.ops.lowtide.NAME_projections` computes the projections, `torch.ops.lowtide.NAME` the output, and
    `torch.ops.lowtide.NAME_backward` every gradient that is wanted. All begin with the fields of a call.

    Args:
        name: Of the operators.
        public: The function's name, for errors.
        instead: What to do for second derivatives.
        kind: The class of a call, such as `lowtide.mlp.call.SwigluCall`: a NamedTuple whose first field ``tensors`` is
            what an autograd node saves, the input first, with ``project``, ``output`` and ``gradients`` that compute
            (no graph is recorded), and the same with ``_flop`` behind that count.
        tensors: How many tensors a call has.
    """

    def __init__(self, name: str, public: str, instead: str, kind: Any, tensors: int) -> None:
        self._kind, self._tensors, self._compute_gradients = kind, tensors, _alone(kind.gradients)
        fields = len(kind._fields)

        def operator(suffix: str, more: str, result: str, *functions: Callable[..., Any]) -> Operator:
            of_call = (lambda *args, f=f: f(kind(*args[:fields]), *args[fields:]) for f in functions)
            return Operator(f"{name}{suffix}", f"({schema_of(kind)}{more}) -> {result}", *of_call)

        self._project = operator(
            "_projections", "", "Tensor[]", _alone(kind.project), kind.empty_projections, kind.project_flop
        )
        self._output = operator("", ", Tensor[] held", "Tensor", _alone(kind.output), _like_output, kind.output_flop)
        self._gradients = operator(
            "_backward", ", bool[] needed, Tensor upstream, Tensor[] held", "Tensor[]",
            self._all_gradients, _like_gradients, kind.gradients_flop,
        )  # fmt: skip
        self.twice = message(public, "to be differentiated once", "a second derivative", f"For those {instead}.")
        self._first = node(f"{name.title()}Mlp", public, self._save, self._gradients_of, self.twice)

        def forward(ctx: Any, _: Tensor, *args: Any) -> Any:
            ctx.count = len(args)
            ctx.set_materialize_grads(False)
            if type(args[0]) is kind:
                return self._output(*args[0], args[1:])
            return self._output(args[:tensors], *args[tensors : tensors + fields - 1], args[tensors + fields - 1 :])

        def backward(ctx: Any, upstream: Tensor | None) -> Any:  # unmodified, to the stand-in
            return upstream, *[None] * ctx.count

        both = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._second: Any = type("MlpOutput", (torch.autograd.Function,), both)

    def run(self, call: Any) -> Tensor:
        """Return the output, connected to whichever of the tensors need a gradient.

        In autograd's graph this is two nodes. The first saves what backward needs, and computes the gradients; the
        second computes the output and saves nothing. A checkpoint recomputes until the last tensor is saved that
        backward needs: it stops between the two, before the down projection, at level 1 before any GEMM.
        """
        y: Tensor
        if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in call.tensors):
            y = self._output(*call, [])
            return y
        # As one argument each, which takes the host less time; the call's tensors belong to the first node alone.
        scalars: Sequence[Any] = (call[1:],)
        fields: Sequence[Any] = (call,)
        if torch.compiler.is_compiling():
            # torch.compile(dynamic=True) makes a variable of a number where something first looks at it: not in a node
            scalars, fields = call[1:], [f.detach() if isinstance(f, Tensor) else f for f in (*call[0], *call[1:])]
        stand_in, *held = self._first.apply(*call.tensors, *scalars)  # type: ignore[no-untyped-call]
        y = self._second.apply(stand_in, *fields, *held)
        return y

    def _save(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        """Save for backward: level 0 the projections, and the input if a weight's gradient reads it; level 1 the input.

        Returns a tensor of the output's shape without its own memory, and the projections where they are saved.
        """
        tensors, scalars = list(args[: self._tensors]), args[self._tensors :]
        ctx.scalars = scalars[0] if len(scalars) == 1 else scalars
        call = self._kind(tensors, *ctx.scalars)
        needs = call.needs(ctx.needs_input_grad[: self._tensors])
        keep = call.checkpoint_level == 0 and needs.projections
        held = self._project(*call) if keep else []
        like = call.input.new_empty((), dtype=call.output_dtype).expand(call.output_shape)
        ctx.input_saved = needs.reads_input if keep else needs.projections
        if not ctx.input_saved:
            tensors[0] = call.input.new_empty(()).expand(call.input.shape)  # its shape and dtype: one element in memory
        ctx.save_for_backward(*tensors, *held)  # a hook takes the host time for each
        ctx.mark_non_differentiable(*held)
        # a dispatch mode, such as that of selective checkpointing, may hold what the operator returned
        ctx.shared = held_elsewhere()
        return like, *held

    def _gradients_of(self, ctx: Any, upstream: Tensor, *_: Any) -> Any:
        """Return every gradient from what was saved, and what they depend on: None if the input was not saved."""
        tensors = list(ctx.saved_tensors)  # once: a checkpoint gives them no second time
        held, tensors = tensors[self._tensors :], tensors[: self._tensors]
        call, wanted = self._kind(tensors, *ctx.scalars), ctx.needs_input_grad[: self._tensors]
        if watched((*tensors, upstream, *held)):
            found = self._gradients.registered(*call, wanted, upstream, held)
        else:
            in_place = is_last_backward() and not ctx.shared
            ctx.maybe_clear_saved_tensors()  # in the last backward, to free what was saved before the node ends
            found = self._compute_gradients(call, wanted, upstream, held, in_place=in_place)
        grads = [g if flag else None for g, flag in zip(found, wanted, strict=True)]
        return grads, tensors if ctx.input_saved else None

    def _all_gradients(self, call: Any, wanted: Sequence[bool], upstream: Tensor, held: Sequence[Tensor]) -> Any:
        found = self._compute_gradients(call, wanted, upstream, list(held), in_place=False)
        return [call.input.new_empty(0) if grad is None else grad for grad in found]


def _alone(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a call as one that autocast does not see."""

    def run(call: Any, *args: Any, **more: Any) -> Any:
        with undisturbed(call.input.device):
            return compute(call, *args, **more)

    return run


def _like_output(call: Any, _: Sequence[Tensor]) -> Any:
    return call.input.new_empty(call.output_shape, dtype=call.output_dtype)


def _like_gradients(call: Any, wanted: Sequence[bool], *_: Any) -> list[Tensor]:
    return [
        call.input.new_empty(0) if t is None or not flag else t.new_empty(t.shape)
        for t, flag in zip(call.tensors, wanted, strict=True)
    ]

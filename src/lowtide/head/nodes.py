"""The head's functions in autograd's graph: gradients stored by forward and scaled in backward, or recomputed there.

A function is a record: what it gets beside the head, the values that it returns, the numbers that backward needs, and
two implementations. Its operators, their fakes and FLOP counts, and its two autograd nodes are made from that here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import Operator, node, save_for_recompute, saved_for_recompute, schema_of, tensor_fields, undisturbed
from lowtide.head.call import Head, HeadCall, Wanted
from lowtide.head.gradients import Gradients
from lowtide.head.ranks.alone import Alone
from lowtide.head.ranks.parallel import Ranks, exchanges_between_ranks_run_in_eager
from lowtide.head.stored import (
    StoredGradients,
    fake_gradients,
    fake_stored_gradients,
    found_gradients,
    keep,
    multiplied,
)

Values = dict[str, Tensor]
Shape = tuple[tuple[int, ...], torch.dtype]
_HEAD = len(HeadCall._fields)
assert HeadCall._fields[:3] == ("input", "linear_weight", "linear_bias")  # whose gradients `node` takes for the first
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)


@dataclass(eq=False)
class Function:
    """A function of a head's logits, and what its operators and nodes are made of."""

    name: str  # of its operator; that of backward has "_backward" behind it
    public: str  # its name in errors
    args: Any  # the record of what it gets beside the head
    forward: Callable[[Head, Any, Wanted, bool], tuple[Values, StoredGradients | None]]  # the last: keep what is known
    backward: Callable[[Head, Any, Wanted, dict[str, Tensor | None], Values], Gradients]  # from upstream and known
    shapes: Callable[[HeadCall, Any, bool], dict[str, Shape]]  # of each value; the last as in forward
    returned: tuple[str, ...]  # names of the values that are returned, differentiable ones first
    differentiable: int  # how many of these are
    known: tuple[str, ...]  # names of the values that backward needs
    ignores: Callable[[Any], bool] = lambda _: True  # whether tokens can be left out
    beside: Callable[[Any], int] = lambda _: 0  # FLOP of what is computed beside the head

    def __post_init__(self) -> None:
        self.upstream = self.returned[: self.differentiable]
        self.names = self.returned + tuple(name for name in self.known if name not in self.returned)
        self.arguments = _HEAD + len(self.args._fields)
        call = f"{schema_of(HeadCall)}, {schema_of(self.args)}, {_WANTED}"
        several = ", ".join(["Tensor"] * (len(self.names) + len(StoredGradients._fields)))
        given = ", ".join(
            [*(f"Tensor? {name}_grad" for name in self.upstream), *(f"Tensor {name}" for name in self.known)]
        )
        self.run = Operator(self.name, f"({call}, bool keep) -> ({several})", self.compute, self._fake, self._flop)
        self.run_backward = Operator(
            f"{self.name}_backward", f"({call}, {given}) -> (Tensor, Tensor, Tensor)", self.compute_gradients,
            self._fake_gradients, self._flop,
        )  # fmt: skip
        self.stored, self.recomputed = _nodes(self)

    def __call__(self, call: HeadCall, args: Any, ranks: Ranks | Alone, *, recompute: bool) -> tuple[Tensor, ...]:
        """Return what is returned, connected to whichever of the head's tensors need a gradient.

        Exchanges between ranks are no operators of a graph: where there are any, a compiler's ends, and begins anew.

        Args:
            call: The head.
            args: The rest.
            ranks: The ranks that share the classes.
            recompute: Whether backward recomputes the logits, or forward stores the gradients.
        """
        if isinstance(ranks, Alone):
            return self._connected(call, args, None, recompute)
        if torch.compiler.is_compiling():
            return exchanges_between_ranks_run_in_eager(self._connected, call, args, ranks, recompute)
        return self._connected(call, args, ranks, recompute)

    def _connected(self, call: HeadCall, args: Any, ranks: Ranks | None, recompute: bool) -> tuple[Tensor, ...]:
        wanted = Wanted(*(tensor is not None and tensor.requires_grad for tensor in call.trained))
        values: Any
        if not (torch.is_grad_enabled() and any(wanted) and self.upstream):
            values = self.values(ranks, (*call, *args, False, False, False, False))[: len(self.returned)]
        elif recompute:
            values = self.recomputed.apply(*call, *args, ranks)
        else:
            values = self.stored.apply(*call, *args, ranks, wanted)
        return values if isinstance(values, tuple) else (values,)

    def values(self, ranks: Ranks | None, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return all values and stored gradients; with a sharded vocabulary there is no operator."""
        if ranks is None:
            found: tuple[Tensor, ...] = self.run(*args)
            return found
        return self.compute(*args, ranks=ranks)

    def _split(self, fields: Sequence[Any]) -> tuple[HeadCall, Any, Wanted]:
        call, args = HeadCall(*fields[:_HEAD]), self.args(*fields[_HEAD : self.arguments])
        return call, args, Wanted(*fields[self.arguments : self.arguments + 3])

    def compute(self, *fields: Any, ranks: Ranks | None = None) -> tuple[Tensor, ...]:
        """Return all values and stored gradients; what is not computed is empty."""
        call, args, wanted = self._split(fields)
        keep_known = fields[-1]
        with torch.no_grad(), undisturbed(call.input.device):
            values, stored = self.forward(call.head(ranks), args, wanted, keep_known)
        shapes = self.shapes(call, args, keep_known)
        names = self.names if keep_known else self.returned
        values = {name: values[name] for name in names if name in values}
        found = [values[name] if name in values else _empty(call, shapes[name]) for name in self.names]
        return (*found, *(self._fake_stored(call, args, wanted) if stored is None else stored))

    def _fake_stored(self, call: HeadCall, args: Any, wanted: Wanted) -> StoredGradients:
        per_token = getattr(args, "reduction", "none") == "none"
        return fake_stored_gradients(call, wanted, per_token=per_token, ignores=any(wanted) and self.ignores(args))

    def _fake(self, *fields: Any) -> tuple[Tensor, ...]:
        call, args, wanted = self._split(fields)
        shapes = self.shapes(call, args, fields[-1])
        return (*(_empty(call, shapes[name]) for name in self.names), *self._fake_stored(call, args, wanted))

    def compute_gradients(self, *fields: Any, ranks: Ranks | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of input, weight and bias, in the shapes and dtypes of these, the bias's wide."""
        call, args, wanted = self._split(fields)
        given = fields[self.arguments + 3 :]
        upstream = dict(zip(self.upstream, given, strict=False))
        known = dict(zip(self.known, given[len(self.upstream) :], strict=True))
        with torch.no_grad(), undisturbed(call.input.device):
            head = call.head(ranks, "recompute")
            return found_gradients(head, self.backward(head, args, wanted, upstream, known))

    def _fake_gradients(self, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, _, wanted = self._split(fields)
        return fake_gradients(call, wanted)

    def _flop(self, *fields: Any) -> int:
        call, args, wanted = self._split(fields)
        return head_flop(call.input, call.linear_weight, wanted) + self.beside(args)


def head_flop(input: Tensor, linear_weight: Tensor, wanted: Sequence[bool] = ()) -> int:
    """Return the FLOP of one product for the logits, and one for each gradient that is ``wanted`` of the two."""
    return 2 * (1 + sum(wanted[:2])) * math.prod(input.shape[:-1]) * linear_weight.numel()


def _empty(call: HeadCall, shape: Shape) -> Tensor:
    return call.input.new_empty(shape[0], dtype=shape[1])


def _nodes(function: Function) -> tuple[Any, Any]:
    """Return the two nodes of a function: one stores the gradients in forward, one recomputes the logits in backward.

    Both get the fields of both records, then the ranks; the first also which gradients are wanted.
    """
    tensors = (*tensor_fields(HeadCall), *(_HEAD + i for i in tensor_fields(function.args)))
    returned, first_known = len(function.returned), len(function.names)
    known = tuple(map(function.names.index, function.known))

    def store(ctx: Any, *args: Any) -> Tensor:
        *fields, ranks, wanted = args
        found = function.values(ranks, (*fields, *wanted, False))
        call, own = HeadCall(*fields[:_HEAD]), function.args(*fields[_HEAD:])
        keep(ctx, StoredGradients(*found[first_known:]), wanted, call, per_token=own.reduction == "none")
        return found[0]

    def multiply(ctx: Any, upstream: Tensor) -> Any:
        return multiplied(ctx, upstream, function.public)

    def save(ctx: Any, *args: Any) -> Any:
        *fields, ranks = args
        found = function.values(ranks, (*fields, False, False, False, True))
        # what is returned is copied: the caller may write to it
        numbers = [found[i].clone() if i < returned else found[i] for i in known]
        save_for_recompute(ctx, *(fields[i] for i in tensors), *numbers)
        ctx.ranks, ctx.scalars = ranks, [None if i in tensors else field for i, field in enumerate(fields)]
        if returned == 1:
            return found[0]
        ctx.mark_non_differentiable(*found[len(function.upstream) : returned])
        return found[:returned]

    def recompute(ctx: Any, *upstream: Tensor | None) -> Any:
        fields, saved = list(ctx.scalars), saved_for_recompute(ctx, function.public)
        for i, tensor in zip(tensors, saved, strict=False):
            fields[i] = tensor
        wanted = ctx.needs_input_grad[:3]
        args = (*fields, *wanted, *upstream[: len(function.upstream)], *saved[len(tensors) :])
        if ctx.ranks is None:
            dx, dw, db = function.run_backward(*args)
        else:
            dx, dw, db = function.compute_gradients(*args, ranks=ctx.ranks)
        trained = fields[:3]
        db = db if trained[2] is None else db.to(trained[2].dtype)
        return [grad if flag else None for grad, flag in zip((dx, dw, db), wanted, strict=True)], trained

    public = function.public
    return node("Stored", public, store, multiply), node("Recomputed", public, save, recompute)

"""The head's functions in autograd's graph: gradients stored by forward and scaled in backward, or recomputed there.

A function is a record: what it gets beside the head, the values that it returns, the numbers that backward needs, and
two implementations. Its operators, their fakes and FLOP counts, and its two autograd nodes are made from that here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import (
    Operator,
    is_last_backward,
    node,
    schema_of,
    tensor_fields,
    undisturbed,
)
from lowtide.head.call import Head, Wanted
from lowtide.head.choice import check_backend, skipping
from lowtide.head.gradients import Gradients
from lowtide.head.ignored import decided, kept_tokens
from lowtide.head.ranks.parallel import Alone, Ranks, exchanges_between_ranks_run_in_eager
from lowtide.head.stored import STORED, Shape, found_gradients, gradient_shapes, keep, multiplied, stored_shapes

Values = dict[str, Tensor]
_IGNORED = Head._fields.index("ignored_tokens")
_ORDER = Head._fields.index("order")
_HEAD = Head._fields.index("ranks")  # what operators take of it: what stands before
assert Head._fields[:3] == ("input", "weight_VD", "bias_V")  # whose gradients `node` takes for the first
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)


@dataclass(eq=False)
class Function:
    """A function of a head's logits, and what its operators and nodes are made of."""

    name: str  # of its operator; that of backward has "_backward" behind it
    public: str  # its name in errors
    args: Any  # the record of its arguments besides the head
    forward: Callable[[Head, Any, Wanted, bool], Values]  # and stored gradients; the last: store what is known
    backward: Callable[[Head, Any, Wanted, dict[str, Tensor | None], Values], Gradients]  # from upstream and known
    shapes: Callable[[Head, Any, bool], dict[str, Shape]]  # of each value; the last as in forward
    returned: tuple[str, ...]  # names of the values that are returned, those of ``upstream`` first
    upstream: tuple[str, ...]  # names of those that are differentiable
    known: tuple[str, ...]  # names of the values that backward needs
    sized: tuple[str, ...] = ()  # the last of these, whose sizes follow from calls before, in a recompute others
    ignores: Callable[[Any], bool] = lambda _: True  # whether tokens can be left out
    beside: Callable[[Any], int] = lambda _: 0  # FLOP of what is computed beside the head
    flop: Callable[[Head, Any, Wanted], int] | None = None  # in place of the head's

    def __post_init__(self) -> None:
        self.names = self.returned + tuple(name for name in self.known if name not in self.returned)
        self.arguments = _HEAD + len(self.args._fields)
        call = f"{schema_of(Head, _HEAD)}, {schema_of(self.args)}, {_WANTED}"
        several = ", ".join(["Tensor"] * (len(self.names) + STORED))
        given = [f"Tensor? {name}_grad" for name in self.upstream] + [f"Tensor {name}" for name in self.known]
        self.run = self._operator(self.name, f"({call}, bool keep) -> ({several})", self.compute)
        backward = f"({call}, {', '.join(given)}) -> (Tensor, Tensor, Tensor)"
        self.run_backward = self._operator(f"{self.name}_backward", backward, self.compute_gradients)
        self.stored, self.recomputed = _nodes(self)

    def _operator(self, name: str, schema: str, compute: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        """Return what computes from the fields; where the vocabulary is sharded, by no operator."""
        operator = Operator(name, schema, compute, partial(compute, real=False), self._flop)

        reduction = self.args._fields.index("reduction") + _HEAD if "reduction" in self.args._fields else None

        def run(ranks: Ranks | None, fields: Sequence[Any]) -> tuple[Tensor, ...]:
            after = None
            if fields[_IGNORED] == "auto":
                kind = name, self.args, None if reduction is None else fields[reduction]
                tensors = (*fields[:2], fields[_HEAD])
                way, after = decided(kind, tensors, partial(self._kept, fields), alone=ranks is None)
                fields = (*fields[:_IGNORED], way, *fields[_IGNORED + 1 :])
            by_operator = ranks is None and not fields[_ORDER]  # what is remembered of a weight is no operand
            found: tuple[Tensor, ...] = operator(*fields) if by_operator else compute(*fields, ranks=ranks)
            if after is not None:
                after()
            return found

        return run

    def _kept(self, fields: Sequence[Any]) -> Tensor:
        head, args, _ = self._split(fields)
        given = fields[self.arguments + 3 :]  # in forward a flag, in backward what flows back first
        return kept_tokens(args, given[: len(self.upstream)] if len(given) > 1 else (), head.tokens)

    def __call__(self, head: Head, args: Any, *, recompute: bool) -> tuple[Tensor, ...]:
        """Return what is returned, connected to whichever of the head's tensors need a gradient.

        With ``recompute`` backward recomputes the logits, else forward stores the gradients. Exchanges between ranks
        are no operators of a graph: where there are any, a compiler's ends, and begins anew.
        """
        check_backend(head, args)
        if (head.skip or not head.ranks.alone) and torch.compiler.is_compiling():
            return exchanges_between_ranks_run_in_eager(self._connected, head, args, recompute)
        return self._connected(head, args, recompute)

    def _connected(self, head: Head, args: Any, recompute: bool) -> tuple[Tensor, ...]:
        trained = any(tensor is not None and tensor.requires_grad for tensor in head[:3])
        if head.skip and trained and torch.is_grad_enabled():
            head = skipping().begin(head)
        fields, ranks = (*head[:_HEAD], *args), None if isinstance(head.ranks, Alone) else head.ranks
        if not (torch.is_grad_enabled() and trained):
            return self.run(ranks, (*fields, False, False, False, False))[: len(self.returned)]
        if recompute:
            return self.recomputed.apply(*fields, ranks)  # type: ignore[no-any-return]
        found = None
        if not torch.compiler.is_compiling():  # the GPU begins before autograd has made its node
            wanted = [tensor is not None and tensor.requires_grad for tensor in head[:3]]
            with torch.no_grad():
                found = self.run(ranks, (*fields, *wanted, False))
        return self.stored.apply(*fields, ranks, found)  # type: ignore[no-any-return]

    def _split(self, fields: Sequence[Any], ranks: Ranks | None = None) -> tuple[Head, Any, Wanted]:
        head = Head(*(*fields[:_HEAD], Alone(fields[1].shape[0]) if ranks is None else ranks))
        return head, self.args(*fields[_HEAD : self.arguments]), Wanted(*fields[self.arguments : self.arguments + 3])

    def compute(self, *fields: Any, ranks: Ranks | None = None, real: bool = True) -> tuple[Tensor, ...]:
        """Return all values and stored gradients; what is not computed is empty, and but for ``real`` all is."""
        head, args, wanted = self._split(fields, ranks)
        keep_known, found = fields[-1], Values()
        if real:
            with torch.no_grad(), undisturbed(head.input.device):
                found = self.forward(head.prepared(), args, wanted, keep_known)
        per_token, ignores = getattr(args, "reduction", "none") == "none", any(wanted) and self.ignores(args)
        shapes = self.shapes(head, args, keep_known)
        shapes = {name: shapes[name] for name in self.names}
        return _filled(head, shapes | stored_shapes(head, wanted, per_token=per_token, ignores=ignores), found)

    def compute_gradients(self, *fields: Any, ranks: Ranks | None = None, real: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of input, weight and bias, in the shapes and dtypes of these, the bias's wide."""
        head, args, wanted = self._split(fields, ranks)
        given, found = fields[self.arguments + 3 :], Values()
        upstream = dict(zip(self.upstream, given, strict=False))
        known = dict(zip(self.known, given[len(self.upstream) :], strict=True))
        if real:
            with torch.no_grad(), undisturbed(head.input.device):
                found = found_gradients(head, self.backward(head.prepared(), args, wanted, upstream, known))
        return _filled(head, gradient_shapes(head, wanted), found)

    def _flop(self, *fields: Any) -> int:
        head, args, wanted = self._split(fields)
        own = head_flop(head.input, head.weight_VD, wanted) if self.flop is None else self.flop(head, args, wanted)
        return own + self.beside(args)


def head_flop(input: Tensor, linear_weight: Tensor, wanted: Sequence[bool] = ()) -> int:
    """Return the FLOP of one product for the logits, and one for each gradient that is ``wanted`` of the two."""
    return 2 * (1 + sum(wanted[:2])) * math.prod(input.shape[:-1]) * linear_weight.numel()


def _filled(head: Head, shapes: dict[str, Shape], found: Values) -> tuple[Tensor, ...]:
    """Return what has these shapes and dtypes, without numbers where it was not found."""
    new = head.input.new_empty
    return tuple([found[name] if name in found else new(size, dtype=dtype) for name, (size, dtype) in shapes.items()])


def _nodes(function: Function) -> tuple[Any, Any]:
    """Return the two nodes of a function: one stores the gradients in forward, one recomputes the logits in backward.

    Both get the fields of both records, then the ranks; the first also what the pass found, None before it.
    """
    tensors = (*tensor_fields(Head), *(_HEAD + i for i in tensor_fields(function.args)))
    returned, known = len(function.returned), tuple(map(function.names.index, function.known))
    fixed = len(known) - len(function.sized)

    def store(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *fields, ranks, given = args
        found: tuple[Tensor, ...] = given or function.run(ranks, (*fields, *ctx.needs_input_grad[:3], False))
        keep(ctx, found[len(function.names) :], Head(*(*fields[:_HEAD], ranks)))
        ctx.mark_non_differentiable(*found[len(function.upstream) : returned])
        return found[:returned]

    def save(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *fields, ranks = args
        found = function.run(ranks, (*fields, False, False, False, True))
        # what is returned is copied: the caller may write to it
        numbers = [found[i].clone() if i < returned else found[i] for i in known]
        # as attributes: torch.utils.checkpoint would raise where a recompute's have other sizes
        ctx.sized = numbers[fixed:]
        ctx.save_for_backward(*(fields[i] for i in tensors), *numbers[:fixed])
        ctx.ranks, ctx.scalars = ranks, [None if i in tensors else field for i, field in enumerate(fields)]
        ctx.mark_non_differentiable(*found[len(function.upstream) : returned])
        return found[:returned]

    def recompute(ctx: Any, *upstream: Tensor | None) -> Any:
        fields, saved = list(ctx.scalars), ctx.saved_tensors
        for i, tensor in zip(tensors, saved, strict=False):
            fields[i] = tensor
        wanted = ctx.needs_input_grad[:3]
        args = (*fields, *wanted, *upstream[: len(function.upstream)], *saved[len(tensors) :], *ctx.sized)
        if is_last_backward():
            ctx.sized = []
        dx, dw, db = function.run_backward(ctx.ranks, args)
        trained = fields[:3]
        db = db if trained[2] is None else db.to(trained[2].dtype)
        return [grad if flag else None for grad, flag in zip((dx, dw, db), wanted, strict=True)], trained

    public = function.public
    stored = node("Stored", public, store, lambda ctx, upstream, *_: multiplied(ctx, upstream, public))
    return stored, node("Recomputed", public, save, recompute)

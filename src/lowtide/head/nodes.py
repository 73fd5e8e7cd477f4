"""The head's functions in autograd's graph: gradients stored by forward and scaled in backward, or recomputed there.

A function is a record: what it gets beside the head, the values that it returns, the numbers that backward needs, and
two implementations. Its operators, their fakes and FLOP counts, and its two autograd nodes are made from that here.

Of stored gradients a scalar loss's upstream one is one factor; with a value for each token and a frozen head, one
factor for each row of the input's. Those of float16 are stored in float32: divided by N, before a GradScaler's factor
is known, they would sink below float16's smallest numbers.
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
    keep_stored,
    node,
    schema_of,
    take_stored,
    undisturbed,
)
from lowtide.head.call import Head, Wanted
from lowtide.head.gradients import Gradients, scaled, stored_dtype
from lowtide.head.ignored import decided, kept_tokens
from lowtide.head.plan import skipping
from lowtide.head.ranks.parallel import Alone, exchanges_between_ranks_run_in_eager

Values = dict[str, Tensor]
Shape = tuple[tuple[int, ...], torch.dtype]
NOTHING = (0,)  # the shape of what was not requested
_IGNORED = Head._fields.index("ignored_tokens")
_HEAD = Head._fields.index("ranks")  # what operators take of it: what stands before
assert Head._fields[:3] == ("input", "weight_VD", "bias_V")  # whose gradients `node` takes for the first
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)
STORED = 6  # tensors: see `stored_shapes`


@dataclass(eq=False)
class Function:
    """A function of a head's logits, and what its operators and nodes are made of.

    ``forward(head, args, wanted, keep)`` returns values of all N tokens by name, and stored gradients where any is
    wanted; with ``keep`` also the ``known`` ones that are not ``returned``. ``backward(head, args, wanted, upstream,
    known)`` gets the gradients of those in ``upstream``, None where none flows back, and what forward returned. Without
    ``keep`` the shape of a value that forward leaves out is (0,). A value for each token is called with
    ``recompute=True``: its upstream gradient is known in backward only.
    """

    name: str  # of its operator; that of backward has "_backward" behind it
    public: str  # its name in errors
    args: Any  # the record of its arguments besides the head
    forward: Callable[[Head, Any, Wanted, bool], Values]
    backward: Callable[[Head, Any, Wanted, dict[str, Tensor | None], Values], Gradients]
    shapes: Callable[[Head, Any, bool], dict[str, Shape]]  # of each value; the last as in forward
    returned: tuple[str, ...]  # names of the values that are returned, those of ``upstream`` first
    upstream: tuple[str, ...]  # names of those that are differentiable
    known: tuple[str, ...]  # names of the values that backward needs
    flop: Callable[[Head, Any, Wanted], int] = lambda head, _, wanted: head_flop(head.input, head.weight_VD, wanted)

    def __post_init__(self) -> None:
        self.names = self.returned + tuple(name for name in self.known if name not in self.returned)
        self.arguments = _HEAD + len(self.args._fields)
        call = f"{schema_of(Head, _HEAD)}, {schema_of(self.args)}, {_WANTED}"
        several = ", ".join(["Tensor"] * (len(self.names) + STORED))
        given = [f"Tensor? {name}_grad" for name in self.upstream] + [f"Tensor {name}" for name in self.known]
        backward = f"({call}, {', '.join(given)}) -> (Tensor, Tensor, Tensor)"
        self.ahead = self._operator(self.name, f"({call}, bool keep) -> ({several})", self.compute)
        self.back = self._operator(f"{self.name}_backward", backward, self.compute_gradients)
        self.stored = node("Stored", self.public, self._store, self._multiply)
        self.recomputed = node("Recomputed", self.public, self._save, self._recompute)

    def _operator(self, name: str, schema: str, compute: Callable[..., Any]) -> Operator:
        return Operator(name, schema, compute, partial(compute, real=False), self._flop)

    def __call__(self, head: Head, args: Any, *, recompute: bool) -> Values:
        """Return what is returned, connected to whichever of the head's tensors need a gradient.

        With ``recompute`` backward recomputes the logits, else forward stores the gradients. Exchanges between ranks
        are no operators of a graph: where there are any, a compiler's ends, and begins anew.
        """
        compiling, recording = torch.compiler.is_compiling(), torch.is_grad_enabled()
        if (head.skip or not head.ranks.alone) and compiling:
            return exchanges_between_ranks_run_in_eager(partial(self, head, args, recompute=recompute))
        wanted = [recording and tensor is not None and tensor.requires_grad for tensor in head[:3]]
        if head.skip and any(wanted):
            head = skipping().begin(head)
        fields: tuple[Any, ...] = (*head[:_HEAD], *args)
        objects = None if head.ranks.alone and head.remembered is None else head[_HEAD:]
        found: Any = None
        if recompute and any(wanted):
            found = self.recomputed.apply(*fields, objects)  # type: ignore[no-untyped-call]
        else:
            if not (compiling and any(wanted)):  # the GPU begins before autograd has made its node
                with torch.no_grad():
                    found = self._run(self.ahead, objects, (*fields, *wanted, False))
            if any(wanted):
                found = self.stored.apply(*fields, objects, found)  # type: ignore[no-untyped-call]
        return dict(zip(self.returned, found, strict=False))

    def _run(self, operator: Operator, objects: Any, fields: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return what an operator computes from the fields; with ``objects`` beside these by no operator."""
        after = None
        if fields[_IGNORED] == "auto":
            tensors, counted = (*fields[:2], fields[_HEAD]), partial(self._kept, fields)
            way, after = decided((operator, self.args), tensors, counted, alone=objects is None)
            fields = (*fields[:_IGNORED], way, *fields[_IGNORED + 1 :])
        found: tuple[Tensor, ...]
        found = operator(*fields) if objects is None else operator.compute(*fields, objects=objects)
        if after is not None:
            after()
        return found

    def _kept(self, fields: Sequence[Any]) -> Tensor:
        head, args, _ = self._split(fields)
        given = fields[self.arguments + 3 :]  # in forward a flag, in backward what flows back first
        return kept_tokens(args, given[: len(self.upstream)] if len(given) > 1 else (), head.tokens)

    def _split(self, fields: Sequence[Any], objects: Any = None) -> tuple[Head, Any, Wanted]:
        head = Head(*fields[:_HEAD], *(objects or [Alone(fields[1].shape[0])]))
        return head, self.args(*fields[_HEAD : self.arguments]), Wanted(*fields[self.arguments : self.arguments + 3])

    def compute(self, *fields: Any, objects: Any = None, real: bool = True) -> tuple[Tensor, ...]:
        """Return all values and stored gradients; what is not computed is empty, and but for ``real`` all is."""
        head, args, wanted = self._split(fields, objects)
        keep_known, found = fields[-1], Values()
        if real:
            with undisturbed(head.input.device):
                found = self.forward(head.prepared(), args, wanted, keep_known)
        per_token, shapes = getattr(args, "reduction", "none") == "none", self.shapes(head, args, keep_known)
        shapes = {name: shapes[name] for name in self.names} | stored_shapes(head, wanted, per_token=per_token)
        return _filled(head, shapes, found)

    def compute_gradients(self, *fields: Any, objects: Any = None, real: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of input, weight and bias, in the shapes and dtypes of these, the bias's wide."""
        head, args, wanted = self._split(fields, objects)
        given, found = fields[self.arguments + 3 :], Values()
        upstream = dict(zip(self.upstream, given, strict=False))
        known = dict(zip(self.known, given[len(self.upstream) :], strict=True))
        if real:
            with undisturbed(head.input.device):
                found = found_gradients(head, self.backward(head.prepared(), args, wanted, upstream, known))
        return _filled(head, gradient_shapes(head, wanted), found)

    def _flop(self, *fields: Any) -> int:
        return self.flop(*self._split(fields))

    # Both nodes get the fields of both records, then what no operator takes; the first also what the pass found.

    def _store(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *fields, objects, given = args
        found: tuple[Tensor, ...] = given or self._run(self.ahead, objects, (*fields, *ctx.needs_input_grad[:3], False))
        keep_stored(ctx, found[len(self.names) :], fields[:3])
        ctx.dtypes = [None if x is None else x.dtype for x in fields[:3]]
        return self._returned(ctx, found)

    def _multiply(self, ctx: Any, upstream: Tensor, *_: Any) -> tuple[list[Tensor | None], Sequence[Tensor | None]]:
        """Return the stored gradients times the upstream one, a scalar or [N], and what else they depend on."""
        stored, sources, in_place = take_stored(ctx, self.public)
        dx, dw, db, input_factor, kept_tokens, kept_any = stored
        grads: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            factor = upstream * input_factor if input_factor.numel() else upstream
            grad = scaled(dx, factor, in_place, kept_tokens)
            if factor.dim():  # nor does a NaN get out where nothing flows back
                grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
            grads[0] = grad.to(ctx.dtypes[0])
        of_all = upstream.where(kept_any, 0)
        if ctx.needs_input_grad[1]:
            grads[1] = scaled(dw, of_all, in_place).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            grads[2] = (db * of_all).to(ctx.dtypes[2])
        return grads, sources

    def _save(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *fields, objects = args
        found = self._run(self.ahead, objects, (*fields, False, False, False, True))
        # what is returned is copied: the caller may write to it
        known = ((self.names.index(name), name in self.returned) for name in self.known)
        numbers = [found[i].clone() if is_returned else found[i] for i, is_returned in known]
        ctx.places = [i for i, field in enumerate(fields) if isinstance(field, Tensor)]
        ctx.save_for_backward(*(fields[i] for i in ctx.places))
        # few, and as attributes: torch.utils.checkpoint would raise where a recompute's have other sizes
        ctx.numbers = numbers
        ctx.objects, ctx.scalars = objects, [None if isinstance(field, Tensor) else field for field in fields]
        return self._returned(ctx, found)

    def _returned(self, ctx: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        returned = found[: len(self.returned)]
        ctx.mark_non_differentiable(*returned[len(self.upstream) :])
        return returned

    def _recompute(self, ctx: Any, *upstream: Tensor | None) -> Any:
        fields, saved, wanted = list(ctx.scalars), ctx.saved_tensors, ctx.needs_input_grad[:3]
        for i, tensor in zip(ctx.places, saved, strict=True):
            fields[i] = tensor
        grads = self._run(self.back, ctx.objects, (*fields, *wanted, *upstream[: len(self.upstream)], *ctx.numbers))
        if is_last_backward():
            ctx.numbers = []
        dtypes = [None if x is None else x.dtype for x in fields[:3]]
        found = zip(grads, dtypes, wanted, strict=True)  # the bias's is wide
        return [grad.to(dtype) if flag else None for grad, dtype, flag in found], fields[:3]


def head_flop(input: Tensor, linear_weight: Tensor, wanted: Sequence[bool] = ()) -> int:
    """Return the FLOP of one product for the logits, and one for each gradient that is ``wanted`` of the two."""
    return 2 * (1 + sum(wanted[:2])) * math.prod(input.shape[:-1]) * linear_weight.numel()


def _filled(head: Head, shapes: dict[str, Shape], found: Values) -> tuple[Tensor, ...]:
    """Return what has these shapes and dtypes, without numbers where it was not found."""
    new = head.input.new_empty
    return tuple([found[name] if name in found else new(size, dtype=dtype) for name, (size, dtype) in shapes.items()])


def gradient_shapes(head: Head, wanted: Wanted, *, stored: bool = False) -> dict[str, Shape]:
    """Return the gradients' shapes, those of what they belong to, and dtypes; the bias's is wide."""
    x, w = head.input, head.weight_VD
    of_input, of_weight = (stored_dtype(t.dtype) if stored else t.dtype for t in (x, w))
    return {
        "input_grad": (x.shape if wanted.input else NOTHING, of_input),
        "weight_grad": (w.shape if wanted.weight else NOTHING, of_weight),
        "bias_grad": (w.shape[:1] if wanted.bias else NOTHING, head.wide),
    }


def stored_shapes(head: Head, wanted: Wanted, *, per_token: bool) -> dict[str, Shape]:
    """Return what forward stores, in this order."""
    N, stores = (head.tokens,), any(wanted)
    return gradient_shapes(head, wanted, stored=True) | {
        # with a value for each token: what each row of the first is still to be multiplied with
        "input_factor": (N if per_token and wanted.input else NOTHING, head.wide),
        # which of the hidden states here count, and whether any token does, here or on another rank that holds classes
        "kept_tokens": (N if stores else NOTHING, torch.bool),
        "kept_any": (() if stores else NOTHING, torch.bool),
    }


def found_gradients(head: Head, into: Gradients, *, stored: bool = False) -> dict[str, Tensor]:
    """Return gradients in the shapes and dtypes of `gradient_shapes`."""
    shapes = gradient_shapes(head, Wanted(True, True, True), stored=stored).items()
    grads = into.input_ND, into.weight_VD, into.bias_V
    found = {name: (x, *form) for (name, form), x in zip(shapes, grads, strict=True) if x is not None}
    # no view without need: one shares its memory, and autograd adds to another gradient's only where nothing does
    return {name: (x if x.shape == shape else x.view(shape)).to(dtype) for name, (x, shape, dtype) in found.items()}


def stored_gradients(
    head: Head,
    into: Gradients,
    *,
    input_factor_N: Tensor | None,  # with a value for each token: each one's factor
    kept: tuple[Tensor, Tensor],  # the last of `stored_shapes`: other tokens' gradients are 0 in any case
) -> dict[str, Tensor]:
    """Return what `stored_shapes` names, as far as it is known."""
    stored = found_gradients(head, into, stored=True)
    if input_factor_N is not None and into.input_ND is not None:
        stored["input_factor"] = input_factor_N
    return stored | {"kept_tokens": kept[0], "kept_any": kept[1]}

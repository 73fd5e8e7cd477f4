"""The head's functions in autograd's graph: gradients stored by forward and scaled in backward, or recomputed there.

A function is a record: what it gets beside the head, the values that it returns, the numbers that backward needs, and
two implementations. Its operators, their fakes and FLOP counts, and its two autograd nodes are made from that here.

Of stored gradients a scalar loss's upstream one is one factor; with a value for each token and a frozen head, one
factor for each row of the input's. Those of float16 are stored in float32: divided by N, before a GradScaler's factor
is known, they would sink below float16's smallest numbers.

Whether ignored tokens are skipped, where nothing is asked, follows from how many there were in the calls before: the
kernels that end before them take a few percent longer than cuBLAS where none is ignored. The host does not wait to
learn a call's number: it is read AFTER calls later, when it has arrived long ago. Only the first call of a kind, of a
head and a function, waits for its own. What is chosen follows from the calls made, never from when a number arrives: a
program that runs again computes the same bits.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    watched,
)
from lowtide.head.backends import skips_ignored
from lowtide.head.call import CrossEntropyArgs, Gradients, Head, TokenStatsArgs, Wanted, stored_dtype
from lowtide.head.plan import skipping
from lowtide.head.ranks import Alone, exchanges_between_ranks_run_in_eager
from lowtide.head.rows import sent, slices

Values = dict[str, Tensor]
Shape = tuple[tuple[int, ...], torch.dtype]
Shares = deque[Callable[[], float]]  # what waits for the share of a call's tokens that are ignored
_IGNORED = Head._fields.index("ignored_tokens")
_HEAD = Head._fields.index("ranks")  # what operators take of it: what stands before
assert Head._fields[:3] == ("input", "weight_VD", "bias_V")  # whose gradients `node` takes for the first
_GRADIENTS = tuple(f"{name}_grad" for name in Wanted._fields)
CPU_BLOCK = 2**20  # elements: what a mixed-dtype product on the CPU may hold in its wide dtype
LEAST = 0.05  # the share of ignored tokens from which skipping them is faster
AFTER = 4  # calls
NUMBERS = 16  # of so many shares one above that is enough: batches differ, and a batch that is computed gains little
MOST_KINDS = 64
_shares: dict[tuple[Any, ...], Shares] = {}  # of each kind's last calls
_skips = cache(skips_ignored)


@dataclass(eq=False)
class Function:
    """A function of a head's logits, and what its operators and nodes are made of.

    ``forward(head, args, wanted, keep)`` returns values of all N tokens by name, and `named_gradients` where any is
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
        call = f"{schema_of(Head, _HEAD)}, {schema_of(self.args)}, {', '.join(f'bool {name}' for name in _GRADIENTS)}"
        several = ", ".join(["Tensor"] * (len(self.names) + len(_GRADIENTS)))
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
        shares: Shares | None = None
        if fields[_IGNORED] == "auto" and objects is None:  # ranks would wait for each other if they chose unlike ways
            way, shares = self._way(operator, fields)
            fields = (*fields[:_IGNORED], way, *fields[_IGNORED + 1 :])
        found: tuple[Tensor, ...]
        found = operator(*fields) if objects is None else operator.compute(*fields, objects=objects)
        if shares is not None:
            self._count(shares, fields)
        return found

    def _way(self, operator: Operator, fields: Sequence[Any]) -> tuple[str, Shares | None]:
        """Return what a pass does with ignored tokens, where nothing is asked, and where they are counted afterwards.

        They are skipped where results may not depend on earlier calls: in a compiled graph, and where deterministic
        algorithms are requested. A captured graph does what the last call did.
        """
        if torch.compiler.is_compiling():
            return "skip", None
        x, w, target = *fields[:2], fields[_HEAD]
        counts = self.args in (CrossEntropyArgs, TokenStatsArgs) and x.device.type == "cuda"
        if not counts or not len(x) or not _skips(x.device):
            return "auto", None
        if torch.are_deterministic_algorithms_enabled() or watched((x, target)):
            return "skip", None
        kind, captures = (operator, x.device, *w.shape), torch.cuda.is_current_stream_capturing()
        shares = _shares.get(kind)
        if shares is not None:
            return "skip" if _pays(shares) else "compute", None if captures else shares
        if captures:
            return "skip", None
        if len(_shares) >= MOST_KINDS:
            _shares.clear()
        shares = _shares[kind] = deque(maxlen=NUMBERS + AFTER - 1)
        return "skip" if self._count(shares, fields) else "compute", None

    def _count(self, shares: Shares, fields: Sequence[Any]) -> bool:
        """Begin to count a call's tokens, and wait for what the next call reads: a graph may capture that one."""
        head, args, _ = self._split(fields)
        given = fields[self.arguments + 3 :]  # in forward a flag, in backward what flows back first
        kept_N = kept_tokens(args, given[: len(self.upstream)], head.tokens)
        kept, N = sent(kept_N.sum()), max(1, kept_N.numel())
        shares.append(cache(lambda: 1 - kept() / N))
        return _pays(shares)

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
        shapes = self.shapes(head, args, keep_known)
        return _filled(head, {name: shapes[name] for name in self.names}, found, wanted, stored=True)

    def compute_gradients(self, *fields: Any, objects: Any = None, real: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of input, weight and bias, in the shapes and dtypes of these, the bias's wide."""
        head, args, wanted = self._split(fields, objects)
        given, found = fields[self.arguments + 3 :], Values()
        upstream = dict(zip(self.upstream, given, strict=False))
        known = dict(zip(self.known, given[len(self.upstream) :], strict=True))
        if real:
            with undisturbed(head.input.device):
                found = named_gradients(head, self.backward(head.prepared(), args, wanted, upstream, known))
        return _filled(head, {}, found, wanted)

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
        found = zip(stored, ctx.dtypes, ctx.needs_input_grad, strict=False)
        return [scaled(g, upstream, in_place).to(dtype) if flag else None for g, dtype, flag in found], sources

    def _save(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *fields, objects = args
        found = self._run(self.ahead, objects, (*fields, False, False, False, True))
        # what is returned is copied: the caller may write to it
        known = ((self.names.index(name), name in self.returned) for name in self.known)
        # few, and as attributes: torch.utils.checkpoint would raise where a recompute's have other sizes
        ctx.numbers = [found[i].clone() if is_returned else found[i] for i, is_returned in known]
        ctx.places = [i for i, field in enumerate(fields) if isinstance(field, Tensor)]
        ctx.save_for_backward(*(fields[i] for i in ctx.places))
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
        found = zip(grads, fields, wanted, strict=False)  # the bias's is wide
        return [grad.to(tensor.dtype) if flag else None for grad, tensor, flag in found], fields[:3]


def head_flop(input: Tensor, linear_weight: Tensor, wanted: Sequence[bool] = ()) -> int:
    """Return the FLOP of one product for the logits, and one for each gradient that is ``wanted`` of the two."""
    return 2 * (1 + sum(wanted[:2])) * math.prod(input.shape[:-1]) * linear_weight.numel()


def gradient_forms(head: Head, *, stored: bool) -> list[Shape]:
    """Return the gradients' shapes, those of what they belong to, and dtypes; the bias's is wide."""
    x, w = head.input, head.weight_VD
    of_input, of_weight = (stored_dtype(t.dtype) if stored else t.dtype for t in (x, w))
    return [(x.shape, of_input), (w.shape, of_weight), (w.shape[:1], head.wide)]


def named_gradients(head: Head, into: Gradients, *, stored: bool = False) -> Values:
    """Return gradients in the shapes and dtypes of `gradient_forms`."""
    found, grads = Values(), (into.input_ND, into.weight_VD, into.bias_V)
    for name, x, (shape, dtype) in zip(_GRADIENTS, grads, gradient_forms(head, stored=stored), strict=True):
        if x is not None:  # no view without need: to a gradient that shares its memory autograd does not add in place
            found[name] = (x if x.shape == shape else x.view(shape)).to(dtype)
    return found


def _filled(
    head: Head, shapes: dict[str, Shape], found: Values, wanted: Wanted, *, stored: bool = False
) -> tuple[Tensor, ...]:
    """Return values of these shapes and dtypes, and the gradients: without numbers where one was not found."""
    forms = zip(_GRADIENTS, wanted, gradient_forms(head, stored=stored), strict=True)
    shapes = shapes | {name: (shape if flag else (0,), dtype) for name, flag, (shape, dtype) in forms}
    new = head.input.new_empty
    return tuple([found[name] if name in found else new(size, dtype=dtype) for name, (size, dtype) in shapes.items()])


def scaled(grad: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Return ``grad * factor`` in the dtype of ``grad``, contiguous, the product itself taken in the factor's.

    The factor is read on its device, and costs nothing if it is 1: a scalar, or one value for each row [...] of
    ``grad`` [..., D], flattened, whose row is 0 where it is 0. What is 0 stays 0, even if the factor is infinite or
    NaN. The result shares no memory with ``grad`` unless it is ``in_place``.
    """
    by_row = factor.dim() > 0
    factors = factor.view((*grad.shape[:-1], 1) if by_row else (1,) * grad.dim())
    if torch.compiler.is_compiling():
        product = (grad * factors).to(grad.dtype).masked_fill(grad == 0, 0)
        return product.masked_fill(factors == 0, 0) if by_row else product
    out = grad if in_place else grad.clone()
    has_numbers = type(out) is Tensor  # and is no FakeTensor
    if out.is_cuda and has_numbers:
        from lowtide.head.kernels.elementwise import scale_

        scale_(out, factor.contiguous())
    elif out.device.type == "cpu" and has_numbers and not by_row and math.isfinite(number := factor.item()):
        if number != 1:  # which keeps its own precision, a 0-d tensor would be rounded to grad's
            out.mul_(number)
    else:
        N, D = shape = factor.numel(), out.shape[-1] if by_row else out.numel()
        for part in slices(N, CPU_BLOCK // max(1, D)):
            block = out.view(shape)[part]
            zero = block == 0
            block.mul_(factor.view(N, 1)[part]).masked_fill_(zero, 0)
    return out.masked_fill_(factors == 0, 0) if by_row else out


def _pays(shares: Shares) -> bool:
    """Return whether skipping pays in the next call: by all shares but the last ones, at first by the first."""
    return max(share() for share in list(shares)[: 1 - AFTER] or [shares[0]]) > LEAST


def kept_tokens(args: Any, upstream: Sequence[Any], tokens: int) -> Tensor:
    """Return which tokens have a target, and in backward an upstream gradient that is not 0: bool [N, *]."""
    kept_NK: Tensor = args.target != args.ignore_index
    flows = [g.reshape(tokens, -1) != 0 for g in upstream if isinstance(g, Tensor) and g.dim()]
    if not flows:
        return kept_NK.any(1) if kept_NK.numel() > tokens else kept_NK
    if upstream[0] is not None:  # the targets'
        flows[0] = flows[0] & kept_NK.reshape(tokens, -1)
    return torch.cat(flows, 1).any(1)

"""The user's function inside the engine's chunks: it gets the logits in pieces, and its vjp is left in their place.

N tokens, n of them computed (masked ones are dropped), C rows of a chunk, c of a piece, D hidden size, V vocabulary,
V_r classes of it on this rank. Where the vocabulary is sharded, ranks exchange a chunk's logits so that each gets whole
rows of its share of them, and only that rank calls the function on these; the gradient goes back the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentValueError, message
from lowtide.head.backends import why_not_row
from lowtide.head.call import Wanted
from lowtide.head.engine import Numbers, Terms, Upstream, gradient_buffers, run
from lowtide.head.function.function import Results, UserFunction, evaluate, vjp
from lowtide.head.function.random import RandomState, random_state, same_state, set_random_state
from lowtide.head.gradients import Gradients
from lowtide.head.matmul import narrow_view
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows, take_leading

Tensors = Sequence[Tensor | None]  # input, weight, bias, index of rows, token arguments and params, in this order
INDEX, FIRST_ARG = 3, 4  # where among these
UpstreamOf = Callable[[Results, Tensor | None, slice], Sequence[Tensor | None] | None]


class FunctionTerms(Terms):
    """One pass over the tokens, of forward or of backward; ``needed`` tensors get a gradient, now or later."""

    def __init__(self, function: UserFunction, tensors: Tensors, needed: Sequence[bool]) -> None:
        x, w, b, index, *rest = tensors
        assert x is not None
        assert w is not None
        self.function, self.head = function, function.head(x, w, b)
        self.wanted = Wanted(*needed[:INDEX])
        leaves = [
            t.detach().requires_grad_(function.graph and need)
            for t, need in zip(rest, needed[FIRST_ARG:], strict=True)
            if t is not None
        ]
        self.args, self.params = leaves[: function.token_args], leaves[function.token_args :]
        self._index = index
        fits = b is not None and b.dtype == self.head.dtype
        self.plan = replace(function.plan, bias_column=function.plan.bias_column and fits)
        self.rows = self.rows_of(self.plan)
        watch = function.graph and any(self.wanted)
        self.anchor = torch.zeros((), device=x.device, requires_grad=True) if watch else None
        # what is autograd's to see, or has no numbers, must not go by address
        real = all(type(t) in (Tensor, torch.nn.Parameter) for t in (x, w)) and self.head.ranks.alone
        self._by_kernel = real and why_not_row(x.device, self.head.dtype, w.shape[0]) is None
        self.narrowed = self._by_kernel and self.plan.backward_gemm == "narrow"
        self.spec: pytree.TreeSpec | None = None
        self._leaves: list[Tensor | None] = []
        self._dtypes: list[torch.dtype | None] = []
        self.differentiable: list[bool] = []
        self.states: list[RandomState | None] = []  # before each piece that draws random numbers
        self._into: Gradients | None = None
        self._of_args: list[Tensor | None] = []
        self._of_params: list[Tensor | None] = []
        self._bias_PV: Tensor | None = None  # the bias's gradient in parts, where the kernel sums it
        self._capped: Tensor | None = None
        self._ones: list[Tensor | None] = []
        self._state: RandomState | None = None  # of the generators, where each piece's is recorded
        self._replayed: Iterator[RandomState | None] = iter(())

    def rows_of(self, plan: HeadPlan) -> Rows:
        """Return the rows that are computed, in the order of a plan's chunks."""
        N, ranks, index = self.function.leading.numel(), self.head.ranks, self._index
        if not ranks.spread:
            return Rows(tokens=N, index=index)
        order = ranks.order(plan)
        assert order is not None
        valid = torch.full((N + 1,), index is None, device=order.device)
        if index is not None:
            valid[index] = True
        valid[N] = False
        return Rows(tokens=N, index=order, filled=True, kept=valid[order])

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.head.input.device

    def forward(self, *, store: bool) -> bool:
        """Compute the results; with ``store`` and one derivative to take, return True: the gradients are there too."""
        if self.function.graph and has_numbers(self.head.input):
            self._state = random_state(self.device)
        if store:
            self._begin(stored=True)
        run(self.head, self.rows, self.plan, self, self._into, upstream=_one if store else None)
        return self._into is not None

    def backward(self, upstream: Sequence[Tensor | None], states: Sequence[RandomState | None]) -> None:
        """Compute every gradient from the results' upstream ones, [..., *] or scalars, and the states of `forward`."""
        self._begin(stored=False)
        found = random_state(self.device) if any(states) else None
        self._replayed = iter(states)
        run(self.head, self.rows, self.plan, self, self._into, upstream=lambda *_: upstream, known={})
        if found is not None:
            set_random_state(found, self.device)

    def _begin(self, *, stored: bool) -> None:
        """Make the memory that takes the gradients."""
        head, wanted, D = self.head, self.wanted, self.head.input.shape[-1]
        some_rows = self._index is not None and not head.ranks.spread
        into = gradient_buffers(head, self.plan, wanted, some_rows=some_rows)
        if into.input_ND is not None and stored and head.input.dtype == torch.float16:
            # until the upstream gradient, and with it GradScaler's factor, has come
            into.input_ND = head.input.new_zeros(head.tokens, D, dtype=head.wide)
        if into.bias_V is not None and self._by_kernel:
            from lowtide.head.kernels.logit_grad import bias_sums

            into.bias_V, self._bias_PV = None, bias_sums(self.plan.piece_rows, len(head.weight_VD), self.device)
        self._into = into
        self._of_args = [a.new_zeros(a.shape) if a.requires_grad else None for a in self.args]
        self._of_params = [
            p.new_zeros(p.shape, dtype=summed_in(p.dtype)) if p.requires_grad else None for p in self.params
        ]

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Add a chunk's results to those of the pass; as they have any structure, none are returned."""
        self._run(z, part, self._collect)
        return {}

    def both_(
        self,
        z: Tensor,
        part: slice,
        upstream: Upstream,  # noqa: ARG002
        out: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Numbers, None]:
        """The same; and with one derivative to take, leave the gradient for an upstream gradient of 1."""
        self._run(z, part, self._collect)
        return {}, None

    def gradient_(
        self,
        z: Tensor,
        part: slice,
        known: Numbers,  # noqa: ARG002
        g: Any,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """Replace a chunk's logits by their gradient; ``g`` are the upstream ones of all results."""

        def of_rows(_: Results, index: Tensor | None, rows: slice) -> Sequence[Tensor | None]:
            if not self.function.per_token:
                return g  # type: ignore[no-any-return]
            return [None if u is None else take_leading(u, len(self.function.leading), index, rows) for u in g]

        self._run(z, part, of_rows)

    def _run(self, z: Tensor, part: slice, upstream: UpstreamOf) -> None:
        """Call the function on a chunk's rows; where ``upstream`` returns any, leave their gradient in the logits."""
        own_cV, index, chosen, start = self._own_rows(z, part)
        pieces = spans(len(own_cV), self.plan.piece_rows)
        if not pieces and self.spec is None:
            pieces = [slice(0, 0)]  # what the function makes of no rows at all tells dtypes and shapes
        for piece in pieces:
            rows = slice(start + piece.start, start + piece.stop)
            if len(own_cV) and (state := next(self._replayed, None)) is not None:
                set_random_state(state, self.device)
            # the slope of a cap is computed from what it returned, and the function may change its logits
            self._capped = None if self.head.softcap is None or self.anchor is None else own_cV[piece].clone()
            args = self.args_of(index, rows)
            results = evaluate(self.function, own_cV[piece], args, self.params, self.anchor)
            if self._state is not None and len(own_cV):
                before, self._state = self._state, random_state(self.device)
                self.states.append(None if same_state(before, self._state) else before)
            g = upstream(results, index, rows)
            if g is not None and len(own_cV):
                self._pull_back(results, g, own_cV, piece, index, rows)
            del results
        ranks = self.head.ranks
        if self._into is not None and self.anchor is not None and not ranks.alone:
            if chosen is not None:
                share = ranks.share_of(part)
                own_cV = own_cV.new_zeros(share.stop - share.start, ranks.vocab).index_copy_(0, chosen, own_cV)
            z[:, : ranks.rows] = ranks.own_classes(own_cV, len(z))

    def _own_rows(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """Return whole logits [c, V] of the rows of a chunk that the function gets on this rank, and where these are.

        That is: places among the N tokens (None: in order), which of this rank's share the rows are (None: all), and
        where in the places they begin.
        """
        ranks, index, kept = self.head.ranks, self.rows.index, self.rows.kept
        if ranks.alone:
            return z, index, None, part.start
        own_cV, share = ranks.whole_rows(z[:, : ranks.rows]), ranks.share_of(part)
        places = torch.arange(share.start, share.stop, device=z.device) if index is None else index[share]
        if kept is None:
            return own_cV, places, None, 0
        chosen = kept[share].nonzero()[:, 0]
        return own_cV[chosen], places[chosen], chosen, 0

    def args_of(self, index: Tensor | None, rows: slice) -> list[Tensor]:
        """Return the token arguments of some rows, as leaves."""
        axes = len(self.function.leading)
        return [take_leading(a.detach(), axes, index, rows).requires_grad_(a.requires_grad) for a in self.args]

    def _pull_back(
        self,
        results: Results,
        upstream: Sequence[Tensor | None],
        z_CV: Tensor,
        piece: slice,
        index: Tensor | None,
        rows: slice,
    ) -> None:
        """Add the gradients of a piece of ``z_CV``, and leave that of the product ``x @ w.T`` in its place."""
        dz, args, params = vjp(results, upstream, self.params)
        for total, grad in zip(self._of_args, args, strict=True):
            if total is not None and grad is not None:
                put_rows(total, grad, index, rows)
        for total, grad in zip(self._of_params, params, strict=True):
            if total is not None and grad is not None:
                total += grad
        if self.anchor is None:
            return
        target, scale = (narrow_view(z_CV, self.head.dtype) if self.narrowed else z_CV)[piece], self.head.scale
        if dz is None:
            target.zero_()
            return
        if dz.layout != torch.strided:
            dz = dz.to_dense()  # of gather(sparse_grad=True)
        if self._capped is not None:
            assert isinstance(self.head.softcap, float)
            dz = torch.addcmul(dz, self._capped * dz, self._capped, value=-(self.head.softcap**-2))
        elif dz.untyped_storage()._cdata == z_CV.untyped_storage()._cdata:
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        if self._by_kernel:
            from lowtide.head.kernels.logit_grad import put_logit_grad

            put_logit_grad(dz, scale, target, self._bias_PV)
        elif scale is None:
            target.copy_(dz)
        else:
            torch.mul(dz, scale, out=target)

    def _collect(self, results: Results, index: Tensor | None, rows: slice) -> Sequence[Tensor | None] | None:
        """Take the results of some rows, like those before; return upstream gradients, 1, if gradients are stored."""
        got, first = [None if leaf is None else leaf.dtype for leaf in results.leaves], self.spec is None
        if first:
            self.spec, self._dtypes, self.differentiable = results.spec, got, [False] * len(got)
            self._leaves = [None if leaf is None else self._total_of(leaf) for leaf in results.leaves]
        if results.spec != self.spec or got != self._dtypes:
            expected = f"the same structure and dtypes for all rows: {self.spec} of {self._dtypes}"
            raise ArgumentValueError(message("fn", expected, f"{results.spec} of {got}"))
        for i, (total, leaf) in enumerate(zip(self._leaves, results.leaves, strict=True)):
            if total is None or leaf is None:
                continue
            self.differentiable[i] |= leaf.requires_grad
            if not self.function.per_token:
                total += leaf.detach()
            elif leaf.shape[1:] != total.shape[1:]:
                expected = f"rows of one shape, {list(total.shape[1:])}"
                raise ArgumentValueError(message("fn", expected, f"{list(leaf.shape[1:])} for other rows"))
            else:
                put_rows(total, leaf.detach(), index, rows)
        one, into = sum(self.differentiable) == 1, self._into
        if into is None:
            return None
        if not first and not one:
            expected = "the same results to depend on its arguments for all rows"
            raise ArgumentValueError(message("fn", expected, "others for later rows"))
        if not one:  # left to backward
            into.input_ND = into.weight_VD = into.bias_V = self._into = None
        elif first:
            self._ones = [None if leaf is None else torch.ones_like(leaf) for leaf in results.leaves]
        return self._ones if one else None

    def _total_of(self, leaf: Tensor) -> Tensor:
        if not self.function.per_token:
            return torch.zeros_like(leaf, dtype=summed_in(leaf.dtype))
        make = torch.empty if self.head.ranks.alone and self.rows.index is None else torch.zeros
        return make(self.rows.tokens, *leaf.shape[1:], dtype=leaf.dtype, device=leaf.device)

    def results(self) -> list[Tensor | None]:
        """Return all results, with the leading axes of the hidden states and in the function's own dtypes."""
        ranks, leading = self.head.ranks, self.function.leading
        if not self.function.per_token:
            pairs = zip(self._leaves, self._dtypes, strict=True)
            return [None if x is None else ranks.add_up_(x).to(d) for x, d in pairs]
        return [None if x is None else ranks.put_together_(x).view((*leading, *x.shape[1:])) for x in self._leaves]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order of the tensors, the same of token arguments and params on every rank."""
        into, ranks = self._into, self.head.ranks
        assert into is not None
        bias_V = into.bias_V if self._bias_PV is None else self._bias_PV.sum(0)
        args = (None if total is None else ranks.put_together_(total) for total in self._of_args)
        params = (None if total is None else ranks.add_up_(total) for total in self._of_params)
        return [into.input_ND, into.weight_VD, bias_V, None, *args, *params]


def _one(*_: Any) -> None:
    """Stand for an upstream gradient of 1, which `FunctionTerms.both_` takes it to be."""


def spans(total: int, most: int) -> list[slice]:
    """Return slices of at most ``most`` rows that cover ``total``, as few as can be, their sizes one apart at most."""
    count = -(-total // most)
    return [slice(i * total // count, (i + 1) * total // count) for i in range(count)]


def put_rows(total: Tensor, rows_c: Tensor, index: Tensor | None, part: slice) -> None:
    """Write rows [c, ...] to their places in ``total``, contiguous [N, ...] or [..., *]."""
    if not rows_c.numel():
        return  # a view of nothing has no one shape
    flat = total.view(-1, *rows_c.shape[1:])
    if index is None:
        flat[part].copy_(rows_c)
    else:
        flat.index_copy_(0, index[part], rows_c.to(total.dtype))


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many values of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and not their shapes alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"

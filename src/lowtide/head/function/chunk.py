"""The user's function inside the engine's chunks: it gets the logits in pieces, which its vjp then overwrites.

N tokens, n of them computed (masked ones are dropped), C rows of a chunk, c of a piece, D hidden size, V vocabulary,
V_r classes of it on this rank. Where the vocabulary is sharded, ranks exchange a chunk's logits so that each gets whole
rows of its share of them, and only that rank calls the function on these; the gradient goes back the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.head.backends import why_not_row
from lowtide.head.call import Head, Wanted
from lowtide.head.engine import Numbers, Terms, gradient_buffers, run
from lowtide.head.function.function import (
    RandomState,
    Results,
    UserFunction,
    evaluate,
    random_state,
    same_state,
    set_random_state,
    vjp,
)
from lowtide.head.gradients import Gradients
from lowtide.head.lengths import evenly
from lowtide.head.matmul import narrow_view, slices
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows, take_leading

Totals = list[Tensor | None]


class FunctionTerms(Terms):
    """One pass over the tokens, of forward or of backward.

    ``tensors`` are input, weight, bias, index of rows, token arguments and params; the ``needed`` ones get a gradient.
    """

    def __init__(self, function: UserFunction, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        x, w, b, self._index, *rest = tensors
        assert x is not None
        assert w is not None
        self.device = x.device
        self.function, self.head = function, Head(x, w, b, *function.settings).prepared()
        self.wanted = Wanted(*needed[:3])
        leaves = [
            t.detach().requires_grad_(function.graph and need)
            for t, need in zip(rest, needed[4:], strict=True)
            if t is not None
        ]
        self.args, self.params = leaves[: function.token_args], leaves[function.token_args :]
        self._rowwise = [i < len(self.args) for i in range(len(leaves))]
        fits = b is not None and b.dtype == self.head.dtype
        self.plan = replace(function.plan, bias_column=function.plan.bias_column and fits)
        self.rows = self.rows_of(self.plan)
        watch = function.graph and any(self.wanted)
        self.anchor = torch.zeros((), device=x.device, requires_grad=True) if watch else None
        # what is autograd's to see, or has no numbers, must not go by address
        real = all(type(t) in (Tensor, torch.nn.Parameter) for t in (x, w)) and self.head.ranks.alone
        self._by_kernel = real and why_not_row(x.device, self.head.dtype, w.shape[0]) is None
        self.narrowed = self._by_kernel and self.plan.backward_gemm == "narrow"
        self.spec: Any = None  # the structure of the results
        self._leaves: list[Tensor | None] = []
        self._dtypes: list[torch.dtype | None] = []
        self.differentiable: list[bool] = []
        self.compare: Callable[[Tensor, Tensor], None] | None = None  # gets the first chunk's logits and its tokens
        self.states: list[RandomState | None] = []  # before each piece that draws random numbers
        self._into: Gradients | None = None
        self._of_leaves: list[Tensor | None] = []
        self._bias_PV: Tensor | None = None  # the bias's gradient in parts, where the kernel sums it
        self._ones: list[Tensor | None] = []
        self._state: RandomState | None = None  # of the generators, where each piece's is recorded
        self._replayed: Iterator[RandomState | None] = iter(())

    def rows_of(self, plan: HeadPlan) -> Rows:
        """Return the rows that are computed, in the order of a plan's chunks."""
        N, index, order = self.function.leading.numel(), self._index, self.head.ranks.order(plan)
        if order is None:
            return Rows(tokens=N, index=index)
        valid = torch.full((N,), index is None, device=self.device)
        rows = Rows(tokens=N).in_order(order)
        return replace(rows, kept=rows.of(valid if index is None else valid.index_fill_(0, index, True)))

    def forward(self, *, store: bool) -> bool:
        """Compute the results; with ``store`` and one derivative to take, return True: the gradients are there too."""
        if self.function.graph and has_numbers(self.head.input):
            self._state = random_state(self.device)
        if store:
            self._begin(stored=True)
        run(self.head, self.rows, self.plan, self, self._into, upstream=(lambda *_: None) if store else None)
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
        head = self.head
        into = gradient_buffers(head, self.rows, self.plan, self.wanted, stored=stored)
        if into.bias_V is not None and self._by_kernel:
            from lowtide.head.kernels.elementwise import bias_sums

            into.bias_V, self._bias_PV = None, bias_sums(self.plan.piece_rows, len(head.weight_VD), self.device)
        self._into = into
        self._of_leaves = [
            t.new_zeros(t.shape, dtype=t.dtype if rowwise else summed_in(t.dtype)) if t.requires_grad else None
            for t, rowwise in zip((*self.args, *self.params), self._rowwise, strict=True)
        ]

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Add a chunk's results, of any structure, to the pass; where gradients are stored, leave them in ``z``."""
        self._run(z, part, None)
        return {}

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Any) -> None:  # noqa: ARG002
        """Leave the gradient for ``g``, the upstream ones of all results; None: `numbers` has, for the only one, 1."""
        if g is not None:
            self._run(z, part, g)

    def _run(self, z: Tensor, part: slice, given: Sequence[Tensor | None] | None) -> None:
        """Call the function on a chunk's rows, for its results or the gradient that ``given`` upstream ones make."""
        own_cV, index, chosen, start = self._own_rows(z, part)
        if self.compare is not None:
            compare, self.compare = self.compare, None
            tokens = torch.arange(start, start + len(own_cV), device=z.device)
            compare(own_cV, tokens if index is None else index[tokens])
        pieces = list(slices(len(own_cV), evenly(len(own_cV), self.plan.piece_rows)))
        if not pieces and self.spec is None:
            pieces = [slice(0, 0)]  # what the function makes of no rows at all tells dtypes and shapes
        for piece in pieces:
            rows = slice(start + piece.start, start + piece.stop)
            if len(own_cV) and (state := next(self._replayed, None)) is not None:
                set_random_state(state, self.device)
            # the slope of a cap is computed from what it returned, and the function may change its logits
            capped = None if self.head.softcap is None or self.anchor is None else own_cV[piece].clone()
            args = self.args_of(index, rows)
            results = evaluate(self.function, own_cV[piece], args, self.params, self.anchor)
            if self._state is not None and len(own_cV):
                before, self._state = self._state, random_state(self.device)
                self.states.append(None if same_state(before, self._state) else before)
            g = self._collect(results, index, rows) if given is None else given
            if given is not None and self.function.per_token:
                leading = len(self.function.leading)
                g = [None if u is None else take_leading(u, leading, index, rows) for u in given]
            if g is not None and len(own_cV):
                dz, of_leaves = vjp(results, g, [*args, *self.params])
                put_or_add(self._of_leaves, of_leaves, self._rowwise, index, rows)
                if self.anchor is not None:
                    self._put(dz, own_cV, piece, capped)
                del dz, of_leaves
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

    def _put(self, dz: Tensor | None, z_CV: Tensor, piece: slice, capped: Tensor | None) -> None:
        """Leave the gradient of the product ``x @ w.T`` in a piece of ``z_CV``, from that of the logits."""
        target, scale = (narrow_view(z_CV, self.head.dtype) if self.narrowed else z_CV)[piece], self.head.scale
        if dz is None:
            target.zero_()
            return
        if dz.layout != torch.strided:
            dz = dz.to_dense()  # of gather(sparse_grad=True)
        if capped is not None:
            assert isinstance(self.head.softcap, float)
            dz = torch.addcmul(dz, capped * dz, capped, value=-(self.head.softcap**-2))
        elif dz.untyped_storage().data_ptr() == z_CV.untyped_storage().data_ptr():
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        if self._by_kernel:
            from lowtide.head.kernels.elementwise import put_logit_grad

            put_logit_grad(dz, scale, target, self._bias_PV)
        elif scale is None:
            target.copy_(dz)
        else:
            torch.mul(dz, scale, out=target)

    def _collect(self, results: Results, index: Tensor | None, rows: slice) -> Sequence[Tensor | None] | None:
        """Take the results of some rows, like those before; return upstream gradients, 1, if gradients are stored."""
        leaves, spec, _ = results
        got, first = [None if leaf is None else leaf.dtype for leaf in leaves], self.spec is None
        if first:
            self.spec, self._dtypes, self.differentiable = spec, got, [False] * len(got)
            self._leaves = [None if leaf is None else self._total_of(leaf) for leaf in leaves]
        if spec != self.spec or got != self._dtypes:
            expected = f"the same structure and dtypes for all rows: {self.spec} of {self._dtypes}"
            raise ArgumentValueError(message("fn", expected, f"{spec} of {got}"))
        for i, (total, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if total is not None and leaf is not None:
                self.differentiable[i] |= leaf.requires_grad
                if leaf.shape[1:] != total.shape[1:]:
                    expected = f"rows of one shape, {list(total.shape[1:])}"
                    raise ArgumentValueError(message("fn", expected, f"{list(leaf.shape[1:])} for other rows"))
        put_or_add(self._leaves, leaves, [self.function.per_token] * len(got), index, rows)
        one, into = sum(self.differentiable) == 1, self._into
        if into is None:
            return None
        if not first and not one:
            expected = "the same results to depend on its arguments for all rows"
            raise ArgumentValueError(message("fn", expected, "others for later rows"))
        if not one:  # left to backward
            into.input_ND = into.weight_VD = into.bias_V = self._into = None
            return None
        if first:
            self._ones = [None if leaf is None else torch.ones_like(leaf) for leaf in leaves]
        return self._ones

    def _total_of(self, leaf: Tensor) -> Tensor:
        if not self.function.per_token:
            return torch.zeros_like(leaf, dtype=summed_in(leaf.dtype))
        make = leaf.new_empty if self.head.ranks.alone and self.rows.index is None else leaf.new_zeros
        return make(self.rows.tokens, *leaf.shape[1:])

    def results(self) -> list[Tensor | None]:
        """Return all results, with the leading axes of the hidden states and in the function's own dtypes."""
        per_token, leading = self.function.per_token, self.function.leading
        found = zip(self._of_all(self._leaves, [per_token] * len(self._leaves)), self._dtypes, strict=True)
        return [None if x is None else x.to(d).view(leading + x.shape[1:] if per_token else ()) for x, d in found]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order of the tensors, the same of token arguments and params on every rank."""
        into = self._into
        assert into is not None
        bias_V = into.bias_V if self._bias_PV is None else self._bias_PV.sum(0)
        return [into.input_ND, into.weight_VD, bias_V, None, *self._of_all(self._of_leaves, self._rowwise)]

    def _of_all(self, totals: Totals, rowwise: Sequence[bool]) -> Totals:
        """Return what all ranks have added up, each its own rows or sums."""
        ways = {True: self.head.ranks.put_together_, False: self.head.ranks.add_up_}
        return [None if x is None else ways[by_row](x) for x, by_row in zip(totals, rowwise, strict=True)]


def put_or_add(totals: Totals, values: Totals, rowwise: Sequence[bool], index: Tensor | None, part: slice) -> None:
    """Write the ``rowwise`` ones, rows [c, ...], to their places in totals [N, ...] or [..., *]; add the others."""
    for total, value, by_row in zip(totals, values, rowwise, strict=True):
        if total is None or value is None or not value.numel():  # a view of nothing has no one shape
            continue
        if not by_row:
            total += value.detach()
        elif index is None:
            total.view(-1, *value.shape[1:])[part].copy_(value.detach())
        else:
            total.view(-1, *value.shape[1:]).index_copy_(0, index[part], value.detach().to(total.dtype))


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many values of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and not their shapes alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"

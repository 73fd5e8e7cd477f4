"""The loops of `linear_apply`: a chunk of logits, the function over pieces of it, and the products of its gradient.

The letters are those of `lowtide.head.user_function.call`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentValueError, message
from lowtide.head.backends import why_not_row
from lowtide.head.gradients import put_input_grad
from lowtide.head.head_plan import padded
from lowtide.head.matmul import HeadMatmul, finish_logits_, narrow_view
from lowtide.head.user_function.call import ApplyCall, Needs, Rows, Tensors, Totals, has_numbers, put_rows, summed_in
from lowtide.head.user_function.function import Caller, Results, vjp
from lowtide.head.user_function.random import RandomState, random_state, same_state, set_random_state


class Pass:
    """One pass over the tokens, of forward or of backward.

    Args:
        call: What was asked.
        tensors: Of what.
        needs: Which gradients are wanted, now or later.
    """

    def __init__(self, call: ApplyCall, tensors: Tensors, needs: Needs) -> None:
        self.call, self.tensors, self.needs = call, tensors, needs
        self.matmul = HeadMatmul(tensors.weight_VD, call.plan, call.dtype, call.wide)
        bias_V = None if tensors.bias_V is None else tensors.bias_V.detach()
        if bias_V is not None and call.plan.bias_column and bias_V.dtype == call.dtype:
            self.matmul.take_bias(bias_V)
            bias_V = None
        self._bias_V = None if bias_V is None else bias_V.to(call.wide)
        graph = call.function.graph
        self.params = [
            p.detach().requires_grad_(graph and need) for p, need in zip(tensors.params, needs.params, strict=True)
        ]
        self.function = Caller(
            call.function, self.device, self.params, logits_grad=needs.logits, args_grad=needs.token_args
        )
        self._hidden = Rows(tensors.input, tensors)
        self._args = [Rows(a, tensors) for a in tensors.token_args]
        # what is autograd's to see, or has no numbers, must not go by address
        real = all(type(t) in (Tensor, torch.nn.Parameter) for t in (tensors.input, tensors.weight_VD))
        self._by_kernel = real and why_not_row(self.device, call.dtype, tensors.weight_VD.shape[0]) is None
        self._ones = tensors.input.new_ones(min(call.plan.chunk_rows, tensors.rows), dtype=call.wide)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.tensors.input.device

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each chunk's rows among the n, its hidden states [C, D] and its logits [C, V] in one reused buffer."""
        V = self.tensors.weight_VD.shape[0]
        rows = self.call.plan.chunk_rows
        buffer = self.tensors.input.new_empty(min(rows, self.tensors.rows), padded(V), dtype=self.call.wide)
        for part in spans(self.tensors.rows, rows):
            x_CD = self.hidden(part)
            z_CV = buffer[: part.stop - part.start, :V]
            self.write_logits(x_CD, z_CV)
            yield part, x_CD, z_CV

    def hidden(self, part: slice) -> Tensor:
        """Return hidden states in the operands' dtype."""
        return self._hidden[part].to(self.call.dtype)

    def write_logits(self, x_CD: Tensor, z_CV: Tensor) -> None:
        """Write the logits of hidden states."""
        self.matmul.logits(x_CD, z_CV, self._bias_V)
        call = self.call
        finish_logits_(z_CV, None, call.logit_scale, call.softcap, call.plan.columns)

    def evaluate(self, z_cV: Tensor, rows: slice) -> Results:
        """Run the function on the logits of some of the n rows."""
        return self.function(z_cV, [a[rows] for a in self._args])

    def totals(self) -> Totals:
        """Return the buffers that take the gradients."""
        t, wide = self.tensors, self.call.wide
        into = Totals(
            token_args=[
                torch.zeros(a.shape, dtype=a.dtype, device=a.device) if need else None
                for a, need in zip(t.token_args, self.needs.token_args, strict=True)
            ],
            params=[
                torch.zeros_like(p, dtype=summed_in(p.dtype)) if need else None
                for p, need in zip(t.params, self.needs.params, strict=True)
            ],
        )
        if self.needs.input:
            # fp16 is kept wide until the upstream gradient, and with it GradScaler's factor, has come
            dtype = wide if t.input.dtype == torch.float16 else t.input.dtype
            N, D = t.leading.numel(), t.input.shape[-1]
            into.input_ND = (torch.empty if t.index is None else torch.zeros)(N, D, dtype=dtype, device=self.device)
        if self.needs.weight:
            dtype = wide if self.call.plan.accumulate == "float32" else t.weight_VD.dtype
            make = torch.empty if t.rows else torch.zeros
            into.weight_VD = make(t.weight_VD.shape, dtype=dtype, device=self.device)
        if self.needs.bias:
            V = t.weight_VD.shape[0]
            if self._by_kernel:
                from lowtide.head.kernels.logit_grad import bias_sums

                into.bias_V = bias_sums(self.call.plan.piece_rows, V, self.device)
            else:
                into.bias_V = torch.zeros(V, dtype=wide, device=self.device)
        return into

    def pull_back(
        self, results: Results, upstream: Sequence[Tensor | None], z_CV: Tensor, x_CD: Tensor, piece: slice,
        rows: slice, into: Totals,
    ) -> None:  # fmt: skip
        """Add a piece's gradients, and leave that of the product ``x @ w.T`` in the place of its logits.

        Args:
            results: Of the piece.
            upstream: Their gradients.
            z_CV: The chunk's logits.
            x_CD: Its hidden states.
            piece: The piece's rows in the chunk.
            rows: The same among the n.
            into: Where the gradients go; those of the chunk's products are left to `multiply`.
        """
        dz, args, params = vjp(results, upstream, self.params)
        for total, grad in zip(into.token_args, args, strict=True):
            if total is not None and grad is not None:
                put_rows(total, grad, self.tensors.index, rows)
        for total, grad in zip(into.params, params, strict=True):
            if total is not None and grad is not None:
                total += grad
        if not self.needs.logits:
            return
        target = self._operand(z_CV)[piece]
        if dz is None:
            target.zero_()
            return
        if dz.layout != torch.strided:
            dz = dz.to_dense()  # of gather(sparse_grad=True)
        if self.call.softcap is not None:
            z = z_CV[piece]
            if results.logits_changed:
                z = torch.empty_like(z)
                self.write_logits(x_CD[piece], z)
            dz = torch.addcmul(dz, z * dz, z, value=-(self.call.softcap**-2))
        elif dz.untyped_storage()._cdata == z_CV.untyped_storage()._cdata:
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        self._put(dz, target, into)

    def _put(self, dz: Tensor, target: Tensor, into: Totals) -> None:
        """Write a piece's gradient, the scale applied, to where the products take it, and add the bias's."""
        scale = self.call.logit_scale
        if self._by_kernel:
            from lowtide.head.kernels.logit_grad import put_logit_grad

            put_logit_grad(dz, scale, target, into.bias_V)
            return
        if into.bias_V is not None:
            summed = dz.sum(0)
            into.bias_V += summed if scale is None else summed * scale
        if scale is None:
            target.copy_(dz)
        else:
            torch.mul(dz, scale, out=target)

    def multiply(self, z_CV: Tensor, x_CD: Tensor, part: slice, into: Totals) -> None:
        """Multiply the gradients that `pull_back` left in place of a chunk's logits with weight and hidden states."""
        if not (self.needs.input or self.needs.weight):
            return
        g_CV = self._operand(z_CV)
        if into.input_ND is not None:
            ones = self._ones[: len(z_CV)] if g_CV.dtype != self.call.wide else None
            put_input_grad(self.matmul, g_CV, ones, into, self.tensors.index, part)
        if into.weight_VD is not None:
            self.matmul.weight_grad(g_CV, None, x_CD, into.weight_VD, first=part.start == 0)

    def _operand(self, z_CV: Tensor) -> Tensor:
        """Return the memory in which the logits' gradient stands as the products take it: the logits' own."""
        return narrow_view(z_CV, self.call.dtype) if self.call.plan.backward_gemm == "narrow" else z_CV


class Collected:
    """The function's results as they come, piece after piece: rows of a whole, or sums."""

    def __init__(self, call: ApplyCall, tensors: Tensors) -> None:
        self.per_token, self.tensors = call.function.per_token, tensors
        self.spec: pytree.TreeSpec | None = None
        self.leaves: list[Tensor | None] = []
        self.dtypes: list[torch.dtype | None] = []
        self.differentiable: list[bool] = []

    def add(self, results: Results, rows: slice) -> None:
        """Take the results of some rows.

        Raises:
            ArgumentValueError: They differ in structure, dtype or shape from those of the rows before.
        """
        leaves = results.leaves
        if self.spec is None:
            self.spec = results.spec
            self.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            self.differentiable = [False] * len(leaves)
            self.leaves = [None if leaf is None else self._begin(leaf) for leaf in leaves]
        got = [None if leaf is None else leaf.dtype for leaf in leaves]
        if results.spec != self.spec or got != self.dtypes:
            raise ArgumentValueError(
                message("fn", f"the same structure and dtypes for all rows: {self.spec} of {self.dtypes}",
                        f"{results.spec} of {got}")
            )  # fmt: skip
        for i, (total, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if total is None or leaf is None:
                continue
            self.differentiable[i] |= leaf.requires_grad
            leaf = leaf.detach()
            if not self.per_token:
                total += leaf
            elif leaf.shape[1:] != total.shape[1:]:
                expected = f"rows of one shape, {list(total.shape[1:])}"
                raise ArgumentValueError(message("fn", expected, f"{list(leaf.shape[1:])} for other rows"))
            else:
                put_rows(total, leaf, self.tensors.index, rows)

    def _begin(self, leaf: Tensor) -> Tensor:
        if not self.per_token:
            return torch.zeros_like(leaf, dtype=summed_in(leaf.dtype))
        make = torch.empty if self.tensors.index is None else torch.zeros
        return make(self.tensors.leading.numel(), *leaf.shape[1:], dtype=leaf.dtype, device=leaf.device)

    def finished(self) -> list[Tensor | None]:
        """Return all results, with the leading axes of the hidden states and in the function's own dtypes."""
        if not self.per_token:
            return [None if x is None else x.to(d) for x, d in zip(self.leaves, self.dtypes, strict=True)]
        leading = self.tensors.leading
        return [None if x is None else x.view((*leading, *x.shape[1:])) for x in self.leaves]


def run_forward(run: Pass, *, store: bool) -> tuple[Collected, Totals | None, list[RandomState | None]]:
    """Compute the results, and where there is one derivative to take, and ``store``, the gradients too.

    Returns:
        tuple: The results; the gradients as if the upstream one were 1, None where they are left to `run_backward`;
        the state of the generators before each piece that draws random numbers.
    """
    call, tensors = run.call, run.tensors
    collected, states = Collected(call, tensors), list[RandomState | None]()
    into, ones = None, list[Tensor | None]()
    record = call.function.graph and has_numbers(tensors.input)
    state = random_state(run.device) if record else None
    if not tensors.rows:  # what the function makes of no rows at all tells dtypes and shapes
        V = tensors.weight_VD.shape[0]
        collected.add(run.evaluate(tensors.input.new_empty(0, V, dtype=call.wide), slice(0, 0)), slice(0, 0))
        return collected, None, []
    for part, x_CD, z_CV in run.chunks():
        for piece in spans(len(z_CV), call.plan.piece_rows):
            rows = slice(part.start + piece.start, part.start + piece.stop)
            results = run.evaluate(z_CV[piece], rows)
            collected.add(results, rows)
            if state is not None:
                after = random_state(run.device)
                states.append(None if same_state(state, after) else state)
                state = after
            if rows.start == 0 and store and sum(collected.differentiable) == 1:
                into = run.totals()
            if into is not None:
                if sum(collected.differentiable) != 1:
                    expected = "the same results to depend on its arguments for all rows"
                    raise ArgumentValueError(message("fn", expected, "others for later rows"))
                if not ones:
                    ones = [None if leaf is None else torch.ones_like(leaf) for leaf in results.leaves]
                run.pull_back(results, ones, z_CV, x_CD, piece, rows, into)
            del results
        if into is not None:
            run.multiply(z_CV, x_CD, part, into)
    return collected, into, states


def run_backward(run: Pass, upstream: Sequence[Tensor | None], states: Sequence[RandomState | None]) -> Totals:
    """Compute every gradient from the results' upstream ones, by running the function once more on each piece.

    Args:
        run: The pass.
        upstream: For each result [..., *] or a scalar; None: not used.
        states: From `run_forward`.
    """
    call, into = run.call, run.totals()
    found = random_state(run.device) if any(states) else None
    given = [None if u is None or not call.function.per_token else Rows(u, run.tensors) for u in upstream]
    before = iter(states)
    for part, x_CD, z_CV in run.chunks():
        for piece in spans(len(z_CV), call.plan.piece_rows):
            rows = slice(part.start + piece.start, part.start + piece.stop)
            state = next(before, None)
            if state is not None:
                set_random_state(state, run.device)
            results = run.evaluate(z_CV[piece], rows)
            above = [u if whole is None else whole[rows] for whole, u in zip(given, upstream, strict=True)]
            run.pull_back(results, above, z_CV, x_CD, piece, rows, into)
            del results
        run.multiply(z_CV, x_CD, part, into)
    if found is not None:
        set_random_state(found, run.device)
    return into


def spans(total: int, most: int) -> Iterator[slice]:
    """Yield slices of at most ``most`` rows that cover ``total``, as few as can be, their sizes one apart at most."""
    count = -(-total // most)
    for i in range(count):
        yield slice(i * total // count, (i + 1) * total // count)

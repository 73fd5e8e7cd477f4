"""The experts of a layer, which save gate and up for backward, or none of their activations.

A call's arguments, forward, backward and FLOP: the GEMMs of the groups, in the order that needs the least memory.
T tokens, K experts per token, S = T K rows sorted by expert, E experts, D hidden size, F intermediate size of an
expert.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from lowtide.kernel_launch import blocks_of, power_of_2
from lowtide.mlp.call import JOINED, Needs
from lowtide.mlp.elementwise import act, act_backward, has_kernels, pieces, widened
from lowtide.mlp.operators import Operators
from lowtide.mlp.projection import multiply
from lowtide.mlp.swiglu import check_level

COLUMNS = 1024  # of a program of the kernels
_ALIGNED = 16  # bytes, of each stride of an operand of PyTorch's grouped GEMM
_NARROW = 8  # columns: a sum over the rows of a group is a GEMM with so many columns


class Form(NamedTuple):
    """What an expert computes between its GEMMs: ``h = act(g) (u + shift)``.

    g is gate, at most ``limit``, and u is up, from ``-limit`` to ``limit``. act is ``g sigmoid(alpha g)`` for
    ``"silu"``, and ``"gelu_tanh"`` has no alpha.
    """

    activation: str
    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0
    joined: str = "gate first"  # where gate and up are among the 2F columns: a key of `JOINED`


class Inner(NamedTuple):
    """Gate and up of all rows, without their bias."""

    gate_up: Tensor  # [S, 2F]
    bias: Tensor | None  # [E, 2F]
    expert: Tensor  # [S], int32: the expert of each row, E for rows of none
    experts: int  # E
    form: Form


class Pairs(NamedTuple):
    """The pairs of each token and one of its experts."""

    inverse: Tensor  # [T, K], int32: the row of each
    ids: Tensor  # [T, K], int64: its expert, E for those that add nothing
    experts: int  # E


class ExpertsCall(NamedTuple):
    """The experts of one layer and their routing: see `lowtide.mlp.operators`.

    The S rows are the pairs of a token and one of its experts, sorted by expert: row s is pair ``order[s]`` of the T K,
    and expert e has the rows from ``ends[e - 1]`` to ``ends[e]``. Pairs with an id of E or more, which no expert has,
    come last; they add nothing and get the gradient 0.
    """

    # x [T, D]; routing [T, K], the weight of each expert of a token; gate_up [E, 2F, D]; down [E, D, F]; their biases
    # [E, 2F] and [E, D], or None; and integers: ids [T, K], and int32 order [S] and ends [E]
    tensors: Sequence[Tensor | None]
    dtype: torch.dtype  # of the GEMMs' operands
    checkpoint_level: int
    transposed: bool  # gate_up is [E, D, 2F], and down [E, F, D]
    activation: str  # this and what follows: `Form`
    limit: float
    alpha: float
    shift: float
    joined: str

    @property
    def input(self) -> Any:
        """Return x."""
        return self.tensors[0]

    @property
    def output_shape(self) -> Any:
        """Return the shape [T, D] of the output."""
        return self.input.shape

    @property
    def output_dtype(self) -> Any:
        """Return the dtype of the output."""
        return self.input.dtype

    def needs(self, wanted: Sequence[bool]) -> Needs:
        """Return what backward needs for the gradients of `tensors` that are ``wanted``."""
        of_x, of_routing, of_gate_up, of_down, of_gate_up_bias, *_ = wanted
        inner = of_x or of_gate_up or of_gate_up_bias
        return Needs(inner, inner, of_routing or of_down, of_gate_up)

    def empty_projections(self) -> list[Tensor]:
        """Return memory for gate and up of all rows [S, 2F]."""
        tensors: Any = self.tensors
        width = tensors[2].shape[2 if self.transposed else 1]
        return [self.input.new_empty(math.prod(tensors[1].shape), width, dtype=self.dtype)]

    def project(self) -> list[Tensor]:
        """Return gate and up of all rows [S, 2F], without their bias."""
        return [_Pass(self).project()]

    def output(self, held: Sequence[Tensor]) -> Tensor:
        """Return the output [T, D] from gate and up, or if there are none from the input."""
        run = _Pass(self)
        inner = run.inner(held[0] if held else run.project())
        h = inner.gate_up.new_empty(len(inner.expert), inner.gate_up.shape[1] // 2)
        gated_rows(inner, h)
        del inner
        y = run.groups.times(h, run.weight(3))
        del h
        return run.combined(y, run.routing, run.down_bias)

    def gradients(
        self, wanted: Sequence[bool], upstream: Tensor, held: list[Tensor], *, in_place: bool
    ) -> list[Tensor | None]:
        """Return the gradients of `tensors` in their shapes and dtypes, None for those that are not ``wanted``.

        ``upstream`` is the output's gradient [T, D]; ``held`` gate and up [S, 2F], which may be overwritten
        ``in_place``, or nothing if forward did not save them. The list is emptied, so that their memory can be freed.
        """
        run, needs = _Pass(self), self.needs(wanted)
        of_x, of_routing, of_gate_up, of_down, of_gate_up_bias, of_down_bias, *_ = wanted
        grads: list[Tensor | None] = [None] * len(wanted)
        dy = upstream.to(self.dtype)
        dy_rows = run.gathered(dy)
        factors = run.routing.reshape(-1)[run.order]
        if of_down_bias:
            grads[5] = run.groups.sums(dy_rows, factors)
        if needs.projections:
            in_place = in_place or not held
            gate_up = held.pop() if held else run.project()
            dh = run.groups.times(dy_rows, run.weight(3).transpose(1, 2))
            of_inner = None if not needs.gate else gate_up if in_place else torch.empty_like(gate_up)
            dots = gate_up.new_empty(len(factors), dtype=run.wide) if of_routing else None
            gated_rows_backward(run.inner(gate_up), dh, factors, (of_inner, dh if of_down else None, dots))
            del gate_up
            if of_down:
                grads[3] = run.weight_grad(dh, dy_rows)
            del dh, dy_rows
            if dots is not None:
                grads[1] = run.routing_grad(dots, dy)
            if of_inner is not None:
                if of_gate_up_bias:
                    grads[4] = run.groups.sums(of_inner)
                if of_gate_up:
                    grads[2] = run.weight_grad(run.gathered(self.input), of_inner)
                if of_x:
                    grads[0] = run.combined(run.groups.times(of_inner, run.weight(2).transpose(1, 2)), None, None)
        tensors: Any = self.tensors
        return [None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]

    # The FLOP of the GEMMs: two per row and element of an expert's weight.

    def project_flop(self) -> int:
        """Return the FLOP of gate and up."""
        return self._flop(2)

    def output_flop(self, held: Sequence[Tensor]) -> int:
        """Return the FLOP of the output."""
        return self._flop(3) + (0 if held else self._flop(2))

    def gradients_flop(self, wanted: Sequence[bool], _upstream: Tensor, held: Sequence[Tensor]) -> int:
        """Return the FLOP of the gradients that are ``wanted``."""
        needs = self.needs(wanted)
        of_down = (needs.gate or wanted[1]) + wanted[3]
        return of_down * self._flop(3) + ((needs.projections and not held) + wanted[0] + wanted[2]) * self._flop(2)

    def _flop(self, weight: int) -> int:
        tensors: Any = self.tensors
        return int(2 * math.prod(tensors[1].shape) * math.prod(tensors[weight].shape[1:]))


class _Pass:
    """A call's rows and weights as the GEMMs read them, during one pass."""

    def __init__(self, call: ExpertsCall) -> None:
        self._call, self._tensors = call, list[Any](call.tensors)
        self._x, self.routing, _, _, self._gate_up_bias, self.down_bias, ids, self.order, ends = self._tensors
        self._experts, self.groups = len(ends), Groups(ends)
        self._ids = ids.long().clamp(max=len(ends)).contiguous()  # [T, K]
        self.wide = torch.promote_types(call.dtype, torch.float32)

    def weight(self, i: int) -> Tensor:
        """Return the matrices from the input to gate and up [E, D, 2F], or from h to the output [E, F, D]."""
        weight: Tensor = self._tensors[i].to(self._call.dtype)
        return weight if self._call.transposed else weight.transpose(1, 2)

    def weight_grad(self, into: Tensor, out: Tensor) -> Tensor:
        """Return a weight's gradient in its layout, from the rows [S, in] that it read and its output's [S, out]."""
        return self.groups.outer(*((into, out) if self._call.transposed else (out, into)))

    def gathered(self, tokens: Tensor) -> Tensor:
        """Return the token of each row [S, D], in the operands' dtype."""
        token = self.order.div(self._ids.shape[1], rounding_mode="floor")
        return tokens.to(self._call.dtype).index_select(0, token)

    def project(self) -> Tensor:
        """Return gate and up [S, 2F], without their bias."""
        return self.groups.times(self.gathered(self._x), self.weight(2))

    def inner(self, gate_up: Tensor) -> Inner:
        """Return gate and up with all that tells what is computed from them."""
        expert = self._ids.reshape(-1)[self.order].to(torch.int32)
        return Inner(gate_up, _contiguous(self._gate_up_bias), expert, self._experts, Form(*self._call[4:]))

    def combined(self, rows: Tensor, factors: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the sum of each token's rows [T, D], with their bias and factors, in the input's dtype."""
        pairs = Pairs(inverse_of(self.order).view(self._ids.shape), self._ids, self._experts)
        return combined(rows, pairs, _contiguous(factors), _contiguous(bias), self._x.dtype)

    def routing_grad(self, dots: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient of the routing weights [T, K], from each row's h . dh and the output's gradient."""
        grad = dots[inverse_of(self.order)].view(self._ids.shape)
        bias, E = self.down_bias, self._experts
        if bias is not None:
            of_all = dy.new_empty(dy.shape[0], E, dtype=self.wide)
            multiply(dy, bias.to(dy.dtype).T, of_all, add=False)
            grad = grad + of_all.gather(1, self._ids.clamp(max=E - 1))
        return torch.where(self._ids < E, grad, 0.0)


# Between the GEMMs, by kernels or in plain PyTorch: in float32 (float64 for float64 operands), rounded once.


def gated_rows(inner: Inner, out: Tensor) -> None:
    """Write ``h = act(g) (u + shift)`` of each row into ``out`` [S, F]; rows of no expert get any values."""
    if has_kernels(out.device):
        _launch("gated_rows", inner, out)
        return
    for rows in pieces(inner.gate_up.shape, out):
        g, u, _ = _gate_and_up(inner, rows)
        out[rows] = _activated(g, inner.form).mul_(u.add_(inner.form.shift))


def gated_rows_backward(
    inner: Inner, grad: Tensor, factors: Tensor, into: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> None:
    """Write what backward needs of each row, from its ``factors`` [S] and ``grad`` [S, F], the gradient of ``h``.

    That gradient lacks the factor. ``into`` are where to, or None: the gradient of gate and up [S, 2F], which may be
    written over these; ``h`` times the factor [S, F], which may be written over ``grad``; and the factor's own gradient
    ``h . grad`` [S]. Rows of no expert get any values.
    """
    if has_kernels(grad.device):
        _launch("gated_rows_backward", inner, grad, factors, *into)
        return
    of_inner, product, dots = into
    form = inner.form
    gate_at, up_at = JOINED[form.joined](grad.shape[1])
    for rows in pieces(inner.gate_up.shape, grad):
        g, u, passes = _gate_and_up(inner, rows)
        dh, w = widened(grad[rows]), factors[rows].to(g.dtype)[:, None]
        activated, shifted = _activated(g, form), u.add_(form.shift)
        h = activated * shifted
        if dots is not None:
            dots[rows] = (h * dh).sum(1)
        dh = dh * w
        if product is not None:
            product[rows] = h.mul_(w)
        if of_inner is not None:
            of_gate = act_backward(shifted.mul_(dh), g.mul_(form.alpha), form.activation)
            of_inner[rows, gate_at] = torch.where(passes[0], of_gate, 0.0)
            of_inner[rows, up_at] = torch.where(passes[1], activated.mul_(dh), 0.0)


def _launch(kernel: str, inner: Inner, of_rows: Tensor, *others: Tensor | None) -> None:
    """Run a kernel, a program for each of the rows [S, F]."""
    from lowtide.mlp import kernels

    form, (S, F) = inner.form, of_rows.shape
    gate, up = JOINED[form.joined](F)
    if of_rows.numel():
        getattr(kernels, kernel)[(S,)](
            inner.gate_up, inner.bias, inner.expert, of_rows, *others, inner.experts, F, gate.start, up.start,
            gate.step or 1, ACTIVATION=form.activation, LIMIT=None if math.isinf(form.limit) else form.limit,
            ALPHA=form.alpha, SHIFT=form.shift, WIDE=kernels.wide(inner.gate_up), BLOCK=min(COLUMNS, power_of_2(F)),
            num_warps=4,
        )  # fmt: skip


def combined(rows: Tensor, pairs: Pairs, factors: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each token's sum over its pairs of ``factor (row + bias)`` [T, D], in ``dtype``.

    ``rows`` are [S, D], ``factors`` [T, K] or None for 1, and ``bias`` [E, D], of which a pair has its expert's.
    """
    (T, K), D = pairs.ids.shape, rows.shape[1]
    out = rows.new_empty(T, D, dtype=dtype)
    if has_kernels(rows.device):
        from lowtide.mlp import kernels

        if out.numel():
            block = min(COLUMNS, power_of_2(D))
            kernels.combine[(T, blocks_of(D, block))](
                rows, pairs.inverse, pairs.ids, factors, bias, out, pairs.experts, K, D, WIDE=kernels.wide(rows),
                BLOCK=block, num_warps=4,
            )  # fmt: skip
        return out
    for tokens in pieces((T, D * K), rows):
        ids, picked = pairs.ids[tokens], widened(rows[pairs.inverse[tokens]])
        if bias is not None:
            picked = picked + bias[ids.clamp(max=pairs.experts - 1)]
        if factors is not None:
            picked = picked * factors[tokens].to(picked.dtype)[..., None]
        out[tokens] = torch.where((ids < pairs.experts)[..., None], picked, 0.0).sum(1)
    return out


def _gate_and_up(inner: Inner, rows: slice) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return g and u of some rows, and where each passes a gradient on, which is inside its limits."""
    gate_up, limit = inner.gate_up[rows], inner.form.limit
    both = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32), copy=True)
    if inner.bias is not None:
        both += inner.bias[inner.expert[rows].clamp(max=inner.experts - 1)]
    gate_at, up_at = JOINED[inner.form.joined](both.shape[1] // 2)
    g, u = both[:, gate_at], both[:, up_at]
    passes = (~(g > limit), ~(u.abs() > limit))
    return g.clamp(max=limit), u.clamp(-limit, limit), passes


def _activated(g: Tensor, form: Form) -> Tensor:
    return act(g, form.activation) if form.alpha == 1 else act(g * form.alpha, form.activation).div_(form.alpha)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as the kernels read it."""
    return None if tensor is None else tensor.contiguous()


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of the pairs ``ids`` [T, K] by expert, and where each expert's rows end, int32 [S] and [E].

    Pairs of one expert stay in their order. Nothing waits for the device.
    """
    # Few bits make the sort short. An id above the last expert stays above it.
    keys = ids.reshape(-1).clamp(max=experts).to(torch.int16 if experts < 2**15 else torch.int64)
    keys, order = torch.sort(keys, stable=True)
    every = torch.arange(experts, device=ids.device, dtype=keys.dtype)
    return order.to(torch.int32), torch.searchsorted(keys, every, right=True, out_int32=True)


def inverse_of(order: Tensor) -> Tensor:
    """Return the place of each pair among the sorted rows, int32 [S]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device, dtype=order.dtype)
    return inverse


class Groups:
    """Rows [S, .] sorted by expert, of which those of expert e end at ``ends[e]``.

    A GEMM of all groups is PyTorch's grouped GEMM on CUDA, in bfloat16 with sizes of whole 16 bytes. In other cases it
    is one GEMM for each expert that has rows, and the host has to read ``ends``.
    """

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends
        self._read: list[int] | None = None

    def times(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the rows [S, in] of each group times its expert's matrix of ``weight`` [E, in, out]."""
        if _has_grouped(rows, weight):
            return grouped_mm(rows, weight, offs=self._ends)
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for e, group in self._groups():
            torch.mm(rows[group], weight[e], out=out[group])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left^T right`` [E, M, N] of each group, from rows [S, M] and [S, N]; 0 for a group without rows."""
        if _has_grouped(left, right):
            return grouped_mm(left.T, right, offs=self._ends)
        out = left.new_zeros(self._ends.shape[0], left.shape[1], right.shape[1])
        for e, group in self._groups():
            torch.mm(left[group].T, right[group], out=out[e])
        return out

    def sums(self, rows: Tensor, factors: Tensor | None = None) -> Tensor:
        """Return the sum of each group's rows [E, N], each times its factor of ``factors`` [S]."""
        columns = rows.new_ones(1, 1) if factors is None else factors.to(rows.dtype)[:, None]
        return self.outer(rows, columns.expand(rows.shape[0], _NARROW).contiguous())[..., 0].contiguous()

    def _groups(self) -> list[tuple[int, slice]]:
        """Return each expert that has rows, and where they are."""
        if self._read is None:
            self._read = self._ends.tolist()
        starts = (0, *self._read[:-1])
        spans = zip(starts, self._read, strict=True)
        return [(e, slice(start, end)) for e, (start, end) in enumerate(spans) if end > start]


def _has_grouped(*operands: Tensor) -> bool:
    """Return whether PyTorch's grouped GEMM takes these operands without a loop of its own."""
    if not operands[0].is_cuda or operands[0].dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(operands[0].device) < (9, 0):
        return False
    return all(_is_aligned(operand) for operand in operands)


def _is_aligned(operand: Tensor) -> bool:
    """Return whether all sizes of an operand but its first, its strides and its start are whole 16 bytes."""
    wide = [stride for stride in operand.stride()[-2:] if stride != 1]
    numbers = (*operand.shape[1:], *operand.stride()[:-2], *wide, operand.storage_offset())
    return len(wide) == 1 and operand.numel() > 0 and all(n * operand.element_size() % _ALIGNED == 0 for n in numbers)


# Gate and up [S, 2F], and the output [T, D].
_EXPERTS = Operators(
    "experts", "fused experts", "run the stock experts: lowtide.unpatch(model)", ExpertsCall, tensors=9
)


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
    return _EXPERTS.run(ExpertsCall(tensors, dtype, check_level(checkpoint_level), transposed, *form))

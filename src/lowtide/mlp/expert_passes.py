"""Forward and backward of a layer's experts: the GEMMs of the groups, in the order that needs the least memory.

T tokens, K experts per token, S = T K rows sorted by expert, E experts, D hidden size, F intermediate size.
"""

import torch
from torch import Tensor

from lowtide.mlp.expert_call import ExpertsCall, ExpertsWanted, Inner, Pairs
from lowtide.mlp.expert_rows import combined, gated_rows, gated_rows_backward
from lowtide.mlp.groups import Groups, inverse_of
from lowtide.mlp.products import multiply


def project_rows(call: ExpertsCall) -> Tensor:
    """Return gate and up of all rows [S, 2F], without their bias."""
    return _Experts(call).project()


def forward_rows(call: ExpertsCall, gate_up: Tensor) -> Tensor:
    """Return the output [T, D] from gate and up, or if these are empty from the input."""
    experts = _Experts(call)
    inner = experts.inner(gate_up if gate_up.dim() == 2 else experts.project())
    h = inner.gate_up.new_empty(call.rows, call.width)
    gated_rows(inner, h)
    del inner, gate_up
    y = experts.groups.times(h, experts.down)
    del h
    return experts.combined(y, call.routing, call.down_bias)


def backward_rows(
    call: ExpertsCall, wanted: ExpertsWanted, upstream: Tensor, saved: list[Tensor], *, in_place: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's tensors in their shapes and dtypes, None for those that are not needed.

    ``upstream`` is the output's gradient [T, D]; ``saved`` gate and up [S, 2F], which may be overwritten ``in_place``,
    or an empty tensor if forward did not save them. The list is emptied, so that their memory can be freed.
    """
    experts = _Experts(call)
    grads: list[Tensor | None] = [None] * len(wanted)
    gate_up = saved.pop()
    dy = upstream.to(call.dtype)
    dy_rows = experts.gathered(dy)
    factors = call.routing.reshape(-1)[call.order]
    if wanted.down_bias:
        grads[5] = experts.groups.sums(dy_rows, factors)
    if wanted.projections:
        if gate_up.dim() != 2:
            gate_up, in_place = experts.project(), True
        dh = experts.groups.times(dy_rows, experts.down.transpose(1, 2))
        inner = experts.inner(gate_up)
        of_inner = None if not wanted.inner else gate_up if in_place else torch.empty_like(gate_up)
        dots = gate_up.new_empty(call.rows, dtype=experts.wide) if wanted.routing else None
        gated_rows_backward(inner, dh, factors, (of_inner, dh if wanted.down else None, dots))
        del inner, gate_up
        if wanted.down:
            grads[3] = experts.weight_grad(dh, dy_rows)
        del dh, dy_rows
        if dots is not None:
            grads[1] = experts.routing_grad(dots, dy)
        if of_inner is not None:
            _through_gate_and_up(experts, wanted, of_inner, grads)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, call.trained, strict=True))


def _through_gate_and_up(
    experts: "_Experts", wanted: ExpertsWanted, of_inner: Tensor, grads: list[Tensor | None]
) -> None:
    """Put in the gradients of input, gate_up and its bias, from that of gate and up [S, 2F]."""
    if wanted.gate_up_bias:
        grads[4] = experts.groups.sums(of_inner)
    if wanted.gate_up:
        grads[2] = experts.weight_grad(experts.gathered(experts.call.input), of_inner)
    if wanted.input:
        dx_rows = experts.groups.times(of_inner, experts.gate_up.transpose(1, 2))
        grads[0] = experts.combined(dx_rows, None, None)


class _Experts:
    """The call's rows and weights as the GEMMs read them, during one pass."""

    def __init__(self, call: ExpertsCall) -> None:
        self.call, self.groups = call, Groups(call.ends)
        self.ids = call.ids.long().clamp(max=len(call.ends)).contiguous()  # [T, K]
        self.wide = torch.float64 if call.dtype == torch.float64 else torch.float32

    @property
    def gate_up(self) -> Tensor:
        """Return the matrices from the input to gate and up [E, D, 2F]."""
        return self._operand(self.call.gate_up)

    @property
    def down(self) -> Tensor:
        """Return the matrices from h to the output [E, F, D]."""
        return self._operand(self.call.down)

    def _operand(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.call.dtype)
        return weight if self.call.transposed else weight.transpose(1, 2)

    def weight_grad(self, into: Tensor, out: Tensor) -> Tensor:
        """Return a weight's gradient in its layout, from the rows [S, in] that it read and its output's [S, out]."""
        return self.groups.outer(*((into, out) if self.call.transposed else (out, into)))

    def gathered(self, tokens: Tensor) -> Tensor:
        """Return the token of each row [S, D], in the operands' dtype."""
        token = self.call.order.div(self.call.ids.shape[1], rounding_mode="floor")
        return tokens.to(self.call.dtype).index_select(0, token)

    def project(self) -> Tensor:
        """Return gate and up [S, 2F], without their bias."""
        return self.groups.times(self.gathered(self.call.input), self.gate_up)

    def inner(self, gate_up: Tensor) -> Inner:
        """Return gate and up with all that tells what is computed from them."""
        expert = self.ids.reshape(-1)[self.call.order].to(torch.int32)
        return Inner(gate_up, _contiguous(self.call.gate_up_bias), expert, len(self.call.ends), self.call.form)

    def combined(self, rows: Tensor, factors: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the sum of each token's rows [T, D], with their bias and factors, in the input's dtype."""
        pairs = Pairs(inverse_of(self.call.order).view(self.ids.shape), self.ids, len(self.call.ends))
        return combined(rows, pairs, _contiguous(factors), _contiguous(bias), self.call.input.dtype)

    def routing_grad(self, dots: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient of the routing weights [T, K], from each row's h . dh and the output's gradient."""
        grad = dots[inverse_of(self.call.order)].view(self.ids.shape)
        bias, E = self.call.down_bias, len(self.call.ends)
        if bias is not None:
            of_all = dy.new_empty(dy.shape[0], E, dtype=self.wide)
            multiply(dy, bias.to(dy.dtype).T, of_all, add=False)
            grad = grad + of_all.gather(1, self.ids.clamp(max=E - 1))
        return torch.where(self.ids < E, grad, 0.0)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as the kernels read it."""
    return None if tensor is None else tensor.contiguous()

"""The operations between the experts' GEMMs, by kernels or in plain PyTorch.

S rows sorted by expert, T tokens, K experts per token, E experts, F intermediate size, D hidden size. Both compute in
float32 (float64 for float64 operands) and round once, to the dtype of the results.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.mlp.call import JOINED
from lowtide.mlp.elementwise import PIECE, act, act_backward, has_kernels, widened
from lowtide.mlp.groups import Form, Inner, Pairs


def gated_rows(inner: Inner, out: Tensor) -> None:
    """Write ``h = act(g) (u + shift)`` of each row into ``out`` [S, F]; rows of no expert get any values."""
    if has_kernels(out.device):
        from lowtide.mlp.kernels import experts as kernels

        kernels.gated_rows(inner, out)
        return
    for rows in _pieces(inner.gate_up):
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
        from lowtide.mlp.kernels import experts as kernels

        kernels.gated_rows_backward(inner, grad, factors, into)
        return
    of_inner, product, dots = into
    form = inner.form
    gate_at, up_at = JOINED[form.joined](grad.shape[1])
    for rows in _pieces(inner.gate_up):
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


def combined(rows: Tensor, pairs: Pairs, factors: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each token's sum over its pairs of ``factor (row + bias)`` [T, D], in ``dtype``.

    ``rows`` are [S, D], ``factors`` [T, K] or None for 1, and ``bias`` [E, D], of which a pair has its expert's.
    """
    (T, K), D = pairs.ids.shape, rows.shape[1]
    out = rows.new_empty(T, D, dtype=dtype)
    if has_kernels(rows.device):
        from lowtide.mlp.kernels import experts as kernels

        kernels.combine(rows, pairs, factors, bias, out)
        return out
    step = max(1, PIECE // max(1, D * K)) if rows.is_cpu else max(1, T)
    for start in range(0, T, step):
        tokens = slice(start, start + step)
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


def _pieces(gate_up: Tensor) -> Iterator[slice]:
    """Yield rows: few enough for a CPU's caches."""
    S, columns = gate_up.shape
    step = max(1, PIECE // max(1, columns)) if gate_up.is_cpu else max(1, S)
    return (slice(start, start + step) for start in range(0, S, step))

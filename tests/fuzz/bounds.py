"""How far a value or a gradient may be from the float64 truth: what plain PyTorch errs, and a few roundings.

For logits z = x w^T + b that are computed in a precision eps, an absolute error of eps (|x| |w|^T + |b|) is what any
summation may have, and with it a relative error of e^z of the same size: `kappa` is the largest of these, plus 1. With
dz the gradient of the truth's logits, the GEMMs of the gradients err by eps |dz| |w| and eps |dz|^T |x| times it. These
are bounds for each entry. Operands of low precision are rounded once more on the way: eps of that dtype times the same
products, and for the norm of a whole gradient eps times its norm. 3 times plain PyTorch's own error is always allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDE_STEPS, LOW_STEPS, NORM_STEPS = 4.0, 2.0, 1.0  # roundings that are allowed beside plain PyTorch's error
PLAIN = 3.0
NOTHING = {torch.float64: 1e-300, torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-24}


class Scales(NamedTuple):
    """What a truth's run leaves behind: see above."""

    kappa: float
    of_name: dict[str, Tensor]  # by leaf: sum of the magnitudes that its gradient is made of
    of_rows: Tensor | None  # the upstream gradient of each row's value, absolute


def scales_of(notes: dict[str, Any]) -> Scales | None:
    """Return the scales of a head's gradients, None where there is no head."""
    if "norm" in notes:
        return _of_norm(notes)
    if "mlp" in notes:
        return _of_mlp(notes)
    if "student" not in notes:
        return None
    x, w, b, raw, z = notes["student"]
    with torch.no_grad():
        magnitude = x.abs().nan_to_num(0, 0, 0) @ w.abs().T
        if b is not None:
            magnitude = magnitude + b.abs().nan_to_num(0, 0, 0)
        stretch = max(1.0, notes.get("stretch", 1.0))
        kappa = 2.0 + (magnitude.max().item() * stretch if magnitude.numel() else 0.0)
        if "teacher" in notes and notes["teacher"][4].numel():
            kappa += notes["teacher"][4].abs().max().item()
        rows = notes["rows"]
        of_rows = None
        for row in rows:
            if row.grad is not None:
                g = row.grad.abs()
                g = g.sum(-1) if g.dim() == raw.dim() else g
                of_rows = g if of_rows is None else of_rows + g
        if raw.grad is None:
            alone = {} if of_rows is None else {"logit_scale": of_rows.sum() * (kappa - 1)}
            return Scales(kappa, alone, of_rows)
        dz = raw.grad.abs()
        if z.grad is not None:  # before the cap, whose slope is a difference
            dz = torch.maximum(dz, z.grad.abs() * stretch)
        if notes["cancels"] and of_rows is not None:  # differences of probabilities, of which little may be left
            p = z.softmax(-1).nan_to_num(0)
            dz = dz + of_rows[..., None] * (p + 1 / z.shape[-1]) * stretch
        if x.dtype == torch.float64 and notes["eps"] < 1e-10:  # then the truth has no more digits
            dz = dz + (0 if of_rows is None else of_rows[..., None])
        N = dz.shape[:-1].numel()
        flat, x = dz.reshape(N, dz.shape[-1]), x.reshape(N, x.shape[-1])
        found = {
            "input": (dz @ w.abs()),
            "linear_weight": flat.T @ x.abs().nan_to_num(0, 0, 0),
            "linear_bias": flat.sum(0),
            "logit_scale": (dz * magnitude).sum(),
        }
    return Scales(kappa, found, of_rows)


def _of_norm(notes: dict[str, Any]) -> Scales:
    """A normalised row's gradient is what is left of its upstream gradient, weighted, across the row."""
    x, weight, offset, eps = notes["norm"]
    with torch.no_grad():
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        w = 1.0 + offset if weight is None else weight.abs() + offset
        each = (rstd * w).expand(x.shape) * notes.get("upstream", 1.0)
        each = each + each.mean(-1, keepdim=True)
        found = {"input": each, "residual": each + notes.get("upstream", 1.0)}
        n = (x * rstd).abs()
        found["weight"] = (
            n.reshape(-1, x.shape[-1]).sum(0) * notes.get("upstream", 1.0) if x.numel() else n.new_zeros(x.shape[-1])
        )
    return Scales(1.0, found, None)


def _of_mlp(notes: dict[str, Any]) -> Scales:
    """The activation is at most |gate| and its slope at most 1.1, and either may have lost all but its last digit.

    Gate and up themselves err by eps of the terms that they sum, of which little may be left.
    """
    x, wg, wu, wd, bg, gate, up = (None if t is None else t.detach().abs() for t in notes["mlp"])
    terms = x @ wg.T + (0 if bg is None else bg)
    kappa = 1.0 + (terms.max().item() if gate.numel() else 0.0)
    if notes["eps"] < 1e-10:  # then plain PyTorch does not show it: the truth has no more digits
        gate, up = gate + terms / kappa, up + x @ wu.T / kappa
    flat = gate.shape[:-1].numel()
    x, gate, up = (t.reshape(flat, t.shape[-1]) for t in (x, gate, up))
    g = notes["out"].grad
    g = torch.zeros(flat, wd.shape[0], dtype=x.dtype) if g is None else g.abs().view(flat, wd.shape[0])
    d_act = g @ wd
    d_gate, d_up, act = 1.1 * d_act * up, d_act * gate, gate * up
    lead = notes["mlp"][0].shape
    found = {
        "input": (d_gate @ wg + d_up @ wu).view(lead),
        "gate_weight": d_gate.T @ x, "up_weight": d_up.T @ x, "down_weight": g.T @ act,
        "gate_bias": d_gate.sum(0), "up_bias": d_up.sum(0), "down_bias": g.sum(0),
    }  # fmt: skip
    return Scales(kappa, {**found, "value": (act @ wd.T).view(*lead[:-1], wd.shape[0])}, None)


def excess(
    got: Tensor,
    true: Tensor,
    plain: Tensor | None,
    *,
    eps: float,
    low: float,
    scale: Tensor | None,
    kappa: float,
    smallest: float = 0.0,
    low_steps: float = LOW_STEPS,
) -> tuple[float, str]:
    """Return how many times the bound the worst error is, and of what; at most 1 is right.

    Args:
        got: What the function under test gave.
        true: The truth in float64.
        plain: What plain PyTorch gives in the same dtype.
        eps: Precision of the arithmetic.
        low: Precision of ``got`` and of the operands.
        scale: Of each entry: what the error is relative to. None: the root mean square of its row and of all.
        kappa: See `Scales`.
        smallest: What a step between the GEMMs may lose to the smallest number of its dtype.
        low_steps: How many roundings in ``low`` there may be before the last one, to the result's dtype.
    """
    if got.shape != true.shape:
        return float("inf"), f"shape {list(got.shape)} for {list(true.shape)}"
    if not got.numel():
        return 0.0, ""
    most = torch.finfo(got.dtype).max
    true, got64 = true.detach().double(), got.detach().double()
    beyond = true.abs() > 0.97 * most  # may be rounded to infinity, or held
    same = (got64.isfinite() == true.isfinite()) | beyond
    if not same.all():
        where = (~same).nonzero()[0].tolist()
        return float("inf"), f"{got64[tuple(where)].item()} for {true[tuple(where)].item()} at {where}"
    fine = true.isfinite() & ~beyond
    if not fine.any():
        return 0.0, ""
    error = (got64 - true).where(fine, 0).abs()
    true = true.where(fine, 0)
    mine = (
        torch.zeros_like(true)
        if plain is None
        else (plain.detach().double() - true).where(fine, 0).abs().nan_to_num(0, 0, 0)
    )
    tiny = NOTHING[got.dtype] + smallest
    steps = WIDE_STEPS if got.dtype != torch.float64 else 2 * WIDE_STEPS  # the truth has roundings of its own
    if scale is None:
        rms = true.square().mean().sqrt()
        rows = true.square().mean(-1, keepdim=True).sqrt() if true.dim() else rms
        scale = (rows + 2 * rms + true.abs()).expand(true.shape)
        if low_steps:
            mine = mine + (mine.square().mean(-1, keepdim=True).sqrt() if mine.dim() else 0)
    bound = (
        PLAIN * mine + (steps * eps * kappa + low_steps * low) * scale.double().where(fine, 0) + low * true.abs() + tiny
    )
    entry = (error / bound).max().item()
    n = true.numel() ** 0.5
    wide = steps * eps * kappa * scale.double().where(fine, 0)
    total = PLAIN * mine.norm() + wide.norm() + NORM_STEPS * low * true.norm() + tiny * n
    if true.numel() < 64:  # of few entries all roundings may go the same way
        total = total + low_steps * low * scale.double().where(fine, 0).norm()
    norm = (error.norm() / total).item()
    return max(
        entry, norm
    ), f"{'entry' if entry > norm else 'norm'}: error {error.norm():.3g} of {true.norm():.3g}, plain {mine.norm():.3g}"


def precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps

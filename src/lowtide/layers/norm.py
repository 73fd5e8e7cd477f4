"""`rms_norm` and `add_rms_norm`: each row divided by its root mean square, times a weight.

Legend: x [..., D] or, as rows, [N, D]; weight [D]. rstd [N] is the factor of each row.
"""

import math
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_name, check_number, refuse_transforms, why_not_local
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.graph import Operator, node, undisturbed
from lowtide.head.backends import why_not_row
from lowtide.kernel_launch import blocks_of, multiprocessors, on_device, power_of_2

Rounding = Literal["before_weight", "after_weight"]

GATHER = "Call it inside the forward of the module that fully_shard wraps, or on the result of to_local()."
_LONGEST = 32768  # of the kernels' rows
TILE = 2048  # values of a tile: short rows are taken several at a time
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the backward pass: each leaves one row of partial sums
_STOCK = "torch.nn.functional.rms_norm"
_TWICE = f"lowtide: expected a norm to be differentiated once, got a second derivative. For those use {_STOCK}."


def rms_norm(
    input: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, rounding: Rounding = "after_weight"
) -> Tensor:
    """Return each row divided by its root mean square: ``x / sqrt(mean(x**2) + eps) * (weight + offset)``.

    The arithmetic is float32 (float64 for float64 inputs). It saves ``input`` itself and one float32 per row for
    backward. On an NVIDIA GPU forward and backward are one kernel each, without a wider copy of the input. Elsewhere it
    is plain PyTorch, bitwise equal to transformers' own modules. The weight's gradient is summed in a fixed order, so
    it is the same from run to run.

    Args:
        input: [..., D], floating point.
        weight: [D], floating point, on the same device; None for ones.
        eps: Added to the mean square.
        offset: Added to the weight: 1 for Gemma, which stores its weights minus 1.
        rounding: ``"after_weight"``: the result is rounded once, to the dtype of ``input``, as in
            `torch.nn.functional.rms_norm`, Gemma and OLMo. ``"before_weight"``: the normalised row is rounded to the
            dtype of ``input`` and then multiplied, and the result has the dtype that PyTorch promotes to, as in
            transformers' Llama, Mistral and Qwen.

    Returns:
        Tensor: [..., D].

    Raises:
        ArgumentTypeError: Not tensors, not floating point, or ``eps`` or ``offset`` is not a number.
        ArgumentValueError: Shapes or devices that do not fit, an ``eps`` that is negative or not finite, or an unknown
            ``rounding``.
        UnsupportedError: Double backward, forward-mode derivatives or torch.func transforms; also a `RuntimeError`.

    Example:
        >>> hidden, weight = torch.randn(2, 5, 64), torch.ones(64)
        >>> rms_norm(hidden, weight, 1e-5, rounding="before_weight").shape
        torch.Size([2, 5, 64])

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    weight = _check("rms_norm", input, weight, None, eps, offset, rounding)
    return checked_rms_norm(input, weight, eps, offset, rounding)


def checked_rms_norm(input: Tensor, weight: Tensor, eps: float, offset: float, rounding: Rounding) -> Tensor:
    """Return `rms_norm` of arguments that the caller has checked: of short sequences the host's time is all."""
    return _run(input, None, weight, float(eps), float(offset), rounding == "before_weight")[0]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    rounding: Rounding = "after_weight",
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(input + residual, ...)`` and the sum itself, in one pass over both.

    The sum is rounded to its dtype before it is normalised, as a separate addition would. Backward adds the gradient of
    the sum in the same pass. It saves the sum and one float32 per row.

    Args:
        input: [..., D].
        residual: Of the same shape, dtype and device.
        weight: As in `rms_norm`.
        eps: As in `rms_norm`.
        offset: As in `rms_norm`.
        rounding: As in `rms_norm`.

    Returns:
        tuple[Tensor, Tensor]: The normalised sum, and the sum.

    Raises:
        ArgumentTypeError: As in `rms_norm`, or ``residual`` has another dtype than ``input``.
        ArgumentValueError: As in `rms_norm`, or ``residual`` has another shape than ``input``.
        UnsupportedError: As in `rms_norm`.

    Example:
        >>> hidden, update, weight = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.ones(64)
        >>> normed, hidden = add_rms_norm(update, hidden, weight, 1e-5)
    """
    weight = _check("add_rms_norm", input, weight, residual, eps, offset, rounding)
    return _run(input, residual, weight, float(eps), float(offset), rounding == "before_weight")


def _check(
    function: str,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: object,
    offset: object,
    rounding: str,
) -> Tensor:
    """Check the arguments, and return the weight."""
    for name, tensor in (("input", x), ("weight", weight), ("residual", residual)):
        error = None if tensor is None and name != "input" else why_not_local(name, tensor, GATHER)
        if error is not None:
            raise error
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    refuse_transforms(function, x, weight, residual, instead=_STOCK, way="use PyTorch's own for this one")
    if x.dim() == 0 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        got = f"{list(weight.shape)} for {list(x.shape)}"
        raise ArgumentValueError(message("weight", "shape [D], D the last axis of input", got))
    if weight.device != x.device:  # tested here to save a call: short sequences wait for the host
        check_device("weight", weight, x)
    if residual is not None:
        if residual.dtype != x.dtype:
            raise ArgumentTypeError(message("residual", f"{x.dtype}, as input has", str(residual.dtype)))
        if residual.shape != x.shape or residual.device != x.device:
            expected, got = (f"shape {list(t.shape)} on {t.device}" for t in (x, residual))
            raise ArgumentValueError(message("residual", f"{expected}, as input has", got))
    for name, number in (("eps", eps), ("offset", offset)):
        if isinstance(number, Tensor):
            hint = f"Pass float({name}), computed once and not at each call: on a GPU that waits for the device."
            raise ArgumentTypeError(message(name, "a number", "Tensor", hint))
        if name == "eps" and isinstance(number, int | float) and not 0 <= number < math.inf:
            raise ArgumentValueError(message("eps", "a finite number of at least 0", f"{eps}"))
        check_number(name, number, -math.inf, math.inf)
    check_name("rounding", rounding, get_args(Rounding))
    return weight


def why_no_kernel(x: Tensor, weight: Tensor) -> str | None:
    """Return why plain PyTorch computes with rows like those of ``x`` and a ``weight``, or None if a kernel does it."""
    return _why_no_kernel(x.device, x.dtype, weight.dtype, x.shape[-1])


@cache
def _why_no_kernel(device: torch.device, x_dtype: torch.dtype, weight_dtype: torch.dtype, D: int) -> str | None:
    if not 0 < D <= _LONGEST:
        return f"its kernels hold rows of 1 to {_LONGEST} values, and these have {D}"
    return why_not_row(device, x_dtype, 1) or why_not_row(device, weight_dtype, 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor, _eps: float, _offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the result, for the sum (empty without a residual) and for rstd."""
    out_dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    return (
        torch.empty(x.shape, dtype=out_dtype, device=x.device),
        torch.empty(0 if residual is None else x.shape, dtype=x.dtype, device=x.device),
        torch.empty(math.prod(x.shape[:-1]), dtype=_wide(x), device=x.device),
    )


def _gradient_outputs(
    _g: Tensor, _g_sum: Tensor | None, x: Tensor, weight: Tensor, _rstd: Tensor, _offset: float,
    wants_x: bool, wants_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return memory for the gradients of the rows and of the weight, empty if not needed."""
    return x.new_empty(x.shape if wants_x else 0), weight.new_empty(weight.shape if wants_weight else 0)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return ``x`` as rows with contiguous columns, a view if there is one, and the step from one row to the next."""
    if x is None:
        return None, 0
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


@cache
def _tile(D: int) -> dict[str, int]:
    """Return how many rows a program of the kernels takes at a time: several short ones."""
    block = power_of_2(D)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


def _normalized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the sum and the factors: see `_outputs`."""
    out, sum_, rstd = _outputs(x, residual, weight, eps, offset, round_first)
    if x.numel() == 0:
        return out, sum_, rstd
    if why_no_kernel(x, weight) is None:
        from lowtide.layers import kernels

        N, D, tile = len(rstd), len(weight), _tile(len(weight))
        with on_device(x.device):
            kernels.rms_norm[(blocks_of(N, tile["ROWS"]),)](
                *_rows(x), *_rows(residual), sum_, weight.contiguous(), out, rstd, N, D, eps, offset,
                ROUND=round_first, **tile,
            )  # fmt: skip
        return out, sum_, rstd
    with undisturbed(x.device):
        if residual is not None:
            x = torch.add(residual, x, out=sum_)
        wide = x.to(_wide(x))
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normed = wide * factor
        if round_first:
            normed = normed.to(x.dtype).to(wide.dtype)
        out.copy_(normed.mul_(weight.to(wide.dtype) + offset))
    return out, sum_, factor.view(-1)


def _gradients(
    g: Tensor, g_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float,
    wants_x: bool, wants_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the rows x that were normalised and of the weight, with n = x * rstd:

        dx = rstd (h - n mean(n h)) + g_sum          dw = sum over rows of g n          h = g * (weight + offset)

    ``g`` and ``g_sum`` are those of the result and of the sum itself. Sums are float32, in a fixed order: each of P
    programs sums its own rows, then the P partial sums are added.
    """
    dx, dw = _gradient_outputs(g, g_sum, x, weight, rstd, offset, wants_x, wants_weight)
    if x.numel() == 0:
        return dx, dw.zero_()
    if why_no_kernel(x, weight) is None:
        from lowtide.layers import kernels

        N, D, tile = len(rstd), len(weight), _tile(len(weight))
        programs = min(blocks_of(N, tile["ROWS"]), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x.device))
        partial = rstd.new_empty(programs, D) if wants_weight else None
        with on_device(x.device):
            kernels.rms_norm_backward[(programs,)](
                *_rows(g), *_rows(g_sum), *_rows(x), weight.contiguous(), rstd, dx if wants_x else None, partial,
                N, D, offset, **tile,
            )  # fmt: skip
            if partial is not None:
                dw.copy_(partial.sum(0))
        return dx, dw
    with undisturbed(x.device):
        g, rstd = g.to(_wide(x)), rstd.view(*x.shape[:-1], 1)
        normed = x.to(_wide(x)) * rstd
        if wants_weight:
            dw.copy_((g * normed).reshape(-1, x.shape[-1]).sum(0))
        if wants_x:
            g = g * (weight.to(g.dtype) + offset)
            into_rows = normed.mul_((g * normed).mean(-1, keepdim=True)).sub_(g).mul_(-rstd)
            dx.copy_(into_rows if g_sum is None else into_rows.add_(g_sum))
    return dx, dw


_CALL = "Tensor x, Tensor? residual, Tensor weight, float eps, float offset, bool round_first"
_OF_GRADIENTS = (
    "Tensor g, Tensor? g_sum, Tensor x, Tensor weight, Tensor rstd, float offset, bool wants_x, bool wants_weight"
)
_RMS_NORM = Operator("rms_norm", f"({_CALL}) -> (Tensor, Tensor, Tensor)", _normalized, _outputs)
_RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward", f"({_OF_GRADIENTS}) -> (Tensor, Tensor)", _gradients, _gradient_outputs
)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
    trained = x.requires_grad or weight.requires_grad or (residual is not None and residual.requires_grad)
    if torch.is_grad_enabled() and trained:
        out: Any = (_NODE if residual is None else _ADDED_NODE).apply(x, residual, weight, *numbers)  # type: ignore[no-untyped-call]
        return (out, out) if residual is None else out
    out, sum_, _ = _RMS_NORM(x, residual, weight, *numbers)
    return out, sum_


def _save(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, first: bool) -> Any:
    """Normalise; save the normalised rows (an input, or the sum), and the factor of each."""
    out, sum_, rstd = _RMS_NORM(x, residual, weight, eps, offset, first)
    ctx.offset = offset
    ctx.save_for_backward(x if residual is None else sum_, weight, rstd)
    return out if residual is None else (out, sum_)


def _take_back(ctx: Any, g: Tensor | None, g_sum: Tensor | None = None) -> Any:
    x, weight, rstd = ctx.saved_tensors
    wants_x, wants_residual, wants_weight = ctx.needs_input_grad[:3]
    g = torch.zeros_like(x) if g is None else g
    dx, dw = _RMS_NORM_BACKWARD(g, g_sum, x, weight, rstd, ctx.offset, wants_x or wants_residual, wants_weight)
    grads = (dx if wants_x else None, dx if wants_residual else None, dw if wants_weight else None)
    return grads, (x, weight)


_NODE = node("RmsNorm", "rms_norm", _save, _take_back, _TWICE)
_ADDED_NODE = node("AddRmsNorm", "add_rms_norm", _save, _take_back, _TWICE)

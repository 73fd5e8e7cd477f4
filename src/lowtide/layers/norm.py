"""`rms_norm` and `add_rms_norm`: each row divided by its root mean square, times a weight.

Legend: x [..., D] or, as rows, [N, D]; weight [D]. rstd [N] is the factor of each row.
"""

import math
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_name, check_number, refuse_transforms, why_not_local
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.graph import Operator, node, schema_of, undisturbed
from lowtide.head.backends import why_not_row
from lowtide.kernel_launch import on_device

Rounding = Literal["before_weight", "after_weight"]

GATHER = "Call it inside the forward of the module that fully_shard wraps, or on the result of to_local()."
_LONGEST = 32768  # of the kernels, whose module needs Triton
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
    return _run(_Call(input, None, weight, float(eps), float(offset), rounding == "before_weight"))[0]


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
    return _run(_Call(input, residual, weight, float(eps), float(offset), rounding == "before_weight"))


class _Call(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    offset: float
    round_first: bool

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the result's dtype."""
        x, weight = self.x.dtype, self.weight.dtype
        return torch.promote_types(x, weight) if self.round_first and x != weight else x


class _BackwardCall(NamedTuple):
    g: Tensor
    g_sum: Tensor | None
    x: Tensor
    weight: Tensor
    rstd: Tensor
    offset: float
    wants_x: bool
    wants_weight: bool


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


def _outputs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the result, for the sum (empty without a residual) and for rstd."""
    call = _Call(*args)
    x = call.x
    return (
        torch.empty(x.shape, dtype=call.out_dtype, device=x.device),
        torch.empty(0 if call.residual is None else x.shape, dtype=x.dtype, device=x.device),
        torch.empty(math.prod(x.shape[:-1]), dtype=_wide(x), device=x.device),
    )


def _gradient_outputs(*args: Any) -> tuple[Tensor, Tensor]:
    """Return memory for the gradients of the rows and of the weight, empty if not needed."""
    call = _BackwardCall(*args)
    x, weight = call.x, call.weight
    return x.new_empty(x.shape if call.wants_x else 0), weight.new_empty(weight.shape if call.wants_weight else 0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as rows with contiguous columns: a view if there is one; itself where it is contiguous."""
    if x.is_contiguous():
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _normalized(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the sum and the factors: see `_outputs`."""
    call, (out, sum_, rstd) = _Call(*args), _outputs(*args)
    x, residual, weight = call.x, call.residual, call.weight
    if x.numel() == 0:
        return out, sum_, rstd
    if why_no_kernel(x, weight) is None:
        from lowtide.layers.kernels.rms_norm import normalize_rows

        with on_device(x.device):
            rows, into_sum = (None, None) if residual is None else (_rows(residual), _rows(sum_))
            into = (_rows(out), into_sum, rstd)
            normalize_rows(
                _rows(x), rows, weight.contiguous(), call.eps, call.offset, round_first=call.round_first, into=into
            )
        return out, sum_, rstd
    with undisturbed(x.device):
        if residual is not None:
            x = torch.add(residual, x, out=sum_)
        wide = x.to(_wide(x))
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + call.eps)
        normed = wide * factor
        if call.round_first:
            normed = normed.to(x.dtype).to(wide.dtype)
        out.copy_(normed.mul_(weight.to(wide.dtype) + call.offset))
    return out, sum_, factor.view(-1)


def _gradients(*args: Any) -> tuple[Tensor, Tensor]:
    call, (dx, dw) = _BackwardCall(*args), _gradient_outputs(*args)
    g, g_sum, x, weight = call[:4]
    if x.numel() == 0:
        return dx, dw.zero_()
    if why_no_kernel(x, weight) is None:
        from lowtide.layers.kernels.rms_norm import normalize_rows_backward

        with on_device(x.device):
            rows = None if g_sum is None else _rows(g_sum)
            into = (_rows(dx) if call.wants_x else None, dw if call.wants_weight else None)
            normalize_rows_backward(_rows(g), rows, _rows(x), weight.contiguous(), call.rstd, call.offset, into=into)
        return dx, dw
    with undisturbed(x.device):
        g, rstd = g.to(_wide(x)), call.rstd.view(*x.shape[:-1], 1)
        normed = x.to(_wide(x)) * rstd
        if call.wants_weight:
            dw.copy_((g * normed).reshape(-1, x.shape[-1]).sum(0))
        if call.wants_x:
            g = g * (weight.to(g.dtype) + call.offset)
            into_rows = normed.mul_((g * normed).mean(-1, keepdim=True)).sub_(g).mul_(-rstd)
            dx.copy_(into_rows if g_sum is None else into_rows.add_(g_sum))
    return dx, dw


def _run(call: _Call) -> tuple[Tensor, Tensor]:
    trained = call.x.requires_grad or call.weight.requires_grad
    if call.residual is not None:
        trained = trained or call.residual.requires_grad
    if torch.is_grad_enabled() and trained:
        out: Any = (_NODE if call.residual is None else _ADDED_NODE).apply(*call)  # type: ignore[no-untyped-call]
        return (out, out) if call.residual is None else out
    out, sum_, _ = _RMS_NORM(*call)
    return out, sum_


_RMS_NORM = Operator("rms_norm", f"({schema_of(_Call)}) -> (Tensor, Tensor, Tensor)", _normalized, _outputs)
_RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward", f"({schema_of(_BackwardCall)}) -> (Tensor, Tensor)", _gradients, _gradient_outputs
)


def _save(ctx: Any, *args: Any) -> Any:
    """Normalise; save the normalised rows (an input, or the sum), and the factor of each."""
    call = _Call(*args)
    out, sum_, rstd = _RMS_NORM(*call)
    ctx.offset, ctx.added = call.offset, call.residual is not None
    ctx.save_for_backward(sum_ if ctx.added else call.x, call.weight, rstd)
    return (out, sum_) if ctx.added else out


def _take_back(ctx: Any, g: Tensor | None, g_sum: Tensor | None = None) -> Any:
    x, weight, rstd = ctx.saved_tensors
    wants_x, wants_residual, wants_weight = ctx.needs_input_grad[:3]
    g = torch.zeros_like(x) if g is None else g
    dx, dw = _RMS_NORM_BACKWARD(g, g_sum, x, weight, rstd, ctx.offset, wants_x or wants_residual, wants_weight)
    grads = (dx if wants_x else None, dx if wants_residual else None, dw if wants_weight else None)
    return grads, (x, weight)


_NODE = node("RmsNorm", "rms_norm", _save, _take_back, _TWICE)
_ADDED_NODE = node("AddRmsNorm", "add_rms_norm", _save, _take_back, _TWICE)

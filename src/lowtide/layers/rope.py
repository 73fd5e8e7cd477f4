"""`rotary`: rotary position embedding of queries and keys.

Legend: q [B, Hq, T, d], k [B, Hk, T, d]; cos and sin [B or 1, T, r], r the part of a head that is rotated.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import check_name, refuse_transforms, why_not_local
from lowtide.errors import ArgumentTypeError, ArgumentValueError, LowtideError, UnsupportedError, message
from lowtide.graph import Operator, node, schema_of, undisturbed
from lowtide.kernel_launch import on_device
from lowtide.layers.norm import GATHER, why_no_kernel
from lowtide.layers.pairs import PAIRS, Pairs

_WRITTEN_OUT = "x * cos + rotate_half(x) * sin"
_TWICE = (
    "lowtide: expected rotary to be differentiated once, got a second derivative. For those rotate in plain PyTorch:"
    f" {_WRITTEN_OUT}."
)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    promote: bool = False,
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated by their positions' angles: ``x * cos + rotate_half(x) * sin`` for every head.

    ``rotate_half`` maps (a, b), the halves of a head's first r values, to (-b, a); the others are unchanged. This
    is transformers' convention for Llama, Mistral, Qwen, Gemma, OLMo, Phi and most others; a factor for attention
    (YaRN, LongRoPE) is part of ``cos`` and ``sin``, as there. Other ``pairs`` are neighbours, as in Cohere, GLM and
    DeepSeek.

    On an NVIDIA GPU one kernel rotates queries and keys, and one their gradients, in float32, each result rounded once.
    Elsewhere, and in float64, it is PyTorch's own arithmetic. Only ``cos`` and ``sin`` are saved for backward. Results
    have the strides of their inputs, if those have no gaps.

    Args:
        q: [B, Hq, T, d], floating point; views of any strides are read without a copy if d is contiguous.
        k: [B, Hk, T, d], of the same dtype.
        cos: [B, T, r] or [1, T, r], floating point, r even and at most d. Not differentiated.
        sin: Of the same shape and dtype.
        unsqueeze_dim: 1; or 2 where ``q`` and ``k`` are [B, T, H, d].
        promote: Return the dtype that PyTorch promotes q and cos to, instead of q's.
        pairs: ``"halves"``; ``"interleaved"``, neighbours (a, b), where entry i of a table is for value i (Cohere);
            ``"repeated"``, neighbours, and entry i of a table's first half is for both values of pair i (GLM);
            ``"deinterleaved"``, the same, with the results as halves: first all a, then all b (DeepSeek); ``"short"``
            and ``"short_interleaved"``, halves (gpt-oss) and neighbours (GPT-J, Llama 4) with tables of r / 2 entries,
            one for both values of a pair; ``"trailing"``, the same neighbours, but of a head's last r values
            (DeepSeek-V4); or ``"backwards"``, halves rotated by the negative angle (nanochat).

    Returns:
        tuple[Tensor, Tensor]: The new queries and keys, of the shapes of ``q`` and ``k``.

    Raises:
        ArgumentTypeError: Not tensors, or dtypes that do not fit.
        ArgumentValueError: Shapes or devices that do not fit, an ``unsqueeze_dim`` that is neither 1 nor 2, or
            ``pairs`` of another name.
        UnsupportedError: ``cos`` or ``sin`` requires a gradient; double backward, forward-mode derivatives or
            torch.func transforms. Also a `RuntimeError`.

    Example:
        >>> q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
        >>> angles = torch.arange(5.0)[:, None] * 1e-4 ** (torch.arange(8.0) / 8)
        >>> table = torch.cat((angles, angles), -1)[None]
        >>> q, k = rotary(q, k, table.cos(), table.sin())

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864.
    """
    check_name("pairs", pairs, tuple(PAIRS))
    error = why_not_rotary(q, k, cos, sin, unsqueeze_dim, PAIRS[pairs])
    if error is not None:
        raise error
    refuse_transforms("rotary", q, k, cos, sin, instead=_WRITTEN_OUT, way="rotate in plain PyTorch")
    return checked_rotary(q, k, cos, sin, unsqueeze_dim, promote, pairs)


def checked_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, promote: bool, pairs: str
) -> tuple[Tensor, Tensor]:
    """Return `rotary` of arguments that the caller has checked."""
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    call = _Call(q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype) if promote else q.dtype, pairs, False)
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    rotated: tuple[Tensor, Tensor] = _NODE.apply(*call) if trained else _ROTARY(*call)  # type: ignore[no-untyped-call]
    return (rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)) if unsqueeze_dim == 2 else rotated


class _Call(NamedTuple):
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    dtype: torch.dtype  # of the results
    pairs: str
    inverse: bool


def why_not_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: object, pairs: Pairs
) -> LowtideError | None:
    """Return the error that `rotary` raises for such arguments, or None where it raises none."""
    named = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name, tensor in named.items():
        error = why_not_local(name, tensor, GATHER)
        if error is not None:
            return error
        if tensor.device != q.device:
            return ArgumentValueError(message(name, f"a tensor on {q.device}, as q is", str(tensor.device)))
        if tensor.requires_grad and name in ("cos", "sin"):
            hint = "Detach it, or rotate in plain PyTorch."
            return UnsupportedError(message(name, "a table of numbers", "one that requires a gradient", hint))
    for name, other in (("k", q), ("sin", cos)):
        if named[name].dtype != other.dtype:
            return ArgumentTypeError(message(name, str(other.dtype), str(named[name].dtype)))
    if not isinstance(unsqueeze_dim, int) or unsqueeze_dim not in (1, 2):
        return ArgumentValueError(message("unsqueeze_dim", "1 or 2", repr(unsqueeze_dim)))
    if q.dim() != 4 or k.dim() != 4:
        return ArgumentValueError(message("q", "4 axes, and 4 of k", f"{list(q.shape)} and {list(k.shape)}"))
    time = 2 if unsqueeze_dim == 1 else 1
    B, T, d = q.shape[0], q.shape[time], q.shape[3]
    if (k.shape[0], k.shape[time], k.shape[3]) != (B, T, d):
        return ArgumentValueError(message("k", f"q's sizes {list(q.shape)} but for the heads", str(list(k.shape))))
    each = 2 if pairs.entries == "short" else 1  # values for an entry
    if (
        cos.dim() != 3
        or cos.shape[0] not in (1, B)
        or cos.shape[1] != T
        or each * cos.shape[2] > d
        or (each * cos.shape[2] % 2)
    ):
        expected = f"shape [{B} or 1, {T}, {'r / 2' if each == 2 else 'r'}], r even and at most {d}"
        return ArgumentValueError(message("cos", expected, str(list(cos.shape))))
    if sin.shape != cos.shape:
        return ArgumentValueError(message("sin", f"shape {list(cos.shape)}, as cos has", str(list(sin.shape))))
    return None


def _outputs(*args: Any) -> tuple[Tensor, Tensor]:
    """Return empty results, with the strides of ``q`` and ``k`` if these have no gaps."""
    call = _Call(*args)
    return torch.empty_like(call.q, dtype=call.dtype), torch.empty_like(call.k, dtype=call.dtype)


def _last_beside(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotated(*args: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*args)
    q_out, k_out = _outputs(*args)
    if call.q.numel() == 0 or why_no_kernel(call.cos, call.q) is not None:
        with undisturbed(call.q.device):
            pairs = PAIRS[call.pairs]
            half = pairs.count(call.cos.shape[-1])
            read, written, entries = pairs.places(half, inverse=call.inverse)
            sin = -call.sin if pairs.backwards else call.sin
            (cos_1, cos_2), (sin_1, sin_2) = (_sides(t.unsqueeze(1), half, *entries) for t in (call.cos, sin))
            if call.inverse:
                sin_1, sin_2 = -sin_2, -sin_1
            rotated, rest = pairs.parts(2 * half, call.q.shape[-1])
            for x, out in ((call.q, q_out), (call.k, k_out)):
                first, second = _sides(x[..., rotated], half, *read)
                into_first, into_second = _sides(out[..., rotated], half, *written)
                into_first.copy_(first * cos_1 - second * sin_1)
                into_second.copy_(second * cos_2 + first * sin_2)
                out[..., rest].copy_(x[..., rest])
        return q_out, k_out
    from lowtide.layers.kernels.rotary import rotate_heads

    q, k, cos, sin = map(_last_beside, call[:4])
    into_q, into_k = _last_beside(q_out), _last_beside(k_out)
    with on_device(q.device):
        rotate_heads(q, k, cos, sin, into=(into_q, into_k), pairs=PAIRS[call.pairs], inverse=call.inverse)
    for out, filled in ((q_out, into_q), (k_out, into_k)):
        if out is not filled:  # its last axis is not contiguous, as its input's is not
            out.copy_(filled)
    return q_out, k_out


def _sides(x: Tensor, half: int, step: int, apart: int) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second value of each pair."""
    end = step * (half - 1) + 1 if half else 0
    return x[..., :end:step], x[..., apart : apart + end : step]


# Rotates queries and keys, or their gradients.
_ROTARY = Operator("rotary", f"({schema_of(_Call)}) -> (Tensor, Tensor)", _rotated, _outputs)


def _save(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Rotate; save the tables."""
    call = _Call(*args)
    ctx.save_for_backward(call.cos, call.sin)
    ctx.dtype, ctx.pairs, ctx.shapes = call.q.dtype, call.pairs, (call.q.shape, call.k.shape)
    rotated: tuple[Tensor, Tensor] = _ROTARY(*call)
    return rotated


def _rotate_back(ctx: Any, *upstream: Tensor | None) -> Any:
    """Rotate the gradients back by the same angles."""
    cos, sin = ctx.saved_tensors
    g_q, g_k = (
        cos.new_zeros(shape, dtype=ctx.dtype) if g is None else g for g, shape in zip(upstream, ctx.shapes, strict=True)
    )
    rotated = _ROTARY(g_q, g_k, cos, sin, ctx.dtype, ctx.pairs, True)
    flags = zip(rotated, ctx.needs_input_grad, upstream, strict=False)
    return [grad if wanted and g is not None else None for grad, wanted, g in flags], ()


_NODE = node("Rotary", "rotary", _save, _rotate_back, _TWICE)

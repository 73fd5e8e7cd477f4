"""`rotary`: rotary position embedding of queries and keys.

Legend: q [B, Hq, T, d], k [B, Hk, T, d]; cos and sin [B or 1, T, r], r the part of a head that is rotated.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import check_name, refuse_transforms, why_not_local
from lowtide.errors import ArgumentTypeError, ArgumentValueError, LowtideError, UnsupportedError, message
from lowtide.graph import Operator, node, undisturbed
from lowtide.kernel_launch import on_device, power_of_2
from lowtide.layers.norm import GATHER, why_no_kernel

TILE = 1024  # values of half a tile of the kernel's

_WRITTEN_OUT = "x * cos + rotate_half(x) * sin"
_TWICE = (
    "lowtide: expected rotary to be differentiated once, got a second derivative. For those rotate in plain PyTorch:"
    f" {_WRITTEN_OUT}."
)


class Pairs(NamedTuple):
    """Where the pairs of a head's r rotated values are, before and after, and the entries of cos and sin for them."""

    read: Literal["halves", "neighbours"]
    written: Literal["halves", "neighbours"]
    # "each": where the values are read; for both "first": in the table's first half, "short": in tables half as wide
    entries: Literal["each", "first", "short"]
    backwards: bool = False  # by the negative angle
    last: bool = False  # a head's last r values are rotated, not its first

    def count(self, entries: int) -> int:
        """Return how many pairs a table with so many entries per position is for."""
        return entries if self.entries == "short" else entries // 2

    def places(self, half: int, *, inverse: bool) -> tuple[tuple[int, int], ...]:
        """Return the places of the values read and written, by the ``inverse`` or not, and of the table's entries.

        A place is the step from pair to pair, and how far apart the two of a pair are.
        """
        read, written = ((1, half) if side == "halves" else (2, 1) for side in (self.read, self.written))
        table = read if self.entries == "each" else (1, 0)
        return (written, read, table) if inverse else (read, written, table)


PAIRS = {
    "halves": Pairs("halves", "halves", "each"),
    "interleaved": Pairs("neighbours", "neighbours", "each"),
    "repeated": Pairs("neighbours", "neighbours", "first"),
    "short": Pairs("halves", "halves", "short"),
    "deinterleaved": Pairs("neighbours", "halves", "first"),
    "short_interleaved": Pairs("neighbours", "neighbours", "short"),
    "trailing": Pairs("neighbours", "neighbours", "short", last=True),
    "backwards": Pairs("halves", "halves", "each", backwards=True),
}


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
    call = q, k, cos, sin, torch.promote_types(q.dtype, cos.dtype) if promote else q.dtype, pairs, False
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    rotated: tuple[Tensor, Tensor] = _NODE.apply(*call) if trained else _ROTARY(*call)  # type: ignore[no-untyped-call]
    return (rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)) if unsqueeze_dim == 2 else rotated


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


def _outputs(
    q: Tensor, k: Tensor, _cos: Tensor, _sin: Tensor, dtype: torch.dtype, _pairs: str, _inverse: bool
) -> tuple[Tensor, Tensor]:
    """Return empty results, with the strides of ``q`` and ``k`` if these have no gaps."""
    return torch.empty_like(_last_beside(q), dtype=dtype), torch.empty_like(_last_beside(k), dtype=dtype)


def _last_beside(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, pairs: str, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated, or by the ``inverse``, as gradients are."""
    q, k, cos, sin = map(_last_beside, (q, k, cos, sin))
    q_out, k_out = _outputs(q, k, cos, sin, dtype, pairs, inverse)
    form = PAIRS[pairs]
    half = form.count(cos.shape[-1])
    read, written, entries = form.places(half, inverse=inverse)
    (B, Hq, T, d), r = q.shape, 2 * half
    if q.numel() and why_no_kernel(cos, q) is None:
        from lowtide.layers import kernels

        heads = max(1, TILE // power_of_2(half))
        per_batch = [0 if table.shape[0] == 1 else table.stride(0) for table in (cos, sin)]
        with on_device(q.device):
            kernels.rotary[(B * T,)](
                q, *q.stride()[:3], k, *k.stride()[:3], q_out, *q_out.stride()[:3], k_out, *k_out.stride()[:3],
                cos, per_batch[0], cos.stride(1), sin, per_batch[1], sin.stride(1), T, Hq, k.shape[1], half, d,
                read[1], written[1], entries[1], STEP=read[0], OUT_STEP=written[0], TABLE_STEP=entries[0],
                Q_HEADS=min(heads, power_of_2(Hq)), K_HEADS=min(heads, max(1, power_of_2(k.shape[1]))),
                HALF=power_of_2(half), REST=power_of_2(d - r), INVERSE=inverse, BACKWARDS=form.backwards,
                LAST=form.last, num_warps=4,
            )  # fmt: skip
        return q_out, k_out
    with undisturbed(q.device):
        sin = -sin if form.backwards else sin
        (cos_1, cos_2), (sin_1, sin_2) = (_sides(t.unsqueeze(1), half, *entries) for t in (cos, sin))
        if inverse:
            sin_1, sin_2 = -sin_2, -sin_1
        turned, rest = (slice(d - r, d), slice(d - r)) if form.last else (slice(r), slice(r, d))
        for x, out in ((q, q_out), (k, k_out)):
            first, second = _sides(x[..., turned], half, *read)
            into_first, into_second = _sides(out[..., turned], half, *written)
            into_first.copy_(first * cos_1 - second * sin_1)
            into_second.copy_(second * cos_2 + first * sin_2)
            out[..., rest].copy_(x[..., rest])
    return q_out, k_out


def _sides(x: Tensor, half: int, step: int, apart: int) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second value of each pair."""
    end = step * (half - 1) + 1 if half else 0
    return x[..., :end:step], x[..., apart : apart + end : step]


# Rotates queries and keys, or their gradients.
_ROTARY = Operator(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, ScalarType dtype, str pairs, bool inverse) -> (Tensor, Tensor)",
    _rotated,
    _outputs,
)


def _save(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, pairs: str, _: bool) -> Any:
    """Rotate; save the tables."""
    ctx.save_for_backward(cos, sin)
    ctx.dtype, ctx.pairs, ctx.shapes = q.dtype, pairs, (q.shape, k.shape)
    return _ROTARY(q, k, cos, sin, dtype, pairs, False)


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

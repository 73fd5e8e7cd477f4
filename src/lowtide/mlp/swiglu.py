"""The gated MLP, which saves two of its intermediates for backward, or none."""

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.arguments import (
    check_device,
    check_index,
    check_name,
    hooks_of,
    operand_dtype,
    refuse_transforms,
    why_not_local,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.mlp.call import SwigluCall
from lowtide.mlp.dense import dense_node, is_dense
from lowtide.mlp.operators import Operators
from lowtide.mlp.projection import Packed, Projection

_GATHER = (
    "Inside FSDP2, wrap the module that calls this (lowtide.nn.SwiGLU, the MLP or the layer), not its projections: the"
    " weights are whole while that module's forward runs."
)
_NAMES = ("input", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")
_WRITTEN_OUT = (
    "torch.nn.functional.linear(torch.nn.functional.silu(torch.nn.functional.linear(input, gate_weight))"
    " * torch.nn.functional.linear(input, up_weight), down_weight)"
)
# Gate and up [N, F], and the output [..., D].
_SWIGLU = Operators("swiglu", "swiglu_mlp", f"write it out: {_WRITTEN_OUT}", SwigluCall, tensors=13)
_DENSE = dense_node(_SWIGLU.twice)


def swiglu_mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    checkpoint_level: int = 1,
    tile_tokens: int | None = None,
) -> Tensor:
    """Return ``(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd``, saving little of it for backward.

    With h the hidden size D and f the intermediate size F, in bfloat16, level 0 saves the input, gate ``x Wg^T + bg``
    and up ``x Wu^T + bu``: 2h + 4f bytes per token. Level 1 saves the input alone, 2h, and recomputes gate and up in
    backward: 11 GEMMs instead of 9. The activation and its product with up are never saved. Backward writes the
    gradients of gate and up over gate and up, and the product over its own gradient.

    Args:
        input: x, hidden states [..., D] in float64, float32, bfloat16 or float16, of any strides, any number of leading
            axes.
        gate_weight: Wg [F, D], as `torch.nn.Linear` stores it. Outside autocast of the same dtype as ``input``.
        up_weight: Wu [F, D], the same.
        down_weight: Wd [D, F], the same.
        gate_bias: bg [F], or None.
        up_bias: bu [F], or None.
        down_bias: bd [D], or None.
        activation: ``"silu"``, or ``"gelu_tanh"``: GELU in its tanh approximation, as in Gemma's MLP.
        checkpoint_level: 0 or 1, as above. Without gradients neither saves anything.
        tile_tokens: Tokens per tile of forward and backward, or None for all in one. A tile's transients are 2f
            elements per token in forward (f at level 0, whose gate and up are saved) and 3f in backward (f at level 0);
            with several tiles the weights' gradients are summed in float32 (float64 for float64). From about 8192
            tokens a tile costs little time.

    Returns:
        Tensor: [..., D], in the dtype of ``input``, or autocast's.

    Raises:
        ArgumentValueError: A shape, device, activation, level or number of tokens that does not fit; also a
            `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit, or a sharded weight; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives or torch.func transforms; also a `RuntimeError`.

    Note:
        The GEMMs read operands of the input's dtype, or autocast's; the elementwise operations between them compute in
        float32 (float64 for float64) and round once. Every subset of the tensors may be frozen. A second backward
        through the same graph (``retain_graph=True``) takes 2f elements per token more at level 0.

    Example:
        >>> x = torch.randn(2, 5, 16, requires_grad=True)
        >>> gate, up, down = torch.randn(40, 16), torch.randn(40, 16), torch.randn(16, 40)
        >>> swiglu_mlp(x, gate, up, down, checkpoint_level=1).sum().backward()
    """
    tensors: Any = (input, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is None and name.endswith("bias"):
            continue
        error = why_not_local(name, tensor, _GATHER)
        if error is not None:
            raise error
        check_device(name, tensor, input)
        if tensor.dtype != input.dtype and operand_dtype(tensor) != operand_dtype(input):
            hint = "Cast one of them, or run under torch.autocast."
            raise ArgumentTypeError(message(name, f"dtype {input.dtype}, as input has", str(tensor.dtype), hint))
    refuse_transforms("swiglu_mlp", *tensors, instead=_WRITTEN_OUT, way="write it out for this one")
    check_name("activation", activation, ("silu", "gelu_tanh"))
    _check_shapes(*tensors)
    projections = map(Projection, tensors[1:4], tensors[4:])
    return adapted_mlp(
        input, *projections, activation=activation, checkpoint_level=checkpoint_level, tile_tokens=tile_tokens
    )


def adapted_mlp(
    input: Tensor,
    gate: Projection,
    up: Projection | None,
    down: Projection,
    *,
    activation: str,
    checkpoint_level: int,
    tile_tokens: int | None = None,
    joined: str = "",
) -> Tensor:
    """Return ``(act(gate(x)) * up(x))`` through ``down``: `lowtide.swiglu_mlp` with adapters or a joined projection.

    If gate and up are one projection, it is passed as ``gate``, with ``up=None`` and in ``joined`` the places of their
    rows, a key of `lowtide.mlp.call.JOINED`. The gradient of its weight is one tensor, whose rows the GEMMs write.

    The adapters' outputs are added to those of the weights in place. It saves for backward what `swiglu_mlp` saves with
    frozen weights: at level 0 gate and up, and the input if an adapter of theirs is trained; at level 1 the input.
    Activations of the adapters' rank are recomputed. A frozen weight costs no GEMM in backward. Adapters of another
    dtype than the input, such as float32 in a bfloat16 model, are multiplied in theirs, outside autocast.

    Dropout takes its seed from the CPU's default generator, the same for every pass; no mask is saved.

    Only level and tile, which users set as attributes, are checked: the caller made the projections of modules that it
    had checked.
    """
    if up is not None and tile_tokens is None and operand_dtype(input) == input.dtype:
        weights = [p.weight for p in (gate, up, down) if p.bias is None and p.adapter is None]
        if len(weights) == 3 and is_dense(input, *weights):
            return _DENSE.apply(input, *weights, activation, check_level(checkpoint_level))  # type: ignore[no-any-return]
    tensors: list[Any] = [input]
    packed: list[Tensor] = []
    forms, scales, dropouts = [], [], []
    dtype = None  # of weights in 4 bits
    for projection in (gate, up, down):
        weight, bias, adapter = projection or (None, None, None)
        # float(), and no defaults of `Projection`: see `lowtide.mlp.operators.Operators.run` on numbers
        a, b, scale, dropout = adapter or (None, None, 1.0, 0.0)
        form = ""
        if type(weight) is Packed:
            form, dtype = weight.form, weight.dtype
            packed += weight.tensors
            weight = None
        tensors += (weight, bias, a, b)
        forms.append(form)
        scales.append(float(scale))
        dropouts.append(float(dropout))
    side = next((a for a in tensors[3::4] if a is not None), input)
    seed = int(torch.randint(2**48, (), device="cpu")) if any(dropouts) else 0
    call = SwigluCall(
        tensors, dtype or operand_dtype(input), activation, check_level(checkpoint_level), check_tile(tile_tokens),
        joined, packed, ",".join(forms), operand_dtype(side), scales, dropouts, seed,
    )  # fmt: skip
    y = _SWIGLU.run(call)
    return y if dtype is None else y.to(input.dtype)


def check_level(level: object) -> int:
    """Return a valid ``checkpoint_level``."""
    value = check_index("checkpoint_level", level)
    if value not in (0, 1):
        expected = "0 (gate and up are saved) or 1 (they are recomputed)"
        raise ArgumentValueError(message("checkpoint_level", expected, repr(level)))
    return value


def check_tile(tile_tokens: object) -> int | None:
    """Return a valid ``tile_tokens``: tokens per tile, None for all."""
    if tile_tokens is None:
        return None
    value = check_index("tile_tokens", tile_tokens)
    if value < 1:
        raise ArgumentValueError(message("tile_tokens", "a whole number above 0, or None", repr(tile_tokens)))
    return value


def _check_shapes(input: Tensor, gate_weight: Tensor, *others: Tensor | None) -> None:
    if gate_weight.dim() != 2:
        raise ArgumentValueError(message("gate_weight", "shape [F, D]", str(list(gate_weight.shape))))
    F, D = gate_weight.shape
    if input.dim() == 0 or input.shape[-1] != D:
        expected = f"shape [..., {D}], as gate_weight is [{F}, {D}]"
        raise ArgumentValueError(message("input", expected, str(list(input.shape))))
    for name, tensor, shape in zip(_NAMES[2:], others, ((F, D), (D, F), (F,), (F,), (D,)), strict=True):
        if tensor is not None and tensor.shape != shape:
            expected = f"shape {list(shape)}, as gate_weight is [{F}, {D}]"
            raise ArgumentValueError(message(name, expected, str(list(tensor.shape))))


def check_plain(**projections: object) -> None:
    """Check that the output of each projection, given by name, is ``x W^T + b`` of its own ``weight`` and ``bias``.

    A parametrised weight is plain: reading it computes it. Not plain are a LoRA layer, a quantised one, a subclass's or
    an instance's own forward, and hooks, which would not run.

    Raises:
        UnsupportedError: One is not plain.
    """
    for name, projection in projections.items():
        kind: Any = type(projection)
        reason = ""
        if not isinstance(projection, nn.Linear):
            reason = f"it is a {kind.__name__}"
        elif kind.forward is not nn.Linear.forward or "forward" in projection.__dict__:
            reason = f"it is a {kind.__name__} with a forward of its own"
        elif any(map(len, hooks_of(projection))):
            reason = "it has hooks, which would not run"
        if reason:
            hint = "Adapters and wrappers go around the projections of an MLP that calls them one by one."
            raise UnsupportedError(message(name, "a plain torch.nn.Linear", reason, hint))

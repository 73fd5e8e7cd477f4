"""The gated MLP of today's transformers, which keeps two of its intermediates for backward, or none."""

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_index, check_tensor, operand_dtype, refuse_transforms
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.mlp.call import SwigluCall
from lowtide.mlp.operators import WRITTEN_OUT, run

ACTIVATIONS = ("silu", "gelu_tanh")
LEVELS = (0, 1)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("input", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


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
    """Return ``(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd``, keeping little of it for backward.

    With h the hidden size D and f the intermediate size F, in bfloat16, level 0 keeps the input, gate ``x Wg^T + bg``
    and up ``x Wu^T + bu``: 2h + 4f bytes a token. Level 1 keeps the input alone, 2h, and computes gate and up once more
    in backward: 11 GEMMs in place of 9. The activation and its product with up are never kept. In backward the
    gradients of gate and up take the memory of gate and up, and the product that of its own gradient.

    Args:
        input: x, hidden states [..., D] in float64, float32, bfloat16 or float16, of any strides, any number of leading
            axes.
        gate_weight: Wg [F, D], as `torch.nn.Linear` stores it. Outside autocast of the same dtype as ``input``.
        up_weight: Wu [F, D], the same.
        down_weight: Wd [D, F], the same.
        gate_bias: bg [F], or None.
        up_bias: bu [F], or None.
        down_bias: bd [D], or None.
        activation: ``"silu"``, or ``"gelu_tanh"``: GELU in its tanh approximation, as Gemma's MLP has it.
        checkpoint_level: 0 or 1, as above. Without gradients neither keeps anything.
        tile_tokens: How many tokens forward and backward work on at a time, or None for all. A tile's transients are 2f
            elements a token in forward (f at level 0, whose gate and up are kept) and 3f in backward (f at level 0),
            and with several tiles the weights' gradients are summed in float32 (float64 for float64). From about 8192
            tokens a tile costs little time.

    Returns:
        Tensor: [..., D], in the dtype of ``input``, or autocast's.

    Raises:
        ArgumentValueError: A shape, device, activation, level or number of tokens that does not fit; also a
            `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit, or a sharded weight; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives or torch.func transforms; also a `RuntimeError`.

    Note:
        The GEMMs read operands of the input's dtype, or autocast's; what stands between them is computed in float32
        (float64 for float64) and rounded once. Every subset of the tensors may be frozen. A second backward through
        the same graph (``retain_graph=True``) costs 2f elements a token more at level 0.

    Example:
        >>> x = torch.randn(2, 5, 16, requires_grad=True)
        >>> gate, up, down = torch.randn(40, 16), torch.randn(40, 16), torch.randn(16, 40)
        >>> swiglu_mlp(x, gate, up, down, checkpoint_level=1).sum().backward()
    """
    tensors = (input, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    for i in range(4):
        check_tensor(_NAMES[i], tensors[i])
    refuse_transforms("swiglu_mlp", *tensors, instead=WRITTEN_OUT, way="write it out for this one")
    dtype = _check_tensors(*tensors)
    _check_shapes(*tensors)
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(message("activation", " or ".join(map(repr, ACTIVATIONS)), repr(activation)))
    return run(
        SwigluCall.plain(
            tensors,
            dtype=dtype,
            activation=activation,
            checkpoint_level=check_level(checkpoint_level),
            tile_tokens=check_tile(tile_tokens),
        )
    )


def check_level(level: object) -> int:
    """Return a level of what is kept for backward.

    Raises:
        ArgumentTypeError: Not an int.
        ArgumentValueError: There is no such level.
    """
    value = check_index("checkpoint_level", level)
    if value not in LEVELS:
        expected = "0 (gate and up are kept) or 1 (they are computed again)"
        raise ArgumentValueError(message("checkpoint_level", expected, repr(level)))
    return value


def check_tile(tile_tokens: object) -> int | None:
    """Return how many tokens are worked on at a time, None for all.

    Raises:
        ArgumentTypeError: Not an int.
        ArgumentValueError: Less than one.
    """
    if tile_tokens is None:
        return None
    value = check_index("tile_tokens", tile_tokens)
    if value < 1:
        raise ArgumentValueError(message("tile_tokens", "a whole number above 0, or None", repr(tile_tokens)))
    return value


def _check_tensors(input: Tensor, *others: Tensor | None) -> torch.dtype:
    """Check types, dtypes and devices, and return the dtype that the GEMMs' operands take."""
    dtype = operand_dtype(input)
    for name, tensor in zip(_NAMES, (input, *others), strict=True):
        if tensor is None:
            continue
        if check_tensor(name, tensor).dtype not in _DTYPES:
            raise ArgumentTypeError(message(name, "float64, float32, bfloat16 or float16", str(tensor.dtype)))
        _refuse_sharded(name, tensor)
        check_device(name, tensor, input)
        if tensor.dtype != input.dtype and operand_dtype(tensor) != dtype:
            hint = "Cast one of them, or run under torch.autocast."
            raise ArgumentTypeError(message(name, f"dtype {input.dtype}, as input has", str(tensor.dtype), hint))
    return dtype


def _check_shapes(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    gate_shape = gate_weight.shape
    if len(gate_shape) != 2:
        raise ArgumentValueError(message("gate_weight", "shape [F, D]", str(list(gate_shape))))
    F, D = gate_shape
    if input.dim() == 0 or input.shape[-1] != D:
        expected = f"shape [..., {D}], as gate_weight is [{F}, {D}]"
        raise ArgumentValueError(message("input", expected, str(list(input.shape))))
    others = (up_weight, down_weight, gate_bias, up_bias, down_bias)
    for i, shape in enumerate(((F, D), (D, F), (F,), (F,), (D,))):
        tensor = others[i]
        if tensor is not None and tensor.shape != shape:
            expected = f"shape {list(shape)}, as gate_weight is [{F}, {D}]"
            raise ArgumentValueError(message(_NAMES[2 + i], expected, str(list(tensor.shape))))


def _refuse_sharded(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "device_mesh"):
        hint = (
            "Inside FSDP2, wrap the module that calls this (lowtide.nn.SwiGLU, the MLP or the layer), not its"
            " projections: the weights are whole while that module's forward runs."
        )
        raise ArgumentTypeError(message(name, "a tensor that is whole on this rank", "a DTensor", hint))

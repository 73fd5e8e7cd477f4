"""bitsandbytes' `Linear4bit` (NF4, FP4) as fused parts run it: its packed weight, dequantised for each use.

With x its input and W its dequantised weight such a layer computes ``x W^T + b`` in its ``compute_dtype`` and returns
it in the dtype of x.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.mlp.packed import Packed
from lowtide.models.eligibility import plain_class
from lowtide.models.instance import BASE, is_code_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that bitsandbytes dequantises to
# Layers whose output is not a product with their dequantised weight, by the name of their class.
_ROUNDS_INPUT = ("Linear8bitLt", "FP8Linear")


def is_four_bit(module: nn.Module) -> bool:
    """Whether the module is a `Linear4bit` of bitsandbytes, or one of its own subclasses for NF4 and FP4."""
    bnb = sys.modules.get("bitsandbytes")
    return bnb is not None and _class_of(module) in (bnb.nn.Linear4bit, bnb.nn.LinearNF4, bnb.nn.LinearFP4)


def _class_of(module: nn.Module) -> Any:
    """Return the class of a layer beneath FSDP2's, and beneath ours if it is a patched output embedding."""
    kind = plain_class(module)
    return getattr(kind, BASE, kind)


def why_not_packed(linear: Any) -> str | None:
    """Return why fused parts cannot read this `Linear4bit`'s weight now, or None."""
    if not torch.compiler.is_compiling() and not is_code_of(_class_of(linear).forward, "bitsandbytes."):
        return "is a Linear4bit whose forward was replaced"
    weight, state = linear.weight, _state_of(linear)
    if state is None:
        return "is a Linear4bit whose weight is not quantised yet: move the model to its device, then patch again"
    if getattr(state, "packing_format_for_cpu", False):
        return "is a Linear4bit whose weight an evaluation on this CPU has packed in another order"
    dense = type(weight) is nn.Parameter and weight.shape[1:] != (1,)  # put in place of the packed one
    if dense or weight.requires_grad or tuple(state.shape) != (linear.out_features, linear.in_features):
        return "is a Linear4bit of another form than bitsandbytes makes it"
    return None


def _state_of(linear: Any) -> Any:
    """Return what dequantises the weight of a `Linear4bit`: of FSDP2's Parameter in its place the layer has it."""
    state = getattr(linear.weight, "quant_state", None)
    return linear.quant_state if state is None else state


def is_here(weight: Tensor) -> bool:
    """Whether a weight in 4 bits is itself on this device: FSDP2's shards outside of their module's call are not."""
    return type(weight) in (sys.modules["bitsandbytes"].nn.Params4bit, nn.Parameter)


def gemm_dtype(linear: Any, x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a `Linear4bit` computes with ``x``; None: one that is not dequantised to.

    If none was chosen when the layer was made, its first input sets it, as in the layer's own forward.
    """
    if not linear.compute_type_is_set:
        linear.set_compute_type(x)
        linear.compute_type_is_set = True
    dtype = linear.compute_dtype or x.dtype
    return dtype if dtype in _DTYPES else None


def packed_weight(linear: Any, dtype: torch.dtype) -> Packed:
    """Return the weight of a `Linear4bit` for GEMMs in ``dtype``."""
    return Packed.of(linear.weight, _state_of(linear), dtype)


def kind_of(linear: Any) -> str:
    """Return the name of a `Linear4bit`'s data type, as in "NF4"."""
    return str(_state_of(linear).quant_type).upper()


def rounds_input(module: nn.Module) -> bool:
    """Whether the module is a layer in 8 bits that rounds its input as well as its weight."""
    return type(module).__name__ in _ROUNDS_INPUT

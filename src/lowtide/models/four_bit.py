"""bitsandbytes' `Linear4bit` (NF4, FP4) as fused parts run it: its packed weight, dequantised for each use.

With x its input and W its dequantised weight such a layer computes ``x W^T + b`` in its ``compute_dtype`` and returns
it in the dtype of x.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.mlp.projection import Packed
from lowtide.models.eligibility import plain_class
from lowtide.models.instance import is_code_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that bitsandbytes dequantises to


def is_four_bit(module: nn.Module) -> bool:
    """Whether the module is a `Linear4bit` of bitsandbytes, or one of its own subclasses for NF4 and FP4."""
    bnb = sys.modules.get("bitsandbytes")
    return bnb is not None and plain_class(module) in (bnb.nn.Linear4bit, bnb.nn.LinearNF4, bnb.nn.LinearFP4)


def why_not_packed(linear: Any) -> str | None:
    """Return why fused parts cannot read this `Linear4bit`'s weight now, or None."""
    kind: Any = plain_class(linear)
    if not torch.compiler.is_compiling() and not is_code_of(kind.forward, "bitsandbytes."):
        return "is a Linear4bit whose forward was replaced"
    state = _state_of(linear)
    if state is None:
        return "is a Linear4bit whose weight is not quantised yet: move the model to its device, then patch again"
    if getattr(state, "packing_format_for_cpu", False):
        return "is a Linear4bit whose weight an evaluation on this CPU has packed in another order"
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

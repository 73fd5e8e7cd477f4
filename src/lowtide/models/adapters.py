"""Linear layers as peft and bitsandbytes have them: what is around one, and projections as `adapted_mlp` takes them.

A LoRA layer is a module with children base_layer, lora_A and lora_B; with x its input it computes
``base_layer(x) + scaling * lora_B(lora_A(lora_dropout(x)))`` with its active adapter; several at a time run peft's own
code. A layer of peft's modules_to_save is one with children original_module and modules_to_save, and calls one of
these. Both are known where their class and its forward are peft's own.

bitsandbytes' `Linear4bit` (NF4, FP4), with x its input and W its dequantised weight, computes ``x W^T + b`` in its
``compute_dtype`` and returns it in the dtype of x. Its packed weight is dequantised for each use.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.mlp.projection import Adapter, Packed, Projection, Weight
from lowtide.models.eligibility import has_hooks, plain_class
from lowtide.models.instance import BASE, children_of, is_code_of, parameters_of

_LORA = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")
_SAVED = ("peft.utils.other",)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that bitsandbytes dequantises to


class LowRankAdapter(NamedTuple):
    """The active adapter: ``scale * b(a(dropout(x)))`` is added."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module  # nn.Dropout, or nn.Identity
    scale: float

    @property
    def drops(self) -> bool:
        """Whether this call draws random numbers."""
        return isinstance(self.dropout, nn.Dropout) and self.dropout.training and self.dropout.p > 0


class AdaptedLinear(NamedTuple):
    """A linear layer as it would be called now: ``base(x)`` and what its adapter adds."""

    base: nn.Linear
    adapter: LowRankAdapter | None
    around: tuple[nn.Module, ...]  # modules that are run on the way, whose hooks count
    four_bit: bool  # whether base is a `Linear4bit`

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """Return every linear layer that is called."""
        return (self.base,) if self.adapter is None else (self.base, self.adapter.a, self.adapter.b)


def adapted_linear(module: nn.Module) -> AdaptedLinear | str:
    """Return what a call of ``module`` would run, or why that is not a linear layer with LoRA or without."""
    layer = saved_module(module)
    base: Any = layer
    adapter: LowRankAdapter | None = None
    around: tuple[nn.Module, ...] = () if layer is module else (module,)
    adapted = is_lora(layer)
    if adapted:
        if not _is_own(layer, _LORA):
            return f"is a {type(layer).__name__}, not the LoRA layer of a plain torch.nn.Linear"
        active = _active(layer)
        if isinstance(active, str):
            return active
        base, adapter = children_of(layer)["base_layer"], active
        around += (layer,) if adapter is None else (layer, adapter.dropout)
    if plain_class(base) is nn.Linear:
        return AdaptedLinear(base, adapter, around, four_bit=False)
    why_not = _why_not_packed(base) if _is_four_bit(base) else why_not_plain(base, adapted)
    return why_not or AdaptedLinear(base, adapter, around, four_bit=True)


def why_not_plain(layer: nn.Module, adapted: bool = False) -> str | None:
    """Return why a layer, or what is ``adapted`` by LoRA, is not a ``torch.nn.Linear``; None where it is."""
    if plain_class(layer) is nn.Linear:
        return None
    kind = type(layer).__name__
    if kind == "Linear":  # of another library
        kind = f"Linear of {type(layer).__module__}"
    lora, on = ("LoRA on ", "on ") if adapted else ("", "")
    return f"is {lora}a {kind}, not {on}a plain torch.nn.Linear"


def saved_module(module: nn.Module) -> nn.Module:
    """Return what a layer of peft's modules_to_save would call now; any other module itself, and one with hooks."""
    if not {"original_module", "modules_to_save"} <= children_of(module).keys() or not _is_own(module, _SAVED):
        return module
    if has_hooks(module) or "forward" in vars(module):
        return module
    layer: Any = module
    active = list(layer.active_adapters)
    stock = layer.disable_adapters or not active or any(name not in layer._adapters for name in active)
    return layer.original_module if stock else layer.modules_to_save[active[0]]  # type: ignore[no-any-return]


def _is_own(module: nn.Module, files: tuple[str, ...]) -> bool:
    """Whether the class of a module and its forward are from one of these files."""
    kind: Any = plain_class(module)
    kind = vars(kind).get(BASE, kind)
    # What compilers cannot trace was so when `lowtide.patch` looked.
    return kind.__module__ in files and (torch.compiler.is_compiling() or is_code_of(kind.forward, *files))


def is_lora(module: nn.Module) -> bool:
    """Whether the module's children have the names of a LoRA layer's."""
    return {"base_layer", "lora_A", "lora_B"} <= children_of(module).keys()


def _active(lora: Any) -> LowRankAdapter | str | None:
    """Return the adapter that a LoRA layer would add now, None for none, or why it would do something else."""
    if lora.disable_adapters:
        return "has adapters merged and disabled, which peft unmerges when it runs" if lora.merged else None
    children = children_of(lora)  # `lora.lora_A` would be slow: modules are found by __getattr__
    a_s, b_s, dropouts = (children_of(children[name]) for name in ("lora_A", "lora_B", "lora_dropout"))
    names = [] if lora.merged else [name for name in lora.active_adapters if name in a_s]
    if not names:
        return None
    name, *others = names
    if others:
        return "has several adapters active at a time"
    if name in lora.lora_variant:
        return f"has an adapter of another form than LoRA's ({type(lora.lora_variant[name]).__name__})"
    adapter = LowRankAdapter(a_s[name], b_s[name], dropouts[name], lora.scaling[name])
    if type(adapter.dropout) not in (nn.Dropout, nn.Identity):
        return f"drops by a {type(adapter.dropout).__name__}"
    biases = [parameters_of(linear).get("bias") for linear in (adapter.a, adapter.b)]
    plain = all(plain_class(linear) is nn.Linear for linear in (adapter.a, adapter.b))
    if not plain or type(adapter.scale) not in (int, float) or biases != [None, None]:
        return "has an adapter of another form than LoRA's (a bias, or a scale that is no number)"
    if not getattr(lora, "cast_input_dtype_enabled", True):
        return "does not cast its input to its adapter's dtype"
    return adapter


def why_not_together(layers: Sequence[AdaptedLinear]) -> str | None:
    """Return why the adapters of an MLP's projections cannot run along with its GEMMs."""
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if len({linear.weight.dtype for adapter in adapters for linear in (adapter.a, adapter.b)}) > 1:
        return "its LoRA weights are of several dtypes"
    if any(adapter.drops for adapter in adapters):
        if torch.compiler.is_compiling():
            return "its LoRA adapters have dropout, and it is compiled"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "its LoRA adapters have dropout, and a CUDA graph is captured"  # their generators are their own
    return None


def low_rank_projections(layers: Sequence[AdaptedLinear], dtype: torch.dtype) -> list[Projection]:
    """Return each projection with its adapter, and a weight in 4 bits for GEMMs in ``dtype``."""
    projections = []
    for base, adapter, _, four_bit in layers:
        weight: Weight = Packed.of(base.weight, _state_of(base), dtype) if four_bit else base.weight
        low_rank = None
        if adapter is not None:
            p = float(adapter.dropout.p) if adapter.drops else 0.0  # type: ignore[arg-type]
            low_rank = Adapter(adapter.a.weight, adapter.b.weight, float(adapter.scale), p)
        projections.append(Projection(weight, base.bias, low_rank))
    return projections


def _is_four_bit(module: nn.Module) -> bool:
    """Whether the module is a `Linear4bit` of bitsandbytes, or one of its own subclasses for NF4 and FP4."""
    bnb = sys.modules.get("bitsandbytes")
    return bnb is not None and plain_class(module) in (bnb.nn.Linear4bit, bnb.nn.LinearNF4, bnb.nn.LinearFP4)


def _why_not_packed(linear: Any) -> str | None:
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

    Or not known yet: where none was chosen when the layer was made, its own forward sets it by its first input.
    """
    dtype = linear.compute_dtype or x.dtype
    return dtype if linear.compute_type_is_set and dtype in _DTYPES else None

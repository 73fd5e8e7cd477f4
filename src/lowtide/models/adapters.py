"""What peft has put around a linear layer, and LoRA on a gated MLP's projections as `adapted_mlp` takes it.

A LoRA layer is a module with children base_layer, lora_A and lora_B; with x its input it computes
``base_layer(x) + sum of scaling * lora_B(lora_A(lora_dropout(x)))`` over the active adapters. A layer of peft's
modules_to_save is one with children original_module and modules_to_save, and calls one of these. Both are known where
their class and its forward are peft's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.mlp.packed import Weight
from lowtide.mlp.projection import Adapter, Projection
from lowtide.models.eligibility import has_hooks, plain_class
from lowtide.models.four_bit import is_four_bit, packed_weight, rounds_input, why_not_packed
from lowtide.models.instance import BASE, children_of, is_code_of, parameters_of

_LORA = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")
_SAVED = ("peft.utils.other",)


class LowRankAdapter(NamedTuple):
    """One active adapter: ``scale * b(a(dropout(x)))`` is added."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module  # nn.Dropout, or nn.Identity
    scale: float

    @property
    def drops(self) -> bool:
        """Whether this call draws random numbers."""
        return isinstance(self.dropout, nn.Dropout) and self.dropout.training and self.dropout.p > 0


class AdaptedLinear(NamedTuple):
    """A linear layer as it would be called now: ``base(x)`` and what its adapters add."""

    base: nn.Linear
    adapters: tuple[LowRankAdapter, ...]
    around: tuple[nn.Module, ...]  # modules that are run on the way, whose hooks count
    four_bit: bool = False  # whether base is a `Linear4bit` (see `lowtide.models.four_bit`)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """Return every linear layer that is called."""
        if not self.adapters:
            return (self.base,)
        return (self.base, *(linear for adapter in self.adapters for linear in (adapter.a, adapter.b)))


def adapted_linear(module: nn.Module, *, four_bit: bool = False) -> AdaptedLinear | str:
    """Return what a call of ``module`` would run, or why that is not a plain linear layer with LoRA or without.

    With ``four_bit`` it may be a `Linear4bit` as well.
    """
    kept = saved_module(module)
    if isinstance(kept, str):
        return kept
    around: tuple[nn.Module, ...] = () if kept is module else (module,)
    if plain_class(kept) is nn.Linear:
        return AdaptedLinear(kept, (), around)  # type: ignore[arg-type]
    if not is_lora(kept):
        why_not = _why_not_base(kept, "is a {}, not a plain torch.nn.Linear", four_bit)
        return AdaptedLinear(kept, (), around, four_bit) if why_not is None else why_not  # type: ignore[arg-type]
    found = _active(kept, four_bit)
    if isinstance(found, str):
        return found
    base: Any = children_of(kept)["base_layer"]
    dropouts = tuple(adapter.dropout for adapter in found)
    return AdaptedLinear(base, found, (*around, kept, *dropouts), four_bit and is_four_bit(base))


def saved_layers(module: nn.Module | None) -> list[nn.Module]:
    """Return the modules that a layer of modules_to_save may call; [] of any other."""
    if module is None or not _is_saved(module):
        return []
    children: Any = children_of(module)
    return [children["original_module"], *children["modules_to_save"].children()]


def saved_module(module: nn.Module) -> nn.Module | str:
    """Return what a layer of modules_to_save would call now, or why that is not known; any other module itself."""
    if not _is_saved(module):
        return module
    if not _is_own(module, _SAVED):
        return f"is a {type(module).__name__}, not a layer of modules_to_save of peft's"
    if has_hooks(module) or "forward" in vars(module):
        return "is a layer of modules_to_save with hooks or a forward of its own"
    layer: Any = module
    active = list(layer.active_adapters)
    stock = layer.disable_adapters or not active or any(name not in layer._adapters for name in active)
    return layer.original_module if stock else layer.modules_to_save[active[0]]  # type: ignore[no-any-return]


def _is_saved(module: nn.Module) -> bool:
    return "original_module" in children_of(module) and "modules_to_save" in children_of(module)


def _is_own(module: nn.Module, files: tuple[str, ...]) -> bool:
    """Whether the class of a module and its forward are from one of these files."""
    kind: Any = plain_class(module)
    kind = vars(kind).get(BASE, kind)
    # What compilers cannot trace was so when `lowtide.patch` looked.
    return kind.__module__ in files and (torch.compiler.is_compiling() or is_code_of(kind.forward, *files))


def is_lora(module: nn.Module) -> bool:
    """Whether the module's children have the names of a LoRA layer's."""
    return all(name in children_of(module) for name in ("base_layer", "lora_A", "lora_B"))


def _kind(module: nn.Module) -> str:
    """Return the name of a module's class, and where it is from if that is the name of PyTorch's own."""
    kind = type(module)
    return f"Linear of {kind.__module__}" if kind.__name__ == "Linear" else kind.__name__


def _why_not_base(base: nn.Module, what: str, four_bit: bool) -> str | None:
    """Return why a layer is neither a plain linear one nor, with ``four_bit``, one in 4 bits; ``what`` for its kind."""
    if plain_class(base) is nn.Linear:
        return None
    if four_bit and is_four_bit(base):
        return why_not_packed(base)
    return what.format(_kind(base)) + ", and rounds its input too" * (four_bit and rounds_input(base))


def _active(lora: Any, four_bit: bool) -> tuple[LowRankAdapter, ...] | str:
    """Return the adapters that a LoRA layer would add now, or why it would do something else."""
    if not _is_own(lora, _LORA):
        return f"is a {type(lora).__name__}, not the LoRA layer of a plain torch.nn.Linear"
    children = children_of(lora)  # `lora.base_layer` would be slow: modules are found by __getattr__
    base = children["base_layer"]
    why_not = _why_not_base(base, "is LoRA on a {}, not on a plain torch.nn.Linear", four_bit)
    if why_not is not None:
        return why_not
    if lora.disable_adapters:
        return "has adapters merged and disabled, which peft unmerges when it runs" if lora.merged else ()
    if lora.merged:
        return ()
    a_s, b_s, dropouts = (children_of(children[name]) for name in ("lora_A", "lora_B", "lora_dropout"))
    found = []
    for name in lora.active_adapters:
        if name not in a_s:
            continue
        if name in lora.lora_variant:
            return f"has an adapter of another form than LoRA's ({type(lora.lora_variant[name]).__name__})"
        scale = lora.scaling[name]
        if type(dropouts[name]) not in (nn.Dropout, nn.Identity):
            return f"drops by a {type(dropouts[name]).__name__}"
        if type(scale) not in (int, float) or parameters_of(a_s[name]).get("bias") is not None:
            return "has an adapter of another form than LoRA's"
        found.append(LowRankAdapter(a_s[name], b_s[name], dropouts[name], scale))
    if found and not getattr(lora, "cast_input_dtype_enabled", True):
        dtype = base.weight.dtype
        if any(adapter.a.weight.dtype != dtype for adapter in found):
            return "does not cast its input to its adapters' dtype"
    return tuple(found)


def why_not_together(layers: Sequence[AdaptedLinear]) -> str | None:
    """Return why the adapters of an MLP's projections cannot run along with its GEMMs."""
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    if not adapters:
        return None
    if len({linear.weight.dtype for adapter in adapters for linear in (adapter.a, adapter.b)}) > 1:
        return "its LoRA weights are of several dtypes"
    if any(adapter.drops for adapter in adapters):
        if any(len(layer.adapters) > 1 for layer in layers):
            return "it has several LoRA adapters with dropout at a time"
        if torch.compiler.is_compiling():
            return "its LoRA adapters have dropout, and it is compiled"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "its LoRA adapters have dropout, and a CUDA graph is captured"  # their generators are their own
    return None


def low_rank_projections(layers: Sequence[AdaptedLinear], dtype: torch.dtype | None) -> list[Projection]:
    """Return each projection with its adapters as one, and a weight in 4 bits for GEMMs in ``dtype``."""
    return [Projection(_weight(layer, dtype), _bias(layer), _adapter(layer.adapters)) for layer in layers]


def _weight(layer: AdaptedLinear, dtype: torch.dtype | None) -> Weight:
    return packed_weight(layer.base, dtype) if layer.four_bit and dtype is not None else layer.base.weight


def _adapter(adapters: Sequence[LowRankAdapter]) -> Adapter | None:
    if not adapters:
        return None
    if len(adapters) == 1:
        (only,) = adapters
        p = float(only.dropout.p) if only.drops else 0.0  # type: ignore[arg-type]
        return Adapter(only.a.weight, only.b.weight, float(only.scale), p)
    # Several are one whose rank is the sum of theirs: a copy of thin matrices.
    scales = {float(adapter.scale) for adapter in adapters}
    scale = scales.pop() if len(scales) == 1 else 1.0
    sides = [adapter.b.weight if not scales else adapter.b.weight * adapter.scale for adapter in adapters]
    with torch.autocast(sides[0].device.type, enabled=False):  # whose torch.cat refuses the other 16-bit dtype
        return Adapter(torch.cat([adapter.a.weight for adapter in adapters]), torch.cat(sides, 1), scale, 0.0)


def _bias(layer: AdaptedLinear) -> Tensor | None:
    """Return the sum of the projection's bias and its adapters'."""
    bias: Tensor | None = layer.base.bias
    for adapter in layer.adapters:
        if adapter.b.bias is not None:
            more = adapter.b.bias * adapter.scale
            bias = more if bias is None else bias + more
    return bias

"""Attention's outputs, kept through a layer's recompute: its kernels are called once, in forward.

Two dispatch modes, one around the layer's forward and one around its recompute, see every operator that runs inside.
The first puts aside what attention's fused operators return (the output, its logsumexp, the state of its dropout); the
second hands that out again in the same order, and the kernel is not called. Both are below autograd, which so saves for
backward what it saves without them, with query, key and value from the recompute.

Source: PyTorch's selective activation checkpoint works so (``torch.utils.checkpoint``). This one looks at attention
alone, puts the random state right after a kept dropout, and gives its tensors to backward as often as it asks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.errors import UnsupportedError, message

Get = Callable[[], Tensor]
Store = Callable[[Tensor], Get]

# aten's fused attention, whatever the backend. The math path is not an operator: it falls apart into matmuls.
_ATEN = (
    r"aten::_(scaled_dot_product_(\w+_)?attention(_for_cpu|_overrideable)?|(flash|efficient|cudnn)_attention_forward)"
)
# What the flash-attn packages register: flash_attn::_flash_attn_forward, flash_attn_3::fwd, and builds of them whose
# namespace carries a version.
_PACKAGES = r"\w*flash_attn\w*::_?(flash_attn_)?(varlen_)?(fwd|forward)"
_NAMES = re.compile(f"{_ATEN}|{_PACKAGES}")


@functools.cache
def is_attention(operator: Any) -> bool:
    """Whether an operator is the fused forward of attention."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return str(operator) == "flex_attention"
    return _NAMES.fullmatch(operator._schema.name) is not None


def stay(tensor: Tensor) -> Get:
    """Keep a tensor where it is, and give it back unless somebody has written to it since."""
    kept = detached(tensor)
    version = kept._version

    def get() -> Tensor:
        if kept._version != version:
            raise changed_in_place()
        return kept.detach()  # an alias each time: what autograd hangs on it must not hang on what is kept

    return get


def detached(tensor: Tensor) -> Tensor:
    """Return an alias that has the tensor's version counter and not its graph, also below autograd."""
    # There, the key that shares counters between a tensor and its views is switched off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def changed_in_place() -> UnsupportedError:
    """Return the error for a kept tensor that was written to between forward and backward."""
    hint = "Write out of place in the layer (x = x + y, not x += y), or give it keep='all'."
    return UnsupportedError(
        message(
            "keep", "tensors that stay as they were kept for backward", "one changed by an in-place operation", hint
        )
    )


@dataclass(frozen=True)
class _Call:
    """One call of an attention operator: what it returned, and the random state that it left behind."""

    operator: Any
    outputs: Any
    rng_state: tuple[torch.device, Tensor] | None


class KeptAttention:
    """What attention returned in one forward of one layer, for as many recomputes as its graph asks for.

    Args:
        store: Takes a floating-point tensor that is to be kept and returns a function that gives it back.
    """

    def __init__(self, store: Store = stay) -> None:
        self.calls: list[_Call] = []
        self._store = store

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the modes for forward and for recompute, as ``torch.utils.checkpoint`` wants them."""
        return _Keeping(self), _GivingBack(self)

    def keep(self, operator: Any, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put aside what an operator returned."""

        def store(tensor: Tensor) -> _Kept:  # the rest is small: seeds, lengths, a mask that nobody asked for
            large = tensor.is_floating_point() and tensor.numel() > 0
            return _Kept(self._store(tensor) if large else stay(tensor))

        stored = tree_map_only(Tensor, store, outputs)
        self.calls.append(_Call(operator, stored, _rng_state_after(operator, outputs, args, kwargs)))

    def give_back(self, index: int, operator: Any) -> Any:
        """Return what call number ``index`` returned, with the random state as that call left it."""
        if index >= len(self.calls) or self.calls[index].operator is not operator:
            came = str(self.calls[index].operator) if index < len(self.calls) else "none"
            hint = "The layer takes another path when it is run again; give it keep='all'."
            raise UnsupportedError(
                message("keep", f"call {index} of attention to be {came}, as in forward", operator, hint)
            )
        call = self.calls[index]
        if call.rng_state is not None:
            _set_rng_state(*call.rng_state)
        return tree_map_only(_Kept, lambda kept: kept.get(), call.outputs)


@dataclass(frozen=True)
class _Kept:
    get: Get


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What both modes are: they let compiled regions inside the layer be, and see higher-order operators."""

    supports_higher_order_operators = True
    holds_no_outputs = True  # but attention's, which is no operator of lowtide's

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs) if kwargs else func(*args)
        if is_attention(func):
            self._kept.keep(func, outputs, args, kwargs or {})
        return outputs


class _GivingBack(_Mode):  # type: ignore[no-untyped-call]
    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next += 1
        return self._kept.give_back(self._next - 1, func)


def contexts_under_compile() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts that ``torch.compile`` understands: PyTorch's own, which its partitioner obeys."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call, no-any-return]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _rng_state_after(
    operator: Any, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, Tensor] | None:
    """Return the random state after an operator with dropout: what follows it in the layer draws from there.

    A kernel that is not called again does not move the generator, and every dropout after it would draw another mask.
    """
    if not _dropout(operator, args, kwargs):
        return None
    device: torch.device = next(x for x in tree_leaves(outputs) if isinstance(x, Tensor)).device
    if device.type == "cpu":
        return device, torch.get_rng_state()
    return device, torch.get_device_module(device).get_rng_state(device)


def _set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator drops anything out."""
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"])
    at = _dropout_at(operator)
    return at is not None and at < len(args) and bool(args[at])


@functools.cache
def _dropout_at(operator: Any) -> int | None:
    """Return where among an operator's arguments the probability of its dropout stands."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None

"""Attention's outputs, saved through a layer's recompute: its kernels are called once, in forward.

Two dispatch modes, one around the layer's forward and one around its recompute, see every operator that runs inside.
The first saves what attention's fused operators return (the output, its logsumexp, the state of its dropout); the
second returns that in the same order, and the kernel is not called. Both are below autograd, which so saves for
backward what it saves without them, with query, key and value from the recompute.

Source: PyTorch's selective activation checkpoint works so (``torch.utils.checkpoint``). This one looks at attention
alone, sets the random state behind a saved dropout, and gives its tensors to backward any number of times.
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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.arguments import is_dtensor
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
    """Save a tensor where it is; the returned function gives it back, and raises if it was written to since."""
    saved = detached(tensor)
    version = saved._version

    def get() -> Tensor:
        if saved._version != version:
            raise changed_in_place()
        return saved.detach()  # an alias each time: what autograd attaches to it must not be attached to what is saved

    return get


def detached(tensor: Tensor) -> Tensor:
    """Return an alias that has the tensor's version counter and not its graph, also below autograd."""
    # There, the key that shares counters between a tensor and its views is switched off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def changed_in_place() -> UnsupportedError:
    """Return the error for a saved tensor that was written to between forward and backward."""
    expected = "tensors that stay unmodified from forward to backward"
    hint = "Write out of place in the layer (x = x + y, not x += y), or set keep='all' for it."
    return UnsupportedError(message("keep", expected, "one changed by an in-place operation", hint))


@dataclass(frozen=True)
class _Call:
    """One call of an attention operator: what it returned, as functions that do, and the random state behind it."""

    operator: Any
    outputs: list[Callable[[], Any]]
    spec: TreeSpec
    rng_state: tuple[torch.device, Tensor] | None


class SavedAttention:
    """What attention returned in one forward of one layer, for any number of recomputes.

    Args:
        store: Takes a floating-point tensor to save and returns a function that gives it back.
    """

    def __init__(self, store: Store = stay) -> None:
        self.calls: list[_Call] = []
        self._store = store

    def saving(self) -> AbstractContextManager[Any]:
        """Return the mode of the forward."""
        return _Saving(self)

    def returning(self) -> AbstractContextManager[Any]:
        """Return the mode of one recompute."""
        return _Returning(self)

    def save(self, operator: Any, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save what an operator returned."""
        leaves, spec = tree_flatten(outputs)
        rng_state = _rng_state_after(operator, leaves, args, kwargs)
        self.calls.append(_Call(operator, [self._saved(value) for value in leaves], spec, rng_state))

    def _saved(self, value: Any) -> Callable[[], Any]:
        if is_dtensor(value):  # of attention over several ranks, as in context parallelism
            with torch.no_grad():  # the local tensor itself, not a view of it
                get = self._saved(value.to_local())
            layout = {"device_mesh": value.device_mesh, "placements": value.placements}
            layout |= {"shape": value.shape, "stride": value.stride()}
            place = functools.partial(type(value).from_local, **layout)
            return lambda: place(get())
        if not isinstance(value, Tensor):
            return lambda: value
        # The rest is small: seeds, lengths, a mask that was not requested.
        return self._store(value) if value.is_floating_point() and value.numel() > 0 else stay(value)

    def give_back(self, index: int, operator: Any) -> Any:
        """Return what call number ``index`` returned, and set the random state that it left behind."""
        call = self.calls[index] if index < len(self.calls) else None
        if call is None or call.operator is not operator:
            expected = f"call {index} of attention to be {call.operator if call else 'none'}, as in forward"
            hint = "The layer takes another path in its recompute: set keep='all' for it."
            raise UnsupportedError(message("keep", expected, operator, hint))
        if call.rng_state is not None:
            _set_rng_state(*call.rng_state)
        return tree_unflatten([get() for get in call.outputs], call.spec)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What both modes share: they do not look into compiled regions of the layer, and see higher-order operators."""

    supports_higher_order_operators = True
    holds_no_outputs = True  # of lowtide's operators: `lowtide.graph` reads it

    def __init__(self, saved: SavedAttention) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Saving(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs) if kwargs else func(*args)
        if is_attention(func):
            self._saved.save(func, outputs, args, kwargs or {})
        return outputs


class _Returning(_Mode):  # type: ignore[no-untyped-call]
    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next += 1
        return self._saved.give_back(self._next - 1, func)


def contexts_under_compile() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts that ``torch.compile`` understands: PyTorch's own, which its partitioner obeys."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call, no-any-return]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _rng_state_after(
    operator: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, Tensor] | None:
    """Return the random state after an operator with dropout: what follows it in the layer draws from there.

    A kernel that is not called again does not move the generator, and every dropout after it would draw another mask.
    """
    if not (dict(zip(_argument_names(operator), args, strict=False)) | kwargs).get("dropout_p"):
        return None
    device: torch.device = next(x for x in leaves if isinstance(x, Tensor)).device
    if device.type == "cpu":
        return device, torch.get_rng_state()
    return device, torch.get_device_module(device).get_rng_state(device)


def _set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@functools.cache
def _argument_names(operator: Any) -> list[str]:
    higher = isinstance(operator, torch._ops.HigherOrderOperator)
    return [] if higher else [argument.name for argument in operator._schema.arguments]

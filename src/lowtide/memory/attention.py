"""Attention's outputs, saved through a layer's recompute: its kernels are called once, in forward.

Two dispatch modes, one around the layer's forward and one around its recompute, see every operator that runs inside.
The first saves what attention's fused operators return (the output, its logsumexp, the state of its dropout); the
second returns that in the same order, and the kernel is not called. Both are below autograd, which so saves for
backward what it saves without them, with query, key and value from the recompute.

Source: PyTorch's selective activation checkpoint works so (``torch.utils.checkpoint``). This one looks at attention
alone, sets the random state behind a saved dropout, lets a store move what is saved to the host, and returns its
tensors any number of times.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.arguments import is_dtensor
from lowtide.errors import UnsupportedError, message
from lowtide.graph import DispatchMode
from lowtide.memory.saved import Store, random_state, stay

# aten's fused attention, whatever the backend. The math path is not an operator: it falls apart into matmuls.
_ATEN = (
    r"aten::_(scaled_dot_product_(\w+_)?attention(_for_cpu|_overrideable)?|(flash|efficient|cudnn)_attention_forward)"
)
# What the flash-attn packages register: flash_attn::_flash_attn_forward, flash_attn_3::fwd, and builds of them whose
# namespace carries a version.
_PACKAGES = r"\w*flash_attn\w*::_?(flash_attn_)?(varlen_)?(fwd|forward)"
_NAMES = re.compile(f"{_ATEN}|{_PACKAGES}|flex_attention")


@functools.cache
def is_attention(operator: Any) -> bool:
    """Whether an operator is the fused forward of attention: what is saved, compiled or not, and what a plan counts."""
    return _NAMES.fullmatch(operator.name()) is not None


class _Call(NamedTuple):
    """One call of an attention operator in forward."""

    operator: Any
    outputs: tuple[Callable[[], Any], ...]  # each returns one of its outputs
    after: Callable[[], None] | None  # sets the random state behind it, where it has dropout


class SavedAttention:
    """What attention returned in one forward of one layer, for any number of recomputes.

    Args:
        store: Saves a floating-point tensor.
    """

    def __init__(self, store: Store = stay) -> None:
        self.calls: list[_Call] = []
        self._store = store

    def contexts(self) -> tuple[DispatchMode, DispatchMode]:
        """Return the contexts of the layer's forward and of its recompute, as the checkpoint's ``context_fn``."""
        return _Mode(self, recomputes=False), _Mode(self, recomputes=True)

    def save(self, operator: Any, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save what an operator returned."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        dropout = _has_dropout(operator, args, kwargs)
        after = random_state(next(x for x in values if isinstance(x, Tensor))) if dropout else None
        self.calls.append(_Call(operator, tuple(map(self._saved, values)), after))

    def _saved(self, value: Any) -> Callable[[], Any]:
        if is_dtensor(value):  # of attention over several ranks, as in context parallelism
            with torch.no_grad():  # the local tensor itself, not a view of it
                get = self._saved(value.to_local())
            layout = {"device_mesh": value.device_mesh, "placements": value.placements}
            layout |= {"shape": value.shape, "stride": value.stride()}
            whole = functools.partial(type(value).from_local, **layout)  # which does not hold the value and its graph
            return lambda: whole(get())
        if not isinstance(value, Tensor):
            return lambda: value
        # The rest is small: seeds, lengths, a mask that was not requested.
        return self._store(value) if value.is_floating_point() and value.numel() > 0 else stay(value)

    def restore(self, index: int, operator: Any) -> Any:
        """Return what call number ``index`` returned, and set the random state that it left behind."""
        call = self.calls[index] if index < len(self.calls) else None
        if call is None or call.operator is not operator:
            expected = f"call {index} of attention to be {call.operator if call else 'none'}, as in forward"
            hint = "The layer takes another path in its recompute: set keep='all' for it."
            raise UnsupportedError(message("keep", expected, operator, hint))
        if call.after is not None:
            call.after()
        values = tuple(get() for get in call.outputs)
        return values if len(values) > 1 else values[0]


class _Mode(DispatchMode):  # type: ignore[no-untyped-call]
    """Saves what attention returns in a layer's forward, or returns it in a recompute.

    It does not look into compiled regions of the layer, and sees higher-order operators.
    """

    supports_higher_order_operators = True
    holds_no_outputs = True  # of lowtide's operators: `lowtide.graph` reads it

    def __init__(self, saved: SavedAttention, *, recomputes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved, self._recomputes = saved, recomputes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._calls = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recomputes and is_attention(func):
            self._calls += 1
            return self._saved.restore(self._calls - 1, func)
        outputs = func(*args, **kwargs) if kwargs else func(*args)
        if is_attention(func):
            self._saved.save(func, outputs, args, kwargs or {})
        return outputs


def contexts_under_compile() -> Any:
    """Return the contexts that ``torch.compile`` understands: PyTorch's own, which its partitioner obeys."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call drops anything out.

    A kernel that is not called again does not move the generator, and every dropout after it would draw another mask.
    """
    return bool((dict(zip(_argument_names(operator), args, strict=False)) | kwargs).get("dropout_p"))


@functools.cache
def _argument_names(operator: Any) -> list[str]:
    if operator.name() == "flex_attention":  # without dropout, and without a schema
        return []
    return [argument.name for argument in operator._schema.arguments]

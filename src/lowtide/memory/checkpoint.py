"""One layer's forward under a policy: PyTorch's checkpoint around it, with attention's outputs saved or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError, message
from lowtide.graph import run_in_eager
from lowtide.memory.attention import SavedAttention, contexts_under_compile
from lowtide.memory.groups import Group, check_layer
from lowtide.memory.offload import Offloader
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.saved import Store, stay, tensors_in

Run = Callable[[Tensor], Any]
_LEFT_OUT = "_lowtide_left_out"  # of a cache: the names of the layers that have not filled it


@dataclass
class LayerState:
    """What `apply_policy` attaches to a layer."""

    name: str  # inside the model
    policy: ActivationPolicy
    offloader: Offloader | None = None  # with offload=True, what its stack shares
    moves: bool = False  # whether what it saves goes to the host: the last layers' stays
    group: Group | None = None  # with every > 1: it, and the layers of which one input is saved
    first: bool = True  # of its group
    before: list[tuple[nn.Module, str, Any]] = field(default_factory=list)  # what attributes of its MLP were


def run_layer(
    layer: nn.Module, state: LayerState, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a layer's stock ``forward`` so that its graph saves what the policy sets and recomputes the rest in backward.

    Without gradients, and in evaluation with a cache to fill, nothing else happens. `apply_policy` has the errors.
    """
    records = torch.is_grad_enabled()
    if records and getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise double_recompute(state.name)
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    for cache in caches:
        if state.name in getattr(cache, _LEFT_OUT, ()):
            raise _left_empty(state.name)
    if caches and records:
        if not layer.training:
            return forward(*args, **kwargs)
        args, kwargs = _without_caches(layer, state.name, caches, args, kwargs)
    if not records or not _is_in_graph(layer, (args, kwargs)):  # frozen layers before the first that trains
        return forward(*args, **kwargs)
    run, hidden = _of_hidden_states(state.name, forward, args, kwargs)
    offloader = state.offloader
    if state.group is not None:
        check_layer(layer, state.name)
        begin = (lambda: stay) if offloader is None else lambda: offloader.begin(moves=state.moves).put
        return state.group.run(run, hidden, partial(_checkpointed, state), begin, first=state.first)
    return _checkpointed(state, run, hidden) if offloader is None else _offloaded(state, offloader, run, hidden)


def _checkpointed(state: LayerState, run: Run, hidden: Tensor, store: Store = stay) -> Any:
    """Checkpoint ``run(hidden)``, with attention's outputs in ``store`` if they are saved."""
    if state.policy.keep == "input":
        return checkpoint(run, hidden, use_reentrant=False)
    if torch.compiler.is_compiling():
        return checkpoint(run, hidden, use_reentrant=False, context_fn=contexts_under_compile)
    saved = SavedAttention(store)
    outputs = checkpoint(run, hidden, use_reentrant=False, context_fn=saved.contexts)
    if not saved.calls:
        hint = (
            "Take a fused attention (attn_implementation='sdpa' or 'flash_attention_2' with a mask and a dtype that its"
            " kernels support), or keep='input' for this layer. Attention inside a region that torch.compile has"
            " compiled is not visible: compile the whole layer, or its other parts alone."
        )
        got = "none (eager attention, the math path of scaled_dot_product_attention, or no attention at all)"
        expected = "a fused attention operator for keep='attention' to save"
        raise UnsupportedError(message(state.name, expected, got, hint))
    return outputs


# Copies on streams run in eager, and so does the layer between them, unless its parts are compiled by themselves.
@run_in_eager
def _offloaded(state: LayerState, offloader: Offloader, run: Run, hidden: Tensor) -> Any:
    """Run a layer with what it saves in host memory."""
    put = offloader.begin(moves=state.moves).put
    # The checkpoint saves its inputs through the hooks that surround it. Its own take over for all that runs inside.
    with saved_tensors_hooks(lambda x: put(x) if x.numel() else stay(x), lambda get: get()):
        return _checkpointed(state, run, hidden, put)


def double_recompute(name: str) -> UnsupportedError:
    """Return the error for a layer that transformers checkpoints as well."""
    expected = "a layer that nothing else recomputes"
    got = "transformers' gradient checkpointing switched on, so that it would be recomputed twice"
    return UnsupportedError(message(name, expected, got, "Call model.gradient_checkpointing_disable()."))


def _is_in_graph(layer: nn.Module, given: Any) -> bool:
    return any(x.requires_grad for x in tensors_in(given)) or any(p.requires_grad for p in layer.parameters())


def _of_hidden_states(
    name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Run, Tensor]:
    """Return the layer as a function of its hidden states alone, and these: its first floating-point tensor.

    They are what is saved. The rest (positions, masks, another stack's output) is shared by the layers, and not copied
    or moved; the function has it without the hidden states.
    """
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    key = next((key for key, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()), None)
    if key is None:
        raise UnsupportedError(message(name, "hidden states: a floating-point tensor", "none among its arguments"))
    if isinstance(key, int):
        before, after = args[:key], args[key + 1 :]
        return lambda hidden: forward(*before, hidden, *after, **kwargs), given[key]
    others = {other: value for other, value in kwargs.items() if other != key}
    return lambda hidden: forward(*args, **{key: hidden}, **others), given[key]


def _without_caches(
    layer: nn.Module, name: str, caches: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a training layer's arguments without caches of keys and values, which a recompute would fill twice.

    transformers makes an empty one for every forward unless ``use_cache=False``, also in training, where nothing reads
    it. The layer is noted in it, so that it is not read later.
    """
    indices = (getattr(module, "layer_idx", None) for module in layer.modules())
    index = next((index for index in indices if isinstance(index, int)), 0)
    if any(_is_filled(cache, index) for cache in caches):
        hint = "Train without past_key_values, or set keep='all' for this layer."
        raise UnsupportedError(message(name, "no cache, or an empty one", "a cache that holds keys and values", hint))
    for cache in caches:
        setattr(cache, _LEFT_OUT, {*getattr(cache, _LEFT_OUT, ()), name})
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs


def _left_empty(name: str) -> UnsupportedError:
    hint = "Pass use_cache=False in training; to continue from a cache, set keep='all' for the layers."
    got = "one of a forward in which this layer was under a policy that recomputes, and left it empty"
    return UnsupportedError(message(name, "a cache that its own forwards have filled", got, hint))


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _is_filled(cache: Any, index: int) -> bool:
    """Whether a cache holds something of a layer: keys and values, or the state of a linear attention."""
    try:
        return bool(cache.get_seq_length(index))
    except ValueError:  # a layer of another kind: linear attention, or one that reads the keys of another layer
        layers = getattr(cache, "layers", ())
        state = getattr(layers[index], "has_previous_state", False) if index < len(layers) else False
        return any(state.values()) if isinstance(state, dict) else bool(state)

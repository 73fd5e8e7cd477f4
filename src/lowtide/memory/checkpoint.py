"""One layer's forward that saves less: a checkpoint around it, with attention's outputs saved or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError, message
from lowtide.memory.attention import SavedAttention, Store, changed_in_place, contexts_under_compile, stay
from lowtide.memory.groups import refuse_compile, run_in_group
from lowtide.memory.offload import Offloader
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.recompute import recomputed
from lowtide.memory.state import Snapshot, Versions, have_own_writes, own_writes
from lowtide.memory.tiles import Call, LayerInTiles
from lowtide.swap import child_class

Forward = Callable[..., Any]
_LEFT_OUT = "_lowtide_left_out"  # of a cache: the layers that have not filled it, with their indices
_STOCK = "_lowtide_stock_cache"
_WITHOUT_TENSORS = {type(None), bool, int, float, str}


@dataclass
class LayerState:
    """What `apply_policy` attaches to a layer."""

    name: str  # inside the model
    policy: ActivationPolicy
    offloader: Offloader | None = None  # with offload=True, what its stack shares
    turn: int | None = None  # its place among those whose tensors go to the host: the last ones' stay
    token_wise: set[int] = field(default_factory=set)  # with tiles: the ways to call it that were checked
    writes: bool = False  # its forward writes to its parameters
    quiet: set[bool] = field(default_factory=set)  # modes, training or not, whose first forward drew no random numbers
    follows: bool = False  # with every > 1: the layer before, of the same group, computes its input
    before: dict[tuple[str, str], Any] = field(default_factory=dict)  # what its MLP had, by module and attribute


def run_layer(
    layer: nn.Module, state: LayerState, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a layer's own ``forward`` so that its graph saves what the policy sets, and recomputes the rest in backward.

    Args:
        layer: The layer.
        state: Its policy, with ``keep`` "attention" or "input".
        forward: The layer's stock forward, bound to it.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UnsupportedError: The layer is checkpointed by transformers already; it was called with a cache that holds keys;
            ``keep="attention"``, and no fused attention ran; offloading, from a device that is none or to a host
            without room; or as `run_in_group` and `LayerInTiles`.
    """
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise double_recompute(state.name)
    args, kwargs, cached = _without_cache(layer, state.name, args, kwargs)
    tensors = _tensors_in((*args, *kwargs.values()))
    # Frozen layers before the first that trains save nothing anyway.
    in_graph = any(x.requires_grad for x in tensors) or any(p.requires_grad for p in layer.parameters())
    if cached or not in_graph:
        return run_without_graph(layer, state, forward, args, kwargs)
    forward = _with_own_writes(layer, state, forward)
    key, hidden = _hidden_states(state.name, args, kwargs)
    save: Callable[..., Any] = partial(_run, state)
    offloader = state.offloader
    if _is_long(hidden, state.policy):
        if torch.compiler.is_compiling():
            refuse_compile(state.name, "tile_tokens", "tile_tokens=None")
        forward = _in_tiles(layer, state, forward, key, (args, kwargs))
        save = forward.run
    run = _of_hidden_states(layer, state, forward, key, args, kwargs)
    if state.policy.every > 1:

        def begin() -> Store:
            return stay if offloader is None else offloader.begin(turn=state.turn).put

        return run_in_group(layer, state.name, run, hidden, save=save, follows=state.follows, begin=begin)
    if offloader is None:
        return save(run, hidden)
    return _run_offloaded(state, offloader, partial(save, run, hidden))


def run_without_graph(
    layer: nn.Module, state: LayerState, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a layer's own ``forward`` where nothing records gradients, in tiles if its policy sets them.

    It runs at once where it cannot run in tiles (with padding, say), in inference mode, under a compiler, with hooks
    inside (those of output_router_logits, say), and with a cache, which tiles would not fill.

    Raises:
        UnsupportedError: As `check_cache`.
    """
    check_cache(state.name, args, kwargs)
    forward = _with_own_writes(layer, state, forward)
    has_cache = any(_is_cache(value) for value in (*args, *kwargs.values()))
    at_once = has_cache or torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    if state.policy.tile_tokens is None or at_once:
        return forward(*args, **kwargs)
    key, hidden = _hidden_states(state.name, args, kwargs)
    # A hook may keep what it sees: without a graph nothing tells, and it would see tiles and the tokens of the check.
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in [*layer.modules()][1:])
    if _is_long(hidden, state.policy) and not hooked:
        with contextlib.suppress(UnsupportedError):
            return _in_tiles(layer, state, forward, key, (args, kwargs)).run_without_graph((args, kwargs))
    return forward(*args, **kwargs)


def _with_own_writes(layer: nn.Module, state: LayerState, forward: Forward) -> Forward:
    """Return a layer's forward, which may not look like a change of weights to the graphs of its other calls."""
    if not state.writes or torch.compiler.is_compiling():
        return forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with own_writes(layer.parameters()):
            return forward(*args, **kwargs)

    return counted


def _is_long(hidden: Tensor, policy: ActivationPolicy) -> bool:
    """Whether hidden states are of more than one tile, or of another shape, which tiles refuse."""
    return policy.tile_tokens is not None and (hidden.dim() != 3 or hidden.shape[1] > policy.tile_tokens)


def _in_tiles(layer: nn.Module, state: LayerState, forward: Forward, key: int | str, call: Call) -> LayerInTiles:
    """Return the layer in tiles, once it is known to work on each token by itself in the way that it is called."""
    tiles = LayerInTiles(layer, state.name, state.policy, forward, key, call)
    tiles.check(layer, call, state.token_wise)
    return tiles


# Copies on streams run in eager, and so does the layer between them, unless its parts are compiled by themselves.
@_disable_dynamo  # torch.compiler.disable, without importing the compiler
def _run_offloaded(state: LayerState, offloader: Offloader, save: Callable[[Store], Any]) -> Any:
    """Run a layer with what it saves in host memory."""
    record = offloader.begin(turn=state.turn)
    # The checkpoint saves its inputs through the hooks that surround it. Its own take over for all that runs inside.
    with saved_tensors_hooks(lambda t: record.put(t) if t.numel() else stay(t), lambda get: get()):
        return save(record.put)


def _run(state: LayerState, run: Callable[[Tensor], Any], hidden: Tensor, store: Store = stay) -> Any:
    """Checkpoint ``run(hidden)``, with attention's outputs in ``store`` if they are saved."""
    if torch.compiler.is_compiling():
        contexts: dict[str, Any] = {} if state.policy.keep == "input" else {"context_fn": contexts_under_compile}
        return checkpoint(run, hidden, use_reentrant=False, **contexts)
    if state.policy.keep == "input":
        return recomputed(state.name, run, hidden)
    saved = SavedAttention(store)
    outputs = recomputed(state.name, run, hidden, saved.saving, saved.returning)
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


def double_recompute(name: str) -> UnsupportedError:
    """Return the error for a layer that transformers checkpoints as well."""
    expected = "a layer that nothing else recomputes"
    got = "transformers' gradient checkpointing switched on, so that it would be recomputed twice"
    return UnsupportedError(message(name, expected, got, "Call model.gradient_checkpointing_disable()."))


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values and in their containers; `tree_leaves` alone takes longer than the rest."""
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            found.append(value)
        elif kind is tuple or kind is list:
            found += _tensors_in(value)
        elif kind not in _WITHOUT_TENSORS:
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _hidden_states(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
    """Return where the hidden states are among a layer's arguments, and these: its first floating-point tensor."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for key, value in given.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return key, value
    raise UnsupportedError(message(name, "hidden states: a floating-point tensor", "none among its arguments"))


def _of_hidden_states(
    layer: nn.Module, state: LayerState, forward: Forward, key: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor], Any]:
    """Return the layer as a function of its hidden states alone, its argument ``key``: they are what is saved.

    The rest (positions, masks, another stack's output) is shared by the layers and not copied; the recompute checks it
    for writes.
    """
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    del given[key]
    run = _of_unchanged(layer, state, forward, list(given.values()))
    places, names = range(len(args)), list(kwargs)  # not these themselves: they hold the hidden states

    def of_hidden(hidden: Tensor) -> Any:
        every = {**given, key: hidden}
        return run(*(every[place] for place in places), **{name: every[name] for name in names})

    return of_hidden


def _of_unchanged(layer: nn.Module, layer_state: LayerState, forward: Forward, rest: list[Any]) -> Forward:
    """Return a forward whose second run has the state of the first, or raises where that is impossible.

    Assignments are restored for it; writes to a tensor of ``rest`` or a parameter cannot be undone. It does not hold
    the hidden states: they may be on the host meanwhile, and the checkpoint manages them.
    """
    if torch.compiler.is_compiling():
        return forward  # the compiler makes writes part of its graph
    given = Versions(_tensors_in(rest))
    first: list[tuple[Snapshot, Versions, Versions]] = []

    def unchanged(*args: Any, **kwargs: Any) -> Any:
        if not first:
            state = Snapshot(layer, rest, draws=layer.training not in layer_state.quiet)
            buffers = Versions(state.large_buffers)
            with own_writes(state.parameters):
                outputs = forward(*args, **kwargs)
            if not state.end():
                layer_state.quiet.add(layer.training)
            layer_state.writes |= have_own_writes(state.parameters)
            # As forward left them: an embedding with max_norm writes to its own.
            first.append((state, buffers, Versions(state.parameters)))
            return outputs
        state, buffers, parameters = first[0]
        if given.changed():
            raise changed_in_place()
        if parameters.changed():
            raise _weights_changed(layer_state.name, "parameters")
        if buffers.changed():
            raise _weights_changed(layer_state.name, "buffers")
        state.check(layer_state.name)
        with state.restored(), own_writes(state.parameters):
            return forward(*args, **kwargs)

    return unchanged


def _weights_changed(name: str, what: str) -> UnsupportedError:
    """Return the error for a layer whose recompute would differ from its forward: gradients would be wrong."""
    hint = "Step the optimizer, merge adapters and swap weights after every backward, or set keep='all' for this layer."
    got = "one changed by an in-place operation, or through .data"
    return UnsupportedError(message(name, f"{what} that are in backward what they were in forward", got, hint))


def _without_cache(
    layer: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments without a cache of keys and values, which a recompute would fill twice.

    transformers makes an empty one for every forward unless ``use_cache=False``, also in training, where nothing reads
    it. In evaluation the caller may read it: the third value is whether the layer must run its stock forward.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches or getattr(layer, "_can_checkpoint_with_cache", False):
        return args, kwargs, False
    check_cache(name, args, kwargs)
    if not layer.training:
        return args, kwargs, True
    found: list[Any] = [getattr(module, "layer_idx", None) for module in layer.modules()]
    index = next((index for index in found if isinstance(index, int)), 0)
    if any(_is_filled(cache, index) for cache in caches):
        hint = "Train without past_key_values, or set keep='all' for this layer."
        raise UnsupportedError(message(name, "no cache, or an empty one", "a cache that holds keys and values", hint))
    for cache in caches:
        setattr(cache, _LEFT_OUT, {**getattr(cache, _LEFT_OUT, {}), name: index})
        # Under a compiler, layers without a policy check nothing.
        if not torch.compiler.is_compiling() and not hasattr(cache, _STOCK):
            cache.__class__ = child_class(type(cache), _cache_overrides, _STOCK)
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs, False


def _cache_overrides(base: Any) -> dict[str, Any]:
    """Return what a cache that a layer has not filled does differently: it refuses that layer's keys later."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = kwargs.get("layer_idx", args[2] if len(args) > 2 else None)
        for name, refused in getattr(self, _LEFT_OUT, {}).items():
            if refused == index:
                raise _was_left_out(name)
        return base.update(self, *args, **kwargs)

    return {"update": update}


def check_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that no cache among the arguments lacks the keys and values of this layer for an earlier forward.

    Raises:
        UnsupportedError: One does, and the layer would run without the context that the cache stands for.
    """
    for value in (*args, *kwargs.values()):
        if _is_cache(value) and name in getattr(value, _LEFT_OUT, ()):
            raise _was_left_out(name)


def _was_left_out(name: str) -> UnsupportedError:
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

"""`apply_policy` and `remove_policy`: what each decoder layer of a model keeps, one instance at a time."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.measure.units import as_gib
from lowtide.memory.checkpoint import LayerState, check_cache, double_recompute, run_layer
from lowtide.memory.offload import ON_DEVICE, Offloader, available
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.report import PolicyReport
from lowtide.memory.stack import Stack, find_stack
from lowtide.swap import child_class

_STATE = "_lowtide_policy"
_BASE = "_lowtide_policy_base"
_LEVEL = "checkpoint_level"
_TILE = "tile_tokens"


def apply_policy(
    model: nn.Module, policy: ActivationPolicy | Sequence[ActivationPolicy], *, host_gib: float | str | None = None
) -> PolicyReport:
    """Set what each decoder layer of a model keeps between its forward and its backward; change this instance only.

    A layer that keeps less is run again in backward, up to the last value that backward needs, by PyTorch's
    non-reentrant checkpoint and with all that it promises: random state and autocast as in forward, any inputs and
    outputs, values and gradients equal to the bit where the layer's kernels are deterministic. With
    ``keep="attention"`` the recompute takes attention's output from what was kept and does not call its kernel; a layer
    that runs no fused attention operator raises. A policy acts wherever gradients are recorded; without them the layer
    runs as it is.

    The layers are found by structure: the longest ``ModuleList`` or ``Sequential`` of modules of one class, or of
    transformers' ``GradientCheckpointingLayer``, whatever the model's family; the report names it. For a model with
    several (an encoder and a decoder), call this for each part. Applying again replaces what was applied before.
    Weights, their names and what ``save_pretrained`` writes do not change. Works before and after `lowtide.patch`,
    ``fully_shard`` and ``torch.compile`` of the model or of its layers.

    With ``offload=True`` what is kept lies in pinned host memory meanwhile, but for the last two of those layers, and
    is brought back a layer ahead of backward. The first forward pins the memory; later ones use it again.

    The recompute runs with the state that the layer had in forward (adapters, modes, hooks, parameters, attributes),
    whatever was assigned since, and restores the current state. Writes to tensors cannot be undone, and raise.

    A recomputing layer fills no cache in training: the empty one that transformers makes for every forward is left out
    (``outputs.past_key_values`` stays empty, and raises when it is passed on), and one that holds keys raises. In
    evaluation, a layer that is given a cache runs as it is.

    Args:
        model: A module with decoder layers: of transformers, peft, or any other.
        policy: One `ActivationPolicy` for all layers, or a sequence with one for each.
        host_gib: The most pinned host memory that ``offload=True`` may take in this process, in GiB, or as a text with
            a unit such as ``"64GiB"``. None: whatever the host has free, or this
            process's part of that where a launcher has started several on it.

    Returns:
        A `PolicyReport`: print it for a table.

    Raises:
        ArgumentTypeError: An argument of another type.
        ArgumentValueError: No list of layers, several longest ones, another number of policies than of layers, layers
            that share an MLP and ask different levels of it, or a ``host_gib`` that is negative or not finite.
        UnsupportedError: The model is under another checkpointing already (transformers' or PyTorch's wrapper), a
            layer's ``forward`` was replaced on the instance, ``mlp_level`` or ``mlp_tile_tokens`` is asked of a layer
            without a fused MLP, or ``offload`` of a machine without a CUDA device. At a layer's first forward:
            ``keep="attention"`` where no fused attention ran, or host memory that does not suffice. In backward: an
            argument, a parameter or a large buffer of a layer that was written to since its forward, or code that was
            replaced since.

    Example:
        >>> report = lowtide.memory.apply_policy(model, ActivationPolicy(keep="attention"))
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        >>> lowtide.memory.remove_policy(model)
    """
    _check(model, policy)
    limit = None if host_gib is None else host_bytes(host_gib)
    stack = find_stack(model)
    policies = [policy] * len(stack.layers) if isinstance(policy, ActivationPolicy) else list(policy)
    if len(policies) != len(stack.layers):
        hint = "Pass one ActivationPolicy for all layers, or a sequence with one for each."
        expected = f"{len(stack.layers)} policies, one for each layer of {stack.name!r}"
        raise ArgumentValueError(message("policy", expected, f"{len(policies)}", hint))
    chosen = dict(zip(stack.layers, policies, strict=True))
    _check_layers(model, stack, chosen)
    _check_shared(stack, chosen)
    for layer in reversed(stack.layers.values()):
        _restore(layer)
    offloaded = [name for name, one in chosen.items() if one.offload]
    moving = offloaded[: max(len(offloaded) - ON_DEVICE, 0)]
    keeping_attention = sum(chosen[name].keep == "attention" for name in moving)
    offloader = Offloader(limit, len(moving), keeping_attention) if offloaded else None
    for name, layer in stack.layers.items():
        own = offloader if chosen[name].offload else None
        _adopt(layer, LayerState(name, chosen[name], own, moves=name in moving))
    sizes = _Sizes(model)
    kept = {name: sizes.bytes_per_token(stack.layers[name], chosen[name]) for name in chosen}
    return PolicyReport(stack.name, chosen, kept, tuple(offloaded[len(moving) :]), stack.others, offloader)


def remove_policy(model: nn.Module) -> None:
    """Undo `apply_policy`: every layer below ``model`` runs as it did before, and pinned host memory is given back.

    A model without a policy is left as it is, so that cleaning up twice does no harm.

    Args:
        model: What `apply_policy` was given, or anything that contains it.

    Raises:
        ArgumentTypeError: ``model`` is no module.

    Example:
        >>> lowtide.memory.remove_policy(model)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    for module in reversed(list(model.modules())):  # the last that set a module which layers share, first
        _restore(module)


def _check(model: object, policy: object) -> None:
    """Raise unless the arguments are what they must be on their own."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    each = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    for one in each:
        if not isinstance(one, ActivationPolicy):
            expected = "a lowtide.memory.ActivationPolicy, or a sequence of them"
            raise ArgumentTypeError(message("policy", expected, f"{one!r} of type {type(one).__name__}"))


def host_bytes(host_gib: float | str) -> int:
    """Return the budget of host memory in bytes."""
    value = as_gib("host_gib", host_gib)
    if not 0 <= value < math.inf:
        hint = "Leave it at None for whatever the host has free."
        raise ArgumentValueError(message("host_gib", "a finite number of GiB, at least 0", f"{host_gib}", hint))
    return int(value * 2**30)


def _check_layers(model: nn.Module, stack: Stack, policies: dict[str, ActivationPolicy]) -> None:
    """Raise before anything has changed if a layer cannot do what its policy says."""
    for name, policy in policies.items():
        layer = stack.layers[name]
        if policy.offload and not available():
            hint = "Take offload=False, or a machine with a CUDA device."
            raise UnsupportedError(message("policy", "a GPU to offload from, with offload=True", "none", hint))
        if policy.keep != "all":
            if "forward" in vars(layer):
                hint = "Undo it (accelerate.hooks.remove_hook_from_module), and put it back after apply_policy."
                got = "one replaced on the instance, which would pass the policy by"
                raise UnsupportedError(message(name, "a layer with the forward of its class", got, hint))
            if hasattr(layer, "_checkpoint_wrapped_module"):
                hint = "Leave torch's checkpoint_wrapper out."
                raise UnsupportedError(
                    message(name, "a layer that nothing else recomputes", type(layer).__name__, hint)
                )
            # Any module of the model: some keep the switch in the list's owner and not in the layers.
            if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
                raise double_recompute(name)
        for field, attribute in (("mlp_level", _LEVEL), ("mlp_tile_tokens", _TILE)):
            if getattr(policy, field) is not None and not _with(attribute, layer):
                hint = (
                    "Call lowtide.patch(model, mlp=True) first; where its report says that it leaves these MLPs as they"
                    f" are, leave {field} at None."
                )
                expected = f"a submodule with {attribute} for {field} to set"
                raise UnsupportedError(message(name, expected, "none", hint))


def _check_shared(stack: Stack, policies: dict[str, ActivationPolicy]) -> None:
    """Raise where layers share one MLP and ask different things of it, of which the last would hold for all."""
    for field, attribute in (("mlp_level", _LEVEL), ("mlp_tile_tokens", _TILE)):
        first: dict[nn.Module, tuple[str, Any]] = {}
        for name, layer in stack.layers.items():
            wanted = getattr(policies[name], field)
            for own, module in _with(attribute, layer).items():
                other, asked = first.setdefault(module, (name, wanted))
                if asked != wanted:
                    expected = f"one {field} in all layers that share the module {own!r}"
                    got = f"{asked} for {other} and {wanted} for {name}"
                    hint = f"Give both the same {field}."
                    raise ArgumentValueError(message("policy", expected, got, hint))


def _with(attribute: str, layer: nn.Module) -> dict[str, Any]:
    """Return a layer's modules that have an attribute, by name."""
    return {name: module for name, module in layer.named_modules() if hasattr(module, attribute)}


def _adopt(layer: nn.Module, state: LayerState) -> None:
    """Put a layer under its policy."""
    if state.policy.mlp_level is not None:
        for name, module in _with(_LEVEL, layer).items():
            state.levels[name] = module.checkpoint_level
            module.checkpoint_level = state.policy.mlp_level
    if state.policy.mlp_tile_tokens is not None:
        for name, module in _with(_TILE, layer).items():
            state.tiles[name] = module.tile_tokens
            module.tile_tokens = state.policy.mlp_tile_tokens
    vars(layer)[_STATE] = state
    if state.policy.keep != "all" and not any(_BASE in vars(cls) for cls in type(layer).__mro__):
        cls: Any = type(layer)
        layer.__class__ = child_class(cls, _overrides, _BASE)


def _restore(layer: nn.Module) -> None:
    """Give a layer back what `_adopt` took; one that has no policy is left as it is."""
    state: LayerState | None = vars(layer).pop(_STATE, None)
    if state is None:
        return
    modules: dict[str, Any] = dict(layer.named_modules())
    for attribute, before in ((_LEVEL, state.levels), (_TILE, state.tiles)):
        for name, value in before.items():
            if hasattr(modules.get(name), attribute):  # unpatched since, it has none
                setattr(modules[name], attribute, value)
    if state.offloader is not None:
        state.offloader.close()
    # A class that something else put on top (fully_shard) stays, and ours inside it runs the stock forward from now on.
    if _BASE in vars(type(layer)):
        layer.__class__ = vars(type(layer))[_BASE]


def _overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a layer under a policy does differently from ``base``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, _STATE, None)
        stock = functools.partial(base.forward, self)  # not a bound method: dynamo may look that up again, and find us
        # A class put on top of ours (fully_shard) keeps it in place under keep="all" as well.
        if state is None or state.policy.keep == "all":
            return stock(*args, **kwargs)
        if not torch.is_grad_enabled():
            check_cache(state.name, args, kwargs)
            return stock(*args, **kwargs)
        return run_layer(self, state, stock, args, kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    return {"forward": forward}


class _Sizes:
    """The widths that the bytes of the report need, where a model's config tells them."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self._hidden: int | None = getattr(config, "hidden_size", None)
        self._heads: int | None = getattr(config, "num_attention_heads", None)
        self._head_dim: int | None = getattr(config, "head_dim", None)

    def bytes_per_token(self, layer: nn.Module, policy: ActivationPolicy) -> int | None:
        """Return what a layer keeps for a token, or None where it is not known."""
        dtypes = [p.dtype for p in layer.parameters() if p.is_floating_point()]
        if policy.keep == "all" or not isinstance(self._hidden, int) or not dtypes:
            return None
        hidden = self._hidden * dtypes[0].itemsize
        if policy.keep == "input":
            return hidden
        if not isinstance(self._heads, int):
            return None
        head_dim = self._head_dim if isinstance(self._head_dim, int) else self._hidden // self._heads
        return hidden + self._heads * (head_dim * dtypes[0].itemsize + 4)  # a float32 logsumexp for each head

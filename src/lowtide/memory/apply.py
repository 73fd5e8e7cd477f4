"""`apply_policy` and `remove_policy`: what each decoder layer of a model saves, one instance at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.measure.units import budget_bytes
from lowtide.memory import copies
from lowtide.memory.checkpoint import LayerState, double_recompute, run_layer
from lowtide.memory.groups import Group
from lowtide.memory.offload import ON_DEVICE, Offloader
from lowtide.memory.policy import ActivationPolicy, words_of
from lowtide.memory.stack import Stack, find_stack
from lowtide.swap import child_class

_STATE = "_lowtide_policy"
_BASE = "_lowtide_policy_base"
_MLP = {"mlp_level": "checkpoint_level", "mlp_tile_tokens": "tile_tokens"}  # the policy's field, and a fused MLP's


@dataclass(frozen=True)
class PolicyReport:
    """What each decoder layer saves from now on; prints in the words of `lowtide plan`.

    Args:
        stack: The name of the list of layers inside the model.
        policies: Each layer's policy, by the layer's name, in order.
        on_device: The names of layers with ``offload=True`` that stay on the GPU, since backward begins with them.
        others: Further lists of layers, not changed.
        offloader: What the layers with ``offload=True`` share; None without any.
    """

    stack: str
    policies: dict[str, ActivationPolicy]
    on_device: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    offloader: Offloader | None = field(default=None, repr=False, compare=False)

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned for these layers now; it grows in the first forward and stays."""
        return self.offloader.host_bytes if self.offloader is not None else 0

    def __str__(self) -> str:
        runs = [(policy, len(list(same))) for policy, same in groupby(self.policies.values())]
        stay = f"; on the GPU all the same: {', '.join(self.on_device)}" * bool(self.on_device)
        return "\n".join([f"{self.stack}: {words_of(runs)}{stay}", *(f"not changed: {other}" for other in self.others)])


def apply_policy(
    model: nn.Module,
    policy: ActivationPolicy | Sequence[ActivationPolicy],
    *,
    host_gib: float | str | None = None,
) -> PolicyReport:
    """Set what each decoder layer of a model saves between its forward and its backward; change this instance only.

    A layer that saves less is recomputed in backward by ``torch.utils.checkpoint(use_reentrant=False)``, with all that
    it promises (random state and autocast as in forward, any inputs and outputs, values and gradients equal to the bit
    where the layer's kernels are deterministic) and its contract: what a layer reads besides its hidden states
    (buffers, attributes, adapters, modes, other arguments) does not change between forward and backward. With
    ``keep="attention"`` the recompute takes attention's output from what was saved and does not call its kernel; a
    layer that runs no fused attention operator raises. A policy acts wherever gradients are recorded; without them the
    layer runs its stock forward.

    The layers are found by structure: the longest ``ModuleList`` or ``Sequential`` of modules of one class, or of
    transformers' ``GradientCheckpointingLayer``, whatever the model's family; the report names it. For a model with
    several (an encoder and a decoder), call this for each part. Applying again replaces what was applied before.
    Weights, their names and what ``save_pretrained`` writes do not change. Works before and after `lowtide.patch`,
    ``fully_shard`` and ``torch.compile`` of the model or of its layers.

    With ``offload=True`` what is saved is in pinned host memory meanwhile, but for the last two of those layers, and
    is brought back a layer ahead of backward. The first forward pins the memory; later ones reuse it.

    With ``every=k`` layers of equal policies form groups of k, from the first on; the last one may be shorter. Only a
    group's first layer saves its input. Backward of a group begins with forwards of all its layers but the last, which
    hold nothing but the other layers' inputs; then each layer is recomputed as usual. Where the model or a hook changes
    hidden states between two layers a group ends, and another one begins.

    A recomputing layer fills no cache in training: the empty one that transformers makes for every forward is left out
    (``outputs.past_key_values`` stays empty, and such a layer raises when it is passed on), and one that holds keys
    raises. In evaluation, a layer that is given a cache runs its stock forward.

    Args:
        model: A module with decoder layers: of transformers, peft, or any other.
        policy: One `ActivationPolicy` for all layers, or a sequence with one for each.
        host_gib: The most pinned host memory that ``offload=True`` may take in this process, in GiB, or as a text with
            a unit such as ``"64GiB"``. None: whatever the host has free, or this process's
            part of that where a launcher has started several on it.

    Returns:
        A `PolicyReport`: print it.

    Raises:
        ArgumentTypeError: An argument of another type.
        ArgumentValueError: No list of layers, several longest ones, another number of policies than of layers, or a
            ``host_gib`` that is negative or not finite.
        UnsupportedError: The model is under another checkpointing already (transformers' or PyTorch's wrapper), a
            layer's ``forward`` was replaced on the instance, ``mlp_level`` or ``mlp_tile_tokens`` is set for a layer
            without a fused MLP, or ``offload`` on a machine without a CUDA device. At a layer's first forward:
            ``keep="attention"`` where no fused attention ran, or a host without room; ``every`` under
            ``torch.compile``, FSDP or ZeRO-3. In backward: a saved tensor that was written to since its forward (or
            PyTorch's own RuntimeError), and ``torch.utils.checkpoint.CheckpointError`` where a recompute saves other
            tensors than the forward did.

    Example:
        >>> report = lowtide.memory.apply_policy(model, ActivationPolicy(keep="attention"))
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        >>> lowtide.memory.remove_policy(model)
    """
    _check(model, policy)
    hint = "None: whatever the host has free."
    limit = None if host_gib is None else budget_bytes("host_gib", host_gib, hint=hint)
    stack = find_stack(model)
    policies = [policy] * len(stack.layers) if isinstance(policy, ActivationPolicy) else list(policy)
    if len(policies) != len(stack.layers):
        hint = "Pass one ActivationPolicy for all layers, or a sequence with one for each."
        expected = f"{len(stack.layers)} policies, one for each layer of {stack.name!r}"
        raise ArgumentValueError(message("policy", expected, f"{len(policies)}", hint))
    chosen = dict(zip(stack.layers, policies, strict=True))
    _check_layers(model, stack, chosen)
    for layer in reversed(stack.layers.values()):
        _restore(layer)
    groups = _groups(chosen)
    offloaded = [names for names in groups if chosen[names[0]].offload]
    moving = offloaded[: max(len(offloaded) - ON_DEVICE, 0)]
    with_attention = sum(chosen[names[0]].keep == "attention" for names in moving)
    offloader = Offloader(limit, len(moving), with_attention) if offloaded else None
    for names in groups:
        group = Group() if chosen[names[0]].every > 1 else None
        for name in names:
            shared = offloader if chosen[name].offload else None
            state = LayerState(name, chosen[name], shared, names in moving, group, first=name == names[0])
            _adopt(stack.layers[name], state)
    staying = tuple(name for names in offloaded[len(moving) :] for name in names)
    return PolicyReport(stack.name, chosen, staying, stack.others, offloader)


def remove_policy(model: nn.Module) -> None:
    """Undo `apply_policy`: every layer below ``model`` is stock again, and pinned host memory is freed.

    Does nothing for a model without a policy, so that cleaning up twice does no harm.

    Args:
        model: What `apply_policy` was given, or anything that contains it.

    Raises:
        ArgumentTypeError: ``model`` is no module.

    Example:
        >>> lowtide.memory.remove_policy(model)
    """
    _check(model)
    for module in reversed(list(model.modules())):  # the last that set a module which layers share, first
        _restore(module)


def _check(model: object, policy: object = ()) -> None:
    """Raise unless the arguments are what they must be on their own."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    each = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    for one in each:
        if not isinstance(one, ActivationPolicy):
            expected = "a lowtide.memory.ActivationPolicy, or a sequence of them"
            raise ArgumentTypeError(message("policy", expected, f"{one!r} of type {type(one).__name__}"))


def _check_layers(model: nn.Module, stack: Stack, policies: dict[str, ActivationPolicy]) -> None:
    """Raise before anything has changed if a layer cannot do what its policy sets."""
    for name, policy in policies.items():
        layer = stack.layers[name]
        if policy.offload and not copies.available():
            hint = "Take offload=False, or a machine with a CUDA device."
            raise UnsupportedError(message("policy", "a GPU to offload from, with offload=True", "none", hint))
        if policy.keep != "all":
            if "forward" in vars(layer):
                hint = "Undo it (accelerate.hooks.remove_hook_from_module), and restore it after apply_policy."
                got = "one replaced on the instance, which would bypass the policy"
                raise UnsupportedError(message(name, "a layer with the forward of its class", got, hint))
            if type(layer).__name__ == "CheckpointWrapper":
                expected, hint = "a layer that nothing else recomputes", "Leave torch's checkpoint_wrapper out."
                raise UnsupportedError(message(name, expected, type(layer).__name__, hint))
            # Any module of the model: some keep the switch in the list's owner and not in the layers.
            if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
                raise double_recompute(name)
        for setting, attribute in _MLP.items():
            if getattr(policy, setting) is not None and not _with(attribute, layer):
                hint = f"Call lowtide.patch(model, mlp=True) first; for MLPs that it cannot fuse, omit {setting}."
                expected = f"a submodule with {attribute} for {setting} to set"
                raise UnsupportedError(message(name, expected, "none", hint))


def _groups(policies: dict[str, ActivationPolicy]) -> list[list[str]]:
    """Return the names of the layers that save something for backward together: each alone, but for ``every``."""
    runs = [(policy.every, list(run)) for policy, run in groupby(policies, key=policies.__getitem__)]
    return [names[i : i + every] for every, names in runs for i in range(0, len(names), every)]


def _with(attribute: str, layer: nn.Module) -> list[nn.Module]:
    """Return a layer's modules that have an attribute."""
    return [module for module in layer.modules() if hasattr(module, attribute)]


def _adopt(layer: nn.Module, state: LayerState) -> None:
    """Put a layer under its policy."""
    for setting, attribute in _MLP.items():
        value = getattr(state.policy, setting)
        for module in _with(attribute, layer) if value is not None else ():
            state.before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    vars(layer)[_STATE] = state
    if state.policy.keep != "all" and not any(_BASE in vars(cls) for cls in type(layer).__mro__):
        cls: Any = type(layer)
        layer.__class__ = child_class(cls, _overrides, _BASE)


def _restore(layer: nn.Module) -> None:
    """Undo `_adopt`, if the layer has a policy."""
    state: LayerState | None = vars(layer).pop(_STATE, None)
    if state is None:
        return
    for module, attribute, value in state.before:
        if hasattr(module, attribute):  # unpatched since, it has none
            setattr(module, attribute, value)
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
        return run_layer(self, state, stock, args, kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    return {"forward": forward}

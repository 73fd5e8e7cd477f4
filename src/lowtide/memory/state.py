"""What a recompute needs from its forward: a layer's Python state, restored, and its tensors, checked for writes.

Between forward and backward anything may be assigned: modes, adapters, hooks, attributes, parameters, random states. A
recompute has to run with the state of the forward, and to leave the current state unchanged, counters among it.

An in-place write raises a tensor's version. A fused optimizer's does not in some releases of PyTorch, so `Versions`
also watches optimizers' steps. Nor does one through ``.data``: `lowtide.samples` compares some values of each weight.
What a layer's own forward writes to its parameters does not count: each run does it again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.code import MODULE_HOOKS, Code
from lowtide.errors import UnsupportedError, message
from lowtide.memory.contents import Contents, has_graph

_OWN = len(vars(nn.Module()))  # attributes that every module has; those of its class come behind them
_SMALL = 1 << 16  # bytes of a buffer that is copied
# Packages whose objects are not looked into.
_FOREIGN = ("torch", "torchao", "builtins", "lowtide", "deepspeed", "accelerate", "bitsandbytes", "numpy")
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, nn.Parameter, Tensor}
_DEPTH = 3  # below an argument or attribute: what its list holds, an object among that, the object's list
_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, set, deque}

_hooks_of = operator.itemgetter(*MODULE_HOOKS)
_KINDS_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")

# Called by functions that layers look up in a table, where their code leads to no further.
_FROM_A_TABLE = ((torch.nn.functional, "scaled_dot_product_attention"),)

_codes: dict[frozenset[type], Code] = {}


class Snapshot:
    """The state from which one forward of a layer starts.

    Args:
        layer: The layer.
        arguments: Its arguments: lists, dictionaries and objects among them may change.
        draws: Whether it may draw from Python's or NumPy's generators, where its code does not show it.
    """

    def __init__(self, layer: nn.Module, arguments: Iterable[Any], *, draws: bool = False) -> None:
        self._places: list[Any] = []  # dictionaries, lists and sets
        self._of_graphs: list[Any] = []  # those among them that hold outputs with their graphs
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._draws, self._of_arguments = draws, False
        self._modules = list(_modules_of(layer))
        self._kinds = [type(module) for module in self._modules]
        self.large_buffers: list[Tensor] = []
        for module in self._modules:
            self._take_module(vars(module))
        self._of_arguments = True
        for value in arguments:
            self._take(value, _DEPTH)
        self._contents = Contents(self._places, self._of_graphs)
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        self.parameters: list[Tensor] = list(dict.fromkeys(parameters))
        self._trained = [p.requires_grad for p in self.parameters]
        self._code = _code_of(frozenset(self._kinds))
        self._around = [read() for read, _ in _AROUND]
        self._watching = [mode for mode in _dispatch_modes() if not _is_foreign(type(mode))]
        draws = self._draws or any(name in self._code.modules for name in ("random", "numpy", "numpy.random"))
        self._random = random_states() if draws else None

    def end(self) -> bool:
        """Call at the end of forward: drops random states that it has not advanced, and returns whether it has."""
        if self._random is not None and positions(self._random) == positions(random_states()):
            self._random = None
        return self._random is not None

    def check(self, name: str) -> None:
        """Raise where a recompute of layer ``name`` would run other code than its forward.

        Raises:
            UnsupportedError: A function or a forward was replaced since, or a mode of the user's is not active.
        """
        exchanged, now = self._code.exchanged(), _dispatch_modes() if self._watching else ()
        missing = next((mode for mode in self._watching if not any(mode is m for m in now)), None)
        if exchanged is not None:
            got, hint = f"another {exchanged}", "Restore it before backward, or replace it for both"
        elif missing is not None:
            got = f"none of the {type(missing).__name__} that was active in forward"
            hint = "Call backward inside the mode as well"
        else:
            return
        expected = "backward to run the code that forward ran"
        raise UnsupportedError(message(name, expected, got, f"{hint}; or set keep='all' for this layer."))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state at forward inside, and the current state afterwards."""
        now = self._contents.now()
        kinds = [(m, type(m), kind) for m, kind in zip(self._modules, self._kinds, strict=True) if type(m) is not kind]
        trained = zip(self.parameters, self._trained, strict=True)
        flips = [p for p, flag in trained if p.requires_grad != flag and p.is_leaf]
        around = [(write, read(), then) for (read, write), then in zip(_AROUND, self._around, strict=True)]
        around = [(write, current, then) for write, current, then in around if current != then]
        random_now = random_states() if self._random is not None else None
        try:
            for module, _, kind in kinds:
                module.__class__ = kind
            if now is not self._contents:
                self._contents.restore()
            for place, clones in self._buffers:
                place.update({name: buffer.clone() for name, buffer in clones.items()})
            for p in flips:
                p.requires_grad_(not p.requires_grad)
            _set_random_states(self._random)
            for write, _, then in around:
                write(then)
            yield
        finally:
            for write, current, _ in around:
                write(current)
            _set_random_states(random_now)
            for p in flips:
                p.requires_grad_(not p.requires_grad)
            now.restore()
            for module, current, _ in kinds:
                module.__class__ = current

    def _take_module(self, own: dict[str, Any]) -> None:
        if "_is_fsdp_managed_module" in own:  # FSDP1 puts views of its own in place, and manages them
            return
        self._places.append(own)
        hooks = _hooks_of(own)
        if any(hooks):
            self._draws = True  # what a hook runs is not looked into
            for place in hooks:
                self._take_content(place, 1)
            self._places += [own[name] for name in _KINDS_OF_HOOKS]
        else:
            self._places += hooks
        for place in (own["_modules"], own["_parameters"]):
            if type(place) in (dict, OrderedDict):  # ZeRO-3's gathers when it is read
                self._places.append(place)
        if own["_buffers"]:
            self._take_buffers(own["_buffers"])
        tensors = dict[str, Tensor]()
        for name, value in islice(own.items(), _OWN, None):
            if isinstance(value, Tensor):
                tensors[name] = value
            elif type(value) not in _LEAVES:
                self._take(value, _DEPTH)
        if tensors:
            self._take_tensors(own, tensors)

    def _take_buffers(self, buffers: dict[str, Any]) -> None:
        self._places.append(buffers)
        plain = {name: buffer for name, buffer in buffers.items() if type(buffer) is Tensor}
        self.large_buffers += [buffer for buffer in plain.values() if not _is_small(buffer)]
        self._clone(buffers, plain)

    def _take_tensors(self, own: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take attributes that are tensors: outputs that the layer has stored, and what may count as a buffer does."""
        if any(map(has_graph, tensors.values())):
            self._of_graphs.append(own)
        self._clone(own, {name: x for name, x in tensors.items() if type(x) is Tensor and not x.requires_grad})

    def _clone(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if small := {name: x.detach().clone() for name, x in tensors.items() if _is_small(x)}:
            self._buffers.append((place, small))

    def _take(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _CONTAINERS:
            self._take_content(value, depth)
        elif kind is tuple and depth:
            for one in value:
                self._take(one, depth - 1)
        elif depth and _is_object(kind):  # type: ignore[arg-type]
            own = vars(value)
            # The tensors of a module's object are part of where its weights are, which is not ours to move.
            if self._of_arguments or not any(issubclass(one, Tensor) for one in set(map(type, own.values()))):
                self._take_content(own, depth)

    def _take_content(self, place: Any, depth: int) -> None:
        if not place:
            self._places.append(place)
            return
        if id(place) in self._seen:
            return
        self._seen.add(id(place))
        values = place.values() if isinstance(place, dict) else place
        kinds = set(map(type, values))
        self._places.append(place)
        if any(issubclass(kind, Tensor) for kind in kinds) and any(map(has_graph, values)):
            self._of_graphs.append(place)
        if depth and not kinds <= _LEAVES:
            for value in values:
                if type(value) not in _LEAVES:
                    self._take(value, depth - 1)


def _modules_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Return a layer and all modules in it: `nn.Module.modules` without its names, which take longer than the rest."""
    left, seen = [layer], {layer}
    while left:
        module = left.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


@functools.cache
def _is_object(kind: type) -> bool:
    """Whether values of a class have attributes that are looked into: a config, a cache, a dataclass."""
    return not _is_foreign(kind) and not issubclass(kind, nn.Module | Tensor | type) and kind.__dictoffset__ != 0


def _code_of(kinds: frozenset[type]) -> Code:
    code = _codes.get(kinds)
    if code is None or code.exchanged() is not None:
        code = _codes[kinds] = Code(kinds, names=_FROM_A_TABLE)
    return code


def _dispatch_modes() -> list[Any]:
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def _function_modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call, no-any-return]


def _set_function_modes(modes: list[Any]) -> None:
    for _ in _function_modes():
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]


_KERNELS = ("flash", "mem_efficient", "math", "cudnn")  # of scaled_dot_product_attention
_IS_ENABLED = [getattr(torch._C, f"_get_{kernel}_sdp_enabled") for kernel in _KERNELS]


def _attention_kernels() -> tuple[bool, ...]:
    return tuple([enabled() for enabled in _IS_ENABLED])


def _set_attention_kernels(enabled: tuple[bool, ...]) -> None:
    for kernel, flag in zip(_KERNELS, enabled, strict=True):
        getattr(torch._C, f"_set_sdp_use_{kernel}")(flag)


# What surrounds a forward: how it is read, and how it is set.
_AROUND: tuple[Any, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_attention_kernels, _set_attention_kernels),
    (_function_modes, _set_function_modes),
)


def random_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global generators; PyTorch's are the checkpoint's affair."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def positions(states: tuple[Any, Any]) -> Any:
    """Return what any draw changes in the states."""
    (_, python, gauss), numpy = states
    return python[0], python[-1], gauss, None if numpy is None else (numpy[1][0], *numpy[2:])


def _set_random_states(states: tuple[Any, Any] | None) -> None:
    if states is not None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy.random"].set_state(states[1])


_watched: weakref.WeakSet[Versions] = weakref.WeakSet()

_OWN_WRITES = "_lowtide_own_writes"  # of a parameter: how many of its versions forwards of its layer have made


@contextlib.contextmanager
def own_writes(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let `Versions` see no change in what a layer's own forward writes to its parameters inside.

    peft's adapters of experts set each weight to itself in every forward. Whether values changed is `Samples`' affair,
    so only what it samples is let off: plain parameters.
    """
    plain = [p for p in parameters if type(p) is nn.Parameter and not p.is_inference()]
    before = _versions(plain)
    try:
        yield
    finally:
        for p, version, now in zip(plain, before, _versions(plain), strict=True):
            if now != version:
                setattr(p, _OWN_WRITES, getattr(p, _OWN_WRITES, 0) + now - version)


def have_own_writes(parameters: Iterable[Tensor]) -> bool:
    """Whether a forward has written to one of them inside `own_writes`."""
    return any(_OWN_WRITES in vars(p) for p in parameters)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the versions that tensors would have without their layer's own writes."""
    return [x._version - vars(x).get(_OWN_WRITES, 0) for x in tensors]


class Versions:
    """The versions of some tensors, now: inference tensors have none, and are left out."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [x for x in tensors if not x.is_inference()]
        self._seen = _versions(self._tensors)
        self._stepped = False
        if self._tensors:
            _watched.add(self)

    def changed(self) -> bool:
        """Return whether one of them was written to since, but for `own_writes`."""
        return self._stepped or _versions(self._tensors) != self._seen

    def see_step(self, stepped: set[int]) -> None:
        """Note that an optimizer stepped the tensors of these ids."""
        self._stepped |= any(id(x) in stepped for x in self._tensors)


def _see_step(optimizer: Any, *_: Any) -> None:
    if _watched:
        fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
        stepped = {id(p) for params in fused for p in params if p.grad is not None}
        for versions in list(_watched) if stepped else ():
            versions.see_step(stepped)


register_optimizer_step_post_hook(_see_step)

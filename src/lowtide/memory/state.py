"""The Python state of a layer at its forward, restored while the layer is recomputed.

Between forward and backward anything may be assigned: modes, adapters, hooks, attributes, parameters, random states. A
recompute has to run with the state of the forward, and to leave the current state unchanged, counters among it.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.code import MODULE_HOOKS, Code
from lowtide.errors import UnsupportedError, message

_OWN = len(vars(nn.Module()))  # attributes that every module has; those of its class come behind them
_SMALL = 1 << 16  # bytes of a buffer of which a copy is kept
_FOREIGN = (
    "torch",
    "torchao",
    "builtins",
    "lowtide",
    "deepspeed",
    "accelerate",
    "bitsandbytes",
    "numpy",
)  # whose objects are not looked into
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, nn.Parameter, Tensor}
_DEPTH = 4  # an argument, its list, an object in it, that object's list

# Called by functions that layers look up in a table, where their code leads to no further.
_FROM_A_TABLE = ((torch.nn.functional, "scaled_dot_product_attention"),)

_codes: dict[frozenset[type], Code] = {}


class Snapshot:
    """The state from which one forward of a layer starts.

    Args:
        layer: The layer.
        arguments: Its arguments: lists, dictionaries and objects among them may change.
    """

    def __init__(self, layer: nn.Module, arguments: Iterable[Any]) -> None:
        self._contents: list[tuple[Any, Any]] = []  # dictionaries, lists and sets, and copies of them
        self._empty: list[Any] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._draws = self._of_arguments = False
        self._modules = list(_modules_of(layer))
        self._kinds = [type(module) for module in self._modules]
        self.large_buffers: list[Tensor] = []
        for module in self._modules:
            self._take_module(vars(module))
        self._of_arguments = True
        for value in arguments:
            self._take(value, _DEPTH)
        parameters = (p for module in self._modules for p in module._parameters.values() if p is not None)
        self.parameters: list[Tensor] = list(dict.fromkeys(parameters))
        self._trained = [p.requires_grad for p in self.parameters]
        self._code = _code_of(frozenset(self._kinds))
        self._around = _Around()
        self._random = _random_states() if self._draws or _draws(self._code) else None

    def end(self) -> None:
        """Call at the end of forward: drops random states that it has not advanced."""
        if self._random is not None and _positions(self._random) == _positions(_random_states()):
            self._random = None

    def check(self, name: str) -> None:
        """Raise where a recompute of layer ``name`` would run other code than its forward.

        Raises:
            UnsupportedError: A function or a forward was replaced since, or a mode of the user's is not active.
        """
        exchanged = self._code.exchanged()
        expected = "backward to run the code that forward ran"
        if exchanged is not None:
            hint = "Put it back before backward, or replace it for both; or give this layer keep='all'."
            raise UnsupportedError(message(name, expected, f"another {exchanged}", hint))
        mode = self._around.missing_mode()
        if mode is not None:
            hint = "Call backward inside the mode as well, or give this layer keep='all'."
            raise UnsupportedError(message(name, expected, f"none of the {mode} that was active in forward", hint))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state at forward inside, and the current state afterwards."""
        now = [(place, _copy(place)) for place, copy in self._contents if not _same(place, copy)]
        now += [(place, _copy(place)) for place in self._empty if place]
        kinds = [(m, type(m)) for m, kind in zip(self._modules, self._kinds, strict=True) if type(m) is not kind]
        flips = [
            p for p, flag in zip(self.parameters, self._trained, strict=True) if p.requires_grad != flag and p.is_leaf
        ]
        random_now = _random_states() if self._random is not None else None
        try:
            for module, kind in zip(self._modules, self._kinds, strict=True):
                if type(module) is not kind:
                    module.__class__ = kind
            changed = {id(place) for place, _ in now}
            for place, copy in self._contents:
                if id(place) in changed:
                    _put(place, _kept_out(copy, place))
            for place in self._empty:
                place.clear()
            for place, clones in self._buffers:
                place.update({name: buffer.clone() for name, buffer in clones.items()})
            for p in flips:
                p.requires_grad_(not p.requires_grad)
            if self._random is not None:
                _set_random_states(self._random)
            with self._around:
                yield
        finally:
            if random_now is not None:
                _set_random_states(random_now)
            for p in flips:
                p.requires_grad_(not p.requires_grad)
            before = {id(place): copy for place, copy in now}
            for place, copy in self._contents:
                wanted = before.get(id(place), copy)
                if not _same(place, wanted):
                    _put(place, _kept_out(wanted, place))
            for place in self._empty:
                if place or id(place) in before:
                    _put(place, before.get(id(place), ()))
            for module, kind in kinds:
                module.__class__ = kind

    def _take_module(self, own: dict[str, Any]) -> None:
        if "_is_fsdp_managed_module" in own:  # FSDP1 puts views of its own in place, and looks after them
            return
        self._contents.append((own, own.copy()))
        for name in MODULE_HOOKS:
            if own[name]:
                self._take_content(own[name], 1)
                self._draws = True  # what a hook runs is not looked into
            else:
                self._empty.append(own[name])
        for name in ("_modules", "_parameters"):
            if type(own[name]) in (dict, OrderedDict):  # ZeRO-3's gathers when it is read
                self._take_content(own[name], 0, always=True)
        if own["_buffers"]:
            self._take_buffers(own["_buffers"])
        for value in islice(own.values(), _OWN, None):
            if type(value) not in _LEAVES:
                self._take(value, 2)

    def _take_buffers(self, buffers: dict[str, Any]) -> None:
        self._take_content(buffers, 0, always=True)
        clones = {}
        for name, buffer in buffers.items():
            if type(buffer) is not Tensor:
                continue
            if buffer.numel() * buffer.element_size() <= _SMALL:
                clones[name] = buffer.detach().clone()
            else:
                self.large_buffers.append(buffer)
        if clones:
            self._buffers.append((buffers, clones))

    def _take(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in (dict, OrderedDict, list, set, deque):
            self._take_content(value, depth)
        elif kind is tuple and depth:
            for one in value:
                self._take(one, depth - 1)
        elif depth and _is_object(kind):
            own = vars(value)
            # A module's object with tensors has a part in where its weights are, which is not for us to move.
            if self._of_arguments or not any(isinstance(one, Tensor) for one in own.values()):
                self._take_content(own, depth)

    def _take_content(self, place: Any, depth: int, *, always: bool = False) -> None:
        if not place:
            self._empty.append(place)
            return
        if id(place) in self._seen:
            return
        self._seen.add(id(place))
        values = list(place.values()) if isinstance(place, dict) else list(place)
        # A tensor with a graph is an output that somebody has put by: held, it holds the graph of the step before.
        if not always and any(type(value) is Tensor and value.grad_fn is not None for value in values):
            return
        self._contents.append((place, _copy(place)))
        if depth:
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


_objects: dict[type, bool] = {}


def _is_object(kind: type) -> bool:
    """Whether values of a class have attributes that are looked into: a config, a cache, a dataclass."""
    known = _objects.get(kind)
    if known is None:
        foreign = kind.__module__.partition(".")[0] in _FOREIGN
        known = not foreign and not issubclass(kind, nn.Module | Tensor | type) and kind.__dictoffset__ != 0
        _objects[kind] = known
    return known


def _copy(place: Any) -> Any:
    return dict(place) if isinstance(place, dict) else list(place)


def _same(place: Any, copy: Any) -> bool:
    """Whether a container holds the very objects of its copy, in the same order. Tensors are not compared by value."""
    if len(place) != len(copy):
        return False
    if isinstance(place, dict):
        return all(map(operator.is_, place.values(), copy.values()))
    return all(map(operator.is_, place, copy))


def _put(place: Any, content: Any) -> None:
    place.clear()
    if isinstance(place, list | deque):
        place.extend(content)
    else:
        place.update(content)


def _kept_out(copy: Any, place: Any) -> Any:
    """Return what a container held, but for sharded Parameters, which FSDP2 puts in place and takes away itself."""
    if not isinstance(place, dict):
        return copy
    return {
        name: place[name] if name in place and (_is_sharded(value) or _is_sharded(place[name])) else value
        for name, value in copy.items()
    }


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def _code_of(kinds: frozenset[type]) -> Code:
    code = _codes.get(kinds)
    if code is None or code.exchanged() is not None:
        classes = dict.fromkeys(
            c for kind in kinds for c in kind.__mro__ if "forward" in vars(c) and c is not nn.Module
        )
        code = _codes[kinds] = Code(classes, names=_FROM_A_TABLE)
    return code


class _Around:
    """What PyTorch does by default now, and which modes look at its functions."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._attention = _attention_backends()
        self._modes = _function_modes()
        self._looking = [mode for mode in _dispatch_modes() if type(mode).__module__.partition(".")[0] not in _FOREIGN]

    def missing_mode(self) -> str | None:
        """Return the name of a dispatch mode, not of a library's, that was active and is not."""
        if not self._looking:
            return None
        now = _dispatch_modes()
        return next((type(mode).__name__ for mode in self._looking if not any(mode is m for m in now)), None)

    def __enter__(self) -> None:
        self._now = torch.get_default_dtype(), _attention_backends(), _function_modes()
        self._change(self._now, (self._dtype, self._attention, self._modes))

    def __exit__(self, *_: object) -> None:
        self._change((self._dtype, self._attention, self._modes), self._now)

    def _change(self, before: Any, after: Any) -> None:
        if before[0] != after[0]:
            torch.set_default_dtype(after[0])
        if before[1] != after[1]:
            _set_attention_backends(after[1])
        if before[2] != after[2]:
            for _ in before[2]:
                torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
            for mode in after[2]:
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _function_modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call, no-any-return]


def _dispatch_modes() -> list[Any]:
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def _attention_backends() -> tuple[bool, ...]:
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


def _set_attention_backends(enabled: tuple[bool, ...]) -> None:
    c = torch._C
    setters = (c._set_sdp_use_flash, c._set_sdp_use_mem_efficient, c._set_sdp_use_math, c._set_sdp_use_cudnn)
    for set_enabled, flag in zip(setters, enabled, strict=True):
        set_enabled(flag)


def _random_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global generators; PyTorch's are the checkpoint's affair."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _draws(code: Code) -> bool:
    """Whether code names one of these generators, as far as it can be followed."""
    return any(name in code.modules for name in ("random", "numpy", "numpy.random"))


def _positions(states: tuple[Any, Any]) -> Any:
    """Return what any draw changes in the states."""
    (_, python, gauss), numpy = states
    return python[0], python[-1], gauss, None if numpy is None else (numpy[1][0], *numpy[2:])


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])

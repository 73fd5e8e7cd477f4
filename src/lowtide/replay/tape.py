"""The record of a call: PyTorch's operators and Triton's launches, in order, with names for their tensors."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

MOST_STEPS = 4096  # these take a second to record, and 40 MiB
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}


@dataclass(frozen=True)
class Pointer:
    """A place in memory: bytes from the beginning of a value's."""

    root: int
    offset: int


@dataclass(frozen=True)
class Value:
    """A tensor in the record."""

    index: int
    at: Pointer = field(compare=False)


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor of a tensor in the record; ``like`` has all but the tensor."""

    like: Any
    at: Pointer


@dataclass(frozen=True, kw_only=True)
class Step:
    """The call of an operator, or a launch."""

    function: Any
    args: tuple[Any, ...]  # nested, with the record's own in place of tensors
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: Any = None  # new values, nested as they are returned; None: none
    writes: bool = True  # to memory that others read, or has another effect
    is_view: bool = False
    launch: bool = False  # takes pointers, and the stream as its fourth argument


class Tape(TorchDispatchMode):
    """Records the operators of PyTorch while it is active, and Triton's launches: see `launched`."""

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.constants: dict[int, Tensor] = {}
        self.is_whole = True  # whether the record can be repeated
        self._values: Any = WeakIdKeyDictionary()
        self._count = 0
        self.inputs = [self._new(arg) if isinstance(arg, Tensor) else None for arg in args]

    def _new(self, tensor: Tensor, at: Pointer | None = None) -> Value:
        self.is_whole &= tensor not in self._values  # one tensor as two arguments
        value = Value(self._count, Pointer(self._count, 0) if at is None else at)
        self._values[tensor] = value
        self._count += 1
        return value

    def value(self, tensor: Tensor) -> Value:
        """Return what stands for a tensor."""
        found: Value | None = self._values.get(tensor)
        if found is None:  # it was made by something that is not on record
            found = self._new(tensor)
            if tensor.dim() == 0 and tensor.device.type == "cpu":  # a number of Python's, as a tensor
                self.constants[found.index] = tensor
            else:
                self.is_whole = False
        return found

    def _standing(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, Tensor) else leaf

    def _pointing(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.value(leaf).at
        base = getattr(leaf, "base", None)
        if not isinstance(base, Tensor):
            return leaf
        like = copy.copy(leaf)
        like.base = None  # the record outlives the memory
        return Descriptor(like, self.value(base).at)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip, PyTorch imports Dynamo in the first recording, and keeps its frames for ever."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        self.is_whole &= len(self.steps) < MOST_STEPS
        if not self.is_whole:
            return func(*args, **kwargs)
        given = replaced((args, kwargs), self._standing)
        written = _written(func, args, kwargs)
        lay = list(map(_lies, written))
        out = func(*args, **kwargs)
        made = [leaf for leaf in leaves(out) if not isinstance(leaf, Tensor) or leaf not in self._values]
        if not all(isinstance(leaf, Tensor) for leaf in made if leaf is not None):
            self.is_whole = False  # a number, which may decide what comes next
            return out
        self.is_whole &= torch.Tag.dynamic_output_shape not in func.tags
        self.is_whole &= lay == list(map(_lies, written))  # else views and pointers taken before are of other memory
        self.is_whole &= not any(self.value(x).index in self.constants for x in written)
        if func is torch.ops.aten.as_strided.default and len(args) + len(kwargs) > 3:
            self.is_whole = False  # it counts from the beginning of memory, where another call's tensor may not begin
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in made:
            if tensor is not None:
                self._new(tensor, self._place(tensor, tensors))
        results = replaced(out, self._standing) if made else None
        if func in _EMPTY and out.is_contiguous():  # PyTorch's own function takes half the time
            how = {"dtype": out.dtype, "device": out.device}
            step = Step(function=torch.empty, args=(tuple(out.shape),), kwargs=how, results=results, writes=False)
        else:
            is_view = bool(made) and all(self.value(x).at.root != self.value(x).index for x in made if x is not None)
            acts = not func._schema.returns or torch.Tag.nondeterministic_seeded in func.tags
            step = Step(
                function=func._op, args=given[0], kwargs=given[1], results=results,
                writes=func._schema.is_mutable or acts, is_view=is_view,
            )  # fmt: skip
        self.steps.append(step)
        return out

    def _place(self, out: Tensor, tensors: list[Tensor]) -> Pointer | None:
        """Return where a view of one of the tensors lies; None for memory of its own."""
        storage = out.untyped_storage()._cdata
        base = next((x for x in tensors if x.untyped_storage()._cdata == storage), None)
        if base is None:
            return None
        at = self.value(base).at
        moved = (out.storage_offset() * out.itemsize) - (base.storage_offset() * base.itemsize)
        return Pointer(at.root, at.offset + int(moved))

    def launched(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record the launch of a compiled kernel: ``function(*args)``, the stream its fourth argument."""
        if not self.is_whole:
            return
        given = tuple(replaced(arg, self._pointing) for arg in args)
        self.steps.append(Step(function=function, args=given, launch=True))

    def called(self, function: Callable[..., Any], args: Sequence[Any], constants: dict[str, Any]) -> None:
        """Record the call of a kernel in Triton's interpreter."""
        if not self.is_whole:
            return
        given = replaced((tuple(args), constants), self._standing)
        self.steps.append(Step(function=function, args=given[0], kwargs=given[1]))

    def begun(self, function: Callable[..., Any], args: Sequence[Any], work: Any) -> Any:
        """Record that ``function(*args)``, beside the operators, has begun ``work``, and its end by ``work.wait()``."""
        if not self.is_whole:
            return work
        given, value = replaced(tuple(args), self._standing), Value(self._count, Pointer(self._count, 0))
        self._count += 1
        self.steps.append(Step(function=function, args=given, results=value))
        return _Begun(self, value, work)

    def ended(self, value: Value) -> None:
        """Record the wait for what was begun."""
        self.steps.append(Step(function=_wait, args=(value,)))


@dataclass(frozen=True)
class _Begun:
    tape: Tape
    value: Value
    work: Any

    def wait(self) -> None:
        self.work.wait()
        self.tape.ended(self.value)


def _wait(work: Any) -> None:
    work.wait()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    named = func._schema.arguments
    given = dict(zip((x.name for x in named), args, strict=False)) | kwargs
    to = [given.get(x.name) for x in named if x.alias_info is not None and x.alias_info.is_write]
    return [leaf for leaf in leaves(to) if isinstance(leaf, Tensor)]


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies in memory."""
    return tensor.shape, tensor.stride(), tensor.data_ptr()


def replaced(nested: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dictionaries with ``leaf`` of each of their leaves."""
    if isinstance(nested, tuple) and not isinstance(nested, torch.Size):
        found = tuple(replaced(x, leaf) for x in nested)
        return type(nested)._make(found) if hasattr(nested, "_make") else found
    if type(nested) is list:
        return [replaced(x, leaf) for x in nested]
    if type(nested) is dict:
        return {name: replaced(x, leaf) for name, x in nested.items()}
    return leaf(nested)


def leaves(nested: Any) -> Iterable[Any]:
    """Yield the leaves of nested tuples, lists and dictionaries."""
    if isinstance(nested, tuple | list | dict):
        for x in nested.values() if isinstance(nested, dict) else nested:
            yield from leaves(x)
    else:
        yield nested

"""Prepared calls: what a function does on a GPU, recorded once and repeated without the Python that decided it.

Before a call's first kernel stands Python: a plan, views, the arguments of each launch. All of it follows from the
arguments' shapes, strides and dtypes, and from those that are no tensors. The second call with the same ones is
recorded: every operator of PyTorch that runs, and every launch by `kernel_launch.Launcher`. From the record a
straight-line function is written, as a compiler would: it allocates, calls the same operators and launches the same
kernels in the same order, so results have the same bits. The pointer of a view is a pointer plus a number, views that
only launches read are not made, and memory is freed after its last use.

What cannot be repeated is not recorded: a number read from a tensor, a size that depends on one, another device.
"""

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

MOST_PROGRAMS = 256  # of one function
MOST_ARENA = 16 * 2**20  # bytes of small buffers in one allocation
ALIGNMENT = 512  # bytes, as PyTorch's allocator has
DEVICES = frozenset({"cuda"})  # where calls are repeated

Compute = Callable[..., tuple[Tensor, ...]]


class _Recording(threading.local):
    tape: "Tape | None" = None


RECORDING = _Recording()  # what takes this thread's launches


class Replayed:
    """A function of tensors and hashable values that returns new tensors, repeated from a record where possible.

    The numbers in its tensors decide nothing that it does. It is called while no gradients are recorded.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._programs: dict[tuple[Any, ...], Compute | None] = {}  # None: called once; `compute`: cannot be repeated

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the function's result."""
        facts = facts_of(args)
        if facts is None:
            return self.compute(*args)
        program = self._programs.get(facts, False)
        if callable(program):
            return program(*args)
        if program is None:
            self._programs[facts] = self.compute  # stays where an error ends the recording
            results, program = record(self.compute, args)
            self._programs[facts] = program or self.compute
            return results
        if len(self._programs) >= MOST_PROGRAMS:
            self._programs.clear()
        self._programs[facts] = None
        return self.compute(*args)


def facts_of(args: Iterable[Any], *, connected: bool = False) -> tuple[Any, ...] | None:
    """Return all that a call depends on besides the numbers in its tensors; None where it is not to be repeated.

    With ``connected`` also what autograd, and checks of types, depend on.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or RECORDING.tape is not None or launches_are_watched():
        return None
    facts: list[Any] = []
    device = None
    for arg in args:
        kind = type(arg)
        if kind is not Tensor and kind is not Parameter:
            if isinstance(arg, Tensor):
                return None
            facts.append(arg)
            if connected:
                facts.append(kind)
            continue
        place = arg.device
        if place.type in DEVICES:
            if device is None:
                device = place
            elif device != place:
                return None
            facts += (arg.dtype, arg.shape, arg.stride(), arg.data_ptr() % 16)
        elif arg.dim() or place.type != "cpu":
            return None
        else:  # a number on the host
            facts += (arg.dtype, place)
        if connected:
            facts.append(arg.requires_grad)
    if device is None:
        return None
    facts.append(device)
    if connected:
        kind = device.type
        facts += (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return tuple(facts)


def launches_are_watched() -> bool:
    """Return whether something, as Triton's profiler does, gets each launch's facts from Triton itself."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return False
    return any(getattr(getattr(knobs.runtime, name, None), "calls", None) for name in _HOOKS)


_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}
_HOOKS = ("launch_enter_hook", "launch_exit_hook")


class Checked:
    """A function that checks and orders arguments, which is called once for all with the same facts.

    It returns records (NamedTuples) of its arguments themselves and of what follows from their facts, then other values
    that do. What has made another tensor of one is called each time.
    """

    def __init__(self, check: Callable[..., tuple[Any, ...]]) -> None:
        self.check = check
        self._known: dict[tuple[Any, ...], list[_Template]] = {}

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return what the function returns."""
        facts = None if torch.compiler.is_compiling() or _is_transformed() else _hashable(args)
        if facts is None:
            return self.check(*args)
        known = self._known.get(facts)
        if known is not None:
            return tuple([template(args) for template in known])
        found = self.check(*args)
        templates = [_Template.of(part, args) for part in found]
        if None not in templates:
            if len(self._known) >= MOST_PROGRAMS:
                self._known.clear()
            self._known[facts] = templates  # type: ignore[assignment]
        return found


def _is_transformed() -> bool:
    """Return whether a call may be one of torch.func's transforms, of forward-mode derivatives or of a trace."""
    c: Any = torch._C
    level = torch.autograd.forward_ad._current_level
    return level >= 0 or c._functorch.peek_interpreter_stack() is not None or c._get_tracing_state() is not None


def _hashable(args: Sequence[Any]) -> tuple[Any, ...] | None:
    try:
        facts = facts_of(args, connected=True)
        hash(facts)
    except (TypeError, RuntimeError):  # an argument of a wrong kind, for which the check has words
        return None
    return facts


@dataclass(frozen=True)
class _Template:
    """A record in which tensors are replaced by those of another call; or another value."""

    values: Any
    make: Callable[[Any], Any] | None = None
    places: tuple[tuple[int, int], ...] = ()  # of a value, and of the argument that goes there

    @classmethod
    def of(cls, found: Any, args: Sequence[Any]) -> "_Template | None":
        """Return the template of a record; None if it holds a tensor that follows from others."""
        if not hasattr(found, "_make"):
            return cls(found)
        numbers_only = not any(isinstance(arg, Tensor) and arg.dim() == 0 for arg in args)
        places = []
        for at, value in enumerate(found):
            if isinstance(value, Tensor):
                origin = next((i for i, arg in enumerate(args) if arg is value), None)
                if origin is not None:
                    places.append((at, origin))
                elif value.dim() or value.device.type != "cpu" or not numbers_only:
                    return None
        return cls(list(found), found._make, tuple(places))

    def __call__(self, args: Sequence[Any]) -> Any:
        """Return the record of these arguments."""
        if self.make is None:
            return self.values
        values = self.values.copy()
        for at, origin in self.places:
            values[at] = args[origin]
        return self.make(values)


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
    """A TMA descriptor of a tensor in the record."""

    like: Any
    at: Pointer


@dataclass(frozen=True, kw_only=True)
class Step:
    """The call of an operator, or a launch."""

    function: Any
    args: tuple[Any, ...]  # nested, with the record's own in place of tensors
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: Any = None  # new values, nested as they are returned; None: none
    writes: bool = True  # to memory that others read
    is_view: bool = False
    launch: bool = False  # takes pointers, and the stream as its fourth argument


class Tape(TorchDispatchMode):
    """Records the operators of PyTorch while it is active, and Triton's launches: see `launched`."""

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
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
        if found is None:
            self.is_whole = False  # it was made by something that is not on record
            found = self._new(tensor)
        return found

    def _standing(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, Tensor) else leaf

    def _pointing(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.value(leaf).at
        base = getattr(leaf, "base", None)
        return Descriptor(leaf, self.value(base).at) if isinstance(base, Tensor) else leaf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        given = replaced((args, kwargs), self._standing)
        out = func(*args, **kwargs)
        made = [leaf for leaf in leaves(out) if not isinstance(leaf, Tensor) or leaf not in self._values]
        if not all(isinstance(leaf, Tensor) for leaf in made if leaf is not None):
            self.is_whole = False  # a number, which may decide what comes next
            return out
        self.is_whole &= torch.Tag.dynamic_output_shape not in func.tags
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
            step = Step(
                function=func._op, args=given[0], kwargs=given[1], results=results, writes=func._schema.is_mutable,
                is_view=is_view,
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
        given = tuple(replaced(arg, self._pointing) for arg in args)
        self.steps.append(Step(function=function, args=given, launch=True))

    def called(self, function: Callable[..., Any], args: Sequence[Any], constants: dict[str, Any]) -> None:
        """Record the call of a kernel in Triton's interpreter."""
        given = replaced((tuple(args), constants), self._standing)
        self.steps.append(Step(function=function, args=given[0], kwargs=given[1]))


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


def record(compute: Compute, args: Sequence[Any]) -> tuple[tuple[Tensor, ...], Compute | None]:
    """Return a function's result, and what repeats its work; None if that is impossible."""
    tape = Tape(args)
    RECORDING.tape = tape
    try:
        with tape:
            results = compute(*args)
    finally:
        RECORDING.tape = None
    outputs = [tape.value(out) for out in results]
    return results, _written(tape, outputs, args) if tape.is_whole else None


def _used(step: Step, kind: type[Value | Pointer]) -> set[int]:
    """Return which values a step takes, as tensors or (with ``Pointer``) as the roots of pointers."""
    found = [leaf.at if isinstance(leaf, Descriptor) else leaf for leaf in leaves((step.args, step.kwargs))]
    return {getattr(leaf, "index" if kind is Value else "root") for leaf in found if isinstance(leaf, kind)}


def _made(step: Step) -> set[int]:
    return {leaf.index for leaf in leaves(step.results) if isinstance(leaf, Value)}


def _needed(tape: Tape, outputs: list[Value]) -> list[Step]:
    """Return the steps on which the outputs, or memory that is written, depend."""
    wanted, steps = {value.index for value in outputs}, []
    for step in reversed(tape.steps):
        if step.writes or _made(step) & wanted:
            steps.append(step)
            wanted |= _used(step, Value) | _used(step, Pointer)
    return steps[::-1]


def _late(steps: list[Step]) -> list[Step]:
    """Return the steps with each allocation and each view right before the first step that takes it.

    What the host does not do before the first launches, it does while they run.
    """
    ordered, waiting = list[Step](), dict[int, Step]()

    def put(step: Step) -> None:
        for index in sorted(_used(step, Value) | _used(step, Pointer)):
            if index in waiting:
                put(waiting.pop(index))
        ordered.append(step)

    for step in steps:
        made = _made(step)
        if len(made) == 1 and not step.launch and not step.writes and (step.function is torch.empty or step.is_view):
            waiting[made.pop()] = step
        else:
            put(step)
    for index in list(waiting):
        if index in waiting:
            put(waiting.pop(index))
    return ordered


def _arena(steps: list[Step], stay: set[int]) -> tuple[dict[int, int], int]:
    """Return where in one allocation the small buffers lie that only launches take, and its bytes."""
    taken = stay.union(*(_used(step, Value) for step in steps))
    places, size = dict[int, int](), 0
    for step in steps:
        if step.function is torch.empty and not _made(step) & taken:
            (shape,), (index,) = step.args, _made(step)
            needed = -(-math.prod(shape) * step.kwargs["dtype"].itemsize // ALIGNMENT) * ALIGNMENT
            if size + needed <= MOST_ARENA:
                places[index], size = size, size + needed
    return places, size


def _written(tape: Tape, outputs: list[Value], args: Sequence[Any]) -> Compute:
    """Return the record as a function of its own."""
    stay = {value.index for value in outputs}
    steps = _late(_needed(tape, outputs))
    device = next(arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type in DEVICES)
    names: dict[str, Any] = {"stream_of": _stream_of, "device": device.index, "empty": torch.empty}
    places, size = _arena(steps, stay)
    roots = set[int]().union(*(_used(step, Pointer) for step in steps))
    last = {index: i for i, step in enumerate(steps) for index in _used(step, Value) | _used(step, Pointer)}
    ends = max((last[index] for index in places), default=-1)
    given = [f"_{i}" if value is None else f"v{value.index}" for i, value in enumerate(tape.inputs)]
    lines = [f"p{value.index} = v{value.index}.data_ptr()" for value in tape.inputs if value and value.index in roots]
    if any(step.launch for step in steps):
        lines.append("stream = stream_of(device)")
    if places:
        names |= {"place": device, "byte": torch.uint8}
        lines += [f"arena = empty(({size},), dtype=byte, device=place)", "start = arena.data_ptr()"]
        lines += [f"p{index} = start + {place}" for index, place in places.items()]
    for i, step in enumerate(steps):
        new = _made(step)
        if not new or not new <= places.keys():
            lines.append(_line(step, names))
        lines += [f"p{index} = v{index}.data_ptr()" for index in sorted((new & roots) - places.keys())]
        used = new | _used(step, Value) | _used(step, Pointer)
        dead = [f"v{x}" for x in sorted(used - stay - places.keys()) if last.get(x, i) == i] + ["arena"] * (i == ends)
        if dead:
            lines.append(f"del {', '.join(dead)}")
    lines.append(f"return ({''.join(f'v{value.index}, ' for value in outputs)})")
    source = f"def run({', '.join(given)}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<prepared call>", "exec"), names)
    run: Compute = names["run"]
    return run


def _line(step: Step, names: dict[str, Any]) -> str:
    """Return a step as source, and put what it needs among the names."""

    def constant(value: Any) -> str:
        name = f"c{len(names)}"
        names[name] = value
        return name

    def source(x: Any) -> str:
        if isinstance(x, Value):
            return f"v{x.index}"
        if isinstance(x, Pointer):
            return f"p{x.root} + {x.offset}" if x.offset else f"p{x.root}"
        if isinstance(x, Descriptor):
            return f"{constant(_descriptors(x.like))}({source(x.at)})"
        if isinstance(x, tuple) and not isinstance(x, torch.Size):
            record = constant(type(x)._make) if hasattr(x, "_make") and not step.launch else ""
            return f"{record}(({''.join(f'{source(y)}, ' for y in x)}))"
        if type(x) is list:
            return f"[{', '.join(map(source, x))}]"
        return repr(x) if x is None or type(x) in (int, bool, str) else constant(x)

    args = [source(x) for x in step.args] + [f"{name}={source(x)}" for name, x in step.kwargs.items()]
    if step.launch:
        args[3] = "stream"
    call = f"{constant(step.function)}({', '.join(args)})"
    return call if step.results is None else f"{source(step.results)} = {call}"


def _stream_of(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _descriptors(like: Any) -> Callable[[int], Any]:
    """Return a function that returns such a descriptor of other memory."""

    @lru_cache(64)
    def at(pointer: int) -> Any:
        other = copy.copy(like)
        other.base = _Memory(pointer)
        return other

    return at


@dataclass(frozen=True)
class _Memory:
    pointer: int

    def data_ptr(self) -> int:
        return self.pointer

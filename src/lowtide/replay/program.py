"""A record as a straight-line function."""

import copy
import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowtide.replay.tape import Descriptor, Pointer, Step, Tape, Value, leaves

MOST_BUFFER, MOST_ARENA = 2 * 2**20, 16 * 2**20  # bytes of a small buffer, and of the allocation that holds all
ALIGNMENT = 512  # bytes, as PyTorch's allocator has


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
    """Return where in one allocation the small buffers lie that only launches take, and its bytes.

    Two whose uses do not overlap may share a place, as kernels of a stream run in order; the largest is placed first.
    """
    taken, last = stay.union(*(_used(step, Value) for step in steps)), _last_uses(steps)
    small: list[tuple[int, int, int, int]] = []  # of each its bytes, the steps that make and last use it, its index
    for i, step in enumerate(steps):
        if step.function is torch.empty and not _made(step) & taken:
            (shape,), (index,) = step.args, _made(step)
            needed = -(-math.prod(shape) * step.kwargs["dtype"].itemsize // ALIGNMENT) * ALIGNMENT
            if needed <= MOST_BUFFER:
                small.append((needed, i, last.get(index, i), index))
    placed: list[tuple[int, int, int, int, int]] = []  # where it begins and ends, and the last three
    for needed, made, until, index in sorted(small, key=lambda buffer: (-buffer[0], buffer[1])):
        at = 0
        for begin, end, other_made, other_until, _ in placed:
            if begin < at + needed and made <= other_until and other_made <= until:
                at = max(at, end)
        if at + needed <= MOST_ARENA:
            insort(placed, (at, at + needed, made, until, index))
    return {index: at for at, *_, index in placed}, max((end for _, end, *_ in placed), default=0)


def _last_uses(steps: list[Step]) -> dict[int, int]:
    """Return which step is the last that takes a value, or memory that begins with it."""
    return {index: i for i, step in enumerate(steps) for index in _used(step, Value) | _used(step, Pointer)}


def program_of(tape: Tape, outputs: list[Value], device: torch.device) -> Callable[..., tuple[Tensor, ...]]:
    """Return the record as a function of its own."""
    stay = {value.index for value in outputs} | tape.constants.keys()
    steps = _late(_needed(tape, outputs))
    names: dict[str, Any] = {"stream_of": _stream_of, "device": device.index, "empty": torch.empty}
    names |= {f"v{index}": tensor for index, tensor in tape.constants.items()}
    places, size = _arena(steps, stay)
    roots = set[int]().union(*(_used(step, Pointer) for step in steps))
    last = _last_uses(steps)
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
    run: Callable[..., tuple[Tensor, ...]] = names["run"]
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

"""What a step allocates and frees, by phase: every event of PyTorch's allocators, on a CPU and on a GPU alike.

The allocators report to the profiler, address by address, so its events miss nothing: scratch inside operators, C++
kernels and backward's threads too. Phases are marks among them, on the same clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.measure.allocations import allocation_profiler
from lowtide.profile.phases import END, Phase, PhaseMarks, with_whole_recomputes

_MARK = "lowtide mark: "
_STEP = "lowtide step"
_range = torch._C._profiler._RecordFunctionFast  # record_function is an operator, which a selective checkpoint counts
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass
class Block:
    """One allocation; events and phases are given by their index in the `Recording`."""

    address: int
    bytes: int  # on a GPU as its allocator rounds them
    begin: int  # the event that allocated it
    operation: str  # the outermost one that allocated it
    phase: int
    end: int | None = None  # the event that freed it; None if it outlives the recording

    def is_live_before(self, event: int) -> bool:
        """Return whether the block is live just before the event of a number."""
        return self.begin < event and (self.end is None or self.end >= event)


class Event(NamedTuple):
    """An allocation or a free."""

    time_ns: int
    bytes: int  # negative: freed
    address: int
    block: int | None  # its index; None for a free of what was there before the recording


@dataclass
class Recording:
    """A step's allocations."""

    blocks: list[Block] = field(default_factory=list)  # in order of time, as the events
    events: list[Event] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)  # the last is the step's end
    begins: list[int] = field(default_factory=list)  # of each phase, its first event
    begins_ns: list[int] = field(default_factory=list)

    def totals(self) -> list[int]:
        """Return the bytes that are live after each event, above what was live when the recording began."""
        return list(accumulate(event.bytes for event in self.events))

    def begin(self, phase: Phase, time_ns: int) -> None:
        """Begin a phase."""
        self.phases.append(phase)
        self.begins.append(len(self.events))
        self.begins_ns.append(time_ns)


@contextmanager
def record(marks: PhaseMarks, device: torch.device) -> Iterator[Recording]:
    """Record one step's allocations on one kind of device, up to the error if it fails; empty until the block ends."""
    recording, before, marked = Recording(), marks.on_begin, list[Phase]()

    def mark(phase: Phase) -> None:
        before(phase)
        marked.append(phase)
        with _range(f"{_MARK}{len(marked) - 1}"):
            pass

    marks.on_begin = mark
    profiler = allocation_profiler()
    try:
        # The tree of some versions lacks an event that no operation surrounds: what Python frees between two of them.
        with profiler, _range(_STEP):
            yield recording
    finally:
        marks.on_begin = before
        if profiler.kineto_results is not None:
            _fill(recording, profiler.kineto_results.experimental_event_tree(), device.type, marked)


def storages(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return address and bytes of the tensors' storages on one kind of device, each once."""
    found = [t.untyped_storage() for t in tensors if isinstance(t, Tensor) and t.device.type == device.type]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def _fill(recording: Recording, tree: list[Any], kind: str, marked: list[Phase]) -> None:
    """Read the events of one kind of device, and the marks, from a finished profile."""
    live: dict[int, int] = {}
    time_ns = 0
    for time_ns, operation, node in sorted(_events(tree), key=lambda event: event[0]):  # equal times keep their order
        if node is None:
            recording.begin(marked[int(operation.removeprefix(_MARK))], time_ns)
            continue
        allocation, event = node.extra_fields, len(recording.events)
        address, size = allocation.ptr, allocation.alloc_size
        if str(allocation.device).partition(":")[0] != kind or not size:
            continue
        if size > 0:
            block: int | None = len(recording.blocks)
            live[address] = len(recording.blocks)
            recording.blocks.append(Block(address, size, event, operation, max(len(recording.phases) - 1, 0)))
        elif (block := live.pop(address, None)) is not None:
            recording.blocks[block].end = event
        recording.events.append(Event(time_ns, size, address, block))
    if not recording.phases or recording.phases[-1].kind != END:  # an error ended the step
        recording.begin(Phase(END), time_ns)
    recording.phases[:] = with_whole_recomputes(recording.phases)


def _events(tree: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield time, outermost operation and node of each allocation; time, name and None of each mark."""
    stack = [(node, "") for node in reversed(tree)]
    while stack:
        node, operation = stack.pop()
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            yield node.start_time_ns, operation, node
        elif node.name.startswith(_MARK):
            yield node.start_time_ns, node.name, None
        else:
            inside = operation or ("" if node.name == _STEP else node.name.removeprefix(_ENGINE))
            stack += [(child, inside) for child in reversed(node.children)]

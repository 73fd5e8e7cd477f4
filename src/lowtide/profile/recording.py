"""What a step allocates and frees, by phase: every event of PyTorch's allocators, on a CPU and on a GPU alike.

The allocators report to the profiler, address by address, so its events miss nothing: scratch inside operators, C++
kernels and backward's threads too. Phases stand among them as marks on the same clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from lowtide.profile.phases import END, Phase, PhaseMarks, mended

_MARK = "lowtide phase: "
_WEIGHTS = "lowtide weights: "
_STEP = "lowtide step"
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass
class Block:
    """One allocation.

    Attributes:
        address: Where.
        bytes: How many; on a GPU as its allocator rounds them.
        begin: The number of the event that made it.
        end: Of the one that freed it; None where it outlives the recording.
        operation: The outermost operation that it was made in.
        phase: The number of the phase (of `Recording.phases`) that it was made in.
    """

    address: int
    bytes: int
    begin: int
    operation: str
    phase: int
    end: int | None = None


@dataclass
class Recording:
    """A step's allocations.

    Attributes:
        blocks: Every allocation, in order.
        times_ns: When each event (an allocation or a free) was.
        deltas: Bytes that each allocated, or freed (below 0).
        event_blocks: The number of each event's block; None for a free of what was there before.
        freed_before: The addresses of what was there before and freed in the step, by the event's number.
        phases: In order; the last is the step's end.
        begins: The number of the first event in each phase.
        begins_ns: When each phase began.
        weights: The numbers of the events after which an address held a module's weights, as it was about to read them.
    """

    blocks: list[Block] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    event_blocks: list[int | None] = field(default_factory=list)
    freed_before: dict[int, int] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    begins_ns: list[int] = field(default_factory=list)
    weights: dict[int, list[int]] = field(default_factory=dict)

    def totals(self) -> list[int]:
        """Return the bytes that are live after each event, above what was live when the recording began."""
        found, total = [], 0
        for delta in self.deltas:
            total += delta
            found.append(total)
        return found

    def live_at(self, event: int) -> Iterator[tuple[int, Block]]:
        """Yield the blocks, and their numbers, that are live when an event has happened."""
        for number, block in enumerate(self.blocks):
            if block.begin > event:
                return
            if block.end is None or block.end > event:
                yield number, block


@contextmanager
def record(marks: PhaseMarks, device: torch.device) -> Iterator[Recording]:
    """Record one step's allocations on one kind of device; the recording is filled when the block ends.

    Also where the block ends by an error: what was allocated until then is what is asked for most.

    Args:
        marks: What tells the phases.
        device: Which kind.

    Yields:
        The `Recording`, empty until then.
    """
    found = Recording()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # 5 lets two lines a profile through to stderr
    before = marks.tell

    def tell(phase: Phase) -> None:
        before(phase)
        _mark(_MARK + phase.to_text())

    addresses: list[set[int]] = []

    def see_weights(module: nn.Module) -> None:
        addresses.append(set(storages(module.parameters(), device)))
        _mark(f"{_WEIGHTS}{len(addresses) - 1}")

    marks.tell, marks.see_weights = tell, see_weights
    # Without the CUDA activity: both allocators report to the CPU side, and what kernels do is for the trace.
    profiler = profile(use_kineto=True, profile_memory=True)
    try:
        # The tree of some versions lacks an event that no operation surrounds: what Python frees between two of them.
        with profiler, torch._C._profiler._RecordFunctionFast(_STEP):
            yield found
    finally:
        marks.tell, marks.see_weights = before, lambda _: None
        if profiler.kineto_results is not None:
            _fill(found, profiler.kineto_results.experimental_event_tree(), device.type, addresses)


def _mark(name: str) -> None:
    """Put a name among the events, not by an operator: a selective checkpoint would count that."""
    with torch._C._profiler._RecordFunctionFast(name):
        pass


def storages(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return address and bytes of the tensors' storages on one kind of device, each once; of shards their own."""
    found = {}
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if isinstance(local, Tensor) and local.device.type == device.type:
                storage = local.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def _fill(found: Recording, tree: list[Any], kind: str, addresses: list[set[int]]) -> None:
    """Read the events of one kind of device, and the marks, out of a finished profile."""
    events = sorted(_events(tree, ""), key=lambda event: event[0])  # stable: equal times keep the order of arrival
    live: dict[int, int] = {}
    for time_ns, operation, node in events:
        if node is None and operation.startswith(_WEIGHTS):
            for address in addresses[int(operation.removeprefix(_WEIGHTS))]:
                found.weights.setdefault(address, []).append(len(found.deltas))
            continue
        if node is None:
            found.phases.append(Phase.from_text(operation.removeprefix(_MARK)))
            found.begins.append(len(found.deltas))
            found.begins_ns.append(time_ns)
            continue
        told = node.extra_fields
        if str(told.device).partition(":")[0] != kind or not told.alloc_size:
            continue
        event, number = len(found.deltas), None
        if told.alloc_size > 0:
            number = live[told.ptr] = len(found.blocks)
            phase = max(len(found.phases) - 1, 0)
            found.blocks.append(Block(told.ptr, told.alloc_size, event, operation, phase))
        elif told.ptr in live:
            number = live.pop(told.ptr)
            found.blocks[number].end = event
        else:
            found.freed_before[event] = told.ptr
        found.times_ns.append(time_ns)
        found.deltas.append(told.alloc_size)
        found.event_blocks.append(number)
    if not found.phases or found.phases[-1].kind != END:  # an error ended the step
        found.phases.append(Phase(END))
        found.begins.append(len(found.deltas))
        found.begins_ns.append(events[-1][0] if events else 0)
    found.phases[:] = mended(found.phases)


def _events(tree: list[Any], outer: str) -> Iterator[tuple[int, str, Any]]:
    """Yield time, outermost operation and node of each allocation; time, name and None of each mark."""
    stack = [(node, outer) for node in reversed(tree)]
    while stack:
        node, operation = stack.pop()
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            yield node.start_time_ns, operation, node
            continue
        name = node.name
        if name.startswith((_MARK, _WEIGHTS)):
            yield node.start_time_ns, name, None
            continue
        inside = operation or ("" if name == _STEP else name.removeprefix(_ENGINE))
        stack += [(child, inside) for child in reversed(node.children)]

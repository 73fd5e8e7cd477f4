"""Counting runs of graphs that torch.compile traced, without a graph break and without a guard on the counts."""

import itertools
from typing import Any
from weakref import WeakValueDictionary

_numbers = itertools.count()
_counters: WeakValueDictionary[str, "Counter"] = WeakValueDictionary()


class Counter:
    """Counts calls of compiled code, which finds it by its ``key``; a copy gets a key of its own."""

    def __init__(self) -> None:
        self._enter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter()

    def count_compiled(self) -> None:
        """Count one run of the traced code."""
        raise NotImplementedError

    def _enter(self) -> None:
        self.key = str(next(_numbers))
        _counters[self.key] = self


def count_when_run(key: str) -> None:
    """Called by traced code: count each run of the graph that is being traced by the `Counter` with this key."""
    from torch._dynamo.comptime import comptime

    comptime(_allow)
    _count(key)
    comptime(_move_out)


def _count(key: str) -> None:
    counter = _counters.get(key)
    if counter is not None:
        counter.count_compiled()


def _allow(_: Any) -> None:
    """Have calls of `_count` moved behind the graph, as those that log may be."""
    from torch._dynamo import config

    config.reorderable_logging_functions.add(_count)


def _move_out(context: Any) -> None:
    """Have a call that is traced inside another function run where the outermost ends: torch 2.13 drops it."""
    tracer = context._ComptimeContext__tx
    outermost = tracer.output.root_tx
    if outermost is not tracer:
        outermost.debug_locals.extend(tracer.debug_locals)
        tracer.debug_locals.clear()

"""The collectives that a call makes on this rank: cases compare them with stock models', benchmarks/ranks.py counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

WORDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier")


@contextmanager
def seen_collectives(see: Callable[[str, tuple[Any, ...]], object]) -> Iterator[None]:
    """Call ``see`` with name and positional arguments of each collective that Python calls in torch.distributed.

    FSDP2 and lowtide call them there. A dispatch mode would change lowtide's path, and a profiler takes a second.
    """
    stock = {name: value for name, value in vars(dist).items() if name.startswith(WORDS) and callable(value)}

    def seen(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            see(name, args)
            return stock[name](*args, **kwargs)

        return call

    with patch.dict(vars(dist), {name: seen(name) for name in stock}):
        yield


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with seen_collectives(lambda name, _: counts.update([name])):
        yield counts

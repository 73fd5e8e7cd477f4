"""Time against memory of the loss over `workspace_mib`, with every peer of lowtide bench head a point.

    python benchmarks/workspace.py --shape llama-1b

The result is that of lowtide bench head, with rows of workspaces: powers of two, from a 64th of the logits up to all of
them. `plots.py` draws it, if matplotlib is there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from script import main

from lowtide import HeadOptions, linear_cross_entropy, plan_head
from lowtide.bench import head
from lowtide.bench.case import Case
from lowtide.bench.config import HeadBenchConfig
from lowtide.bench.harness import Peer, Run

POINTS = 7


def workspaces(case: Case) -> Iterator[Peer]:
    """Yield lowtide with each workspace; of those that have the same plan, the smallest alone."""
    sizes: Any = (len(case.x), case.x.shape[1], len(case.w), case.x.dtype, case.x.device)
    top, seen = math.ceil(math.log2(len(case.x) * len(case.w) * case.x.itemsize / 2**20)), set[object]()
    for value in (2.0**k for k in range(top - POINTS + 1, top + 1)):
        options = HeadOptions(workspace_mib=value)
        plan = plan_head(*sizes, options)
        key = (plan.backend, plan.gradient, plan.accumulate, plan.chunk_rows)
        if key not in seen:
            about = {"workspace_mib": value, "plan": dataclasses.asdict(plan)}
            loss = partial(linear_cross_entropy, options=options)
            yield Peer(f"lowtide {value:g} MiB", lambda _, loss=loss: loss, about=lambda _, about=about: about)
        seen.add(key)


def measure(run: Run) -> None:
    head.measure(run, peers=lambda case: [*run.chosen, *workspaces(case)])
    if importlib.util.find_spec("matplotlib") is not None:
        import plots

        plots.main(run.file)


if __name__ == "__main__":
    sys.exit(main(measure, HeadBenchConfig, __doc__, head.PEERS))

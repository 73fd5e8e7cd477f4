"""A step of several GPUs in each way that is planned, from the fastest that fits to those that do not."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.measure.text import folded, table
from lowtide.measure.units import gib, gib_text
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.search import Candidate, Search
from lowtide.memory.planner.ways import name_of, refusal_of, ways_of


class Sharing(NamedTuple):
    """A way to share a step, and the fastest that fits by it."""

    job: Job
    tokens: int = 0  # of a step, on all GPUs
    chosen: Candidate | None = None  # None: nothing fits, or it is not planned
    least: int = 0  # bytes of the step that takes the least, where nothing fits
    refused: str = ""  # why it is not planned

    @property
    def tokens_per_second(self) -> float:
        """Return those of all GPUs; 0 where nothing fits."""
        return self.tokens / self.chosen.seconds if self.chosen else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return it as plain numbers and texts."""
        job = self.job
        found = {"parallel": job.parallel, "tensor_parallel": job.group_size, "fsdp_layers": job.fsdp_layers}
        if self.chosen is None:
            return {**found, "refused": self.refused} if self.refused else {**found, "least_gib": gib(self.least)}
        speed = {"tokens": self.tokens, "tokens_per_second": self.tokens_per_second}
        return {**found, **speed, "peak_gib": gib(self.chosen.peak), "policies": str(self.chosen)}


def compare(search: Search, budget: int) -> tuple[Sharing, ...]:
    """Return the ways of a step, by tokens per second of all GPUs; then by what they need."""
    found = [_way(search, job, budget) for job in ways_of(search.job)]
    return tuple(sorted(found, key=lambda way: (-way.tokens_per_second, bool(way.refused), way.least)))


def _way(search: Search, job: Job, budget: int) -> Sharing:
    if refusal := refusal_of(job, search.host_bytes):
        return Sharing(job, refused=f"{refusal.name} has to be {refusal.expected}")
    own = search.of(job, search.host_bytes)
    tokens, chosen = own.costs.ranks.tokens, own.fastest(budget)
    return Sharing(job, tokens, chosen, 0 if chosen else own.least().peak)


def ways_table(ways: tuple[Sharing, ...], width: int | None = None) -> str:
    """Return the ways as a table for a terminal of so many letters across; None: no line is folded."""
    rows = [["way", "tokens/s", "tokens", "peak GiB", "policies"]]
    for way in ways:
        name, chosen = name_of(way.job), way.chosen
        if chosen is not None:
            speed = [f"{way.tokens_per_second:,.0f}", f"{way.tokens:,}", f"{gib(chosen.peak):.2f}"]
            rows.append([name, *speed, str(chosen)])
        elif way.refused:
            rows.append([name, "", "", "", f"not planned: {way.refused}"])
        else:
            rows.append([name, "", f"{way.tokens:,}", gib_text(way.least), "needs more than the budget"])
    text = table(rows, left=(0, 4))
    return folded(text, width, indent=text.index(rows[0][-1]))

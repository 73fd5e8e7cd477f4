"""What the planner puts on a disk: as much as the offloader would, and no faster than layers and disk can be."""

from __future__ import annotations

import random
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.measure.units import gib
from lowtide.memory import MemoryPlan, plan_memory
from lowtide.memory.offload import IN_FLIGHT, ON_THE_WAY, Offloader
from lowtide.memory.pinned import HostPool
from lowtide.memory.planner.disk import DiskSpace
from lowtide.memory.planner.layer_costs import PAGES
from lowtide.memory.planner.search import Search
from lowtide.memory.policy import ActivationPolicy

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
LONG = {"seq_len": 262144, "batch_size": 1, "budget_gib": 30, "device": "h100"}
OFFLOADED = ActivationPolicy(keep="input", mlp_level=1, offload=True)


def plan(**given: Any) -> MemoryPlan:
    return plan_memory(LLAMA, **{**LONG, **given})


def offloader(limit: float, layers: int) -> Offloader:
    """Return what layers share, with so much host memory."""
    found = Offloader(int(limit), layers, 0, Path())
    found._pool = HostPool(int(limit), lambda *_: None, lambda *_: None)
    return found


def test_as_many_layers_as_the_offloader_puts_there() -> None:
    search = Search(plan(host_gib=100).job, 2**40)
    of_layer = search.costs.layers[OFFLOADED].saved + PAGES
    for _ in range(50):
        n, limit = random.randint(3, 16), random.uniform(ON_THE_WAY, 17) * of_layer
        rest = [(ActivationPolicy(mlp_level=0), 16 - n)] if n < 16 else []
        where = search.costs.placed([(OFFLOADED, n), *rest], int(limit), DiskSpace(2**50))
        moved = n - 2  # the last ones stay
        fits = moved * of_layer <= limit  # then it gets no folder
        beyond = 0 if fits else offloader(limit, moved)._beyond(moved * of_layer, of_layer)
        assert where.disk == beyond * of_layer
        assert where.host <= limit
        assert where.host + where.disk >= moved * of_layer


@pytest.mark.parametrize("rate", [1e8, 1e9, 3e9, 8e9, 1e11])
def test_waits_for_the_disk(rate: float) -> None:
    """Beside a step whose writer and reader are followed layer by layer."""
    search = Search(plan(host_gib=100).job, 2**40)
    cost, groups = search.costs.layers[OFFLOADED], [(OFFLOADED, 16)]
    each = cost.saved + PAGES
    where = search.costs.placed(groups, int(6 * each), DiskSpace(2**50, rate))
    on_disk = where.disk // each
    assert on_disk == 12

    now, writer, writing = 0.0, 0.0, deque[float]()
    for layer in range(16):
        if layer < on_disk:
            while len(writing) >= IN_FLIGHT:
                now = max(now, writing.popleft())
        now += cost.forward
        if layer < on_disk:
            writer = max(writer, now) + each / rate
            writing.append(writer)
    reader = 0.0
    for layer in reversed(range(16)):
        if layer < on_disk:
            now = max(now, reader)
        if 0 < layer <= on_disk:  # the one before is read meanwhile
            reader = max(reader, now, writer) + each / rate
        now += cost.backward
    step = 16 * (cost.forward + cost.backward)
    assert step + where.seconds == pytest.approx(now, rel=0.15)


def test_a_disk_never_makes_a_step_slower() -> None:
    without = plan(host_gib=6)
    same = plan(host_gib=100, disk_gib=100)
    assert (same.disk_bytes, same.seconds) == (0, plan(host_gib=100).seconds)
    last = without.seconds
    for rate in ("0.1GB", "1GB", "3GB", "20GB"):
        found = plan(host_gib=6, disk_gib=500, disk_rate=rate)
        assert found.seconds <= last
        assert found.host_bytes <= 6 * 2**30
        last = found.seconds
    assert found.disk_bytes > 0
    assert found.seconds < without.seconds
    assert plan(host_gib=12, disk_gib=500).longest_sequence > plan(host_gib=12).longest_sequence
    assert plan(host_gib=6, disk_gib=1, disk_rate="20GB").disk_bytes <= 2**30


def test_the_least_memory_is_that_of_as_many_layers_as_have_room() -> None:
    """A layer is on the disk as a whole, whatever part of one has room besides."""
    job = plan(seq_len=1024, batch_size=256, host_gib=100).job
    each = Search(job, 2**40).costs.layers[OFFLOADED].saved + PAGES
    for host, disk in ((5.5, 6.5), (4.95, 6.72), (7.98, 6.35), (6, 7), (6.9, 8.05)):
        search = Search(job, int(host * each), offload_states=False, space=DiskSpace(int(disk * each), 2e10))
        search.ladder, search.sparse, search.tiles = [OFFLOADED, ActivationPolicy(mlp_level=1)], [], []
        assert search.least().peak == min(one.peak for one in search.candidates)


def test_as_little_host_memory_as_fits_beside_the_disk_is_advised() -> None:
    given: dict[str, Any] = {"seq_len": 1024, "batch_size": 512, "budget_gib": 50}
    advised = {}
    for disk in (0, 500):
        with pytest.raises(ArgumentValueError, match="host_gib=") as error:
            plan(**given, host_gib=1, disk_gib=disk)
        found = re.search(r"host_gib=(\d+) fits", str(error.value))
        assert found
        advised[disk] = int(found[1])
        assert plan(**given, host_gib=advised[disk], disk_gib=disk).peak_bytes <= 50 * 2**30
    assert advised[500] < advised[0]


def test_how_it_is_told() -> None:
    found = plan(host_gib=6, disk_gib=500)
    amount = f"{gib(found.disk_bytes):.2f}"
    assert f"on disk {amount} of 500.00 GiB; " in str(found)
    assert f"{amount} GiB of them on disk" in str(found)
    assert "peak GiB  host GiB  disk GiB  s per step  policies" in str(found)
    assert ', host_gib=6, disk="/nvme")' in found.lines()
    told = found.to_dict()
    assert (told["disk_budget_gib"], told["disk_bytes_per_s"]) == (500, pytest.approx(3e9))
    assert told["choice"]["disk_gib"] == gib(found.disk_bytes)


def test_what_a_disk_needs() -> None:
    with pytest.raises(ArgumentValueError, match="disk_gib: expected host_gib beside it, got 5 alone"):
        plan(disk_gib=5)
    with pytest.raises(ArgumentValueError, match="disk_rate: expected a finite number of GiB, above 0"):
        plan(host_gib=5, disk_gib=5, disk_rate=0)

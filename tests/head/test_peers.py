"""The protocol of exchanges by copy engines, on the CPU: each rank's stream of exchanges is a thread."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.head.ranks import exchange, peers
from lowtide.head.ranks.peers import Peers

SLOT_BYTES = 2**15  # small, for exchanges of many parts


class Memory:
    """All ranks' memory, as torch's symmetric memory gives it out, and its flags."""

    def __init__(self, ranks: int) -> None:
        self.bytes = [torch.zeros(2 * SLOT_BYTES, dtype=torch.uint8) for _ in range(ranks)]
        self.addresses = [rank * 2**32 for rank in range(ranks)]
        self.flags: dict[int, int] = {}

    def run(self, _: Any, operations: Any, value: int) -> None:
        end = time.monotonic() + 30
        for operation in operations:
            if operation.kind == peers._WRITE:
                self.flags[operation.address] = value
            while self.flags.get(operation.address, 0) < value:
                assert time.monotonic() < end, "ranks wait for each other"
                time.sleep(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes all ranks' ends of a group."""

    def make(ranks: int) -> list[Peers]:
        memory = Memory(ranks)
        monkeypatch.setattr(peers, "SLOT_BYTES", SLOT_BYTES)
        monkeypatch.setattr(peers, "_run", memory.run)
        monkeypatch.setattr(Peers, "_beside", lambda _, run, *__: run())
        return [_end(rank, ranks, memory) for rank in range(ranks)]

    return make


def _end(rank: int, ranks: int, memory: Memory) -> Peers:
    end: Any = Peers.__new__(Peers)
    end._rank, end._size, end._count, end._stream = rank, ranks, 0, SimpleNamespace()
    end._place = SLOT_BYTES // ranks // peers._ALIGNED * peers._ALIGNED
    end._slots, end._addresses, end._places = memory.bytes, memory.addresses, {}
    end._others = [(rank + step) % ranks for step in range(1, ranks)]
    end._meet = end._meetings()
    return end  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8])
def test_sums_and_gathered_rows_are_right_in_any_order_of_events(ranks: int, made: Any) -> None:
    order = random.Random(ranks)
    kinds, dtypes = ("gather", "sum", "rounded sum", "scattered sum"), (torch.float32, torch.float64, torch.int64)
    todo = [(order.choice(kinds), order.choice(dtypes), order.choice((1, 7, 900, 5000))) for _ in range(24)]

    def given(i: int, rank: int) -> Tensor:
        _, dtype, n = todo[i]  # whole numbers, of which every sum is exact, in bfloat16 too
        generator = torch.Generator().manual_seed(1000 * i + rank)
        return torch.randint(-8, 9, (ranks * n,), generator=generator).to(dtype)

    def run(end: Peers) -> None:
        rank, pause = end._rank, random.Random(end._rank)
        for i, (kind, dtype, n) in enumerate(todo):
            x, every = given(i, rank), torch.stack([given(i, other) for other in range(ranks)])
            total = every.sum(0)
            time.sleep(pause.choice((0, 0, 1e-4, 1e-3)))
            if kind == "gather":
                out, want = torch.empty_like(every), every
                end.begin_gather(x, out)
            elif kind == "sum":
                out, want = x, total
                end.begin_sum(x, out)
            elif kind == "rounded sum":
                narrow = torch.bfloat16 if dtype.is_floating_point else dtype
                out, want = torch.empty_like(x, dtype=narrow), total.to(narrow)
                end.begin_sum(x, out)
            else:
                out, want = x.new_empty(n), total.view(ranks, n)[rank]
                end.begin_scattered_sum(x, out)
            assert torch.equal(out, want), (i, kind, dtype, n)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(run, made(ranks)))


def test_a_group_that_was_first_used_in_inference_mode_trains(made: Any) -> None:
    """Training cannot write to what was made there."""
    ends = made(2)

    def run(end: Peers, *, infers: bool) -> None:
        with torch.inference_mode(infers):
            x = torch.ones(8)
            end.begin_sum(x, x)
            assert x.tolist() == [2.0] * 8

    with ThreadPoolExecutor(2) as threads:
        for infers in (True, False, True):
            list(threads.map(partial(run, infers=infers), ends))


@pytest.mark.parametrize("fails", ["reach", "memory", "rendezvous"])
def test_where_one_rank_cannot_none_waits_for_it(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, here, met = 3, threading.local(), threading.Barrier(3, timeout=30)
    table: list[list[int]] = [[]] * ranks

    def numbers_of_all(numbers: list[int], *_: Any) -> list[list[int]]:
        table[here.rank] = numbers
        met.wait()
        gathered = list(table)
        met.wait()
        return gathered

    def memory_of(*_: Any) -> Tensor:
        if fails == "memory" and here.rank == 1:
            raise torch.OutOfMemoryError
        return torch.empty(1)

    def joined(*_: Any) -> Any:
        met.wait()  # as a rendezvous does
        if fails == "rendezvous" and here.rank == 1:
            raise RuntimeError
        return object()

    def run(rank: int) -> Any:
        here.rank = rank
        return exchange._made_peers(SimpleNamespace(size=lambda: ranks), torch.device("cuda", rank))

    monkeypatch.setattr(exchange, "numbers_of_all", numbers_of_all)
    monkeypatch.setattr(exchange, "place_of", lambda device: [0, device.index])
    monkeypatch.setattr(exchange, "reach_each_other", lambda _: fails != "reach" or here.rank != 1)
    monkeypatch.setattr(exchange, "memory_of", memory_of)
    monkeypatch.setattr(exchange, "Peers", joined)
    with ThreadPoolExecutor(ranks) as threads:
        assert list(threads.map(run, range(ranks))) == [None] * ranks


def test_which_ranks_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(peers, "_gpu", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 3})
    here = [[7, 100 + index, index, 0] for index in range(4)]
    assert peers.reach_each_other(here[:3])
    assert not peers.reach_each_other(here), "0 and 3 do not"
    assert not peers.reach_each_other(here[:1])
    assert not peers.reach_each_other([here[0], here[0]]), "one GPU, two ranks"
    for place, why in (
        ([8, 101, 1, 0], "another host"),
        ([7, 101, 2, 0], "its GPU has another index here"),
        ([7, 104, 4, 0], "not seen here"),
        ([7, 101, -1, 0], "no GPU, or switched off"),
        ([7, 101, 1, 1], "in another group before"),
    ):
        assert not peers.reach_each_other([here[0], place]), why


def test_what_switches_exchanges_by_copy_engines_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_gpu", lambda index: 100 + index)
    gpu = torch.device("cuda", 1)
    assert peers.place_of(torch.device("cpu"))[2] == -1
    for name in ("NCCL_P2P_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        assert peers.place_of(gpu)[1:3] == [101, 1]
        monkeypatch.setenv(name, "1")
        assert peers.place_of(gpu)[2] == -1
        monkeypatch.delenv(name)


def test_operations_are_laid_out_as_the_driver_reads_them() -> None:
    """Offsets of cuda.h: an int, an address, a union of 8 bytes, an int, an address; 48 bytes in all."""
    fields = [getattr(peers._Operation, name).offset for name, *_ in peers._Operation._fields_]
    assert (fields, peers.ctypes.sizeof(peers._Operation)) == ([0, 8, 16, 24, 32, 40], 48)
    first, second = peers._operations((peers._WRITE, 2**40), (peers._WAIT, 8))
    assert (first.kind, first.address, second.kind, second.address) == (2, 2**40, 1, 8)

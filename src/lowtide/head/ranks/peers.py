"""Exchanges between the GPUs of one host by their copy engines: GEMMs keep all multiprocessors.

A collective of NCCL is a kernel, which holds multiprocessors until all ranks take part. Behind a GEMM that holds every
one to its end it begins late, and a GEMM behind it waits for the slowest rank. Here each GPU's copy engine writes into
the others' memory, and streams wait for numbers there, by CUDA's stream memory operations
(https://docs.nvidia.com/cuda/cuda-driver-api, "Stream Memory Operations"); the only kernels are the additions, and
copies within a GPU.

W ranks. An exchange is the k-th on each of them, all on one stream a rank. A rank writes what it sends to another into
that one's slot k mod 2, then k to its flag there, and waits until all flags in its own memory have reached k. No slot
is written before it was read: the flag k + 1 of a rank, which comes before anything that is sent to it in exchange
k + 2, was written after that rank had read its slot of exchange k.
"""

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import cache, reduce
from hashlib import sha256
from operator import ne
from os import environ
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lowtide.head.matmul import slices
from lowtide.head.ranks.watchdog import timeout_of, watch
from lowtide.replay.replayed import on_device

LEAST_BYTES = 2**20  # of the first exchange: a group that has only shorter ones need not have this memory
SLOT_BYTES = 2**25  # what all ranks send to one of them at a time; a GPU has two such slots
_ALIGNED = 256  # bytes
_FLAG_BYTES = 64  # of each rank


def place_of(device: torch.device) -> list[int]:
    """Return numbers of the host and of the GPU, its index here, -1 where it takes no part, and of groups it is in."""
    nowhere = [0, 0, -1, 0]
    if device.type != "cuda" or torch.version.hip or environ.get("NCCL_P2P_DISABLE") == "1":
        return nowhere
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":  # a stream that waits would hold the GEMMs behind it
        return nowhere
    try:  # with its processes: those of another container cannot be reached
        boot, processes = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/pid").readlink()
    except OSError:
        return nowhere
    index = torch.cuda.current_device() if device.index is None else device.index
    return [_number_of(f"{platform.node()} {boot} {processes}"), _gpu(index), index, Peers.made]


def reach_each_other(places: list[list[int]]) -> bool:
    """Return whether the ranks at these places are GPUs of this host that can write into each other's memory."""
    hosts, gpus, indices, groups = zip(*places, strict=True)
    if len(gpus) < 2 or len(set(gpus)) < len(gpus) or min(indices) < 0 or max(indices) >= torch.cuda.device_count():
        return False
    # torch numbers a process's rendezvous: those of one group must have had as many
    if len(set(hosts)) > 1 or len(set(groups)) > 1 or any(map(ne, map(_gpu, indices), gpus)):
        return False
    return all(torch.cuda.can_device_access_peer(one, other) for one in indices for other in indices if one != other)


def _gpu(index: int) -> int:
    return _number_of(str(torch.cuda.get_device_properties(index).uuid))


def _number_of(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


class Completion:
    """The end of an exchange, for which a stream waits; until then nothing that it reads or writes is freed."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream, *held: Tensor) -> None:
        """``stream`` is what the exchange was begun on: memory that is freed is used there next."""
        self._event, self._stream = event, stream
        self._held: tuple[Tensor, ...] = held

    def wait(self) -> None:
        """Make the current stream wait."""
        if self._held:
            torch.cuda.current_stream(self._held[0].get_device()).wait_event(self._event)
        self._held = ()

    def __del__(self) -> None:
        if self._held:  # an error came between, and another stream or thread may be current
            self._stream.wait_event(self._event)


def memory_of(ranks: int, device: torch.device) -> Tensor:
    """Return this rank's memory for `Peers`: all that can fail on one rank alone, which others would wait for there."""
    import torch.distributed._symmetric_memory as symmetric  # slow to import, and only here

    _ = _driver()
    with torch.cuda.device(device):
        memory = symmetric.empty(2 * SLOT_BYTES + _FLAG_BYTES * ranks, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before any other rank can write there
    return memory


# For even and odd exchanges: a rank's places in each rank's memory, and each one's in its own.
Places = list[tuple[list[Tensor], list[Tensor]]]


class Peers:
    """A group's memory for such exchanges. Every rank makes one at the same time: the host waits for the others."""

    made = 0  # by this process

    def __init__(self, group: Any, memory: Tensor) -> None:
        import torch.distributed._symmetric_memory as symmetric

        Peers.made, device = Peers.made + 1, memory.device
        self._rank, self._size, self._count = group.rank(), group.size(), 0
        self._place = SLOT_BYTES // self._size // _ALIGNED * _ALIGNED  # of one rank in a slot
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        with torch.cuda.device(device):
            met = symmetric.rendezvous(memory, group)
            with torch.inference_mode(mode=False):  # training cannot write to an inference tensor
                self._slots = [met.get_buffer(r, (2 * SLOT_BYTES,), torch.uint8, 0) for r in range(self._size)]
            self._places: dict[torch.dtype, Places] = {}
            self._addresses: list[int] = met.buffer_ptrs
            self._alive = memory, met
            self._ended = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # exchanges: the stream writes it
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._meet, self._end = self._meetings(), _operations((_WRITE, self._ended.data_ptr()))
            _run(self._stream, self._meet, 0)  # an error where the driver cannot
            _run(self._stream, self._end, 1)
            torch.cuda.synchronize(device)
            if int(self._ended) != 1:  # the watchdog would end a process that is well
                raise RuntimeError("The host does not see what a stream writes.")
            self._ended.zero_()
        watch(_progress_of(ref(self)), timeout_of(group, device), f"rank {self._rank}")

    def begin_gather(self, x: Tensor, out: Tensor) -> Completion:
        """Begin to write every rank's ``x``, contiguous, into ``out`` [W, ...]."""
        mine, all_ranks = x.view(-1), out.view(self._size, -1)

        def run() -> None:
            all_ranks[self._rank].copy_(mine)
            for part in slices(len(mine), self._place // x.itemsize):
                self._spread(mine[part], [of_rank[part] for of_rank in all_ranks])

        return self._beside(run, x, out)

    def begin_sum(self, x: Tensor, out: Tensor) -> Completion:
        """Begin to write the sum of all ranks' ``x``, contiguous, into ``out``: ``x`` itself or of a narrower dtype."""
        mine, into, W = x.view(-1), out.view(-1), self._size
        share = self._place // x.itemsize

        def run() -> None:
            for part in slices(len(mine), share * W):
                lengths = _even_lengths(part.stop - part.start, W, _ALIGNED // x.itemsize)
                targets = torch.split(into[part], lengths)
                self._add(torch.split(mine[part], lengths), targets[self._rank])
                self._spread(targets[self._rank], targets)

        return self._beside(run, x, out)

    def begin_scattered_sum(self, x: Tensor, out: Tensor) -> Completion:
        """Begin to write this rank's rows of the sum of all ranks' ``x`` [W * C, ...], contiguous, into ``out``."""
        parts, into = x.view(self._size, -1), out.view(-1)

        def run() -> None:
            for part in slices(len(into), self._place // x.itemsize):
                self._add([of_rank[part] for of_rank in parts], into[part])

        return self._beside(run, x, out)

    def _beside(self, run: Callable[[], None], *tensors: Tensor) -> Completion:
        """Call ``run`` on the stream of exchanges, after what the current stream has been given so far."""
        # of a number: for a device PyTorch takes as long as for a copy
        begun_on = torch.cuda.current_stream(tensors[0].get_device())
        self._stream.wait_stream(begun_on)
        with on_device(tensors[0].device), torch.no_grad():
            torch.cuda.set_stream(self._stream)
            try:
                run()
            finally:
                torch.cuda.set_stream(begun_on)
        _run(self._stream, self._end, self._count)
        return Completion(self._stream.record_event(), begun_on, *tensors)

    def _add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Exchange ``parts[r]`` with each rank r, and add up what all have for this one, in the order of the ranks."""
        *terms, last = received = self._exchange(parts, [parts[self._rank]] * self._size)
        scratch = received[self._rank == 0]  # the slot of one of the first two, which are read first
        torch.add(reduce(lambda one, other: torch.add(one, other, out=scratch), terms), last, out=out)

    def _spread(self, x: Tensor, out: Sequence[Tensor]) -> None:
        """Send ``x`` to every rank, and write what each rank r sends into ``out[r]``, which is as long."""
        received = self._exchange([x] * self._size, out)
        for rank in self._others:
            out[rank].copy_(received[rank])

    def _exchange(self, sent: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Send ``sent[r]`` to each rank r; return what each sent here, ``like`` these, in a slot, and this rank's."""
        self._count += 1
        there, here = self._places_of(like[0].dtype)[self._count % 2]
        for rank in self._others:
            there[rank][: sent[rank].numel()].copy_(sent[rank])
        _run(self._stream, self._meet, self._count)
        received = [place[: its.numel()] for place, its in zip(here, like, strict=True)]
        received[self._rank] = sent[self._rank]
        return received

    def _places_of(self, dtype: torch.dtype) -> Places:
        """Return, for even and odd exchanges, this rank's places in each rank's memory, and each one's in its own."""
        found = self._places.get(dtype)
        if found is None:
            with torch.inference_mode(mode=False):  # as above
                found = self._places[dtype] = [
                    (
                        [self._place_in(rank, slot, self._rank, dtype) for rank in range(self._size)],
                        [self._place_in(self._rank, slot, rank, dtype) for rank in range(self._size)],
                    )
                    for slot in range(2)
                ]
        return found

    def _place_in(self, at: int, slot: int, sender: int, dtype: torch.dtype) -> Tensor:
        """Return the place for what ``sender`` sends, in a slot in the memory of rank ``at``."""
        first = slot * SLOT_BYTES + sender * self._place
        return self._slots[at][first : first + self._place].view(dtype)

    def _meetings(self) -> "ctypes.Array[_Operation]":
        """Return what a stream does once it has sent: it tells every other rank, and waits for what they sent."""
        told = [(_WRITE, self._flag(rank, self._rank)) for rank in self._others]
        return _operations(*told, *((_WAIT, self._flag(self._rank, rank)) for rank in self._others))

    def _flag(self, at: int, sender: int) -> int:
        """Return the address in the memory of rank ``at`` of the number of exchanges that ``sender`` has sent there."""
        return self._addresses[at] + 2 * SLOT_BYTES + sender * _FLAG_BYTES


def _progress_of(peers: "ref[Peers]") -> Callable[[], tuple[int, int] | None]:
    """Return what returns how many exchanges have begun and how many have ended; None where they are no more."""

    def progress() -> tuple[int, int] | None:
        its = peers()
        return None if its is None else (its._count % 2**31, int(its._ended) % 2**31)

    return progress


def _even_lengths(n: int, parts: int, whole: int) -> list[int]:
    """Return lengths of parts of n numbers, in whole lines but for the last ones."""
    each = -(-n // (parts * whole)) * whole
    return [max(0, min(each, n - i * each)) for i in range(parts)]


_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32


class _Operation(ctypes.Structure):
    """The driver's ``CUstreamBatchMemOpParams``: a write of an int32, or a wait until it has reached a value.

    Flags 0: writes are ordered after earlier ones; waits end at values that are not less, as signed differences.
    """

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def _operations(*each: tuple[int, int]) -> "ctypes.Array[_Operation]":
    """Return operations, kinds and addresses, which a stream does in this order."""
    return (_Operation * len(each))(*(_Operation(kind=kind, address=address) for kind, address in each))


@cache
def _driver() -> Any:
    found = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    return found


def _run(stream: torch.cuda.Stream, operations: "ctypes.Array[_Operation]", value: int) -> None:
    """Let a stream do operations where it has come so far, all with one value: one call, and not one for each."""
    value %= 2**32
    for operation in operations:
        operation.value = value
    if code := _driver()(stream.cuda_stream, len(operations), operations, 0):
        raise RuntimeError(f"cuStreamBatchMemOp_v2 returned CUDA's error {code}.")

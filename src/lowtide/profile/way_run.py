"""One implementation's steps: timed, then recorded, then traced. Runs in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from lowtide.bench.harness import OUT_OF_MEMORY, reason_of, release
from lowtide.bench.way import COMPILE, Way
from lowtide.bench.ways import SDPA, attention_of, build_way, make_optimizer
from lowtide.errors import UnsupportedError
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import (
    cuda_peak_bytes,
    cuda_reserved_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    resident_bytes,
)
from lowtide.measure.units import gib
from lowtide.profile.owners import known_before, optimizer_tensors
from lowtide.profile.phases import EMBEDDING, END, HEAD_BACKWARD, OPTIMIZER, Phase, PhaseMarks, mended
from lowtide.profile.recording import Recording, record, storages
from lowtide.profile.sharding import leave, shard, start_group
from lowtide.profile.timeline import describe, segments, time_by_kind

MISSED_FREES = 1.02  # of the allocator's own peak, above which a recording's is not believed
SNAPSHOT_ENTRIES = 2_000_000  # events of the allocator; more than a step of a hundred layers has


def measure(way: dict[str, str], settings: dict[str, Any], stem: str) -> dict[str, Any] | None:
    """Return what an implementation's steps took, or why they did not run; `run_child` calls it.

    Args:
        way: The `Way`'s fields.
        settings: model, seq_len, batch_size, vocab_size, dtype, device, optimizer, lora, sharding, offload_params,
            gpus, steps, warm, memory_limit (GiB, 0: none), seed, trace: as in `ProfileConfig`, nothing left to choose.
        stem: The beginning of the path of every file that is written.

    Returns:
        None on all ranks but the first.
    """
    device = torch.device(settings["device"])
    rank = int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        if settings["memory_limit"]:
            whole = torch.cuda.get_device_properties(rank).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings["memory_limit"] * 2**30 / whole))
    sharded = settings["sharding"] != "none"
    if sharded:
        start_group(device)
    try:
        told = Steps(Way(**way), settings, device, rank).run(stem)
    except Exception as error:  # a policy that does not fit, a lack of memory for the model alone
        if settings["gpus"] > 1:  # the other ranks would wait for this one
            raise
        told = {
            "failed": out_of_memory("while the model was built", device)
            if is_out_of_memory(error)
            else reason_of(error)
        }
    if sharded:
        atexit.register(leave)  # when the answer is written
    return told if rank == 0 else None


def out_of_memory(where: str, device: torch.device) -> str:
    """Return the row's text; on a GPU with what its tensors took at most."""
    taken = cuda_peak_bytes() if device.type == "cuda" else resident_bytes()
    return f"{OUT_OF_MEMORY} at {gib(taken):.2f} GiB, {where}"


class Steps:
    """A model of one way, and its training step."""

    def __init__(self, way: Way, settings: dict[str, Any], device: torch.device, rank: int) -> None:
        self.settings, self.device, self.rank = settings, device, rank
        self.model = build_way(
            way,
            settings["model"],
            getattr(torch, settings["dtype"]),
            device,
            seed=settings["seed"],
            vocab_size=settings["vocab_size"],
            lora=settings["lora"],
        )
        if settings["sharding"] != "none":
            shard(self.model, settings["sharding"], device, offload=settings["offload_params"])
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(settings["optimizer"], self.trained)
        generator = torch.Generator().manual_seed(settings["seed"] + rank)
        shape = (settings["batch_size"], settings["seq_len"])
        vocab = self.model.config.get_text_config().vocab_size
        self.ids = torch.randint(0, vocab, shape, generator=generator).to(device)
        self.losses: list[Tensor] = []
        self.gradients: set[int] = set()
        self.marks = PhaseMarks()
        self.marks.install(self.model, children=way.impl != COMPILE)

    def step(self) -> None:
        """Run one step; where it fails, what memory it held is left to whoever catches the error."""
        self.marks.begin(Phase(EMBEDDING))
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        self.marks.begin(Phase(HEAD_BACKWARD))
        loss.backward()
        self.marks.begin(Phase(OPTIMIZER))
        self.see_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.marks.begin(Phase(END))
        self.losses.append(loss.detach())

    def see_gradients(self) -> None:
        """Keep the addresses of the gradients that there are."""
        self.gradients = set(storages((p.grad for p in self.trained), self.device))

    def run(self, stem: str) -> dict[str, Any]:
        """Return the figures of all steps; the files go to ``stem``."""
        settings = self.settings
        timed: list[list[tuple[Phase, float]]] = []
        failed = None
        release(self.device)
        reset_cuda_peak()
        try:
            for _ in range(settings["warm"]):
                self.step()
            reset_cuda_peak()
            for _ in range(settings["steps"]):
                with self.clock() as found:
                    self.step()
                timed.append(found)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = out_of_memory(f"in the {self.marks.current}", self.device)
            if settings["gpus"] > 1:
                raise UnsupportedError(failed) from error
        taken = self._memory()
        losses = [value if math.isfinite(value) else None for value in (loss.item() for loss in self.losses)]
        files = settings["trace"] and self.rank == 0  # every rank takes the same steps, and the first one writes
        recorded = self._recorded(f"{stem}-snapshot.pickle" if files else None, timed)
        told = {**taken, **recorded, "losses": losses, "parameters": sum(p.numel() for p in self.model.parameters())}
        told["attention"] = attention_of(self.model)
        own = f"attention is the model's own ({told['attention']}), not PyTorch's fused one"
        notes = [told.get("note"), None if told["attention"] == SDPA else own, missed_frees(told)]
        if any(notes):
            told["note"] = "; ".join(filter(None, notes))
        told["trained_parameters"] = sum(p.numel() for p in self.trained)
        if failed:
            return {**told, "failed": failed}
        if settings["trace"]:
            self._trace(f"{stem}-trace.json.gz" if files else None, told["files"])
        steps_ms = [sum(ms for _, ms in step) for step in timed]
        tokens = settings["seq_len"] * settings["batch_size"] * settings["gpus"]
        seconds = statistics.median_low(steps_ms) / 1e3
        return {**told, "steps_ms": steps_ms, "seconds": seconds, "tokens_per_s": tokens / seconds}

    @contextlib.contextmanager
    def clock(self) -> Iterator[list[tuple[Phase, float]]]:
        """Fill the list with each phase of a step and its ms, on a GPU by its own clock; the last is the end, of 0."""
        found: list[tuple[Phase, float]] = []
        seen: list[tuple[Phase, Callable[[], Any]]] = []
        now = _gpu_now if self.device.type == "cuda" else _host_now
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.tell = lambda phase: seen.append((phase, now()))
        try:
            yield found
        finally:
            self.marks.tell = lambda _: None
        if seen[-1][0].kind != END:  # an error ended it
            seen.append((Phase(END), now()))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for (phase, begin), (_, end) in pairwise(seen):
            found.append((phase, _between(begin, end)))
        found.append((seen[-1][0], 0.0))

    def _memory(self) -> dict[str, float]:
        """Return what the steps so far took, in GiB, by the allocator's own count."""
        told = {"host_peak_gib": gib(peak_resident_bytes())}
        if self.device.type == "cuda":
            told["allocated_gib"] = gib(cuda_peak_bytes())
            told["reserved_gib"] = gib(cuda_reserved_bytes())
        return told

    def _recorded(self, snapshot: str | None, timed: list[list[tuple[Phase, float]]]) -> dict[str, Any]:
        """Return one more step's recording, as it is drawn; its phases as long as in the timed steps."""
        self._clean()
        known = known_before(self.model, self.optimizer, [self.ids, *self.losses], self.device)
        files: dict[str, str] = {}
        of_gpu = snapshot if self.device.type == "cuda" else None
        with _snapshot(of_gpu, files), self.clock() as own, record(self.marks, self.device) as recording:
            try:
                self.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.see_gradients()
        known.gradients = self.gradients
        known.states = set(storages(optimizer_tensors(self.optimizer), self.device))
        self._clean()
        lengths, note = _lengths(recording, timed, own)
        parts = segments(recording.phases, lengths)
        told = {**describe(recording, known, lengths), "segments": parts, "time_by_kind_ms": time_by_kind(parts)}
        return {**told, "files": files, **({"note": note} if note else {})}

    def _clean(self) -> None:
        """Let go of what a step that failed has left."""
        self.marks.restart()
        self.optimizer.zero_grad(set_to_none=True)
        release(self.device)

    def _trace(self, file: str | None, files: dict[str, str]) -> None:
        """Write the profiler's trace of one more step; without a file, take the step alone."""
        if file is None:
            self.step()
            return
        plain = Path(file.removesuffix(".gz"))
        cuda = self.device.type == "cuda"
        with profile(use_kineto=True, use_device="cuda" if cuda else None) as profiler:
            self.step()
            if cuda:
                torch.cuda.synchronize()
        assert profiler.kineto_results is not None
        profiler.kineto_results.save(str(plain))
        with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
        files["trace"] = Path(file).name


def _lengths(
    recording: Recording, timed: list[list[tuple[Phase, float]]], own: list[tuple[Phase, float]]
) -> tuple[list[float], str | None]:
    """Return the ms of each phase of a recording: as the median step took them, if it went through the same phases."""
    same = [step for step in timed if mended([phase for phase, _ in step]) == recording.phases]
    if same:
        totals = [sum(ms for _, ms in step) for step in same]
        median = same[totals.index(statistics.median_low(totals))]
        return [ms for _, ms in median][:-1], None
    return [ms for _, ms in own][:-1], "times are those of the recorded step, which recording slows"


def missed_frees(told: dict[str, Any]) -> str | None:
    """Return what to think of a recording whose peak is above the allocator's own count; None where it is not."""
    counted = told.get("allocated_gib")
    if counted is None or told["peak"]["gib"] <= counted * MISSED_FREES:
        return None
    return (
        f"the recording has a peak of {told['peak']['gib']:.2f} GiB where the allocator counted {counted:.2f}: frees "
        "were missed, so that its picture and its owners' shares are too large. The allocator's count is right"
    )


@contextlib.contextmanager
def _snapshot(file: str | None, files: dict[str, str]) -> Iterator[None]:
    """Write PyTorch's memory snapshot of what happens inside, for pytorch.org/memory_viz."""
    if file is None:
        yield
        return
    # No stacks of frees: the one of a tensor that is freed while an exception ends an autograd function, as it does
    # where a checkpoint has computed enough again, makes PyTorch lose the exception.
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, context="alloc", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(file)  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        files["snapshot"] = Path(file).name


def _gpu_now() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _host_now() -> Any:
    return time.perf_counter_ns()


def _between(begin: Any, end: Any) -> float:
    """Return the ms between two moments of one clock."""
    found = (end - begin) / 1e6 if isinstance(begin, int) else float(begin.elapsed_time(end))
    return found if math.isfinite(found) else 0.0

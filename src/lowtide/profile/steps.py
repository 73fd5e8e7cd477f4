"""One implementation's steps: timed, then recorded, then traced. Runs in its own process."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lowtide.bench.harness import OUT_OF_MEMORY, reason_of, release
from lowtide.bench.way import Way
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
from lowtide.memory.stack import find_stack
from lowtide.profile.owners import known_before, optimizer_tensors
from lowtide.profile.phases import EMBEDDING, END, HEAD_BACKWARD, OPTIMIZER, Phase, PhaseMarks, with_whole_recomputes
from lowtide.profile.recording import record, storages
from lowtide.profile.timeline import describe, segments, time_by_kind

SNAPSHOT_ENTRIES = 2_000_000  # events of the allocator; more than a step of a hundred layers has
TIMEOUT = timedelta(minutes=5)  # until a rank gives up waiting for one that failed
Timed = list[tuple[Phase, float]]
"""A step's phases and their ms; the last is the end, of 0."""


def measure(way: dict[str, str], settings: dict[str, Any], stem: str) -> dict[str, Any] | None:
    """Return the times and the memory of an implementation's steps, or why they did not run; None on other ranks.

    `run_child` calls it with a `Way`'s fields, the settings of `ProfileConfig` without "auto" (memory_limit in GiB, 0:
    none; sharding; vocab_size), and the beginning of the path of every file that is written.
    """
    device = torch.device(settings["device"])
    rank = int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        if settings["memory_limit"]:
            whole = torch.cuda.get_device_properties(rank).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings["memory_limit"] * 2**30 / whole))
    sharded = settings["sharding"] != "none"
    if sharded:  # gloo beside NCCL: what is in host memory has collectives too
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        result = Steps(Way(**way), settings, device, rank).run(stem)
    except Exception as error:  # a policy that does not fit, a lack of memory for the model alone
        if settings["gpus"] > 1:  # the other ranks would wait for this one
            raise
        memory = is_out_of_memory(error)
        result = {"failed": out_of_memory("while the model was built", device) if memory else reason_of(error)}
    if sharded:
        atexit.register(_leave)  # when the result is written
    return result if rank == 0 else None


def _leave() -> None:
    """End the process group, and the process: gloo's threads abort an interpreter that is being torn down."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def out_of_memory(where: str, device: torch.device) -> str:
    """Return the row's text; on a GPU with the peak of its tensors."""
    taken = cuda_peak_bytes() if device.type == "cuda" else resident_bytes()
    return f"{OUT_OF_MEMORY} at {gib(taken):.2f} GiB, {where}"


class Steps:
    """A model of one implementation, and its training step."""

    def __init__(self, way: Way, settings: dict[str, Any], device: torch.device, rank: int) -> None:
        self.settings, self.device, self.rank = settings, device, rank
        given = {name: settings[name] for name in ("seed", "vocab_size", "lora")}
        self.model = build_way(way, settings["model"], getattr(torch, settings["dtype"]), device, **given)
        if settings["sharding"] != "none":
            _shard(self.model, settings["sharding"], device, offload=settings["offload_params"])
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(settings["optimizer"], self.trained)
        generator = torch.Generator().manual_seed(settings["seed"] + rank)
        shape = (settings["batch_size"], settings["seq_len"])
        vocab = self.model.config.get_text_config().vocab_size
        self.ids = torch.randint(0, vocab, shape, generator=generator).to(device)
        self.losses: list[Tensor] = []
        self.gradients: set[int] = set()  # addresses
        self.marks = PhaseMarks()
        self.marks.install(self.model, children=not way.compiles_layers)

    def step(self) -> None:
        """Run one step; if it fails, the caller frees its memory."""
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
        """Record the addresses of the gradients."""
        self.gradients = set(storages((p.grad for p in self.trained), self.device))

    def run(self, stem: str) -> dict[str, Any]:
        """Return the results of all steps; the files' paths begin with ``stem``."""
        settings = self.settings
        timed: list[Timed] = []
        failed = None
        release(self.device)
        reset_cuda_peak()
        try:
            for _ in range(settings["warm"]):
                self.step()
            reset_cuda_peak()
            for _ in range(settings["steps"]):
                with self.clock() as phases:
                    self.step()
                timed.append(phases)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = out_of_memory(f"in the {self.marks.current}", self.device)
            if settings["gpus"] > 1:
                raise UnsupportedError(failed) from error
        result: dict[str, Any] = {"host_peak_gib": gib(peak_resident_bytes())}
        if self.device.type == "cuda":
            result |= {"allocated_gib": gib(cuda_peak_bytes()), "reserved_gib": gib(cuda_reserved_bytes())}
        losses = [value if math.isfinite(value) else None for value in (loss.item() for loss in self.losses)]
        first = self.rank == 0  # every rank takes the same steps, and the first one writes
        snapshot = first and settings["snapshot"] and self.device.type == "cuda"
        slowed = self._record(result, f"{stem}-snapshot.pickle" if snapshot else None, timed)
        result |= {"losses": losses, "parameters": sum(p.numel() for p in self.model.parameters())}
        result["attention"] = attention_of(self.model)
        own = f"attention is the model's own ({result['attention']}), not PyTorch's fused one"
        if notes := list(filter(None, [slowed, result["attention"] != SDPA and own])):
            result["note"] = "; ".join(notes)
        result["trained_parameters"] = sum(p.numel() for p in self.trained)
        if failed:
            return {**result, "failed": failed}
        if settings["trace"]:
            self._trace(f"{stem}-trace.json.gz" if first else None, result["files"])
        steps_ms = [sum(ms for _, ms in step) for step in timed]
        tokens = settings["seq_len"] * settings["batch_size"] * settings["gpus"]
        seconds = statistics.median_low(steps_ms) / 1e3
        return {**result, "steps_ms": steps_ms, "seconds": seconds, "tokens_per_s": tokens / seconds}

    @contextlib.contextmanager
    def clock(self) -> Iterator[Timed]:
        """Fill the list with each phase of a step and its ms, on a GPU by its own clock."""
        phases: Timed = []
        begun: list[tuple[Phase, Any]] = []
        cuda = self.device.type == "cuda"
        now = _gpu_now if cuda else time.perf_counter_ns
        if cuda:
            torch.cuda.synchronize()
        self.marks.on_begin = lambda phase: begun.append((phase, now()))
        try:
            yield phases
        finally:
            self.marks.on_begin = lambda _: None
        if begun[-1][0].kind != END:  # an error ended it
            begun.append((Phase(END), now()))
        if cuda:
            torch.cuda.synchronize()
        for (phase, begin), (_, end) in pairwise(begun):
            phases.append((phase, float(begin.elapsed_time(end)) if cuda else (end - begin) / 1e6))
        phases.append((begun[-1][0], 0.0))

    def _record(self, result: dict[str, Any], snapshot: str | None, timed: list[Timed]) -> str | None:
        """Add the recording of one more step, its phases as long as in the timed steps; return a note about these."""
        self._clean()
        known = known_before(self.model, self.optimizer, [self.ids, *self.losses], self.device)
        files: dict[str, str] = {}
        if snapshot is not None:
            # No stacks of frees: the one of a tensor that is freed while an exception ends an autograd function, as it
            # does where a checkpoint has recomputed enough, makes PyTorch lose the exception.
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, context="alloc", stacks="python")
        with self.clock() as own, record(self.marks, self.device) as recording:
            try:
                self.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.see_gradients()
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            files["snapshot"] = Path(snapshot).name
        known.gradients = self.gradients
        known.states = set(storages(optimizer_tensors(self.optimizer), self.device))
        self._clean()
        step = median_step(timed, recording.phases)
        lengths = [ms for _, ms in step or own][:-1]
        parts = segments(recording.phases, lengths)
        result |= describe(recording, known, lengths)
        result |= {"segments": parts, "time_by_kind_ms": time_by_kind(parts), "files": files}
        return None if step else "times are those of the recorded step, which recording slows"

    def _clean(self) -> None:
        """Free what a failed step left."""
        self.marks.restart()
        self.optimizer.zero_grad(set_to_none=True)
        release(self.device)

    def _trace(self, file: str | None, files: dict[str, str]) -> None:
        """Write the profiler's trace of one more step; without a file, only run the step."""
        if file is None:
            self.step()
            return
        with torch.profiler.profile(acc_events=True) as profiler:
            self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(file)
        files["trace"] = Path(file).name


def _shard(model: Any, sharding: str, device: torch.device, *, offload: bool) -> None:
    """Shard each decoder layer, and the rest, by FSDP2, with ``offload`` in host memory, where the optimizer then runs.

    ``zero3``: weights, gradients and optimizer states; ``zero2``: weights are gathered once a step.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    kwargs: dict[str, Any] = {"mesh": mesh, "offload_policy": policy}
    for layer in find_stack(model).layers.values():
        fully_shard(layer, reshard_after_forward=sharding == "zero3", **kwargs)
    fully_shard(model, reshard_after_forward=None if sharding == "zero3" else False, **kwargs)  # None: its own choice


def median_step(timed: Sequence[Timed], phases: Sequence[Phase]) -> Timed | None:
    """Return the step of median time among those that went through the same phases; None if none did."""
    same = [step for step in timed if with_whole_recomputes([phase for phase, _ in step]) == phases]
    totals = [sum(ms for _, ms in step) for step in same]
    return same[totals.index(statistics.median_low(totals))] if same else None


def _gpu_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

"""One implementation's steps: timed, then recorded, then traced. Runs in its own process."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.harness import OUT_OF_MEMORY, reason_of, release
from lowtide.bench.models import SDPA, attention_of, build_model, config_of, make_optimizer
from lowtide.bench.variant import Variant
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import (
    cuda_peak_bytes,
    cuda_reserved_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    resident_bytes,
)
from lowtide.measure.units import gib
from lowtide.profile.memory import describe, known_before, optimizer_tensors, segments, time_by_kind
from lowtide.profile.phases import EMBEDDING, END, HEAD_BACKWARD, OPTIMIZER, Phase, PhaseMarks, with_whole_recomputes
from lowtide.profile.recording import record, storages

SNAPSHOT_ENTRIES = 2_000_000  # events of the allocator; more than a step of a hundred layers has
Timed = list[tuple[Phase, float]]
"""A step's phases and their ms; the last is the end, of 0."""


def measure(variant: dict[str, str], settings: dict[str, Any], stem: str) -> dict[str, Any]:
    """Return the times and the memory of an implementation's steps, or why they did not run.

    `run_child` calls it with a `Variant`'s fields, the settings of `ProfileConfig` without "auto" (memory_limit in GiB,
    0: none; vocab_size), and the beginning of the path of every file that is written.
    """
    device = torch.device(settings["device"])
    if settings["memory_limit"]:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings["memory_limit"] * 2**30 / whole))
    try:
        return Steps(Variant(**variant), settings, device).run(stem)
    except Exception as error:  # a policy that does not fit, a lack of memory for the model alone
        memory = is_out_of_memory(error)
        return {"failed": out_of_memory("while the model was built", device) if memory else reason_of(error)}


def out_of_memory(where: str, device: torch.device) -> str:
    """Return the row's text; on a GPU with the peak of its tensors."""
    taken = cuda_peak_bytes() if device.type == "cuda" else resident_bytes()
    return f"{OUT_OF_MEMORY} at {gib(taken):.2f} GiB, {where}"


class Steps:
    """A model of one implementation, and its training step."""

    def __init__(self, variant: Variant, settings: dict[str, Any], device: torch.device) -> None:
        self.settings, self.device, self.cuda = settings, device, device.type == "cuda"
        config = config_of(settings["model"], vocab_size=settings["vocab_size"])
        dtype, seed = getattr(torch, settings["dtype"]), settings["seed"]
        self.model = build_model(variant, config, dtype, device, seed=seed, lora=settings["lora"])
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(settings["optimizer"], self.trained)
        shape = (settings["batch_size"], settings["seq_len"])
        vocab = self.model.config.get_text_config().vocab_size
        self.ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)).to(device)
        self.losses: list[Tensor] = []
        self.gradients: set[int] = set()  # addresses, when the optimizer begins
        self.marks = PhaseMarks()
        self.marks.install(self.model, children=not variant.compiles_layers)

    def step(self) -> None:
        """Run one step; if it fails, the caller frees its memory."""
        self.marks.begin(Phase(EMBEDDING))
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        self.marks.begin(Phase(HEAD_BACKWARD))
        loss.backward()
        self.marks.begin(Phase(OPTIMIZER))
        self._see_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.marks.begin(Phase(END))
        self.losses.append(loss.detach())

    def _see_gradients(self) -> None:
        self.gradients = set(storages((p.grad for p in self.trained), self.device))

    def run(self, stem: str) -> dict[str, Any]:
        """Return the results of all steps; the files' paths begin with ``stem``."""
        settings, timed, failed = self.settings, list[Timed](), None
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
        result: dict[str, Any] = {"host_peak_gib": gib(peak_resident_bytes())}
        if self.cuda:
            result |= {"allocated_gib": gib(cuda_peak_bytes()), "reserved_gib": gib(cuda_reserved_bytes())}
        losses = [value if math.isfinite(value) else None for value in (loss.item() for loss in self.losses)]
        slowed = self._record(result, f"{stem}-snapshot.pickle" if settings["snapshot"] and self.cuda else None, timed)
        attention = attention_of(self.model)
        own = "" if attention == SDPA else f"attention is the model's own ({attention}), not PyTorch's fused one"
        if notes := [note for note in (slowed, own) if note]:
            result["note"] = "; ".join(notes)
        result |= {"losses": losses, "loss": losses[0] if losses else None, "attention": attention}
        for name, parameters in (("parameters", self.model.parameters()), ("trained_parameters", self.trained)):
            result[name] = sum(p.numel() for p in parameters)
        if failed:
            return {**result, "failed": failed}
        if settings["trace"]:
            with torch.profiler.profile(acc_events=True) as profiler:
                self.step()
                self._wait()
            profiler.export_chrome_trace(f"{stem}-trace.json.gz")
            result["files"]["trace"] = f"{Path(stem).name}-trace.json.gz"
        steps_ms = [sum(ms for _, ms in step) for step in timed]
        seconds = statistics.median_low(steps_ms) / 1e3
        return {**result, "steps_ms": steps_ms, "seconds": seconds, "tokens_per_s": self.ids.numel() / seconds}

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def clock(self) -> Iterator[Timed]:
        """Fill the list with each phase of a step and its ms, on a GPU by its own clock."""
        phases: Timed = []
        begun: list[tuple[Phase, Any]] = []
        now = _gpu_now if self.cuda else time.perf_counter_ns
        self._wait()
        self.marks.on_begin = lambda phase: begun.append((phase, now()))
        try:
            yield phases
        finally:
            self.marks.on_begin = lambda _: None
        if begun[-1][0].kind != END:  # an error ended it
            begun.append((Phase(END), now()))
        self._wait()
        for (phase, begin), (_, end) in pairwise(begun):
            phases.append((phase, float(begin.elapsed_time(end)) if self.cuda else (end - begin) / 1e6))
        phases.append((begun[-1][0], 0.0))

    def _record(self, result: dict[str, Any], snapshot: str | None, timed: list[Timed]) -> str:
        """Add the recording of one more step, its phases as long as in the timed steps; return a note on times."""
        self._clean()
        known = known_before(self.model, self.optimizer, [self.ids, *self.losses], self.device)
        if snapshot is not None:
            # No stacks of frees: the one of a tensor that is freed while an exception ends an autograd function, as it
            # does where a checkpoint has recomputed enough, makes PyTorch lose the exception.
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, context="alloc", stacks="python")
        with self.clock() as slow, record(self.marks, self.device) as recording:
            try:
                self.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._see_gradients()
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
        known.gradients = self.gradients
        known.states = set(storages(optimizer_tensors(self.optimizer), self.device))
        self._clean()
        step = median_step(timed, recording.phases)
        lengths = [ms for _, ms in step or slow][:-1]
        parts = segments(recording.phases, lengths)
        result |= describe(recording, known, lengths) | {"segments": parts, "time_by_kind_ms": time_by_kind(parts)}
        result |= {"peak_gib": result["peak"]["gib"]}
        result["files"] = {} if snapshot is None else {"snapshot": Path(snapshot).name}
        return "" if step else "times are those of the recorded step, which recording slows"

    def _clean(self) -> None:
        """Free what a failed step left."""
        self.marks.restart()
        self.optimizer.zero_grad(set_to_none=True)
        release(self.device)


def median_step(timed: Sequence[Timed], phases: Sequence[Phase]) -> Timed | None:
    """Return the step of median time among those that went through the same phases; None if none did."""
    same = [step for step in timed if with_whole_recomputes([phase for phase, _ in step]) == phases]
    totals = [sum(ms for _, ms in step) for step in same]
    return same[totals.index(statistics.median_low(totals))] if same else None


def _gpu_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

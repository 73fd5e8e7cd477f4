"""One implementation's steps: timed, then one recorded. Runs in its own process."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.harness import OUT_OF_MEMORY, reason_of, release
from lowtide.bench.models import build_model, make_optimizer
from lowtide.bench.variant import Variant
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import reset_cuda_peak
from lowtide.measure.units import gib
from lowtide.profile.memory import OPTIMIZER_STATES, OTHER, WEIGHTS, describe, read_recording, storages
from lowtide.profile.phases import HEAD_BACKWARD, OPTIMIZER, Phase, PhaseMarks, profiler_range
from lowtide.train.shapes import model_config

SNAPSHOT_ENTRIES = 2_000_000  # events of the allocator; more than a step of a hundred layers has


def measure(variant: dict[str, str], settings: dict[str, Any], stem: str) -> dict[str, Any]:
    """Return the times and the memory of an implementation's steps, or why they did not run; `run_child` calls it.

    ``settings`` are those of `ProfileConfig` without "auto"; the files' paths begin with ``stem``.
    """
    try:
        return Steps(Variant(**variant), settings).run(stem)
    except Exception as error:  # a policy that does not fit, a lack of memory for the model alone
        return {"failed": reason_of(error)}


class Steps:
    """A model of one implementation, and its training step."""

    def __init__(self, variant: Variant, settings: dict[str, Any]) -> None:
        self.settings, self.device = settings, torch.device(settings["device"])
        config = model_config(settings["model"])
        dtype, seed = getattr(torch, settings["dtype"]), settings["seed"]
        self.model = build_model(variant, config, dtype, self.device, seed=seed, lora=settings["lora"])
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(settings["optimizer"], self.trained)
        shape = (settings["batch_size"], settings["seq_len"])
        vocab = self.model.config.get_text_config().vocab_size
        self.ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        self.losses: list[Tensor] = []
        self.gradients: dict[int, int] = {}  # of the last step: addresses and bytes after backward
        self.marks = PhaseMarks(self.model, self.device)

    def step(self) -> None:
        """Run one step."""
        with self.marks.step():
            try:
                loss = self.model(input_ids=self.ids, labels=self.ids).loss
                self.marks.begin(Phase(HEAD_BACKWARD))
                loss.backward()
            finally:
                self.gradients = storages((p.grad for p in self.trained), self.device)
            self.marks.begin(Phase(OPTIMIZER))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def attempt(self) -> str:
        """Run one step, and return where memory ran out; empty if it did not."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        try:
            self.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return f"{OUT_OF_MEMORY} in the {self.marks.phases[-2]}"
        return ""

    def run(self, stem: str) -> dict[str, Any]:
        """Return the results of all steps; the files' paths begin with ``stem``."""
        timed, failed = list[list[float]](), ""
        release(self.device)
        for i in range(-self.settings["warm"], self.settings["steps"]):
            if i <= 0:
                reset_cuda_peak()
            if failed := self.attempt():
                break
            if i >= 0:
                timed.append(self.marks.lengths_ms())
        losses = [loss.item() for loss in self.losses]
        result = {"losses": losses, "loss": losses[0] if losses else None}
        if self.device.type == "cuda":
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            result |= {"allocated_gib": gib(allocated), "reserved_gib": gib(reserved)}
        for name, parameters in (("parameters", self.model.parameters()), ("trained_parameters", self.trained)):
            result[name] = sum(p.numel() for p in parameters)
        if failed:
            return {**result, **self.record(stem, []), "failed": failed}
        steps_ms = list(map(sum, timed))
        median = timed[steps_ms.index(statistics.median_low(steps_ms))]
        seconds = sum(median) / 1e3
        speed = {"steps_ms": steps_ms, "seconds": seconds, "tokens_per_s": self.ids.numel() / seconds}
        return {**result, **self.record(stem, median), **speed}

    def record(self, stem: str, lengths_ms: list[float]) -> dict[str, Any]:
        """Return the recording of one more step, its phases as long as in the one without; write its files.

        Where no step without a recording had the same phases, because memory ran out, they are as long as they were.
        """
        self.optimizer.zero_grad(set_to_none=True)  # what a step that failed has left
        release(self.device)
        before, cuda = self._bytes(), self.device.type == "cuda"
        if cuda:
            # No stacks of frees: the one of a tensor that is freed while an exception ends an autograd function, as it
            # does where a checkpoint has recomputed enough, makes PyTorch lose the exception.
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, context="alloc", stacks="python")
        # The tree of some versions lacks an event that no range surrounds: what Python frees between two operations.
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler, profiler_range("lowtide step"):
            self.attempt()
        files = {"trace": f"{stem}-trace.json.gz"}
        profiler.export_chrome_trace(files["trace"])
        if cuda:
            files["snapshot"] = f"{stem}-snapshot.pickle"
            torch.cuda.memory._dump_snapshot(files["snapshot"])  # type: ignore[no-untyped-call]
        recorded_ms, recording = self.marks.lengths_ms(), read_recording(profiler, self.marks.phases, self.device)
        unlike = len(lengths_ms) != len(recorded_ms)
        note = {"note": "times are those of the recorded step, which recording slows"} if unlike else {}
        told = describe(recording, before, self.gradients, recorded_ms if unlike else lengths_ms)
        return {**told, **note, "files": {name: Path(file).name for name, file in files.items()}}

    def _bytes(self) -> dict[str, int]:
        """Return the bytes of each owner between two steps."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        owned = {WEIGHTS: self.model.parameters(), OPTIMIZER_STATES: states}
        sizes = {owner: sum(storages(tensors, self.device).values()) for owner, tensors in owned.items()}
        if self.device.type == "cuda":  # workspaces too
            return {**sizes, OTHER: torch.cuda.memory_allocated(self.device) - sum(sizes.values())}
        others = storages((*self.model.buffers(), self.ids, *self.losses), self.device)
        return {**sizes, OTHER: sum(others.values())}

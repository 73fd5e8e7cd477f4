"""What a step of a long sequence should take on the GPU, on the host and in time: where the search begins.

The planner's arithmetic (`lowtide.memory.planner.step_bytes`), with parameters, gradients and optimizer states where
they are: on the host under FSDP2, a layer's at a time on the GPU; or on the GPU and frozen, beside adapters that are
too small to count. T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.bench.longest_config import OFFLOADED, Train
from lowtide.bench.way import LIGER, LOWTIDE, STOCK
from lowtide.head.options import HeadOptions
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.gpus import Gpu
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import PAGES, checkpoint_bytes
from lowtide.memory.planner.search import Search, largest
from lowtide.memory.planner.shapes import ModelShape
from lowtide.memory.planner.step_bytes import Groups, Memory, placed
from lowtide.memory.planner.times import Times
from lowtide.memory.policy import ActivationPolicy

LAYERS_ON_GPU = 5  # of parameters' size under FSDP2: one at work, one fetched ahead, a copy of each, a gradient
STATES = 2  # tensors that AdamW keeps for each parameter
HOST_RATE = 5e9  # parameters a second that AdamW updates on the host
PEERS_MORE = 14  # bytes a token and hidden size that a peer's layer keeps beyond a patched one, when it runs again
LOGIT = 12  # bytes of each logit that the stock loss has at once: measured, 24 GiB of 16384 x 131072
OWN = LOWTIDE
LORA = Adapters(16, ("q_proj", "v_proj"))  # what is trained where the model is not


@dataclass(frozen=True)
class Demand:
    """What a step should take: bytes on the GPU and on the host, seconds, and what the layers keep."""

    gpu: int
    host: int
    seconds: float
    groups: Groups


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One way to train one model on one machine.

    Attributes:
        way: Who.
        train: What is trained.
        shape: The model.
        gpu: Which; its rates are for the times.
        dtype: Of all tensors.
        gpu_bytes: What may be taken on the GPU; None: it is a CPU that trains, in the host's memory.
        host_bytes: The same on the host.
        tile: Tokens that our MLPs work on at a time.
    """

    way: str
    train: Train
    shape: ModelShape
    gpu: Gpu
    dtype: torch.dtype
    gpu_bytes: int | None
    host_bytes: int
    tile: int

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer states on the host; FSDP2 pins the first two."""
        if self.train == "lora":
            return 0
        pinned = sum(pinned_bytes(n * self.dtype.itemsize) for n in parameter_sizes(self.shape))
        return 2 * pinned + STATES * self.shape.params * self.dtype.itemsize

    def at(self, T: int) -> Demand:
        """Return what a step of T tokens takes where the layers keep as little on the GPU as they can."""
        job = self._job(T)
        return self._demand(job, self._groups(job))

    def fastest(self, T: int) -> Demand:
        """Return what the fastest step of T tokens takes that should fit, with nothing of the layers on the host.

        That is `at`'s for peers, whose layers have no choice, and where nothing else fits.
        """
        if self.way == OWN and self.gpu_bytes is not None:
            job = self._job(T)
            for one in reversed(Search(job, 0).front):
                demand = self._demand(job, one.groups)
                if self._has_room(demand):
                    return demand
        return self.at(T)

    def _job(self, T: int) -> Job:
        adapters = LORA if self.train == "lora" else None
        return Job(self.shape, T, 1, self.gpu, self.dtype, "sgd", head=HeadOptions(), adapters=adapters)

    def _demand(self, job: Job, groups: Groups) -> Demand:
        T, memory = job.seq_len, Memory(job)
        peak = max(
            phase.bytes - phase.gradients - (phase.weights if self.train == "full" else 0) + self._logits(T, phase.name)
            for phase in memory.phases(groups)
            if not (self.train == "lora" and phase.name in ("embedding", "optimizer"))
        )
        host = self.states
        if self.way == OWN:
            host += memory.host(groups)
        else:
            peak += T * PEERS_MORE * self.shape.hidden // 2 * self.dtype.itemsize
            if self.way.endswith(OFFLOADED) and self.gpu_bytes is not None:  # a CPU's tensors stay where they are
                each = checkpoint_bytes(job, groups[0][0])
                saved = [each] * self.shape.layers + self.saved_outside(T)
                host += sum(map(pinned_bytes, saved))
                peak -= (self.shape.layers - ON_DEVICE) * each
        peak += self._resident(memory)
        if self.gpu_bytes is None:
            host += peak
        return Demand(peak, host, self._seconds(job, groups), groups)

    def saved_outside(self, T: int) -> list[int]:
        """Return the bytes of the large tensors that autograd saves of a peer's step outside its layers.

        ``save_on_cpu`` around the step takes them to the host too, one that is saved twice in two copies.
        """
        e, full = self.dtype.itemsize, self.train == "full"
        stream, weight = T * self.shape.hidden * e, self.shape.vocab_params * e
        if self.way.startswith(LIGER):  # what the final norm reads, and the gradients that the loss has made in forward
            return [stream, stream] + [weight] * full
        # Twice what the final norm reads, in float32, and twice what it returns, for its weight and for the head's; the
        # head's weight; twice the log-probabilities.
        wide, logits = 4 * T * self.shape.hidden, 4 * T * self.shape.vocab
        return [wide, wide, *[stream, stream] * full, weight, logits, logits]

    def fits(self, T: int) -> bool:
        """Return whether a step of T tokens should fit."""
        return self._has_room(self.at(T))

    def _has_room(self, demand: Demand) -> bool:
        return demand.host <= self.host_bytes and (self.gpu_bytes is None or demand.gpu <= self.gpu_bytes)

    def longest(self, step: int) -> int:
        """Return the longest sequence that should fit, in steps of so many tokens; 0 where none does."""
        return step * largest(lambda n: self.fits(n * step))

    def _groups(self, job: Job) -> list[tuple[ActivationPolicy, int]]:
        """Return what the layers keep: each its input, ours on the host as far as there is room, first layers first."""
        if self.way != OWN:
            return [(ActivationPolicy(keep="input", mlp_level=0), self.shape.layers)]
        here = ActivationPolicy(keep="input", mlp_level=1, mlp_tile_tokens=self.tile)
        if self.gpu_bytes is None:  # nothing to offload from
            return [(here, self.shape.layers)]
        away = ActivationPolicy(keep="input", mlp_level=1, mlp_tile_tokens=self.tile, offload=True)
        room = max(self.host_bytes - self.states, 0) // (checkpoint_bytes(job, away) + PAGES)
        moved = min(self.shape.layers, room + ON_DEVICE) if room else 0
        return [(policy, n) for policy, n in ((away, moved), (here, self.shape.layers - moved)) if n]

    def _logits(self, T: int, phase: str) -> int:
        """Return the bytes of logits in a phase: a stock loss builds them."""
        return LOGIT * T * self.shape.vocab if phase == "head" and self.way.startswith(STOCK) else 0

    def _resident(self, memory: Memory) -> int:
        """Return the bytes of parameters and gradients that are on the GPU at once under FSDP2."""
        if self.train == "lora":
            return 0
        vocab = self.shape.vocab_params * (1 if self.shape.tied else 2) * self.dtype.itemsize
        return 2 * vocab + LAYERS_ON_GPU * memory.layer_gradients

    def _seconds(self, job: Job, groups: Groups) -> float:
        update = self.shape.params / HOST_RATE if self.train == "full" else 0.0
        return Times(job).step(groups) + update


def moves(groups: Groups) -> int:
    """Return how many layers' checkpoints go to the host."""
    return sum(n for _, n, moved in placed(groups) if moved)


def pinned_bytes(size: int) -> int:
    """Return what PyTorch's own allocator of pinned memory takes: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def parameter_sizes(shape: ModelShape) -> Sequence[int]:
    """Return the sizes of the large parameters: four of attention and three of the MLP a layer, the vocabulary's."""
    h, q, k, f = shape.hidden, shape.query_width, shape.kv_width, shape.intermediate
    layer = [h * q, h * k, h * k, h * q, h * f, h * f, h * f]
    return layer * shape.layers + [shape.vocab_params] * (1 if shape.tied else 2)

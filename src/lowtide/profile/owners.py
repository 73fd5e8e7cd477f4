"""Whose each byte is: weights, gradients, optimizer states, layers' activations, the head's, recomputed, transients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowtide.profile.phases import EMBEDDING, END, FORWARD, HEAD, HEAD_BACKWARD, OPTIMIZER, RECOMPUTE
from lowtide.profile.recording import Block, Recording, storages

WEIGHTS, GRADIENTS, OPTIMIZER_STATES = "weights", "gradients", "optimizer"
ACTIVATIONS, HEAD_OWNER, RECOMPUTED, TRANSIENTS, OTHER = "activations", "head", "recomputed", "transients", "other"
OWNERS = (WEIGHTS, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, HEAD_OWNER, RECOMPUTED, TRANSIENTS, OTHER)
_EXCHANGE = "FSDP::"  # begins the names of FSDP2's hooks: what they make but weights is on its way between ranks
_BY_PHASE = {HEAD: HEAD_OWNER, HEAD_BACKWARD: HEAD_OWNER, RECOMPUTE: RECOMPUTED}


@dataclass
class Known:
    """What is known by identity: by the address of its storage.

    Attributes:
        before: Owner and bytes of what was there when the recording began, by address.
        baseline: All bytes that were live on the device then.
        gradients: Addresses of the parameters' gradients when the optimizer began, or an error ended the step.
        states: Addresses of the optimizer's tensors after its step.
    """

    before: dict[int, tuple[str, int]] = field(default_factory=dict)
    baseline: int = 0
    gradients: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def known_before(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Tensor], device: torch.device
) -> Known:
    """Return what is on the device between two steps."""
    found = Known()
    groups = (
        (WEIGHTS, model.parameters()),
        (GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None)),
        (OPTIMIZER_STATES, optimizer_tensors(optimizer)),
        (OTHER, (*model.buffers(), *inputs)),
    )
    for owner, tensors in groups:
        for address, size in storages(tensors, device).items():
            found.before.setdefault(address, (owner, size))
    known = sum(size for _, size in found.before.values())
    found.baseline = known if device.type == "cpu" else int(torch.cuda.memory_allocated(device))
    return found


@dataclass(frozen=True)
class Owned:
    """A block's owner, and the phase that it is made in as `Phase.to_text` has it, where the owner is known by that."""

    owner: str
    detail: str = ""


def owners_of(recording: Recording, known: Known) -> list[Owned]:
    """Return the owner of each block: by identity where that is known, else by the phase in which it was made."""
    phases, begins = recording.phases, recording.begins
    # Gradients were looked at when the optimizer began, or when an error ended the step.
    grown = next(event for phase, event in zip(phases, begins, strict=True) if phase.kind in (OPTIMIZER, END))
    return [_owner(recording, known, block, grown) for block in recording.blocks]


def _owner(recording: Recording, known: Known, block: Block, grown: int) -> Owned:
    phase = recording.phases[block.phase]
    if block.end is None and block.address in known.states:
        return Owned(OPTIMIZER_STATES)
    if block.address in known.gradients and _is_live(block, grown):
        return Owned(GRADIENTS)
    if any(_is_live(block, event) for event in recording.weights.get(block.address, ())):
        return Owned(WEIGHTS, "gathered")
    if block.operation.startswith(_EXCHANGE):
        return Owned(TRANSIENTS, phase.to_text())
    if phase.kind in (FORWARD, EMBEDDING) and _is_live(block, recording.begins[block.phase + 1]):
        return Owned(ACTIVATIONS, phase.to_text())
    return Owned(_BY_PHASE.get(phase.kind, TRANSIENTS), phase.to_text())


def _is_live(block: Block, event: int) -> bool:
    """Whether a block is live before the event of a number."""
    return block.begin < event and (block.end is None or block.end >= event)

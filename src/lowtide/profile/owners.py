"""The owner of each byte: weights, gradients, optimizer states, layers' activations, head, recomputed, transients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowtide.profile.phases import EMBEDDING, END, FORWARD, HEAD, HEAD_BACKWARD, OPTIMIZER, RECOMPUTE, Label
from lowtide.profile.recording import Block, Recording, storages

WEIGHTS, GRADIENTS, OPTIMIZER_STATES = "weights", "gradients", "optimizer"
ACTIVATIONS, HEAD_OWNER, RECOMPUTED, TRANSIENTS, OTHER = "activations", "head", "recomputed", "transients", "other"
OWNERS = {
    WEIGHTS: Label("weights", "#5b6770", dark=True),
    GRADIENTS: Label("gradients", "#9fa8ad"),
    OPTIMIZER_STATES: Label("optimizer states", "#cfd4d6"),
    ACTIVATIONS: Label("activations saved for backward", "#2f7fb8", dark=True),
    HEAD_OWNER: Label("head: logits, loss", "#d1602a", dark=True),
    RECOMPUTED: Label("recomputed", "#8fc1e3"),
    TRANSIENTS: Label("transients", "#e8b84a"),
    OTHER: Label("inputs, workspaces", "#b9a3c9"),
}
_COMMUNICATION = "FSDP::"  # prefix of FSDP2's hooks: their buffers, weights aside, are in transit between ranks
_BY_PHASE = {HEAD: HEAD_OWNER, HEAD_BACKWARD: HEAD_OWNER, RECOMPUTE: RECOMPUTED}


@dataclass
class Known:
    """What is known by identity: by the address of its storage."""

    before: dict[int, tuple[str, int]] = field(default_factory=dict)  # owner and bytes of what the recording found
    baseline: int = 0  # all bytes that were live on the device then
    gradients: set[int] = field(default_factory=set)  # when the optimizer began, or an error ended the step
    states: set[int] = field(default_factory=set)  # the optimizer's tensors after its step


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def known_before(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Tensor], device: torch.device
) -> Known:
    """Return what is on the device between two steps."""
    known = Known()
    groups = (
        (WEIGHTS, model.parameters()),
        (GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None)),
        (OPTIMIZER_STATES, optimizer_tensors(optimizer)),
        (OTHER, (*model.buffers(), *inputs)),
    )
    for owner, tensors in groups:
        for address, size in storages(tensors, device).items():
            known.before.setdefault(address, (owner, size))
    listed = sum(size for _, size in known.before.values())
    known.baseline = listed if device.type == "cpu" else int(torch.cuda.memory_allocated(device))
    return known


def owners_of(recording: Recording, known: Known) -> list[str]:
    """Return the owner of each block: by identity if that is known, else by the phase that allocated it."""
    starts = zip(recording.phases, recording.begins, strict=True)
    # `Known.gradients` was taken when the optimizer began, or when an error ended the step.
    complete = next(event for phase, event in starts if phase.kind in (OPTIMIZER, END))
    return [_owner(recording, known, block, complete) for block in recording.blocks]


def _owner(recording: Recording, known: Known, block: Block, complete: int) -> str:
    kind = recording.phases[block.phase].kind
    if block.end is None and block.address in known.states:
        return OPTIMIZER_STATES
    if block.address in known.gradients and block.is_live_before(complete):
        return GRADIENTS
    if any(block.is_live_before(event) for event in recording.weights.get(block.address, ())):  # gathered
        return WEIGHTS
    if block.operation.startswith(_COMMUNICATION):
        return TRANSIENTS
    if kind in (FORWARD, EMBEDDING) and block.is_live_before(recording.begins[block.phase + 1]):
        return ACTIVATIONS
    return _BY_PHASE.get(kind, TRANSIENTS)

"""The random number generators that a user's function may draw from: where they stand, and whether they have moved."""

import torch
from torch import Tensor

RandomState = tuple[Tensor, int, int]  # the CPU's state, and a GPU's seed and offset, which are numbers on the host


def random_state(device: torch.device) -> RandomState:
    """Return where the generators stand that a function of tensors on ``device`` draws from."""
    if device.type != "cuda":
        return torch.get_rng_state(), 0, 0
    gpu = torch.cuda.default_generators[device.index]
    return torch.get_rng_state(), gpu.initial_seed(), gpu.get_offset()


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators there."""
    cpu, seed, offset = state
    torch.set_rng_state(cpu)
    if device.type == "cuda":
        gpu = torch.cuda.default_generators[device.index]
        gpu.manual_seed(seed)
        gpu.set_offset(offset)


def same_state(a: RandomState, b: RandomState) -> bool:
    """Return whether no random number was drawn between two states."""
    return a[1:] == b[1:] and torch.equal(a[0], b[0])

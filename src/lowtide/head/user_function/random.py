"""The random number generators that a user's function may draw from: where they stand, and whether they have moved."""

from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """Where the generators stand: the CPU's state, and a GPU's seed and offset, which are numbers on the host."""

    cpu: Tensor
    gpu: tuple[int, int] | None


def random_state(device: torch.device) -> RandomState:
    """Return where the generators stand that a function of tensors on ``device`` draws from."""
    if device.type != "cuda":
        return RandomState(torch.get_rng_state(), None)
    gpu = torch.cuda.default_generators[device.index]
    return RandomState(torch.get_rng_state(), (gpu.initial_seed(), gpu.get_offset()))


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators there."""
    torch.set_rng_state(state.cpu)
    if state.gpu is not None:
        seed, offset = state.gpu
        gpu = torch.cuda.default_generators[device.index]
        gpu.manual_seed(seed)
        gpu.set_offset(offset)


def same_state(a: RandomState, b: RandomState) -> bool:
    """Return whether no random number was drawn between two states."""
    return a.gpu == b.gpu and torch.equal(a.cpu, b.cpu)

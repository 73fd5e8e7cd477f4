"""What a module computes, found out by running it on a few random rows beside the formula that it may have.

The rows go through a twin: the module's own forward with small random weights on the CPU, so that a probe needs no real
weights (they may be on no device yet, or on a full one) and takes a millisecond.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Small enough for an epsilon to matter, large enough for a clamp to; float16 holds a few times the largest.
ROW_SCALES = (1e-3, 0.3, 1.0, 1.0, 40.0, 4000.0)


def random(*shape: int, seed: int) -> Tensor:
    """Return normal float32 numbers on the CPU; the global generators stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def rows(D: int) -> Tensor:
    """Return one random row of each of `ROW_SCALES` [2, 3, D]."""
    scales = torch.tensor(ROW_SCALES, device="cpu", dtype=torch.float32)  # whatever the default dtype is
    return (random(len(ROW_SCALES), D, seed=0) * scales[:, None]).view(2, -1, D)


def twin_of(
    module: nn.Module, base: type, *, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
) -> nn.Module:
    """Return an instance of ``base`` with the module's attributes, but with these children and parameters.

    Args:
        module: Whose attributes are taken; not changed.
        base: The class, free of what patch made.
        modules: All children.
        parameters: All parameters of its own.
    """
    twin: Any = object.__new__(base)
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    vars(twin).update(state)
    vars(twin)["_modules"], vars(twin)["_parameters"] = dict(modules), dict(parameters)
    return twin.train()  # type: ignore[no-any-return]


def outcome(function: Callable[[], Any]) -> Any:
    """Run ``function`` without gradients, autocast and lasting use of the global generator; return what it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            return function()
    except Exception as error:  # whatever a stranger's forward raises means that it is not of our form
        return error.with_traceback(None)  # which holds frames, and they the module


def outcomes(base: Any, twin: nn.Module, x: Tensor) -> list[Any]:
    """Return what the forward of ``base`` makes of a twin and ``x``, in training and in evaluation."""
    return [outcome(functools.partial(base.forward, twin.train(mode), x)) for mode in (True, False)]


def agree(got: object, expected: Tensor, tolerance: float) -> bool:
    """Whether ``got`` is a tensor like ``expected``, each row within ``tolerance`` of its largest value."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((got - expected).abs() <= tolerance * largest).all())

"""What tests on a GPU share; every test leaves nothing behind that another process would lack."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.measure.timing import peak_above

ON_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("full_float32"),
]
MAJOR = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
EXPONENTIAL = pytest.mark.skipif(MAJOR not in (9, 10), reason="needs a GPU that has the exponential path")
HOPPER = pytest.mark.skipif(MAJOR != 9, reason="needs a Hopper GPU")


@pytest.fixture
def full_float32() -> None:
    """Products as exact as their operands, for comparisons with float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """PyTorch keeps what a test allocated; several processes share the GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a test multiplied on
        torch.cuda.empty_cache()


@contextmanager
def no_waits() -> Iterator[None]:
    """Fail where the host waits for the device; run before what compiles kernels."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_beyond_gradients(step: Callable[[], Any], *leaves: Tensor) -> int:
    """Return the peak bytes of a step above what was there, without the gradients of the leaves, None before it."""
    for leaf in leaves:
        leaf.grad = None
    return peak_above(step, "cuda") - sum(0 if leaf.grad is None else leaf.grad.nbytes for leaf in leaves)


def requested_bytes(when: str = "current") -> int:
    """Bytes that tensors asked for; their blocks are up to 1 MiB larger where the allocator had no better."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])

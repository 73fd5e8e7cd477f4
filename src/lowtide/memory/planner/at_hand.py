"""The GPU that is planned for: one of the table, or the one at hand, measured and remembered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import ArgumentTypeError, UnsupportedError, message
from lowtide.measure.cached import CachedTable
from lowtide.measure.timing import time_side_by_side
from lowtide.memory.planner.gpus import DEFAULT, GPUS, HALF_LENGTH, HALF_RATE, Gpu, gpu_named, known_as

IN_A_ROW = 40  # products that are timed together: after some milliseconds a GPU lowers its clock


def find_gpu(device: str | torch.device | Gpu | None) -> Gpu:
    """Return the GPU that is planned for.

    Args:
        device: A name of `GPUS`, in any case, with ``rtx`` and hyphens or without, or as its driver has it;
            ``"a100"`` is the one of 80 GB. ``"cuda"`` (or a CUDA device): the one at hand, measured; a `Gpu`; None:
            the one at hand by its name (measured where the table lacks it), and an H100 where there is none.

    Raises:
        ArgumentValueError: An unknown name.
        UnsupportedError: ``"cuda"`` without a GPU, or without so many.
    """
    if isinstance(device, Gpu):
        return device
    if device is None:
        if not torch.cuda.is_available():
            return GPUS[DEFAULT]
        known = known_as(torch.cuda.get_device_name())
        return GPUS[known] if known else measured_gpu(torch.device("cuda"))
    if not isinstance(device, (str, torch.device)):
        raise ArgumentTypeError(message("device", "a name, a torch.device or None", type(device).__name__))
    name = str(device)
    if re.fullmatch(r"cuda(:\d+)?", name.lower()):
        return measured_gpu(torch.device(name.lower()))
    return gpu_named(name)


def measured_gpu(device: torch.device) -> Gpu:
    """Return the GPU at hand, measured in some seconds, or as it was measured before with this PyTorch.

    Raises:
        UnsupportedError: There is none.
    """
    if not torch.cuda.is_available():
        hint = f"Name one instead: {', '.join(GPUS)}."
        raise UnsupportedError(message("device", "a CUDA GPU on this machine", f"{str(device)!r} without one", hint))
    if device.index is not None and device.index >= torch.cuda.device_count():
        expected = f"one of the {torch.cuda.device_count()} GPUs here"
        raise UnsupportedError(message("device", expected, repr(str(device))))
    key = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    known = MEASURED.read().get(key)
    if known is None:
        known = _measure(device)
        MEASURED.remember(key, known)
    return known


def _of_fields(fields: dict[str, Any]) -> Gpu:
    return Gpu(**{**fields, "capability": tuple(fields["capability"])})


MEASURED = CachedTable("gpus.json", _of_fields)  # by GPU and version of PyTorch


def _measure(device: torch.device) -> Gpu:
    """Measure products, attention, copies and transfers, each some times, and keep the medians."""
    about = torch.cuda.get_device_properties(device)
    dtype = torch.bfloat16 if about.major >= 8 else torch.float16
    with torch.cuda.device(device):
        narrow, wide = (_attention_rates(dtype, head_dim) for head_dim in (64, 128))
        found = Gpu(
            name=about.name,
            memory_gib=about.total_memory / 2**30,
            bandwidth=_copy_rate(),
            gemm=_gemm_rate(dtype),
            gemm32=_gemm_rate(torch.float32),
            attention=narrow[0],
            attention_backward=narrow[1],
            wide_head=(wide[0] / narrow[0] + wide[1] / narrow[1]) / 2,
            pcie=_transfer_rate(),
            capability=(about.major, about.minor),
            measured=True,
        )
        torch.cuda.empty_cache()  # what was measured with
        return found


def _seconds(function: Callable[[], object]) -> float:
    return time_side_by_side({"it": function}, "cuda", warm=2, reps=5)["it"].median_ms / 1e3


def _gemm_rate(dtype: torch.dtype) -> float:
    N, D, F = 8192, 4096, 8192 if dtype.itemsize == 2 else 1024
    x, w = (torch.randn(rows, D, device="cuda", dtype=dtype) for rows in (N, F))
    out = torch.empty(N, F, device="cuda", dtype=dtype)

    def products() -> None:
        for _ in range(IN_A_ROW):
            torch.mm(x, w.T, out=out)

    return 2 * N * (D * F + HALF_RATE) * IN_A_ROW / _seconds(products)


def _attention_rates(dtype: torch.dtype, head_dim: int) -> tuple[float, float]:
    T, heads = 16384, 16
    q, k, v = (torch.randn(1, heads, T, head_dim, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    out, upstream = forward(), torch.randn(1, heads, T, head_dim, device="cuda", dtype=dtype)
    flop = 2 * T * (T + HALF_LENGTH) * heads * head_dim
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
    return flop / _seconds(forward), 2.5 * flop / backward


def _copy_rate() -> float:
    here = torch.empty(2**29, device="cuda", dtype=torch.uint8)
    there = torch.empty_like(here)
    return 2 * here.numel() / _seconds(lambda: there.copy_(here))


def _transfer_rate() -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(2**28, device="cuda", dtype=torch.uint8)
    out = _seconds(lambda: host.copy_(here, non_blocking=True))
    back = _seconds(lambda: here.copy_(host, non_blocking=True))
    return host.numel() / max(out, back)

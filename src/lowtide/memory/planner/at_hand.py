"""The GPU that is planned for: one of the table, or the one at hand, measured once and cached in a file."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtide.errors import ArgumentTypeError, UnsupportedError, message
from lowtide.measure.cached import CachedTable
from lowtide.measure.timing import time_side_by_side
from lowtide.memory.planner.gpus import DEFAULT, GPUS, HALF_RATE, Gpu, attention_reaches, gpu_named, known_as

IN_A_ROW = 40  # GEMMs that are timed together: after some milliseconds a GPU lowers its clock
MEASURED = CachedTable(  # by GPU and version of PyTorch
    "gpus.json", lambda fields: Gpu(**{**fields, "capability": tuple(fields["capability"])})
)


def find_gpu(device: str | torch.device | Gpu | None) -> Gpu:
    """Return the GPU that is planned for.

    Args:
        device: As for `plan_memory`; names as `gpu_named` reads them.

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
    """Return the GPU at hand, measured in some seconds, or from the cache where this PyTorch measured it before.

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


def _measure(device: torch.device) -> Gpu:
    """Measure GEMMs, attention, copies and transfers, each some times; the rates are of the medians."""
    about = torch.cuda.get_device_properties(device)
    dtype = torch.bfloat16 if about.major >= 8 else torch.float16
    with torch.cuda.device(device):
        narrow, wide = (_attention_rates(dtype, head_dim) for head_dim in (64, 128))
        bandwidth, pcie = _copy_rates()
        found = Gpu(
            name=about.name,
            memory_gib=about.total_memory / 2**30,
            bandwidth=bandwidth,
            gemm=_gemm_rate(dtype),
            gemm32=_gemm_rate(torch.float32),
            attention=narrow[0],
            attention_backward=narrow[1],
            wide_head=(wide[0] / narrow[0] + wide[1] / narrow[1]) / 2,
            pcie=pcie,
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

    def gemms() -> None:
        for _ in range(IN_A_ROW):
            torch.mm(x, w.T, out=out)

    return 2 * N * (D * F + HALF_RATE) * IN_A_ROW / _seconds(gemms)


def _attention_rates(dtype: torch.dtype, head_dim: int) -> tuple[float, float]:
    T, heads = 16384, 16
    q, k, v = (torch.randn(1, heads, T, head_dim, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    upstream = torch.randn_like(out)
    flop = 2 * T * T * heads * head_dim / attention_reaches(T)
    forward = _seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
    return flop / forward, 2.5 * flop / backward


def _copy_rates() -> tuple[float, float]:
    """Return the bytes per second that a copy on the GPU reads and writes, and those between host and GPU."""
    here, there = (torch.empty(2**29, device="cuda", dtype=torch.uint8) for _ in range(2))
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    part = here[: host.numel()]
    ways = (lambda: host.copy_(part, non_blocking=True), lambda: part.copy_(host, non_blocking=True))
    return 2 * here.numel() / _seconds(lambda: there.copy_(here)), host.numel() / max(map(_seconds, ways))

"""What a GPU can do: by name from a table, or measured on the one at hand and remembered.

Memory is what PyTorch reports, bandwidths and peaks are the vendors' (dense, bfloat16 with float32 sums). The factors
are the share of the peak that large products, and attention forward and backward, reach in training. Those of the H100
were measured (docs/plan.md); the others are estimates from published runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.measure import time_side_by_side
from lowtide.measure.cached import CachedTable

DEFAULT = "h100"
HALF_RATE = 1.2e6  # numbers of a weight at which a product of many tokens runs at half the rate of large ones
HALF_LENGTH = 1500  # tokens of a sequence at which causal attention runs at half the rate of long ones
IN_A_ROW = 40  # products that are timed together: after some milliseconds a GPU lowers its clock


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the planner sees it.

    Attributes:
        name: In `GPUS`, or as the driver has it.
        memory_gib: Memory in GiB.
        bandwidth: Of its memory, bytes a second, as reached by a copy.
        gemm: FLOP a second of large bfloat16 or float16 products, as reached; of smaller ones see `HALF_RATE`.
        gemm32: The same in float32.
        attention: FLOP a second of causal attention's forward, counted without the masked half, at 64 numbers a head,
            in long sequences; in shorter ones see `HALF_LENGTH`.
        attention_backward: The same of its backward.
        wide_head: The factor on the last two at 128 numbers a head and more.
        pcie: Bytes a second between pinned host memory and the GPU, either way.
        capability: CUDA's compute capability.
        measured: Whether the rates were measured on this machine.
        peak: FLOP a second of bfloat16 and float16 products by the data sheet; 0 where nobody told.
        peak32: The same in float32.
    """

    name: str
    memory_gib: float
    bandwidth: float
    gemm: float
    gemm32: float
    attention: float
    attention_backward: float
    wide_head: float
    pcie: float
    capability: tuple[int, int]
    measured: bool = False
    peak: float = 0.0
    peak32: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes."""
        return int(self.memory_gib * 2**30)


def _gpu(
    name: str,
    memory_gib: float,
    gb_s: float,
    tflops: float,
    tflops32: float,
    pcie_gb_s: float,
    capability: tuple[int, int],
    *,
    gemm: float = 0.74,
    attention: float = 0.515,
    attention_backward: float = 0.445,
    wide_head: float = 1.25,
) -> Gpu:
    """Return a GPU from its data sheet and the shares of it that are reached."""
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        bandwidth=gb_s * 1e9 * 0.755,
        gemm=tflops * 1e12 * gemm,
        gemm32=tflops32 * 1e12 * 0.8,
        attention=tflops * 1e12 * attention,
        attention_backward=tflops * 1e12 * attention_backward,
        wide_head=wide_head,
        pcie=pcie_gb_s * 1e9 * 0.86,
        capability=capability,
        peak=tflops * 1e12,
        peak32=tflops32 * 1e12,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.2, 3350, 989, 67, 64, (9, 0)),
        _gpu("h100-pcie", 79.2, 2000, 756, 51, 64, (9, 0), gemm=0.68),
        _gpu("h100-nvl", 93.1, 3938, 835, 60, 64, (9, 0), gemm=0.68),
        _gpu("h200", 139.8, 4800, 989, 67, 64, (9, 0)),
        _gpu("b200", 178.3, 8000, 2250, 80, 64, (10, 0)),
        _gpu("a100-80gb", 79.1, 2039, 312, 19.5, 32, (8, 0), gemm=0.8, attention=0.58, attention_backward=0.48),
        _gpu("a100-40gb", 39.4, 1555, 312, 19.5, 32, (8, 0), gemm=0.8, attention=0.58, attention_backward=0.48),
        _gpu("l40s", 44.4, 864, 362, 91.6, 32, (8, 9), gemm=0.6, attention=0.5, attention_backward=0.4),
        _gpu("l4", 22.0, 300, 121, 30.3, 32, (8, 9), gemm=0.5, attention=0.4, attention_backward=0.33),
        _gpu("a10", 22.1, 600, 125, 31.2, 32, (8, 6), gemm=0.55, attention=0.45, attention_backward=0.38),
        _gpu("a6000", 47.4, 768, 154.8, 38.7, 32, (8, 6), gemm=0.75, attention=0.6, attention_backward=0.5),
        _gpu("rtx5090", 31.4, 1792, 209.5, 104.8, 64, (12, 0), gemm=0.9, attention=0.75, attention_backward=0.6),
        _gpu("rtx4090", 23.5, 1008, 165.2, 82.6, 32, (8, 9), gemm=0.9, attention=0.8, attention_backward=0.65),
        _gpu("rtx3090", 23.6, 936, 71, 35.6, 32, (8, 6), gemm=0.85, attention=0.8, attention_backward=0.65),
    )
}
# Words of a driver's name, in lower case, all of which it has; the first that fits.
_DRIVER_NAMES = (
    ("h100-pcie", ("h100", "pcie")), ("h100-nvl", ("h100", "nvl")), ("h100", ("h100",)),
    ("h200", ("h200",)), ("b200", ("b200",)),
    ("a100-80gb", ("a100", "80gb")), ("a100-40gb", ("a100",)), ("l40s", ("l40s",)), ("l4", ("l4",)), ("a10", ("a10",)),
    ("a6000", ("rtx", "a6000")), ("rtx5090", ("rtx", "5090")), ("rtx4090", ("rtx", "4090")),
    ("rtx3090", ("rtx", "3090")),
)  # fmt: skip


_SIZED = {"a100": "a100-80gb"}  # a name without the memory


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
    plain = _letters(name)
    found = _SIZED.get(plain) or next((one for one in GPUS if plain and plain in _spellings(one)), known_as(name))
    if found is None:
        expected = f"'cuda' for the GPU at hand, or one of {', '.join(GPUS)}"
        raise ArgumentValueError(message("device", expected, repr(name)))
    return GPUS[found]


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _spellings(name: str) -> tuple[str, str]:
    """Return a name of the table as `_letters` leaves it, and without the word before its number."""
    return _letters(name), _letters(name).removeprefix("rtx")


def known_as(driver_name: str) -> str | None:
    """Return the table's name for a GPU as the driver names it, None where the table lacks it.

    A slice of one (MIG), and a laptop's of the same name, has a part of its memory and rates: the table lacks it.
    """
    words = driver_name.lower().replace("-", " ").split()
    if "mig" in words or "laptop" in words:
        return None
    return next((name for name, needed in _DRIVER_NAMES if all(word in words for word in needed)), None)


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

"""What a GPU can do: by name from a table, or measured on the one at hand and remembered.

Memory is what PyTorch reports, bandwidths and peaks are the vendors' (dense, bfloat16 with float32 sums). The factors
are the share of the peak that large products, and attention forward and backward, reach in training. Those of the H100
were measured (docs/plan.md); the others are estimates from published runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, did_you_mean, message

DEFAULT = "h100"
USABLE = 0.93  # of a GPU's memory, where no budget is given: the driver's context and what the allocator cannot fill
HALF_RATE = 1.2e6  # numbers of a weight at which a product of many tokens runs at half the rate of large ones
HALF_LENGTH = 1500  # tokens of a sequence at which causal attention runs at half the rate of long ones


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

    @property
    def most_bytes(self) -> int:
        """Return the most that tensors can take: the allocator needs 2% of the memory, and at least 1 GiB."""
        return max(0, min(int(0.98 * self.memory_bytes), self.memory_bytes - 2**30))

    @property
    def default_budget_bytes(self) -> int:
        """Return what tensors may take where no budget is given."""
        return min(int(USABLE * self.memory_bytes), self.most_bytes)


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


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a name, in any case, with ``rtx`` and hyphens or without, or as its driver has it.

    Raises:
        ArgumentValueError: An unknown name.
    """
    plain = _letters(name)
    found = _SIZED.get(plain) or next((one for one in GPUS if plain and plain in _spellings(one)), known_as(name))
    if found is None:
        expected = f"'cuda' for the GPU at hand, or one of {', '.join(GPUS)}"
        raise ArgumentValueError(message("device", expected, repr(name), did_you_mean(name, GPUS)))
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

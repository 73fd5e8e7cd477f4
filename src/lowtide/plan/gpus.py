"""What a GPU can do, by name from a table.

Memory is what PyTorch reports, bandwidths and peaks are the vendors' (dense, bfloat16 with float32 sums). The factors
are the share of the peak that large GEMMs, and attention forward and backward, reach in training. Those of the H100
were measured (docs/plan.md); the others are estimates from published runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, did_you_mean, message

if TYPE_CHECKING:
    import torch

DEFAULT = "h100"
USABLE = 0.93  # of a GPU's memory, where no budget is given: the driver's context and what the allocator cannot fill
HALF_RATE = 0.3e6  # numbers of a weight at which a GEMM of many tokens runs at half the rate of large ones
HALF_LENGTH = 1500  # tokens of a sequence at which causal attention runs at half the rate of long ones
# How much longer causal attention takes at most over sequences whose keys and values leave the GPU's cache, and the
# tokens at which it is half of that: fitted to steps of 65,536 to 524,288 tokens on an H100 (docs/plan.md, accuracy).
LONGER, LONG_TOKENS = 0.12, 1e5
FLASH_ACCUMULATOR = 4  # bytes of each number of the query gradient's float32 sum, inside attention's backward


def attention_reaches(tokens: int, window: int = 0) -> float:
    """Return the share of its rate that causal attention reaches over a sequence of so many tokens.

    Keys and values of a window, of which 0 is the whole sequence, stay in the cache however long the sequence is.
    """
    seen = min(window or tokens, tokens)
    return tokens / (tokens + HALF_LENGTH) / (1 + LONGER * seen**2 / (seen**2 + LONG_TOKENS**2))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's memory and the rates that training reaches on it: bytes or FLOP per second."""

    name: str  # in `GPUS`, or as the driver reports it
    memory_gib: float
    bandwidth: float  # of its memory, as a copy reaches it
    gemm: float  # of large bfloat16 or float16 GEMMs; smaller ones: `HALF_RATE`
    gemm32: float  # the same in float32
    attention: float  # of causal attention's forward, masked half not counted, head size 64: see `attention_reaches`
    attention_backward: float
    wide_head: float  # the factor on the last two at head sizes from 128
    pcie: float  # between pinned host memory and the GPU, in each direction
    capability: tuple[int, int]  # CUDA's compute capability
    like: str = ""  # the one of the table whose rates it is planned with; empty: its own
    peak: float = 0.0  # of bfloat16 and float16 GEMMs, by the data sheet; 0: unknown
    peak32: float = 0.0  # the same in float32
    nvlink: float = 0.0  # between GPUs of one host, in each direction, as exchanges reach it; 0: by PCIe

    @property
    def between(self) -> float:
        """Return the bytes per second that a GPU receives from others of its host."""
        return self.nvlink or self.pcie

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
    reached: tuple[float, float, float] = (0.72, 0.515, 0.445),  # by GEMMs, attention forward and backward
    nvlink_gb_s: float = 0.0,
) -> Gpu:
    """Return a GPU from its data sheet and the shares of it that are reached."""
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        bandwidth=gb_s * 1e9 * 0.755,
        gemm=tflops * 1e12 * reached[0],
        gemm32=tflops32 * 1e12 * 0.8,
        attention=tflops * 1e12 * reached[1],
        attention_backward=tflops * 1e12 * reached[2],
        wide_head=1.25,
        pcie=pcie_gb_s * 1e9 * 0.86,
        capability=capability,
        peak=tflops * 1e12,
        peak32=tflops32 * 1e12,
        nvlink=nvlink_gb_s * 1e9 * 0.8,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.2, 3350, 989, 67, 64, (9, 0), nvlink_gb_s=450),
        _gpu("h100-pcie", 79.2, 2000, 756, 51, 64, (9, 0), (0.68, 0.515, 0.445)),
        _gpu("h100-nvl", 93.1, 3938, 835, 60, 64, (9, 0), (0.68, 0.515, 0.445)),
        _gpu("h200", 139.8, 4800, 989, 67, 64, (9, 0), nvlink_gb_s=450),
        _gpu("b200", 178.3, 8000, 2250, 80, 64, (10, 0), nvlink_gb_s=900),
        _gpu("a100-80gb", 79.1, 2039, 312, 19.5, 32, (8, 0), (0.8, 0.58, 0.48), 300),
        _gpu("a100-40gb", 39.4, 1555, 312, 19.5, 32, (8, 0), (0.8, 0.58, 0.48), 300),
        _gpu("l40s", 44.4, 864, 362, 91.6, 32, (8, 9), (0.6, 0.5, 0.4)),
        _gpu("l4", 22.0, 300, 121, 30.3, 32, (8, 9), (0.5, 0.4, 0.33)),
        _gpu("a10", 22.1, 600, 125, 31.2, 32, (8, 6), (0.55, 0.45, 0.38)),
        _gpu("a6000", 47.4, 768, 154.8, 38.7, 32, (8, 6), (0.75, 0.6, 0.5)),
        _gpu("rtx5090", 31.4, 1792, 209.5, 104.8, 64, (12, 0), (0.9, 0.75, 0.6)),
        _gpu("rtx4090", 23.5, 1008, 165.2, 82.6, 32, (8, 9), (0.9, 0.8, 0.65)),
        _gpu("rtx3090", 23.6, 936, 71, 35.6, 32, (8, 6), (0.85, 0.8, 0.65)),
    )
}
# Words that the driver's name has where they are not the table's; the first that fits, those of more words first.
_DRIVER_WORDS = {"a100-40gb": ("a100",), "a6000": ("rtx", "a6000")}
_WORDS = {name: _DRIVER_WORDS.get(name, tuple(name.replace("rtx", "rtx-").split("-"))) for name in GPUS}

_SIZED = {"a100": "a100-80gb"}  # a name without the memory


def find_gpu(device: str | torch.device | Gpu | None) -> Gpu:
    """Return the GPU that is planned for.

    A GPU at hand that the table lacks has its own memory, and the rates of an H100.

    Args:
        device: As for `plan_memory`; names as `gpu_named` reads them.

    Raises:
        ArgumentTypeError: It is neither a name, a device nor a `Gpu`.
        ArgumentValueError: An unknown name.
        UnsupportedError: ``"cuda"`` without a GPU, or without so many.
    """
    import torch

    if isinstance(device, Gpu):
        return device
    if device is not None and not isinstance(device, (str, torch.device)):
        raise ArgumentTypeError(message("device", "a name, a torch.device or None", type(device).__name__))
    name = ("cuda" if device is None else str(device)).lower()
    if not re.fullmatch(r"cuda(:\d+)?", name):
        return gpu_named(name)
    index = int(name.partition(":")[2] or 0)
    if device is None and not torch.cuda.is_available():
        return GPUS[DEFAULT]
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        hint = f"Name one instead: {', '.join(GPUS)}."
        raise UnsupportedError(message("device", "a CUDA GPU on this machine", f"{name!r} without one", hint))
    about = torch.cuda.get_device_properties(index)
    if known := known_as(about.name):
        return GPUS[known]
    memory, capability = about.total_memory / 2**30, (about.major, about.minor)
    return replace(GPUS[DEFAULT], name=about.name, memory_gib=memory, capability=capability, like=DEFAULT)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a name, in any case, with ``rtx`` and hyphens or without, or as its driver reports it.

    ``"a100"`` is the one of 80 GB.

    Raises:
        ArgumentValueError: An unknown name.
    """
    plain = _letters(name)
    spellings = {_letters(one): one for one in GPUS} | {_letters(one).removeprefix("rtx"): one for one in GPUS}
    found = _SIZED.get(plain) or spellings.get(plain) or known_as(name)
    if found is None:
        expected = f"'cuda' for the GPU at hand, or one of {', '.join(GPUS)}"
        raise ArgumentValueError(message("device", expected, repr(name), did_you_mean(name, GPUS)))
    return GPUS[found]


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def known_as(driver_name: str) -> str | None:
    """Return the table's name for a GPU as the driver reports it, None where the table lacks it.

    A slice of one (MIG), and a laptop's of the same name, has a part of its memory and rates: the table lacks it.
    """
    words = driver_name.lower().replace("-", " ").split()
    if "mig" in words or "laptop" in words:
        return None
    most_first = sorted(_WORDS, key=lambda name: -len(_WORDS[name]))
    return next((name for name in most_first if all(word in words for word in _WORDS[name])), None)

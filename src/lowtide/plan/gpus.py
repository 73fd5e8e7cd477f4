"""What a GPU can do, by name from a table, ``gpus.json``, or as the driver reports it.

Memory is what PyTorch reports, bandwidths and peaks are the vendors' (dense, bfloat16 with float32 sums). ``reached``
are the shares of the peak that large GEMMs, and attention forward and backward, reach in training. Those of the H100
were measured (docs/plan.md); the others are estimates from published runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import ArgumentValueError, UnsupportedError, did_you_mean, message

if TYPE_CHECKING:
    import torch

DEFAULT = "h100"
USABLE = 0.93  # of a GPU's memory, where no budget is given: the driver's context and what the allocator cannot fill
WIDE_HEAD, WIDE = 1.25, 96  # how much faster attention is at heads from so many numbers on
HALF_LENGTH = 1500  # tokens of a sequence at which causal attention runs at half the rate of long ones


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's memory and the rates that training reaches on it: bytes or FLOP per second."""

    name: str  # in `GPUS`, or as the driver reports it
    memory_gib: float
    gb_s: float  # of its memory, by the data sheet, in 10^9 bytes
    tflops: float  # of bfloat16 and float16 GEMMs, by the data sheet
    tflops32: float  # the same in float32
    pcie_gb_s: float  # to and from pinned host memory, each way
    capability: tuple[int, int]  # CUDA's compute capability
    reached: tuple[float, float, float] = (0.72, 0.515, 0.445)
    nvlink_gb_s: float = 0.0  # between GPUs of one host, each way; 0: by PCIe
    like: str = ""  # the one of the table whose rates it is planned with; empty: its own

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second of its memory, as a copy reaches it."""
        return self.gb_s * 1e9 * 0.755

    @property
    def pcie(self) -> float:
        """Return the bytes per second between pinned host memory and the GPU, each way."""
        return self.pcie_gb_s * 1e9 * 0.86

    @property
    def between(self) -> float:
        """Return the bytes per second that a GPU receives from others of its host."""
        return self.nvlink_gb_s * 1e9 * 0.8 or self.pcie

    def gemm(self, width: int) -> float:
        """Return the FLOP per second of large GEMMs over numbers of ``width`` bytes."""
        return self.tflops * 1e12 * self.reached[0] if width == 2 else self.tflops32 * 1e12 * 0.8

    def attention(self, width: int, head_dim: int, tokens: int) -> tuple[float, float]:
        """Return the FLOP per second of causal attention, forward and backward; the masked half does not count."""
        rate = self.tflops * 1e12 * tokens / (tokens + HALF_LENGTH) * (WIDE_HEAD if head_dim >= WIDE else 1.0)
        rate *= self.gemm(width) / self.gemm(2)
        return rate * self.reached[1], rate * self.reached[2]

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes."""
        return int(self.memory_gib * 2**30)

    def budget(self, asked: int | None) -> int:
        """Return the bytes that tensors may take, of so many that were asked for; None: of what is usable.

        The allocator needs 2% of the memory, and at least 1 GiB.
        """
        most = min(0.98 * self.memory_bytes, self.memory_bytes - 2**30)
        return int(min(asked or USABLE * self.memory_bytes, most))


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
GPUS = {name: Gpu(name=name, **{**row, "capability": tuple(row["capability"])}) for name, row in _TABLE.items()}


def find_gpu(device: str | torch.device | Gpu | None) -> Gpu:
    """Return the GPU that is planned for.

    A GPU at hand that the table lacks has its own memory, and the rates of an H100.

    Args:
        device: As for `plan_memory`; names as `gpu_named` reads them.

    Raises:
        ArgumentValueError: An unknown name.
        UnsupportedError: ``"cuda"`` without a GPU, or without so many.
    """
    import torch

    if isinstance(device, Gpu):
        return device
    name = ("cuda" if device is None else str(device)).lower()
    if not re.fullmatch(r"cuda(:\d+)?", name):
        return gpu_named(name)
    index, here = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if device is None and not here:
        return GPUS[DEFAULT]
    if index >= here:
        hint = f"Name one instead: {', '.join(GPUS)}."
        raise UnsupportedError(message("device", "a CUDA GPU on this machine", f"{name!r} without one", hint))
    about = torch.cuda.get_device_properties(index)
    if known := known_as(about.name):
        return GPUS[known]
    memory, capability = about.total_memory / 2**30, (about.major, about.minor)
    return replace(GPUS[DEFAULT], name=about.name, memory_gib=memory, capability=capability, like=DEFAULT)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a name, in any case, with ``rtx`` or without, or as its driver reports it.

    ``"a100"`` is the one of 80 GB.

    Raises:
        ArgumentValueError: An unknown name.
    """
    if (found := known_as(name)) is None:
        expected = f"'cuda' for the GPU at hand, or one of {', '.join(GPUS)}"
        raise ArgumentValueError(message("device", expected, repr(name), did_you_mean(name, GPUS)))
    return GPUS[found]


def known_as(name: str) -> str | None:
    """Return the table's name for a GPU as people write it, or as the driver reports it; None where the table lacks it.

    A slice of one (MIG), and a laptop's of the same name, has a part of its memory and rates: the table lacks it.
    """
    words = _words(name)
    found = [one for one in GPUS if _words(one) <= words and not words & {"mig", "laptop"}]
    return max(found, key=lambda one: len(_words(one)), default=None)


def _words(name: str) -> set[str]:
    return set(re.sub("[^a-z0-9]|rtx", " ", name.lower()).split())

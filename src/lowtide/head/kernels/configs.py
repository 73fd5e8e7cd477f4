"""Tile sizes of the exponential GEMM: a table for known GPUs, and the results of tuning runs on this machine."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lowtide.measure.cached import CachedTable


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How one program of the exponential GEMM works."""

    rows: int = 128  # of a tile, from the hidden states
    columns: int = 256  # of a tile, from the vocabulary
    depth: int = 64  # hidden sizes multiplied at a time
    group: int = 8  # row tiles whose programs share a part of the weight in cache
    stages: int = 4  # tiles in flight from memory
    warps: int = 8
    pieces: int = 2  # 1 or 2, in which a tile is stored: two take half the shared memory
    per_multiprocessor: int = 1  # programs


KEPT = CachedTable("gemm.json", lambda fields: GemmConfig(**fields))  # what tuning runs on this machine found
TABLE = {"NVIDIA H100 80GB HBM3": GemmConfig(), "NVIDIA H200": GemmConfig()}


@cache
def of_device(device: torch.device) -> GemmConfig:
    """Return the tile sizes for ``device``, as of the first call."""
    return lookup(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def lookup(name: str) -> GemmConfig:
    """Return the tile sizes for the GPU of this name: what was tuned on this machine, the table's, or the default."""
    return tuned().get(name) or TABLE.get(name) or GemmConfig()


def topk_row_bytes(k: int, V: int, device: torch.device) -> int:
    """Return the scratch of a row for its k highest logits: those of its tiles, and what sorting these takes."""
    columns = of_device(device).columns
    return min(k, -(-V // columns)) * (4 * columns + 48)


@cache
def tuned() -> dict[str, GemmConfig]:
    """Return what tuning runs on this machine found, by the GPU's name."""
    return KEPT.read()


def remember(name: str, config: GemmConfig) -> Path:
    """Add ``config`` for the GPU called ``name`` to the file, which is whole or as before, and return its path."""
    file = KEPT.remember(name, config)
    tuned.cache_clear()
    of_device.cache_clear()
    return file

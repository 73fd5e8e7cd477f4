"""Tile sizes of the exponential GEMM: a table for known GPUs, and what a tuning run left on this machine's disk."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lowtide.measure.cached import CachedTable


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How one program of the exponential GEMM works.

    Attributes:
        rows: Rows of a tile, from the hidden states.
        columns: Columns of a tile, from the vocabulary.
        depth: Hidden sizes multiplied at a time.
        group: Row tiles whose programs share a part of the weight in cache.
        stages: Tiles in flight from memory.
        warps: Warps of a program.
        pieces: 1 or 2: in how many pieces a tile is stored. Two take half the shared memory.
        per_multiprocessor: Programs on each multiprocessor.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 8
    stages: int = 4
    warps: int = 8
    pieces: int = 2
    per_multiprocessor: int = 1


KEPT = CachedTable("gemm.json", lambda fields: GemmConfig(**fields))  # what tuning runs on this machine found
TABLE = {"NVIDIA H100 80GB HBM3": GemmConfig(), "NVIDIA H200": GemmConfig()}


@cache
def of_device(device: torch.device) -> GemmConfig:
    """Return the tile sizes for ``device``, as they were when it was first asked for."""
    return lookup(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def lookup(name: str) -> GemmConfig:
    """Return the tile sizes for the GPU called ``name``: from a tuning run on this machine, the table, or the default.

    Args:
        name: As `torch.cuda.get_device_name` gives it.
    """
    return tuned().get(name) or TABLE.get(name) or GemmConfig()


def topk_row_bytes(k: int, V: int, device: torch.device) -> int:
    """Return the scratch of a row for its k highest logits: those of its tiles, and what sorting these takes."""
    columns = of_device(device).columns
    return min(k, -(-V // columns)) * (4 * columns + 48)


@cache
def tuned() -> dict[str, GemmConfig]:
    """Return what tuning runs found, by the GPU's name; nothing where there is no such file or it cannot be read."""
    return KEPT.read()


def remember(name: str, config: GemmConfig) -> Path:
    """Add ``config`` for the GPU called ``name`` to the file, which is whole or as before, and return its path."""
    file = KEPT.remember(name, config)
    tuned.cache_clear()
    of_device.cache_clear()
    return file

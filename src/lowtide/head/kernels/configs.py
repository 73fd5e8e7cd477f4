"""Tile sizes of the exponential GEMM: a table for known GPUs, and the default for all others."""

from dataclasses import dataclass
from functools import cache

import torch


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


TABLE = {"NVIDIA H100 80GB HBM3": GemmConfig(), "NVIDIA H200": GemmConfig()}


@cache
def of_device(device: torch.device) -> GemmConfig:
    """Return the tile sizes for ``device``: the table's, or the default."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return TABLE.get(name, GemmConfig())


def topk_row_bytes(k: int, V: int, device: torch.device) -> int:
    """Return the scratch of a row for its k highest logits: those of its tiles, and what sorting these takes."""
    columns = of_device(device).columns
    return min(k, -(-V // columns)) * (4 * columns + 48)

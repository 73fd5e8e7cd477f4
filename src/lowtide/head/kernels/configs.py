"""Tile sizes of the GEMMs whose epilogue finishes the rows; without Triton, for plans."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How one program of such a GEMM works: as on an H100, where it was the fastest."""

    rows: int = 128  # of a tile, from the hidden states
    columns: int = 256  # of a tile, from the vocabulary; its two halves are finished and stored one by one
    depth: int = 64  # hidden sizes multiplied at a time
    group: int = 8  # row tiles whose programs share a part of the weight in cache
    stages: int = 4  # tiles in flight from memory
    warps: int = 8


CONFIG = GemmConfig()

"""The time of a schedule on the exponential path: GEMMs in whole waves of tiles, traffic beside them, launches.

N tokens, D hidden size, V vocabulary, C rows of a chunk, B classes of a block; GEMMs of m x n results and depth k.

A GEMM's tiles hide what they load, but not what they add to: a sum's traffic counts as the other side of a right
triangle. Fitted to an H100; measured schedules: benchmarks/results/2026-11-24-head-plans-h100.json.
"""

from functools import cache
from math import hypot, inf
from typing import NamedTuple

import torch

SUSTAINED = 0.69  # of a GPU's peak of FLOP and of bytes: under load its clock follows its power
PER_CLOCK = 4096  # bfloat16 FLOP of a multiprocessor of Hopper; twice that of later ones
# Of the rate of large GEMMs: the exponentials' epilogue takes its share, and E has many zeros, which take less power.
EXP, INPUT, WEIGHT = 0.98, 1.08, 0.985
EXP_TILES = ((128, 256),)
TILES = ((128, 256), (256, 128), (192, 192))  # cuBLAS takes the one that fills its waves best
FLOAT32_SUM = 1.2  # cuBLAS adds to float32 more slowly than its bytes explain
SPLIT_DEPTH, MOST_SPLITS = 2048, 8  # cuBLAS splits so deep a product, or a multiple, where few tiles would be one wave
CHUNK_LAUNCHES, BLOCK_LAUNCHES = 30e-6, 12e-6  # seconds: the thin kernels and the gaps between all of a chunk's
CHUNK_HOST, BLOCK_HOST = 250e-6, 60e-6  # what the host needs to launch them; the device waits if it is done before
THIN_BYTES = 16  # read and written between the GEMMs for each row and hidden size


class Gpu(NamedTuple):
    """What a GPU can do."""

    processors: int
    rate: float  # bfloat16 FLOP per second of large GEMMs
    bandwidth: float  # bytes per second
    memory: int

    def gemm(self, m: int, n: int, k: int, tiles: tuple[tuple[int, int], ...] = TILES) -> float:
        """Return the seconds of a GEMM: each wave takes as long as one of its tiles, also if it is not full."""
        splits = 1 if tiles is EXP_TILES else max(1, min(MOST_SPLITS, k // SPLIT_DEPTH))
        elements: float = inf
        for rows, columns in tiles:
            waves = -(-(-(-m // rows) * -(-n // columns) * splits) // self.processors)
            elements = min(elements, waves * rows * columns)
        operands = 2 * (m * k + n * k)
        return max(2 * elements * self.processors * k / splits / self.rate, operands / self.bandwidth)


HOPPER = Gpu(132, 740e12, 2.31e12, 81079 * 2**20)  # the SXM5 one, of 80 GB


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU at hand by its properties; Hopper where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    about = torch.cuda.get_device_properties(device)
    per_clock = PER_CLOCK * (1 if about.major < 10 else 2)
    rate = about.multi_processor_count * about.clock_rate * 1e3 * per_clock
    bandwidth = 2 * about.memory_clock_rate * 1e3 * about.memory_bus_width / 8
    return Gpu(about.multi_processor_count, SUSTAINED * rate, SUSTAINED * bandwidth, about.total_memory)


class Schedule(NamedTuple):
    """A pass over N tokens."""

    gpu: Gpu
    size: tuple[int, int, int]  # N, D, V
    trained: bool  # whether the weight gets a gradient

    def in_chunks(self, C: int, sum_bytes: int) -> float:
        """Return the seconds of three GEMMs a chunk; the weight's gradient is summed in numbers of ``sum_bytes``."""
        (N, _, V), total = self.size, self._thin
        for chunks, rows in ((N // C, C), (1, N % C)):
            if chunks and rows:
                one = self._exp(rows, V) + self._input(rows, V) + self._weight(rows, V, sum_bytes) + CHUNK_LAUNCHES
                total += chunks * max(one, CHUNK_HOST)
        return total

    def in_blocks(self, C: int, B: int, sum_rows: int, sum_bytes: int) -> float:
        """Return the seconds of row sums, ``sum_rows`` at a time, and then three GEMMs a block of B classes."""
        N, _, V = self.size
        sums = N / sum_rows * max(self._exp(sum_rows, V) + CHUNK_LAUNCHES, CHUNK_HOST)
        chunk = CHUNK_LAUNCHES
        for blocks, width in ((V // B, B), (1, V % B)):
            if blocks and width:
                one = self._exp(C, width) + self._input(C, width) + self._weight(C, width, sum_bytes) + BLOCK_LAUNCHES
                chunk += blocks * max(one, BLOCK_HOST)
        return sums + N / C * chunk + self._thin

    @property
    def _thin(self) -> float:
        N, D, _ = self.size
        return THIN_BYTES * N * D / self.gpu.bandwidth

    def _exp(self, C: int, B: int) -> float:
        return self.gpu.gemm(C, B, self.size[1], EXP_TILES) / EXP

    def _input(self, C: int, B: int) -> float:
        """Return the seconds of E W; of blocks it is added to what is there, in float32."""
        _, D, V = self.size
        added = 8 * C * D if B < V else 0
        return hypot(self.gpu.gemm(C, D, B) / INPUT, added / self.gpu.bandwidth)

    def _weight(self, C: int, B: int, sum_bytes: int) -> float:
        """Return the seconds of E^T X, whose sum is read, but for the first chunk's, and written."""
        N, D, _ = self.size
        traffic = sum_bytes * B * D * (2 - C / max(N, C)) * (FLOAT32_SUM if sum_bytes == 4 else 1)
        return self.trained * hypot(self.gpu.gemm(B, D, C) / WEIGHT, traffic / self.gpu.bandwidth)

"""Lengths of chunks and of rows that GEMMs multiply fast: whole tiles, chunks of one length, and blocks that fit.

N tokens, V vocabulary.
"""

from collections.abc import Iterator

from lowtide.head.cost import Gpu

GPU_TILE = 128  # rows
BLOCK_ROWS = (4096, 3072, 2048, 1792, 1536, 1024, 768, 512, 256, 128)  # of a chunk in blocks
LEAST_BLOCK = 1024  # columns


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8


def tile_of(rows: int) -> int:
    """Return the tile that chunks of so many rows are made of: half a GPU's where a whole one is much of a chunk."""
    return GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2


def whole_tiles(rows: int, tile: int = GPU_TILE) -> int:
    """Return fewer rows, in whole tiles, where they are more than one."""
    return rows - rows % tile if rows > GPU_TILE else rows


def evenly(N: int, rows: int) -> int:
    """Return the rows of as many chunks of one size."""
    return max(1, -(-N // max(1, -(-N // rows))))


def level(N: int, rows: int) -> int:
    """Return fewer rows, in whole tiles, where that leaves the number of chunks: the last should not be a short one."""
    if rows < GPU_TILE or rows >= N:
        return rows
    tile = tile_of(rows)
    return min(rows, -(-evenly(N, rows) // tile) * tile)


def next_power(rows: int) -> int:
    """Return the least power of two that is not below."""
    return 1 << max(0, rows - 1).bit_length()


def fitting_blocks(N: int, V: int, room: int, of_row: int, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Yield rows and columns of blocks that fit: as few of one width as can be, and those of whole waves of tiles.

    ``room`` is in bytes, as is ``of_row``: what a row takes besides its columns.
    """
    for longest in BLOCK_ROWS:
        rows = level(N, min(longest, N))
        widest = (room - rows * of_row) // (2 * max(1, rows)) // 256
        if 256 * widest < min(V, LEAST_BLOCK):
            continue
        tiles, all_tiles = -(-rows // GPU_TILE), -(-V // 256)
        widest = min(widest, all_tiles)
        waves = widest * tiles // gpu.processors * gpu.processors // tiles
        for width in {-(-all_tiles // -(-all_tiles // widest)), waves or widest}:
            yield rows, min(V, 256 * width)

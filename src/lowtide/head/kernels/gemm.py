"""One GEMM with its epilogues: x W^T tile by tile, each tile's float32 accumulators passed to a function.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. Persistent, through TMA descriptors:
`gemm_tiles` is the loop, `exp_logits` and `stats` hold the epilogues. Operands are rows of 16-byte stride with
unit stride within. `gathered_logits` computes single rows, for the few that are recomputed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowtide.head.kernels.elementwise import tanh
from lowtide.kernel_launch import Launcher, multiprocessors

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NO_LOGIT = tl.constexpr(-1e30)  # stands beyond V; its exponential times it is 0


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


class LogitTransform(NamedTuple):
    """``softcap * tanh((z + bias) * scale / softcap)`` of products z, without the parts that are None."""

    bias_V: Tensor | None = None  # float32
    scale: Tensor | None = None  # 0-d float32 on the device
    softcap: float | Tensor | None = None  # above 0

    def of_classes(self, part: slice) -> "LogitTransform":
        """Return the same for some of the classes."""
        return self if self.bias_V is None else self._replace(bias_V=self.bias_V[part])


PLAIN = LogitTransform()
TILE = tl.constexpr(128)  # rows


class Used(NamedTuple):
    """How many rows of a chunk are used, the first ones: of all rows a number that only the device has."""

    number: Tensor | None = None  # int32 [1]; None: all
    first: int = 0  # the chunk's first row


ALL = Used()


@triton.jit
def counted_rows(used, C):  # type: ignore[no-untyped-def]
    """Return how many of C rows are used."""
    rows = C
    if used.number is not None:
        rows = tl.minimum(tl.maximum(tl.load(used.number) - used.first, 0), C)
    return rows


@triton.jit
def rows_in_tiles(used, C):  # type: ignore[no-untyped-def]
    """Return the same in whole tiles: what is computed, with zeros or no token's numbers in the rest of the last."""
    rows = counted_rows(used, C)
    if used.number is not None:
        rows = tl.minimum(tl.cdiv(rows, TILE) * TILE, C)
    return rows


@triton.jit
def finish_logits(z, columns, V, transform):  # type: ignore[no-untyped-def]
    """Apply a `LogitTransform` to products [..., columns] of these classes."""
    if transform.bias_V is not None:
        z += tl.load(transform.bias_V + columns, mask=columns < V, other=0.0)
    if transform.scale is not None:
        z *= tl.load(transform.scale)
    if transform.softcap is not None:
        z = transform.softcap * tanh(z / transform.softcap)
    return z


@triton.jit
def times_slope(x, z, transform):  # type: ignore[no-untyped-def]
    """Multiply with the cap's derivative at capped logits z."""
    if transform.softcap is not None:
        x *= 1.0 - (z / transform.softcap) * (z / transform.softcap)
    return x


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _each_tile(  # type: ignore[no-untyped-def]
    x_d, w_d, out_d, rows, used, transform, C, V, D, epilogue: tl.constexpr, BOUND: tl.constexpr, CONFIG: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Call ``epilogue(z, row, p, C, V, out_d, rows, transform, BOUND, CONFIG)`` on every PROGRAMS-th tile of x W^T.

    Groups of CONFIG.group row tiles share W in cache; rows go first, p counts across. Beyond C and V products are 0.
    What an epilogue reads and writes for each row is ``rows``. Tiles of rows that are not `Used` are left out.
    """
    C = rows_in_tiles(used, C)
    ROWS: tl.constexpr = CONFIG.rows
    COLUMNS: tl.constexpr = CONFIG.columns
    row_tiles = tl.cdiv(C, ROWS)
    column_tiles = tl.cdiv(V, COLUMNS)
    steps = tl.cdiv(D, CONFIG.depth)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        width = CONFIG.group * column_tiles
        first = (tile // width) * CONFIG.group
        height = min(row_tiles - first, CONFIG.group)
        row = (first + (tile % width) % height) * ROWS
        p = (tile % width) // height
        z = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(steps):
            z = tl.dot(x_d.load([row, k * CONFIG.depth]), w_d.load([p * COLUMNS, k * CONFIG.depth]).T, z)
        epilogue(z, row, p, C, V, out_d, rows, transform, BOUND, CONFIG)


def gemm_tiles(
    epilogue: Any, x_CD: Tensor, w_VD: Tensor, out_CV: Tensor | None, rows: tuple[Any, ...], transform: LogitTransform,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Call the epilogue on every tile of x W^T, BOUND where the last one is cut off at V."""
    (V, D), programs, config = w_VD.shape, multiprocessors(x_CD.device), CONFIG
    _each_tile[(programs,)](
        TensorDescriptor.from_tensor(x_CD, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(w_VD, [config.columns, config.depth]),
        None if out_CV is None else TensorDescriptor.from_tensor(out_CV, [config.rows, config.columns // 2]),
        rows, used, transform, len(x_CD), V, D, epilogue=epilogue, BOUND=V % config.columns != 0, CONFIG=config,
        PROGRAMS=programs, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def gathered_logits(  # type: ignore[no-untyped-def]
    x_matrix, rows, listed, w_matrix, columns, V, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Return x W^T, float32, of any ``rows`` (int64), where ``listed``, and any ``columns`` below V."""
    x_ptr, x_stride = x_matrix
    w_ptr, w_stride = w_matrix
    inside = columns < V
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, D, DEPTH):
        d = k + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + rows[:, None] * x_stride + d[None, :], mask=listed[:, None] & (d < D)[None, :], other=0.0)
        w_at = w_ptr + columns.to(tl.int64)[None, :] * w_stride + d[:, None]
        w = tl.load(w_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        z = tl.dot(x, w, z)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def halves(z, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's left and right half of the columns: finished one after the other, they need fewer registers."""
    return tl.split(tl.permute(tl.reshape(z, (CONFIG.rows, 2, CONFIG.columns // 2)), (0, 2, 1)))


def matrix(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Return a matrix as kernels take it: its pointer, its row stride and its width."""
    return (None, 0, 0) if x is None else (x, x.stride(0), x.shape[1])


def tiles_across(V: int) -> int:
    """Return P."""
    return -(-V // CONFIG.columns)

"""What the GEMMs for Hopper's own instructions share: Gluon's names, tiles, barriers, and the loop over a tile's steps.

A persistent program a multiprocessor has a producer warp, which loads stages through TMA, and two consumer warpgroups,
which multiply ROWS rows each of a tile [2 * ROWS, COLUMNS]. See `exp_logits_hopper` for the barriers.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.gemm import descriptor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9's names, else 3.6's
    load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    GLUON_ERROR = None
except (ImportError, AttributeError) as error:  # no kernel of these can run: see `exp_logits_hopper.why_not_on`
    gluon, gl, GLUON_ERROR = triton, tl, str(error)
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None
    load_tile = store_tile = barrier = TensorDescriptor = None

__all__ = ["TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "tma"]  # of Gluon's

ROWS = gl.constexpr(64)  # of each consumer; a tile has twice as many
COLUMNS = gl.constexpr(256)
PIECE = gl.constexpr(64)  # columns finished at a time
LEAVE = gl.constexpr(2)  # the step at which a consumer asks whether its last store has left the buffer
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit  # type: ignore[untyped-decorator]
def stage_and_phase(step, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return where a step's operands lie, and the parity of how often others lay there before."""
    return step % STAGES, (step // STAGES) & 1


@gluon.jit  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    z, step, steps, stages, old_empty, HALF: gl.constexpr, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
    DEEP: gl.constexpr
):  # fmt: skip
    """Add the next ``steps`` steps' products to z; return it and the next step. DEEP: a product runs on meanwhile.

    TRANSPOSED: "a" or "b", the operand that is stored the other way round; None: neither.
    """
    a_s, b_s, full, empty = stages
    for k in range(steps):
        stage, phase = stage_and_phase(step, STAGES)
        mbarrier.wait(full.index(stage), phase)
        a = a_s.index(2 * stage + HALF)
        if TRANSPOSED == "a":
            z = warpgroup_mma(a.permute((1, 0)), b_s.index(stage), z, use_acc=k > 0, is_async=True)
        elif TRANSPOSED == "b":
            z = warpgroup_mma(a, b_s.index(stage).permute((1, 0)), z, use_acc=k > 0, is_async=True)
        else:
            z = warpgroup_mma(a, b_s.index(stage), z, use_acc=k > 0, is_async=True)
        if old_empty is not None:  # noqa: SIM102 - known when compiled
            if k == gl.minimum(LEAVE, steps - 1):
                tma.store_wait(0)
                barrier()
                mbarrier.arrive(old_empty.index(HALF), count=1)
        if DEEP:
            z = warpgroup_mma_wait(1, deps=(z,))
            if k > 0:
                barrier()
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        else:
            z = warpgroup_mma_wait(0, deps=(z,))
            barrier()  # a warp's wait is for its own rows, and one thread arrives for all four
            mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    if DEEP:
        z = warpgroup_mma_wait(0, deps=(z,))
        if steps > 0:
            barrier()
            mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
    return z, step


@gluon.jit  # type: ignore[untyped-decorator]
def load_stage(stages, step, a_d, above, below, b_d, b_at, STAGES: gl.constexpr, DEPTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load a step's operands when both consumers have left its stage: a's blocks ``above`` and ``below``, and b's."""
    a_s, b_s, full, empty = stages
    stage, phase = stage_and_phase(step, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    loaded = full.index(stage)
    mbarrier.expect(loaded, (2 * ROWS + COLUMNS) * DEPTH * 2)
    load_tile(a_d, above, loaded, a_s.index(2 * stage))
    load_tile(a_d, below, loaded, a_s.index(2 * stage + 1))
    load_tile(b_d, b_at, loaded, b_s.index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def barriers(COUNT: gl.constexpr, EMPTY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return COUNT barriers that one arrival completes, and COUNT that EMPTY arrivals do."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty


@gluon.jit
def pieces_of(z):  # type: ignore[no-untyped-def]
    """Return a tile's columns in four pieces, in order."""
    even, odd = z.reshape([ROWS, 2, 2, PIECE]).permute(0, 3, 1, 2).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@gluon.jit
def counted(count, first, C):  # type: ignore[no-untyped-def]
    """Return how many rows count."""
    rows = gl.to_tensor(C)
    if count is not None:
        rows = gl.minimum(gl.maximum(gl.load(count) - first, 0), C)
    return rows


def hopper_descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """Return the TMA descriptor of ``x``, to copy blocks of it into shared memory as the tensor cores read it."""
    return descriptor(x, rows, columns, TensorDescriptor, _shared_layout((rows, columns), x.dtype))


@cache
def _shared_layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float32)

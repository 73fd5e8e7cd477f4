"""The valid tokens and their factors in one pass, since the first GEMM waits for them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher

BLOCK = 1024


@Launcher
@triton.jit(do_not_specialize=["N", "ignore_index"])  # type: ignore[untyped-decorator]
def _select(target_ptr, weights, out, N, V, ignore_index, shard, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token_weight_ptr, class_weight_ptr = weights
    y_ptr, unit_ptr, counted_ptr = out
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    target = tl.load(target_ptr + i, mask=inside, other=0)
    kept = inside & (target != ignore_index)
    is_class = (target >= 0) & (target < V)
    y = tl.where(is_class, target, 0)
    unit = tl.full((BLOCK,), 1.0, tl.float32)
    if token_weight_ptr is not None:
        unit = tl.load(token_weight_ptr + i, mask=inside, other=0.0)
    unit = tl.where(is_class, unit, float("nan"))
    counted = tl.full((BLOCK,), 1.0, tl.float32)
    if class_weight_ptr is not None:
        counted = tl.load(class_weight_ptr + y)
    if shard is not None:
        first, width, elsewhere = shard
        y -= first
        y = tl.where((y >= 0) & (y < width), y, elsewhere)
    tl.store(y_ptr + i, tl.where(kept, y, -1).to(tl.int32), mask=inside)
    tl.store(unit_ptr + i, tl.where(kept, unit, 0.0), mask=inside)
    tl.store(counted_ptr + tl.program_id(0), tl.sum(tl.where(kept, counted, 0.0), 0))


def select(
    target_N: Tensor, V: int, ignore_index: int, token_weight_N: Tensor | None, class_weight_V: Tensor | None,
    shard: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return classes, what each token counts, and the parts of the mean's denominator, from contiguous int64 targets.

    Classes are int32 [N], -1 for ignored tokens, 0 for those whose target is no class; what a token counts is float32
    [N], 0 if ignored, NaN if its target is no class. ``shard`` is, where the vocabulary is sharded, this rank's first
    class, how many it has, and what stands in the place of the others; classes are then counted from its first one.
    """
    N = target_N.numel()
    blocks = triton.cdiv(N, BLOCK)
    y_N = torch.empty(N, dtype=torch.int32, device=target_N.device)
    floats = torch.empty(N + blocks, dtype=torch.float32, device=target_N.device)
    if N:
        weights, out = (token_weight_N, class_weight_V), (y_N, floats, floats[N:])
        _select[(blocks,)](target_N, weights, out, N, V, ignore_index, shard, BLOCK=BLOCK)
    return y_N, floats[:N], floats[N:]

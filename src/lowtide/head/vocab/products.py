"""Loops over chunks where each rank holds a part of the vocabulary: their plan, their memory, their products.

V_r classes of this rank, C rows of a chunk, D hidden size.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.matmul import HeadMatmul
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.schedules import remembered_plan


def chunks_of(ranks: Ranks, plan: HeadPlan) -> list[slice]:
    """Return each chunk's rows within a group of tokens."""
    length, step = ranks.tokens.length, max(1, plan.chunk_rows // ranks.tokens.groups)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def plan_part(
    ranks: Ranks, weight_VD: Tensor, dtype: torch.dtype, options: HeadOptions, reduction: str, *, weight_frozen: bool
) -> HeadPlan:
    """Return the plan of a loop over chunks of logits [C, V_r + 1], the same on every rank."""
    tokens = ranks.tokens
    return remembered_plan(
        tokens.groups * tokens.length,
        weight_VD.shape[1],
        ranks.shard.most_rows + 1,
        dtype,
        weight_VD.device,
        plain_options(options),
        weight_dtype=weight_VD.dtype,
        reduction=reduction,
        weight_frozen=weight_frozen,
        device_bytes=ranks.limits.gpu_bytes,
    )


def chunk_buffer(ranks: Ranks, plan: HeadPlan, x: Tensor, rows: int, wide: torch.dtype) -> Tensor:
    """Return memory for a chunk's logits of this rank's ``rows`` classes, and one column for those of others."""
    groups = ranks.tokens.groups
    count = groups * max(1, plan.chunk_rows // groups) if plan.chunks else 0
    return x.new_empty(count, padded(rows + 1), dtype=wide)[:, : rows + 1]


def plain_options(options: HeadOptions) -> HeadOptions:
    """Return the options for a part of the vocabulary.

    Raises:
        UnsupportedError: An implementation asked for by name that cannot share a vocabulary.
    """
    if options.backend not in ("auto", "torch"):
        hint = "Its kernels do not know other ranks' classes; cross entropy's of 'exp' do."
        expected = "'auto' or 'torch' where the vocabulary is sharded"
        raise UnsupportedError(message("backend", expected, f"{options.backend!r}", hint))
    return replace(options, backend="torch")


def add_products(
    matmul: HeadMatmul,
    z_CV: Tensor,
    outside_C: Tensor | None,
    x_CD: Tensor,
    into: Gradients,
    ranks: Ranks,
    part: slice,
    *,
    begun: bool,
) -> None:
    """Add a chunk's gradients: the sum of the hidden states' over the ranks runs beside the weight's own product.

    Args:
        matmul: The GEMMs.
        z_CV: The gradient of this rank's logits, each row's still to be multiplied with ``outside_C``.
        outside_C: See there; None: 1.
        x_CD: The chunk's hidden states.
        into: Takes the gradients.
        ranks: The others.
        part: The chunk's rows within a group.
        begun: Whether the weight's gradient holds something already.
    """
    if into.bias_V is not None:
        into.bias_V += z_CV.sum(0) if outside_C is None else outside_C @ z_CV
    if into.input_ND is None and into.weight_VD is None:
        return
    g_CV = matmul.operand(z_CV)
    reduced = None
    if into.input_ND is not None:
        part_CD = torch.empty_like(x_CD, dtype=matmul.wide)  # summed before it is rounded
        matmul.input_grad(g_CV, outside_C, part_CD)
        reduced = ranks.tokens.reduce(part_CD)
    if into.weight_VD is not None:
        matmul.weight_grad(g_CV, outside_C, x_CD, into.weight_VD, not begun)
    if reduced is not None and into.input_ND is not None:
        reduced.write(into, part.start)

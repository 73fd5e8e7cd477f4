"""The exponential path: the logits' GEMM writes exponentials, or sums of tiles. On one rank, or on one of several."""

from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows
from lowtide.head.terms.loss import Loss

if TYPE_CHECKING:  # what they import has kernels, and needs Triton
    from lowtide.head.exponentials.losses import CrossEntropy
    from lowtide.head.exponentials.tile_sums import TileStatistics


def losses_of(head: Head, loss: Loss, plan: HeadPlan) -> "CrossEntropy":
    """Return a loss in either direction."""
    if head.ranks.alone:
        from lowtide.head.exponentials.losses import CrossEntropy

        return CrossEntropy(head, loss, plan)
    from lowtide.head.exponentials.sharded import ShardedCrossEntropy

    return ShardedCrossEntropy(head, loss, plan)


def statistics_of(head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> "TileStatistics":
    """Return token statistics in either direction."""
    if head.ranks.alone:
        from lowtide.head.exponentials.tile_sums import TileStatistics

        return TileStatistics(head, y_nK, plan, tokens)
    from lowtide.head.exponentials.sharded import ShardedStatistics

    return ShardedStatistics(head, y_nK, plan, tokens)

"""Cross entropy and token statistics where a GEMM finishes the rows of logits, which never exist.

Every per-row tensor is flat, [n, ...], in the order of ``head.ranks.order(plan)``. Needs Triton.
"""

from collections.abc import Callable

from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.gradients import Gradients
from lowtide.head.plan import HeadPlan
from lowtide.head.terms.loss import Loss


def cross_entropy(
    head: Head, loss: Loss, y_n: Tensor, plan: HeadPlan, factor: Callable[[], tuple[Tensor, Gradients]] | None
) -> dict[str, Tensor]:
    """Return each row's "loss", logsumexp "lse" and "miss", that minus the target's logit, float32 [n].

    With ``factor`` also compute the gradients: from the same exponentials or from recomputed ones, as the plan says.

    Args:
        head: The head.
        loss: The loss, token weights left out.
        y_n: int32: row of this rank's weight; at least its rows where another rank has the class; -1 where ignored.
        plan: Chunks and blocks.
        factor: Returns what each row's loss is multiplied with on its way to the gradients [n], and what takes these.
            It is called when the first GEMM is under way: the host should not keep the device waiting.
    """
    from lowtide.head.exponentials.losses import CrossEntropy

    return CrossEntropy(head, loss, y_n, plan).forward(factor)


def cross_entropy_gradients(
    head: Head,
    loss: Loss,
    y_n: Tensor,
    plan: HeadPlan,
    factor_n: Tensor,
    into: Gradients,
    known: dict[str, Tensor],
) -> None:
    """Add the gradients, from the "lse" and "miss" that `cross_entropy` returned; the other arguments as there."""
    from lowtide.head.exponentials.losses import CrossEntropy

    CrossEntropy(head, loss, y_n, plan).gradients(factor_n, into, known)


def statistics(head: Head, y_nK: Tensor, want: frozenset[str], topk: int, plan: HeadPlan) -> dict[str, Tensor]:
    """Return statistics of each row's logits, float32, and classes, int64.

    Args:
        head: The head.
        y_nK: int64 classes of the whole vocabulary; for one below 0 that of class 0 is returned.
        want: Which of "entropy", "sum_sq_prob" and "mean" are computed.
        topk: How many of the highest logits.
        plan: Chunks.

    Returns:
        dict[str, Tensor]: "lse", "top" (the highest class) and "top_logprob" [n], "logprob" [n, K], what is wanted [n],
        and with ``topk`` "topk_values" and "topk_ids" [n, topk].
    """
    from lowtide.head.exponentials.tile_sums import TileStatistics

    return TileStatistics(head, y_nK, plan).forward(want, topk)


def statistics_gradients(
    head: Head, y_nK: Tensor, plan: HeadPlan, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients
) -> None:
    """Add the gradients of statistics.

    Args:
        head: The head.
        y_nK: As in `statistics`; below 0 where ignored.
        plan: Chunks and blocks.
        known: What `statistics` returned; "logprob" and "entropy" where they have an upstream gradient.
        upstream: Upstream gradients of "logprob" (0 where ignored), "entropy", "lse" and "mean", of any of them.
        into: Takes the gradients.
    """
    from lowtide.head.exponentials.tile_sums import TileStatistics

    TileStatistics(head, y_nK, plan).gradients(known, upstream, into)

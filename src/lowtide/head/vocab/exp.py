"""The exponential path where each rank holds a part of the vocabulary: the GEMMs of `exponentials/path` on V_r classes.

The targets' logits are known to the ranks that have them, and told to all once. A chunk is cut in pieces
(`exp_pieces.py`). Of each piece E = exp(z - t) is built, and its sums, a few numbers a row, begin their way to all
(`exp_sums.py`); what the exchange takes is hidden behind the products of its neighbours. When all pieces are finished,
the chunk's part of the hidden states' gradient begins to be added up over the ranks, and the weight's product runs
beside that (`exp_gradients.py`). No exchange is waited for by the host, and none depends on numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.vocab.exp_gradients import Products, Rebuilt
from lowtide.head.vocab.exp_pieces import Fetched, cut
from lowtide.head.vocab.exp_sums import ExpShard, Summed


class ShardedExp:
    """One call, in either direction.

    Args:
        shard: What its pieces share.
    """

    def __init__(self, shard: ExpShard) -> None:
        self._shard = shard
        self._fetched = Fetched(shard.head, shard.ranks, shard.y_GL)

    def run(self, factor: Callable[[], Tensor] | None, into: Gradients) -> Tensor:
        """Return each row's loss, logsumexp and that minus the target's logit [3, groups, length].

        With a factor also the gradients: from the same E, or from one built once more, as the plan says.

        Args:
            factor: Makes what each row's loss is multiplied with on its way to the gradients, or None. It is called
                when the first GEMM is under way: the host should not keep the device waiting.
            into: Takes the gradients.
        """
        shard, plan, in_chunks = self._shard, self._shard.plan, self._shard.plan.schedule == "chunks"
        found = torch.empty(3, *shard.y_GL.shape, dtype=torch.float32, device=shard.y_GL.device)
        if factor is not None and in_chunks:
            Products(shard, self._fetched, factor, into, found).run()
            return found
        # the same on every rank, also where others compute gradients and this one does not
        sizes = (plan.chunk_rows, plan.product_rows) if in_chunks else (plan.sum_rows, plan.sum_rows)
        before: Summed | None = None
        for taken in self._fetched.ahead(cut(shard.ranks, plan, *sizes)):
            summed = shard.sum(taken, found, None, None)
            if before is not None:
                shard.finish(before, found)
            before = summed
        if before is not None:
            shard.finish(before, found)
        if factor is not None:
            self.rebuild(factor(), found[1], found[2], into)
        return found

    def rebuild(self, factor_GL: Tensor, lse_GL: Tensor, miss_GL: Tensor, into: Gradients) -> None:
        """Compute the gradients from what `run` found: E once more, a block of this rank's classes at a time."""
        Rebuilt(self._shard, factor_GL, lse_GL, miss_GL, into).run()

"""Cross entropy with a sharded vocabulary, in the place of the operators."""

from typing import Any

import torch
from torch import Tensor

from lowtide.head import operators
from lowtide.head.call import Wanted
from lowtide.head.operators import Call, Stored
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.registration import undisturbed


class ShardedHead:
    """The same calls as `operators`, on this rank's shard of the vocabulary.

    Args:
        ranks: The others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, *args: Any) -> Stored:
        """Compute the loss, the same on every rank, and the gradients that are wanted."""
        *fields, keep_rows = args
        call, wanted = Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])
        with torch.no_grad(), undisturbed(call.input.device):
            return operators._loss_and_gradients(call, wanted, keep_rows, self.ranks)

    def run_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients from the upstream one, a scalar or [N], and what forward kept of each row."""
        *fields, upstream, lse, miss = args
        call, wanted = Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])
        with torch.no_grad(), undisturbed(call.input.device):
            return operators._gradients(call, wanted, upstream, lse, miss, self.ranks)

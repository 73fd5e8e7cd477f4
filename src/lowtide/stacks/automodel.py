"""NeMo Automodel's loss without logits: ``loss_fn: {_target_: lowtide.stacks.automodel.AutomodelLoss}``.

Written for NeMo Automodel 0.7, whose recipes pass hidden states and the head's weight to losses of this base class.
"""

import torch.distributed as dist
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from torch import Tensor

from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions


class AutomodelLoss(LinearCrossEntropy):  # type: ignore[misc]
    """The sum of the tokens' losses, divided by the number of tokens that all ranks have.

    Args:
        ignore_index: Label of ignored tokens.
        logit_softcapping: Logits are ``c tanh(z / c)``; 0 for none.
        workspace_mib: See `lowtide.HeadOptions`.
    """

    def __init__(
        self, ignore_index: int = -100, logit_softcapping: float = 0.0, workspace_mib: float | None = None
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, "sum"
        self.softcap = logit_softcapping or None
        self.options = HeadOptions(workspace_mib=workspace_mib)

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: dist.ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar in float32.

        Args:
            hidden_states: [B, T, D].
            labels: [B, T], shifted.
            lm_weight: [V, D], cast to the hidden states' dtype; one that FSDP2 shards is gathered by Automodel's own
                function.
            num_label_tokens: Divides the sum; None for 1.
            grad_reduce_group: The ranks whose gradients of ``lm_weight`` are averaged.
            loss_weights: Factors of the tokens [B, T].
        """
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group).to(hidden_states.dtype)
        loss = linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            reduction="sum",
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            token_weight=loss_weights,
            options=self.options,
        )
        return loss if num_label_tokens is None else loss / max(num_label_tokens, 1)

"""torchtitan's loss without logits: ``--override.imports lowtide.stacks.torchtitan.without_logits``.

Written for torchtitan 0.3, FSDP2 and pipelines; a vocabulary that ranks share is refused.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import derive, override

from lowtide.distributed.fsdp import end_forward_alone
from lowtide.errors import ArgumentTypeError, UnsupportedError, message
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions

_HEAD = "torchtitan's lm_head"
_HINT = "Leave lowtide's override out."


class TorchtitanLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """`linear_cross_entropy` in place of a head and a loss for each of ``num_chunks`` chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """torchtitan's, and the memory of `lowtide.HeadOptions`."""

        workspace_mib: float | None = None

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.options = HeadOptions(workspace_mib=config.workspace_mib)
        self.vocab = config.loss_fn.global_vocab_size

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Let the head's forward compute the loss: FSDP2 gathers and reshards the weight around it."""
        if type(lm_head).forward is not nn.Linear.forward:
            raise UnsupportedError(message(_HEAD, "a linear layer", type(lm_head).__name__, _HINT))
        super().set_lm_head(lm_head)
        lm_head.forward = self._loss

    def _loss(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        head: Any = self.lm_head
        if labels is None:  # logits, for other callers of the head
            return nn.Linear.forward(head, hidden)
        rows = head.weight.shape[0]
        if self.vocab not in (None, rows):
            raise UnsupportedError(message(_HEAD, f"a weight of {self.vocab} rows", f"a shard of {rows}", _HINT))
        end_forward_alone(head)  # of the unit that torchtitan makes of the last norm and the head
        return linear_cross_entropy(
            hidden, head.weight, labels, linear_bias=head.bias, reduction="sum", options=self.options
        )

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and no metrics.

        Args:
            pred: The hidden states [B, T, D].
            labels: [B, T], shifted.
            global_valid_tokens: Divides the sum of the tokens' losses; None for 1.
        """
        assert self.lm_head is not None
        loss: Tensor = self.lm_head(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


@override(target=ChunkedLossWrapper.Config, description="linear and cross-entropy without logits")  # type: ignore[untyped-decorator]
def without_logits(cfg: Any, workspace_mib: float | None = None) -> Any:
    """Return the configuration of `TorchtitanLoss` for that of a chunked cross-entropy."""
    if type(cfg.loss_fn) is not CrossEntropyLoss.Config:
        raise ArgumentTypeError(message("loss.loss_fn", "CrossEntropyLoss", type(cfg.loss_fn).__qualname__, _HINT))
    return derive(cfg, TorchtitanLoss.Config, workspace_mib=workspace_mib)

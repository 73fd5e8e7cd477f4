"""Megatron-Core's language models without logits: `fuse` replaces a model's output layer and its loss.

Written for Megatron-Core 0.16: tensor parallelism, with sequence parallelism or without, tied weights, multi-token
prediction. What the output layer returns beside a loss is computed by Megatron as before: without labels, in inference,
or where it has a bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lowtide.errors import ArgumentTypeError, message
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions, check_options
from lowtide.head.ranks import VocabShard


class _NoLogits(NamedTuple):
    """What stands for logits between the output layer and the loss."""

    hidden: Tensor  # [S, B, D]; with sequence parallelism this rank's part of S
    weight: Tensor  # [V / W, D]

    def transpose(self, *_: int) -> "_NoLogits":
        """Return itself, for code between the two that orders axes."""
        return self


def fuse(model: Any, *, options: HeadOptions | None = None) -> None:
    """Compute the losses of a Megatron-Core ``GPTModel``, those of multi-token prediction too, without logits.

    Each token's loss stays as Megatron returns it, [B, S] in float32, and so do all gradients, to rounding. The ranks
    of the model's tensor-parallel group exchange a few numbers a token, and the hidden states' gradient.

    Args:
        model: The model, before Megatron wraps it for data parallelism. A stage of a pipeline without an output layer
            is left as it is.
        options: How the head runs: see `HeadOptions`.

    Raises:
        ArgumentTypeError: ``model`` is another model or a wrapper, or ``options`` no HeadOptions; also a `TypeError`.
    """
    check_options(options)
    if not (hasattr(model, "post_process") and hasattr(model, "_postprocess")):
        got, hint = type(model).__name__, "Of a wrapper pass its .module."
        raise ArgumentTypeError(message("model", "a GPTModel of Megatron-Core, not wrapped", got, hint))
    if not model.post_process:
        return
    layer = model.output_layer
    within: list[bool] = []  # whether the output is for a loss
    postprocess, forward, loss_of = model._postprocess, layer.forward, model.compute_language_model_loss

    def run(*args: Any, **kwargs: Any) -> Any:
        within.append(kwargs.get("labels") is not None)
        try:
            return postprocess(*args, **kwargs)
        finally:
            within.pop()

    def output(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if not (within and within[-1]) or runtime_gather_output or layer.bias is not None:
            return forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        return _NoLogits(input_, layer.weight if weight is None else weight), None

    model._postprocess, layer.forward = run, output
    model.compute_language_model_loss = _fused(layer, loss_of, options)


def _fused(layer: Any, loss_of: Callable[..., Tensor], options: HeadOptions | None) -> Callable[..., Tensor]:
    """Return the loss of labels [B, S]; of logits, as Megatron computes it."""
    group = layer.tp_group

    def loss(labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, _NoLogits):
            return loss_of(labels, logits)
        hidden, weight = logits
        shard = None
        if group.size() > 1:
            rows = len(weight)
            shard = VocabShard(group=group, first=group.rank() * rows, rows=rows, vocab=group.size() * rows)
            if layer.sequence_parallel:  # each rank gets the whole gradient, so that its own part needs no sum
                from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        target = labels.transpose(0, 1).contiguous()
        losses = linear_cross_entropy(hidden, weight, target, reduction="none", vocab_shard=shard, options=options)
        return losses.transpose(0, 1).contiguous()

    return loss

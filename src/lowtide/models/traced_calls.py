"""A patched model and its head while torch.compile traces a call of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.models.report import NOT_CALLED, ONE_TOKEN, WITHOUT_LABELS, count_when_run


class _Traced:
    """The patched model whose call is traced. Attributes of a global object hold across the breaks of a graph too."""

    state: Any = None
    awaited = False  # the head is to return lazy logits
    scores = False  # without labels
    head_called = False


_traced = _Traced()


def call_of_model(
    model: nn.Module, state: Any, forward: Callable[[nn.Module], Any], *, awaited: bool, scores: bool
) -> Any:
    """Trace the stock ``forward`` of a patched model.

    ``state`` is `patch`'s of this model; ``awaited``: whether the head's logits are lazy; ``scores``: whether that is
    for scores, without labels.
    """
    from torch._dynamo.comptime import comptime

    comptime(_adopt)
    if awaited and state.why_not is not None:
        count_when_run(state.key, state.why_not)
    _traced.state, _traced.awaited, _traced.scores, _traced.head_called = state, awaited, scores, False
    outputs = forward(model)
    _traced.state = None
    if awaited and state.why_not is None and not _traced.head_called:
        count_when_run(state.key, NOT_CALLED)
    return outputs


def is_one_token(hidden: object) -> bool:
    """Whether hidden states [..., T, D] are of one token of each sequence, as in generation."""
    return isinstance(hidden, Tensor) and hidden.dim() > 1 and hidden.shape[-2] == 1


def _adopt(context: Any) -> None:
    """Adopt the head of the model that is traced, as an eager call does."""
    model, state = (
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().value for name in ("model", "state")
    )
    state.adopt(model)


def call_of_head(head: nn.Module, forward: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    """Trace a call of a patched head, whose stock ``forward`` is given: lazy logits where a loss is awaited."""
    state = _traced.state
    if state is None or state.head is not head:
        return forward(*args, **kwargs)
    _traced.head_called = True
    if _traced.scores and is_one_token(args[0]):
        count_when_run(state.key, ONE_TOKEN)
        return forward(*args, **kwargs)
    if _traced.awaited:
        from lowtide.models.traced_logits import traced_logits

        return traced_logits(head, forward, args, kwargs, state)
    logits = forward(*args, **kwargs)
    if head.training and torch.is_grad_enabled() and logits.requires_grad:
        count_when_run(state.key, WITHOUT_LABELS)
    return logits

"""One layer's forward that keeps less: ``torch.utils.checkpoint`` around it, with attention's outputs kept or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError, message
from lowtide.memory.attention import KeptAttention, contexts_under_compile
from lowtide.memory.policy import ActivationPolicy

Forward = Callable[..., Any]


def run_layer(
    layer: nn.Module,
    name: str,
    policy: ActivationPolicy,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a layer's own ``forward`` so that its graph keeps what the policy says, and recomputes the rest in backward.

    Args:
        layer: The layer.
        name: Its name inside the model, for errors.
        policy: With ``keep`` "attention" or "input".
        forward: The layer's stock forward, bound to it.
        args: What the layer was called with.
        kwargs: The same, by name.

    Raises:
        UnsupportedError: The layer is checkpointed by transformers already; it was called with a cache that holds keys;
            or ``keep="attention"``, and no fused attention ran.
    """
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise double_recompute(name)
    args, kwargs, cached = _without_cache(layer, name, args, kwargs)
    if cached:
        return forward(*args, **kwargs)
    run, hidden = _of_hidden_states(name, forward, args, kwargs)
    if policy.keep == "input":
        return checkpoint(run, hidden, use_reentrant=False)
    if torch.compiler.is_compiling():
        return checkpoint(run, hidden, use_reentrant=False, context_fn=contexts_under_compile)
    kept = KeptAttention()
    outputs = checkpoint(run, hidden, use_reentrant=False, context_fn=kept.contexts)
    if not kept.calls:
        raise _no_attention(name)
    return outputs


def double_recompute(name: str) -> UnsupportedError:
    """Return the error for a layer that transformers checkpoints as well."""
    expected = "a layer that nothing else recomputes"
    got = "transformers' gradient checkpointing switched on, so that it would be recomputed twice"
    return UnsupportedError(message(name, expected, got, "Call model.gradient_checkpointing_disable()."))


def _no_attention(name: str) -> UnsupportedError:
    hint = (
        "Take a fused attention (attn_implementation='sdpa' or 'flash_attention_2' with a mask and a dtype that its "
        "kernels know), or keep='input' for this layer. What torch.compile has compiled inside the layer cannot be "
        "looked into: compile the whole layer, or its other parts alone."
    )
    got = "none (eager attention, the math path of scaled_dot_product_attention, or no attention at all)"
    return UnsupportedError(message(name, "a fused attention operator for keep='attention' to keep", got, hint))


def _of_hidden_states(
    name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Tensor], Any], Tensor]:
    """Return the layer as a function of its hidden states alone, and these: they are the input that is kept.

    They are the first floating-point tensor among what the layer was called with. The rest (positions, masks, another
    stack's output) is shared by the layers and stays as it is.
    """
    at = next((index for index, value in enumerate(args) if _is_hidden(value)), None)
    if at is not None:
        before, after = args[:at], args[at + 1 :]
        return lambda hidden: forward(*before, hidden, *after, **kwargs), args[at]
    key = next((key for key, value in kwargs.items() if _is_hidden(value)), None)
    if key is None:
        raise UnsupportedError(message(name, "hidden states: a floating-point tensor", "none among its arguments"))
    rest = {other: value for other, value in kwargs.items() if other != key}
    return lambda hidden: forward(*args, **{key: hidden}, **rest), kwargs[key]


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _without_cache(
    layer: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments without a cache of keys and values, which a recompute would fill twice.

    transformers makes an empty one for every forward unless it is told not to, also in training, where nothing reads
    it. In evaluation somebody may: the third value says that the layer must run as it is.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches or getattr(layer, "_can_checkpoint_with_cache", False):
        return args, kwargs, False
    if not layer.training:
        return args, kwargs, True
    index = next((m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)), 0)
    if any(cache.get_seq_length(index) for cache in caches):
        hint = "Train without past_key_values, or give this layer keep='all'."
        raise UnsupportedError(message(name, "no cache, or an empty one", "a cache that holds keys and values", hint))
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs, False


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")

"""Whether a layer works on each token by itself but for its attention, so that it can run in tiles of tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowtide.errors import UnsupportedError, message
from lowtide.memory.state import positions, random_states
from lowtide.memory.surroundings import Surroundings

_TOKENS = 32  # of the check
_WITHIN = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}  # products of other sizes


def check_token_wise(
    name: str, run: Callable[[Tensor, tuple[int, int]], Tensor], hidden: Tensor, trained: Iterable[Tensor]
) -> None:
    """Raise unless a layer computes each token from that token alone, where attention returns each token's value.

    It runs on a few random tokens. The gradient of one of them with respect to the others has to be zero, exactly: no
    convolution, no state, no shift of tokens. The second half of them alone has to give the queries, keys, values and
    outputs that it gives behind the first: positions are those of the arguments. All that receives a gradient has to be
    the hidden states or a parameter of the layer. And nothing may keep what the layer computed: a loss of a router's
    logits, say, which would get no gradient.

    Args:
        name: The layer's name, for errors.
        run: Returns the layer's output for hidden states of the tokens from the first number to before the second.
        hidden: The hidden states, [batch, tokens, hidden].
        trained: The layer's parameters that require gradients.

    Raises:
        UnsupportedError: One of these is not so.
    """
    kept = _check(name, run, hidden, set(trained))
    if kept() is not None:
        gc.collect()  # in a cycle it may not be kept
    if kept() is not None:
        raise _refusal(
            name, "one whose values are kept beside its output: by a hook, an attribute, output_router_logits"
        )


def _check(
    name: str, run: Callable[[Tensor, tuple[int, int]], Tensor], hidden: Tensor, trained: set[Tensor]
) -> weakref.ref[Tensor]:
    """Check all but the last; return the hidden states of the check, which live as long as the graph does."""
    tokens = min(hidden.shape[1], _TOKENS)
    half, own = tokens // 2, torch.Generator(hidden.device).manual_seed(0)
    shape = hidden.shape[0], tokens, *hidden.shape[2:]
    sample = torch.randn(shape, generator=own, device=hidden.device, dtype=torch.float32).to(hidden.dtype)
    before = positions(random_states())
    with torch.enable_grad(), Surroundings(hidden).restored():
        sample.requires_grad_()
        with _TokenWise() as later, torch.no_grad():
            try:
                part = run(sample[:, half:], (half, tokens))
            except (RuntimeError, ValueError, IndexError) as error:
                raise _refusal(name, f"one that fails for a part of its tokens: {error}") from error
        with _TokenWise() as whole:  # the last to run: what it leaves anywhere has a graph
            output = run(sample, (0, tokens))
        (gradient,) = torch.autograd.grad(output[:, half].float().square().sum(), [sample], retain_graph=True)
    gradient[:, half] = 0
    if gradient.count_nonzero():
        raise _refusal(name, "one where other operations read other tokens too: a convolution, a state, a shift")
    if not _leaves(output) <= trained | {sample}:
        raise _refusal(name, "one that uses trained tensors which are no parameters of its own")
    if positions(random_states()) != before:
        raise _refusal(name, "one that draws random numbers from Python or NumPy")
    pairs = [*zip(whole.seen, later.seen, strict=False)]
    for x, y in [*((x[:, :, half:], y) for x, y in pairs), (output[:, half:], part)]:
        if x.shape != y.shape or not _near(x, y):
            raise _refusal(name, "one whose tokens depend on how many are before them: positions that it counts itself")
    return weakref.ref(sample)


class _TokenWise(TorchFunctionMode):
    """Inside, attention returns each token's own value, and dropout what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return args[0] if args else (kwargs or {})["input"]
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = (named[x] for x in ("query", "key", "value"))
        self.seen += [x.detach() for x in (query, key, value)]
        # All three have a part in it, so that none that reads other tokens stays unseen.
        value = value + key.mean(-1, keepdim=True)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1) + query.mean(-1, keepdim=True)


def _near(x: Tensor, y: Tensor) -> bool:
    within = _WITHIN.get(x.dtype, 6e-2)
    return bool((x.double() - y.double()).norm() <= within * x.double().norm() + 1e-30)


def _leaves(output: Tensor) -> set[Any]:
    """Return the tensors that get a gradient by a graph."""
    found, left, seen = set(), [output.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        left += [one for one, _ in node.next_functions]
    return found


def _refusal(name: str, got: str) -> UnsupportedError:
    expected = "with tile_tokens a layer that computes each token from that token alone, but for its attention"
    return UnsupportedError(message(name, expected, got, "Take tile_tokens=None."))

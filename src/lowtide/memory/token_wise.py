"""Whether a layer works on each token by itself but for its attention, so that it can run in tiles of tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states

from lowtide.errors import UnsupportedError, message
from lowtide.memory.state import Snapshot, Versions, positions, random_states
from lowtide.memory.surroundings import Surroundings, without_hooks
from lowtide.memory.tile_attention import Replacing, Tile

Run = Callable[[Tensor, Tile], Tensor]
_TOKENS = 32  # of the check
# How far products of the same numbers in other sizes may be apart.
_WITHIN = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def check_token_wise(name: str, layer: nn.Module, run: Run, hidden: Tensor) -> None:
    """Raise unless a layer computes each token from that token alone, where attention returns each token's value.

    It runs on a few random tokens of very different norms, most of which have one direction: they would crowd an expert
    of limited capacity, and shift a mean. The gradient of one of them with respect to the others has to be zero,
    exactly: no convolution, no state, no shift of tokens. Each half of them alone has to give the queries, keys,
    values, outputs and gradients that it gives beside the other: positions are those of the arguments. All that
    receives a gradient has to be the hidden states or a parameter of the layer, and a zero gradient has to give zeros:
    no loss is added in backward. Nothing but dropout may draw random numbers. No tensor of the layer may be written or
    get another value, and nothing may keep what the layer computed: a loss of a router's logits, say, which would get
    no gradient. The layer's state is as before afterwards.

    Args:
        name: The layer's name, for errors.
        layer: The layer.
        run: Returns the layer's output for hidden states of the tokens from the first number to before the second.
        hidden: The hidden states, [batch, tokens, hidden].

    Raises:
        UnsupportedError: One of these is not so.
    """
    with Snapshot(layer, ()).restored():
        kept = _check(name, layer, run, hidden)
        if kept() is not None:
            gc.collect()  # in a cycle it may not be kept
        if kept() is not None:
            raise _refusal(
                name, "one whose values are kept beside its output: by a hook, an attribute, output_router_logits"
            )


def check_trained(name: str, output: Tensor, own: Iterable[Tensor]) -> None:
    """Raise unless all that gets a gradient by an output's graph is among the layer's ``own``.

    Raises:
        UnsupportedError: Something else does, and would get none.
    """
    if not _leaves(output) <= set(own):
        raise _refusal(name, "one that uses trained tensors which are no parameters of its own")


def _check(name: str, layer: nn.Module, run: Run, hidden: Tensor) -> weakref.ref[Tensor]:
    """Check all but the last; return the hidden states of the check, which live as long as the graph does."""
    tokens = min(hidden.shape[1], _TOKENS)
    middle, own = tokens // 2, torch.Generator(hidden.device).manual_seed(0)
    halves, every = ((0, middle), (middle, tokens)), (0, tokens)
    shape = hidden.shape[0], tokens, *hidden.shape[2:]
    sample = torch.randn(shape, generator=own, device=hidden.device, dtype=torch.float32)
    alike = torch.arange(tokens, device=hidden.device) % 4 > 0
    sample[:, alike] = sample[:, :1].clone()
    sample = (sample * torch.logspace(-1, 1, tokens, device=hidden.device)[:, None]).to(hidden.dtype)
    trained = [sample, *(p for p in layer.parameters() if p.requires_grad)]
    before, states = positions(random_states()), [_tensors(layer)]
    versions = Versions(states[0].values())
    # Of the hooks of saved tensors around the layer none is for what is saved here.
    with torch.enable_grad(), Surroundings(hidden).restored(), saved_tensors_hooks(lambda x: x, lambda x: x):
        sample.requires_grad_()
        drawn = _states(hidden)
        ones = torch.ones(tokens, 1, device=hidden.device)
        one = torch.zeros_like(ones).index_fill_(0, torch.tensor(middle, device=hidden.device), 1.0)
        try:
            with torch.no_grad(), _token_wise(name, []):
                as_forward = run(sample, every)
            parts = [_run(name, run, sample, half, ones)[1] for half in halves]
            states.append(_tensors(layer))
            whole = _run(name, run, sample, every, ones)[1]
            output, (_, gradient, *_), _ = _run(name, run, sample, every, one)
            with without_hooks(trained):
                of_nothing = _run(name, run, sample, every, torch.zeros_like(ones), trained)[2]
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _refusal(name, f"one that fails for a part of its tokens: {error}") from error
        drawn = [x for x, y in zip(drawn, _states(hidden), strict=True) if not torch.equal(x, y)]
    if any(x is not None and x.count_nonzero() for x in of_nothing):
        raise _refusal(name, "one whose backward adds gradients to those of its output: an auxiliary loss")
    gradient[:, middle] = 0
    if gradient.count_nonzero():
        raise _refusal(name, "one where other operations read other tokens too: a convolution, a state, a shift")
    check_trained(name, output, trained)
    if drawn or positions(random_states()) != before:
        raise _refusal(name, "one that draws random numbers from Python or NumPy, or in PyTorch but for dropout")
    if versions.changed() or not all(map(_same, states, [states[1], _tensors(layer)])):
        raise _refusal(
            name, "one that writes to its buffers or attributes: running statistics, a value kept for a loss"
        )
    pairs = [
        (x[:, slice(*half)], y)
        for half, part in zip(halves, parts, strict=True)
        for x, y in zip(whole, part, strict=False)
    ]
    if not _near(whole[0], as_forward):
        raise _refusal(name, "one whose forward without a graph, as that of tiles is, computes something else")
    if not all(x.shape == y.shape and _near(x, y) for x, y in pairs):
        raise _refusal(name, "one whose tokens depend on how many others there are: positions that it counts itself")
    return weakref.ref(sample)


def _run(
    name: str, run: Run, sample: Tensor, part: tuple[int, int], weights: Tensor, trained: Iterable[Tensor] = ()
) -> Any:
    """Run a part of the tokens, and backward from the norm of each output, times a weight: no gradient overflows.

    Returns:
        The output, with a graph; as [batch, tokens, ...] it, its gradient and what attention was given; and the
        gradients of ``trained``.
    """
    rows, seen = slice(*part), list[Tensor]()
    with _token_wise(name, seen):
        output = run(sample[:, rows], part)
    loss = (output.float().norm(dim=-1, keepdim=True) * weights[rows]).sum()
    gradient, *others = torch.autograd.grad(loss, [sample, *trained], allow_unused=True)
    return output, [output.detach(), gradient[:, rows], *seen], others


def _tensors(layer: nn.Module) -> dict[Any, Tensor]:
    """Return a layer's buffers, and the tensors that are attributes of its modules."""
    places = [(m, name, x) for m in layer.modules() for own in (m._buffers, vars(m)) for name, x in own.items()]
    return {(m, name): x for m, name, x in places if isinstance(x, Tensor)}


def _same(old: dict[Any, Tensor], new: dict[Any, Tensor]) -> bool:
    """Whether those that there were have the values that they had: a pruned weight is assigned in each forward."""
    pairs = [(x, new[place]) for place, x in old.items() if place in new and new[place] is not x]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def _states(hidden: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *get_device_states(hidden)[1]]


def _token_wise(name: str, seen: list[Tensor]) -> Replacing:
    """Return a context in which attention returns each token's own value, and dropout what it is given.

    The queries, keys and values that attention is given are added to ``seen``.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        _dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        if attn_mask is None and not is_causal and query.shape[-2] > 1:  # a tile of one token does not tell
            raise _refusal(name, "attention to later tokens")
        seen.extend(x.detach().transpose(1, 2) for x in (query, key, value))
        # All three have a part in it, so that none that reads other tokens stays unseen.
        value = value + key.mean(-1, keepdim=True)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1) + query.mean(-1, keepdim=True)

    def as_given(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input

    return Replacing({F.scaled_dot_product_attention: attention, F.dropout: as_given})


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

"""One layer in tiles along the sequence: what it holds for a moment is then that of a tile, in forward and in backward.

Of a decoder layer only attention looks at other tokens. So a tile of tokens runs through the whole layer at a time, and
attention takes the keys and values of all tiles so far. Forward runs the tiles in order. Backward computes the keys and
values of all tiles again (a tile ends at attention), then runs the tiles with their graphs, from the last to the first:
a tile's keys and values have their whole gradient when its turn comes, as all later queries have had theirs.

With h the hidden size and k the width of all key heads, backward of a layer holds for a token of the whole sequence 3h
values (its input and two gradients), 2k of keys and values and 2k in float32 of their gradients, with
``keep="attention"`` its output too; all else is that of one tile's tokens. Gradients of parameters are added up in
float32.

Source: StreamBP (Luo et al., 2025) runs a layer's backward so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lowtide.code import MODULE_HOOKS
from lowtide.errors import UnsupportedError, message
from lowtide.memory.groups import is_fsdp_unit
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.surroundings import Surroundings, without_hooks
from lowtide.memory.tile_attention import Tile, WholeSequence
from lowtide.memory.token_wise import check_token_wise, check_trained

Run = Callable[[Tensor], Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a layer


class LayerInTiles:
    """One call of a layer, in tiles: it is called in the place of the layer's forward, in forward and in backward.

    Args:
        layer: The layer.
        name: Its name in the model.
        policy: Its policy, with ``tile_tokens``.
        forward: Its stock forward.
        key: Where the hidden states [batch, tokens, hidden] are among the arguments: a position or a name.
        call: The arguments.

    Raises:
        UnsupportedError: It cannot run in tiles.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        policy: ActivationPolicy,
        forward: Callable[..., Any],
        key: int | str,
        call: Call,
    ) -> None:
        assert policy.tile_tokens is not None
        self._name, self._forward, self._key = name, forward, key
        self._keeps_attention = policy.keep == "attention"
        self._trained = [p for p in layer.parameters() if p.requires_grad]
        hidden = self._hidden(call)
        self._refuse(layer, hidden, call)
        self._tiles = _tiles_of(hidden.shape[1], policy.tile_tokens)
        self._around: list[Surroundings] = []
        self._backward: Callable[[Call], Any] | None = None  # while it runs
        self._rest: list[Any] = []  # what the layer returns, without the output itself
        self._spec: Any = None

    def check(self, layer: nn.Module, call: Call, seen: set[int]) -> None:
        """Raise unless the layer works on each token by itself but for attention, as `check_token_wise`.

        Args:
            layer: The layer.
            call: The arguments.
            seen: The ways to call it that were checked, to which this one is added.
        """
        if (way := _way(layer, call, self._tiles[-1][1])) in seen:
            return

        def run(hidden: Tensor, tile: Tile) -> Tensor:
            args, kwargs = given = self._part(call, tile, hidden)
            leaves, spec = tree_flatten(given)
            output = self._output_of(self._forward(*args, **kwargs))
            now, spec_now = tree_flatten(given)
            if spec != spec_now or any(x is not y for x, y in zip(leaves, now, strict=True)):
                raise self._refusal("one that writes to a list or a dictionary among its arguments")
            return output

        check_token_wise(self._name, layer, run, self._hidden(call))
        seen.add(way)

    def run(self, run: Run, hidden: Tensor, _store: object = None) -> Any:
        """Return the layer's outputs, with a graph that saves the hidden states, and attention's output if kept.

        Args:
            run: Calls this object with all arguments, in the state that the layer had in forward.
            hidden: The hidden states.
        """
        output = _Tiled.apply(self, run, hidden, *self._trained)  # type: ignore[no-untyped-call]
        return self._outputs_with(output)

    def run_without_graph(self, call: Call) -> Any:
        """Return the layer's outputs, and save nothing."""
        self._keeps_attention = False
        output, _ = self._run_forward(call)
        return self._outputs_with(output)

    def _outputs_with(self, output: Tensor) -> Any:
        """Return what the layer returns, with this output."""
        return tree_unflatten([output if isinstance(one, Tensor) else one for one in self._rest], self._spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, also again for the layers behind it, or backward while `backward` runs."""
        return (self._backward or self._run_forward)((args, kwargs))

    def forward(self, run: Run, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output, and what attention saves."""
        found: tuple[Tensor, tuple[Tensor, ...]] = run(hidden)
        return found

    def backward(
        self, run: Run, hidden: Tensor, saved: tuple[Tensor, ...], gradient: Tensor, *, wanted: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states, if they are ``wanted``, and of the trained parameters."""
        self._backward = partial(self._run_backward, saved=saved, gradient=gradient, wanted=wanted)
        try:
            found: tuple[Tensor | None, ...] = run(hidden)
        finally:
            self._backward = None
        return found

    @torch.no_grad()
    def _run_forward(self, call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
        whole = WholeSequence(self._name, self._tiles, keeps=self._keeps_attention)
        output: Tensor | None = None
        for place, tile in enumerate(self._tiles):
            with self._surroundings(place, call):
                own = self._run_tile(whole, place, self._part(call, tile))
            if output is None:
                output = own.new_empty(own.shape[0], self._tiles[-1][1], *own.shape[2:])
            output[:, slice(*tile)] = own
        assert output is not None
        return output, whole.saved()

    def _run_backward(
        self, call: Call, *, saved: tuple[Tensor, ...], gradient: Tensor, wanted: bool
    ) -> tuple[Tensor | None, ...]:
        whole = WholeSequence(self._name, self._tiles, keeps=self._keeps_attention, saved=saved)
        for place, tile in enumerate(self._tiles):
            with self._surroundings(place, call), torch.no_grad():
                whole.fill(partial(self._run_tile, whole, place, self._part(call, tile)))
        hidden = self._hidden(call)
        of_hidden = torch.zeros_like(hidden) if wanted else None
        sums: list[Tensor | None] = [None] * len(self._trained)
        for place, tile in reversed(list(enumerate(self._tiles))):
            rows = slice(*tile)
            own = hidden[:, rows].detach().contiguous().requires_grad_(wanted)
            with self._surroundings(place, call), torch.enable_grad():
                output = self._run_tile(whole, place, self._part(call, tile, own))
            inputs = [*([own] if wanted else []), *self._trained]
            if tile is self._tiles[-1]:
                check_trained(self._name, output, inputs)
            found: list[Tensor | None] = [None] * len(inputs)
            if output.requires_grad:
                with without_hooks(self._trained):
                    found = list(torch.autograd.grad(output, inputs, gradient[:, rows], allow_unused=True))
            del output
            if of_hidden is not None and (of_own := found.pop(0)) is not None:
                of_hidden[:, rows] = of_own
            sums = [_added(total, one) for total, one in zip(sums, found, strict=True)]
        pairs = zip(sums, self._trained, strict=True)
        return of_hidden, *(None if total is None else total.to(p.dtype) for total, p in pairs)

    def _surroundings(self, place: int, call: Call) -> AbstractContextManager[Any]:
        """Return a context with the random state and autocast of a tile's first run; in that run they are noted."""
        if place < len(self._around):
            return self._around[place].restored()
        self._around.append(Surroundings(self._hidden(call)))
        return nullcontext()

    def _run_tile(self, whole: WholeSequence, place: int, call: Call) -> Tensor:
        """Return a tile's output."""
        args, kwargs = call
        with whole.attending(place):
            outputs = self._forward(*args, **kwargs)
        return self._output_of(outputs)

    def _output_of(self, outputs: Any) -> Tensor:
        """Return the one tensor that a layer returns."""
        self._rest, self._spec = tree_flatten(outputs)
        found = [x for x in self._rest if isinstance(x, Tensor)]
        if len(found) != 1 or any(x is not None for x in self._rest if not isinstance(x, Tensor)):
            expected = "with tile_tokens a layer that returns its output alone"
            got = f"{len(found)} tensors among {len(self._rest)} values"
            raise UnsupportedError(message(self._name, expected, got, "Take tile_tokens=None."))
        self._rest = [x if x is None else x.new_empty(0) for x in self._rest]  # not the tensor itself
        return found[0]

    def _refuse(self, layer: nn.Module, hidden: Tensor, call: Call) -> None:
        tensors = [x for x in tree_leaves(call) if isinstance(x, Tensor)]
        others = [x for x in tensors if x.requires_grad and x is not hidden]
        cases = {
            "parts that FSDP2 gathers by themselves": any(map(is_fsdp_unit, [*layer.modules()][1:])),
            "a transform of torch.func": torch._C._are_functorch_transforms_active(),
            "one of ZeRO-3": any(hasattr(p, "ds_id") for p in layer.parameters()),
            f"hidden states {list(hidden.shape)}": hidden.dim() != 3,
            "further arguments that need a gradient": bool(others),
            "weights cached by parametrize.cached()": bool(parametrize._cache_enabled),  # without their graph
            "a mask [batch, heads, tokens, tokens]": any(x.dim() == 4 and x.shape[-1] == x.shape[-2] for x in tensors),
        }
        for got in (got for got, case in cases.items() if case):
            raise self._refusal(got)

    def _refusal(self, got: str) -> UnsupportedError:
        expected = "with tile_tokens a layer of hidden states [batch, tokens, hidden] alone, that holds its weights"
        return UnsupportedError(message(self._name, expected, got, "Take tile_tokens=None."))

    def _hidden(self, call: Call) -> Tensor:
        args, kwargs = call
        found: Tensor = args[self._key] if isinstance(self._key, int) else kwargs[self._key]
        return found

    def _part(self, call: Call, tile: Tile, hidden: Tensor | None = None) -> Call:
        return _part_of(call, self._key, tile, self._tiles[-1][1], hidden)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LayerInTiles, run: Run, hidden: Tensor, *_trained: Tensor) -> Tensor:
        output, saved = layer.forward(run, hidden)
        ctx.layer, ctx.run = layer, run
        ctx.save_for_backward(hidden, *saved)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2]
        return None, None, *ctx.layer.backward(ctx.run, hidden, tuple(saved), gradient, wanted=wanted)


def _tiles_of(tokens: int, tile_tokens: int) -> list[Tile]:
    """Return tiles of nearly equal sizes, of at most ``tile_tokens`` tokens."""
    count = -(-tokens // tile_tokens)
    return [(i * tokens // count, (i + 1) * tokens // count) for i in range(count)]


def _part_of(call: Call, key: int | str, tile: Tile, tokens: int, hidden: Tensor | None = None) -> Call:
    """Return a layer's arguments for some of its tokens.

    Args:
        call: The arguments.
        key: Where the hidden states are among them.
        tile: The tokens.
        tokens: How many tokens the arguments are for: tensors of that size in their second dimension are [batch,
            tokens, ...], others of that size in their first are [tokens, ...].
        hidden: The tile's hidden states; None: those of the arguments.
    """

    def part(value: Any) -> Any:
        dim = _cut_of(value, tokens) if isinstance(value, Tensor) else None
        return value if dim is None else value.narrow(dim, tile[0], tile[1] - tile[0])

    args, kwargs = call
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    own = {name: part(value) if name == key else tree_map(part, value) for name, value in given.items()}
    own[key] = (own[key] if hidden is None else hidden).contiguous()  # as layers are used to have them
    return tuple(own[place] for place in range(len(args))), {name: own[name] for name in kwargs}


def _cut_of(value: Tensor, tokens: int) -> int | None:
    """Return the dimension in which an argument is cut into tiles, None if in none."""
    return next((dim for dim in (1, 0) if value.dim() > dim and value.shape[dim] == tokens), None)


def _way(layer: nn.Module, call: Call, tokens: int) -> int:
    """Return a hash of what sets how a layer runs: flags, modules, modes, hooks, where its arguments are cut."""
    arguments = [
        (x.dim(), _cut_of(x, tokens)) if isinstance(x, Tensor) else x
        for x in tree_leaves(call)
        if isinstance(x, Tensor | bool | int | str | None)
    ]
    hooks = [[hook for name in MODULE_HOOKS for hook in getattr(m, name).values()] for m in layer.modules()]
    codes = [(*(getattr(hook, "__code__", type(hook)) for hook in each),) for each in hooks]
    return hash((*arguments, *((type(m), m.training) for m in layer.modules()), *codes))


def _added(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """Return a sum of gradients, in float32 at least."""
    if one is None:
        return total
    if total is None:
        return one.to(torch.promote_types(one.dtype, torch.float32), copy=True)
    return total.add_(one)

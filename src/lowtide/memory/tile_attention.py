"""Causal attention of a tile's queries with the keys of all tiles so far, and its gradients, a tile of keys at a time.

Each part of the keys runs one fused kernel, and gives an output o_i and a logsumexp l_i. Together they are ::

    l = log sum_i exp(l_i),   output = sum_i exp(l_i - l) o_i

and in backward the gradients of each part follow from the output and l of all. Sums are in float32 at least.

Source: ring attention (Liu et al., 2023), whose ranks are tiles here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from lowtide.errors import UnsupportedError, message

Tile = tuple[int, int]  # its first token, and the first one behind it


class _ReachedAttentionError(Exception):
    """Ends a run of a layer that is for its keys and values alone."""


class WholeSequence:
    """What attention of one layer needs of other tiles, for the time of one forward or backward of the layer.

    Args:
        name: The layer's name, for errors.
        tiles: All tiles, in order.
        keeps: Whether attention's output is saved for backward.
        saved: In backward: what `saved` returned in forward.
    """

    def __init__(self, name: str, tiles: list[Tile], *, keeps: bool, saved: tuple[Tensor, ...] = ()) -> None:
        self._name, self._tiles, self._keeps = name, tiles, keeps
        self._calls = 0
        self._phase: Literal["forward", "keys", "gradients"] = "forward"
        self._outputs = saved
        self._keys_and_values: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def saved(self) -> tuple[Tensor, ...]:
        """Return attention's output [batch, tokens, heads, d] and its logsumexp [batch, heads, tokens], if kept."""
        return self._outputs

    def fill(self, run: Callable[[], object]) -> None:
        """Run a tile of the layer up to attention, for its keys and values: the first thing in backward."""
        self._phase = "keys"
        with contextlib.suppress(_ReachedAttentionError):
            run()
        self._phase = "gradients"

    @contextlib.contextmanager
    def attending(self, place: int) -> Iterator[None]:
        """Let attention inside be that of a tile with all tiles so far.

        Raises:
            UnsupportedError: It is another kind of attention, or does not run once.
        """
        self._calls = 0
        with Replacing({F.scaled_dot_product_attention: partial(self._call, place)}):
            yield
        if self._calls != 1:
            raise self._refusal(f"{self._calls} calls", "Load the model with attn_implementation='sdpa'.")

    def _call(
        self,
        place: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        """Return attention of a tile, from the arguments of `torch.nn.functional.scaled_dot_product_attention`."""
        self._calls += 1
        tokens, device = self._tiles[place][1] - self._tiles[place][0], query.device.type
        if attn_mask is not None:
            hint = "Omit masks and padding: pack rows, or pad on the right and leave attention_mask out."
            raise self._refusal("a mask", hint)
        if dropout_p:
            raise self._refusal(f"a dropout of {dropout_p}")
        if (query.shape[-2], key.shape[-2]) != (tokens, tokens) or query.dim() != 4 or key.shape[-1] != value.shape[-1]:
            raise self._refusal(f"queries, keys and values of {[*map(list, (query.shape, key.shape, value.shape))]}")
        if not is_causal and tokens > 1:
            raise self._refusal("attention to later tokens")
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:  # as autocast does for this function
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        choice = SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=grouped))
        if (device, choice) not in _KERNELS or (query.shape[-1] % 8 and device != "cpu"):
            hint = "Train in bfloat16, with a head_dim that is a multiple of 8."
            raise self._refusal(f"{choice.name} on {device} for {query.dtype} and {query.shape[-1]} a head", hint)
        self._kernel = _KERNELS[device, choice]
        if self._phase != "gradients":
            self._put(place, key, value)
        if self._phase == "keys":
            raise _ReachedAttentionError
        found: Tensor = _TileAttention.apply(self, place, more.get("scale"), query, key, value)  # type: ignore[no-untyped-call]
        return found

    def _refusal(self, got: str, hint: str = "") -> UnsupportedError:
        expected = (
            "with tile_tokens one call of scaled_dot_product_attention, causal, without mask and dropout, by"
            " FLASH_ATTENTION or CUDNN_ATTENTION"
        )
        return UnsupportedError(message(self._name, expected, got, f"{hint} Or take tile_tokens=None.".strip()))

    def attend(self, place: int, scale: float | None, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tile's output [batch, heads, tokens, d], and its logsumexp [batch, heads, tokens]."""
        start, stop = self._tiles[place]
        if self._outputs and self._phase == "gradients":
            # Kernels read the second without its strides.
            return self._outputs[0][:, start:stop].transpose(1, 2), self._outputs[1][:, :, start:stop].contiguous()
        output, logsumexp = self._attend(query, start, stop, causal=True, scale=scale)
        if start:
            before, its_logsumexp = self._attend(query, 0, start, causal=False, scale=scale)
            share = torch.sigmoid(its_logsumexp - logsumexp)[..., None]
            wide = output.to(share.dtype)
            output = wide.lerp_(before.to(share.dtype), share.expand_as(wide)).to(query.dtype)
            logsumexp = torch.logaddexp(logsumexp, its_logsumexp)
        if self._keeps and self._phase == "forward":
            self._keep(place, output, logsumexp)
        return output, logsumexp

    def gradients(
        self, place: int, scale: float | None, gradient: Tensor, query: Tensor, output: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a tile's queries, keys and values; those of later tiles have been computed before."""
        gradient, output = (_laid_out_as(query, x) for x in (gradient, output))
        if not self._gradients:
            wide = torch.promote_types(query.dtype, torch.float32)
            self._gradients = [torch.zeros_like(x, dtype=wide) for x in self._keys_and_values]
        of_query = torch.zeros_like(query, dtype=self._gradients[0].dtype)
        for start, stop in self._tiles[: place + 1]:
            given = gradient, query, *self._part(start, stop), output, logsumexp
            found, *of_part = self._kernel[1](*given, causal=(start, stop) == self._tiles[place], scale=scale)
            of_query += found
            for total, one in zip(self._gradients, of_part, strict=True):
                total[:, :, start:stop] += one
        own = slice(*self._tiles[place])
        return tuple(x.to(query.dtype) for x in (of_query, *(total[:, :, own] for total in self._gradients)))

    def _attend(
        self, query: Tensor, start: int, stop: int, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = self._kernel[0](query, *self._part(start, stop), causal=causal, scale=scale)
        return output, logsumexp.reshape(output.shape[:-1])

    def _put(self, place: int, key: Tensor, value: Tensor) -> None:
        if not self._keys_and_values:
            self._keys_and_values = [self._of_all(key), self._of_all(value)]
        for total, one in zip(self._keys_and_values, (key, value), strict=True):
            total[:, :, slice(*self._tiles[place])] = one

    def _part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        key, value = self._keys_and_values
        return key[:, :, start:stop], value[:, :, start:stop]

    def _of_all(self, tile: Tensor) -> Tensor:
        """Return room for all tokens, with a token's heads side by side, as projections return them."""
        batch, heads, _, width = tile.shape
        return tile.new_empty(batch, self._tiles[-1][1], heads, width).transpose(1, 2)

    def _keep(self, place: int, output: Tensor, logsumexp: Tensor) -> None:
        if not self._outputs:
            of_all = logsumexp.new_empty(*logsumexp.shape[:2], self._tiles[-1][1])
            self._outputs = self._of_all(output).transpose(1, 2), of_all
        own = slice(*self._tiles[place])
        self._outputs[0][:, own], self._outputs[1][:, :, own] = output.transpose(1, 2), logsumexp


class _TileAttention(torch.autograd.Function):
    """A tile's attention; its own keys and values, which `WholeSequence` has, are inputs for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, whole: WholeSequence, place: int, scale: float | None, query: Tensor, *_own: Tensor
    ) -> Tensor:
        output, logsumexp = whole.attend(place, scale, query)
        ctx.whole, ctx.place, ctx.scale = whole, place, scale
        ctx.save_for_backward(query, output, logsumexp)
        return output.clone()  # the layer may write to it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = ctx.whole.gradients(ctx.place, ctx.scale, gradient, *ctx.saved_tensors)
        return None, None, None, *found


class Replacing(TorchFunctionMode):
    """Inside, other functions are called in the place of PyTorch's; what `lowtide.patch` fuses stays fused.

    Args:
        others: The functions, by those in whose place they are called.
    """

    leaves_fused_parts = True  # `lowtide.models.eligibility` reads it

    def __init__(self, others: dict[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


Kernel = tuple[Callable[..., Any], Callable[..., Any]]  # attention's forward and backward


def _laid_out_as(query: Tensor, x: Tensor) -> Tensor:
    """Return a tensor with the strides that a kernel's own output for these queries has.

    PyTorch plans cuDNN's backward once for queries, keys and values of the same sizes and strides, and reads all later
    outputs and their gradients with the strides that it planned for.
    """
    strides = torch.empty_like(query, device="meta").stride()
    same = all(n == 1 or own == its for n, own, its in zip(x.shape, x.stride(), strides, strict=True))
    return x if same else torch.empty_like(query).copy_(x)


def _forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def _backward_on_cpu(*given: Tensor, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)


def _forward_by_flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)


def _backward_by_flash(*given: Tensor, causal: bool, scale: float | None) -> Any:
    query, key, state = given[1], given[2], _no_dropout(given[1])
    # Sequences of one length have no offsets.
    more = None, None, query.shape[2], key.shape[2], 0.0, causal, state, state[:0]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *more, scale=scale)


def _forward_by_cudnn(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)


def _backward_by_cudnn(*given: Tensor, causal: bool, scale: float | None) -> Any:
    query, key, state = given[1], given[2], _no_dropout(given[1])[:1].view(torch.int64)
    more = state, state, None, None, None, query.shape[2], key.shape[2], 0.0, causal
    given = *given[:-1], given[-1][..., None]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given, *more, scale=scale)


def _no_dropout(query: Tensor) -> Tensor:
    """Return the random state of a dropout that there is not."""
    return torch.zeros(2, dtype=torch.uint64, device=query.device)


_KERNELS: dict[tuple[str, SDPBackend], Kernel] = {
    ("cpu", SDPBackend.FLASH_ATTENTION): (_forward_on_cpu, _backward_on_cpu),
    ("cuda", SDPBackend.FLASH_ATTENTION): (_forward_by_flash, _backward_by_flash),
    ("cuda", SDPBackend.CUDNN_ATTENTION): (_forward_by_cudnn, _backward_by_cudnn),
}

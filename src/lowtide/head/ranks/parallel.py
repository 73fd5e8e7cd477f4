"""The ranks of a call: each one's part of a sharded vocabulary and of the tensors, and what they exchange.

W ranks, V classes of which this one holds V_r, N tokens, C rows of a chunk, D hidden size. Ranks pass the same
arguments, as to torch.distributed itself, on GPUs of one kind: so all plan alike, and make the same exchanges. What is
exchanged has the shape of tokens, never of the vocabulary: a rank that holds no target takes part. What is computed of
gathered numbers is the same on every rank, bit for bit. Hidden states are the same on every rank, or each holds its
part of the sequence; so is their gradient, never a part of a sum.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.arguments import is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.graph import node, run_in_eager
from lowtide.head.gradients import Gradients
from lowtide.head.ranks import exchange as exchange
from lowtide.head.ranks.exchange import Exchange
from lowtide.head.ranks.shard import VocabShard, checked_shard, shard_of_dtensor
from lowtide.head.rows import take_rows

_Result = TypeVar("_Result")
_Held = TypeVar("_Held", Tensor, Tensor | None)
_Given = TypeVar("_Given")


class Group:
    """A call's view of the ranks that share its vocabulary, where all tokens are on each."""

    spread, groups = False, 1  # whether each rank holds a part of the tokens, and of how many ranks a chunk has rows

    def order(self, plan: Any) -> Tensor | None:  # noqa: ARG002
        """Return the indices of all chunks' rows among the N tokens, N where a rank has none; None: in order."""
        return None

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> Exchange:
        """Begin to gather a chunk's hidden states [C, D], the rows ``part`` in the order of `order`.

        Where all tokens are on every rank, ``index`` may be of some of them, the same on each.
        """
        return Exchange(take_rows(input, index, part, dtype))

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return x


class Alone(Group):
    """The group of one rank, which has the whole vocabulary: its exchanges return its own numbers at once."""

    alone, first, size = True, 0, 1

    def __init__(self, V: int) -> None:
        self.rows = self.vocab = self.most_rows = V

    def itself(self, x: _Given, *_: object) -> _Given:
        """Return what is given: the sum over all ranks, what this one holds of it, and so on."""
        return x

    sum_of = logsumexp_of = highest_of = add_up_ = put_together_ = whole_rows = own_classes = share_of = itself
    hidden = local = whole = result = class_weight = itself

    def here(self, y: Tensor) -> tuple[Tensor, None]:
        """Return each class's row of the weight, and no mask: all are here."""
        return y, None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [1, ...]."""
        return x[None]

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None, into: Gradients) -> Callable[[], None]:
        """Write a chunk's gradient of the hidden states where it belongs."""
        into.put_input(part if index is None else index[part], product_CD)
        return lambda: None

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a trained scale as the factor of the hidden states and of the bias."""
        return scale, scale


class Ranks(Group):
    """This rank's classes, and what is exchanged."""

    alone = False

    def __init__(self, shard: VocabShard, leading: Sequence[int], device: torch.device, mesh: Any) -> None:
        """``leading``: sizes of the axes of tokens, all of them. ``mesh``: of the DTensors; None: there are none."""
        self.mesh, self._group, self._leading, self._device = mesh, shard.group, leading, device
        self.first, self.rows, self.vocab, self.most_rows = shard.first, shard.rows, shard.vocab, shard.most_rows
        self.size: int = shard.group.size()

    @cached_property
    def _classes(self) -> list[int]:
        """Return how many classes each rank holds, which the ranks exchange once a call: the host waits."""
        return exchange.number_of_all(self.rows, self._group, self._device)

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None, into: Gradients) -> Callable[[], None]:
        """Begin to add up all ranks' gradients of some rows' hidden states; return what waits, and writes them."""
        under_way, rows = exchange.begin_sum(product_CD, self._group), part if index is None else index[part]
        return lambda: into.put_input(rows, under_way.get())

    def share_of(self, part: slice) -> slice:
        """Return the rows of a chunk that are this rank's share."""
        C, i = part.stop - part.start, self._group.rank()
        return slice(part.start + i * C // self.size, part.start + (i + 1) * C // self.size)

    def _shares(self, C: int) -> list[int]:
        return [(i + 1) * C // self.size - i * C // self.size for i in range(self.size)]

    def whole_rows(self, z_CV: Tensor) -> Tensor:
        """Return logits of this rank's share of a chunk's rows and of all classes."""
        if not len(z_CV):
            return z_CV.new_empty(0, self.vocab)
        shares = self._shares(len(z_CV))
        c = shares[self._group.rank()]
        received = [c * V for V in self._classes]
        out = exchange.swapped(z_CV.reshape(-1), [C * self.rows for C in shares], received, self._group)
        blocks = zip(torch.split(out, received), self._classes, strict=True)
        return torch.cat([block.view(c, V) for block, V in blocks], 1)

    def own_classes(self, g_cV: Tensor, C: int) -> Tensor:
        """Undo `whole_rows` for a gradient: return it for all ``C`` rows of the chunk and this rank's classes."""
        if not C:
            return g_cV.new_empty(0, self.rows)
        blocks = torch.cat([block.reshape(-1) for block in torch.split(g_cV, self._classes, 1)])
        sent, received = [len(g_cV) * V for V in self._classes], [c * self.rows for c in self._shares(C)]
        return exchange.swapped(blocks, sent, received, self._group).view(C, self.rows)

    def add_up_(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in its memory."""
        return exchange.begin_sum(x, self._group).get()

    def put_together_(self, x: Tensor) -> Tensor:
        """Return ``x``, contiguous, whose entries one rank has and the others 0, of any dtype, in its memory."""
        if x.numel():
            self.add_up_(x.view(-1).view(torch.uint8))  # bytes: 0 added to a number would make 0 of -0
        return x

    def begin_gather(self, x: Tensor) -> Exchange:
        """Begin to gather every rank's ``x`` [W, ...]."""
        return exchange.begin_gather(x, self._group)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [W, ...]."""
        return self.begin_gather(x).get()

    def sum_of(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in the order of the ranks: the same on each."""
        return self.gather(x).sum(0)

    def logsumexp_of(self, x: Tensor) -> Tensor:
        """Return the logarithm of the sum of all ranks' exponentials."""
        return self.gather(x).logsumexp(0)

    def highest_of(self, x: Tensor) -> Tensor:
        """Return the highest of all ranks' numbers."""
        return self.gather(x).amax(0)

    def here(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each class's row of this rank's weight, ``rows`` for those of others, and which are here."""
        here = (y >= self.first) & (y < self.first + self.rows)
        return (y - self.first).where(here, self.rows), here

    def local(self, tensor: _Held) -> _Held:
        """Return what this rank holds of a tensor, in autograd's graph."""
        held: Any = tensor
        return held.to_local() if is_dtensor(tensor) else tensor

    def hidden(self, input: Tensor) -> Tensor:
        """Return the hidden states as the chunks read them, in autograd's graph: of all tokens."""
        held: Any = input
        spread = is_dtensor(input) and not held.placements[0].is_replicate()
        return self.local(held.redistribute(placements=[_replicate()]) if spread else input)

    def whole(self, tensor: _Held) -> _Held:
        """Return a tensor as a plain one that is whole; one that is plain is so already."""
        held: Any = tensor
        return held.full_tensor() if is_dtensor(tensor) else tensor

    def class_weight(self, weight_V: Tensor | None) -> Tensor | None:
        """Return the class weights of this rank's classes."""
        return None if weight_V is None else weight_V[self.first : self.first + self.rows]

    def check_alike(self, name: str, weight: Tensor) -> None:
        """Check that another head is sharded as this one: by DTensors or not, and the same classes on each rank."""
        if is_dtensor(weight) != (self.mesh is not None):
            own, other = ("a plain tensor", "a DTensor")[:: 1 if self.mesh is None else -1]
            raise ArgumentTypeError(message(name, f"{own}, as input is", other))
        if self.mesh is not None:
            shard_of_dtensor(name, weight, self.mesh)
        if weight.shape[0] != (self.rows if self.mesh is None else self.vocab):
            expected = f"the student's classes: {self.rows} of {self.vocab} on this rank"
            raise ArgumentValueError(message(name, expected, f"shape {list(weight.shape)}"))

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a trained scale as the factor of the hidden states and of the bias, its gradient's parts summed.

        The bias's part, and with spread tokens the hidden states', is of what this rank holds.
        """
        summed: Tensor = _SUMMED_GRADIENT.apply(scale, self)  # type: ignore[no-untyped-call]
        return summed if self.spread else scale, summed

    def result(self, value: Tensor) -> Tensor:
        """Return a result, the same on every rank, as what the hidden states came as."""
        if self.mesh is None:
            return value
        from torch.distributed.tensor import DTensor

        replicated: Tensor = DTensor.from_local(value, self.mesh, [_replicate()], run_check=False)
        return replicated


class SpreadRanks(Ranks):
    """Sequence parallelism: each rank has its part of one axis of tokens; chunks are gathered one by one, as needed.

    All parts have L rows: shorter ones are filled up with ignored tokens. A chunk, and each piece of one, has as many
    rows of every part, one part's after another's.
    """

    spread = True

    def __init__(self, shard: VocabShard, leading: Sequence[int], *of_call: Any, axis: int) -> None:
        super().__init__(shard, leading, *of_call)
        self.groups, self._axis = self.size, axis
        self._length = -(-leading[axis] // self.size)  # of a part's axis; DTensor's rule
        self.slots = self.size * self._length * math.prod((*leading[:axis], *leading[axis + 1 :]))  # all parts' rows

    def _parts(self, x: Tensor, fill: int) -> Tensor:
        """Return values [...] of all tokens as those of each part [W, L]."""
        x, axis = self._filled(x, self.size * self._length, fill), self._axis
        cut = x.reshape(*x.shape[:axis], self.size, self._length, *x.shape[axis + 1 :])
        return cut.movedim(axis, 0).flatten(1)

    def _filled(self, x: Tensor, length: int, fill: int = 0) -> Tensor:
        axis = self._axis
        missing = length - x.shape[axis]
        return pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, missing], value=fill) if missing else x

    def order(self, plan: Any) -> Tensor | None:
        """See `Group.order`."""
        N = math.prod(self._leading)
        parts_WL = self._parts(torch.arange(N, device=self._device).view(*self._leading), N)
        rows = (plan.product_rows or plan.chunk_rows) // self.size  # a piece's, of each part
        return torch.cat([piece.reshape(-1) for piece in torch.split(parts_WL, rows, 1)])

    def mine(self, x: Tensor) -> Tensor:
        """See `Group.mine`."""
        return self._parts(x, 0)[self._group.rank()]

    def hidden(self, input: Tensor) -> Tensor:
        """See `Ranks.hidden`; of this rank's part."""
        return self._filled(self.local(input), self._length)

    def begin_rows(self, input: Tensor, _index: Tensor | None, part: slice, dtype: torch.dtype) -> Exchange:
        """See `Group.begin_rows`."""
        gathered = exchange.begin_gather(take_rows(input, None, self._of_part(part), dtype), self._group)
        return gathered._replace(value=gathered.value.flatten(0, 1))

    def begin_sum(self, product_CD: Tensor, part: slice, _index: Tensor | None, into: Gradients) -> Callable[[], None]:
        """See `Ranks.begin_sum`."""
        under_way, rows = exchange.begin_scattered_sum(product_CD, self._group), self._of_part(part)
        return lambda: into.put_input(rows, under_way.get())

    def _of_part(self, rows: slice) -> slice:
        return slice(rows.start // self.size, rows.stop // self.size)


def ranks_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object, *, gathered: bool
) -> Ranks:
    """Return how the ranks share a head of DTensors, or with ``shard`` of this rank's rows, all of which is checked.

    ``gathered``: hidden states are to be whole on each rank, and not in parts of the sequence.
    """
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    if shard is not None:
        return Ranks(checked_shard(tensors, shard), input.shape[:-1], input.device, None)
    placed: Any = input if is_dtensor(input) else linear_weight
    for name, tensor in tensors.items():
        if tensor is not None and not is_dtensor(tensor):
            hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
            raise ArgumentTypeError(message(name, "a DTensor, as others of this call are", "a plain tensor", hint))
    mesh = placed.device_mesh
    of_dtensor = shard_of_dtensor("linear_weight", linear_weight, mesh)
    if linear_bias is not None:
        shard_of_dtensor("linear_bias", linear_bias, mesh)
    of_call, axis = (of_dtensor, input.shape[:-1], input.device, mesh), _axis_of(input)
    return Ranks(*of_call) if gathered or axis is None else SpreadRanks(*of_call, axis=axis)


def _axis_of(input: Any) -> int | None:
    placement = input.placements[0]
    if placement.is_replicate():
        return None
    if input.device_mesh.ndim == 1 and placement.is_shard() and placement.dim < input.dim() - 1:
        return int(placement.dim)
    expected = "placement Replicate(), or Shard of one axis of tokens"
    raise ArgumentValueError(message("input", expected, str(input.placements), "Redistribute it first."))


@run_in_eager
def exchanges_between_ranks_run_in_eager(function: Callable[..., _Result], *args: Any) -> _Result:
    """Call ``function`` outside of a compiler's graphs: its error where there must be one graph has this name."""
    return function(*args)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate  # slow to import, and loaded where there are DTensors

    return Replicate()


def _pass_on(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
    ctx.ranks = ranks
    return x.view_as(x)


_SUMMED_GRADIENT = node("SummedGradient", "logit_scale", _pass_on, lambda ctx, g: ([ctx.ranks.sum_of(g)], ()))

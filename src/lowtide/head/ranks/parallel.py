"""The ranks of a call: each one's part of a sharded vocabulary and of the tensors, and what they exchange.

W ranks, V classes of which this one holds V_r, N tokens, C rows of a chunk, D hidden size. What is exchanged has the
shape of tokens, never of the vocabulary, and how often follows from shapes and options alone, and where ignored tokens
are dropped, from the number of the others: a rank whose tokens are all ignored, or that holds no target, takes part.
What is computed from gathered numbers is the same on every rank, bit for bit. Hidden states are the same on every rank,
or each holds its part of the sequence; so is their gradient, never a part of a sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.graph import node, run_in_eager
from lowtide.head.gradients import Gradients
from lowtide.head.matmul import slices
from lowtide.head.ranks import exchange as exchange
from lowtide.head.ranks.exchange import Exchange
from lowtide.head.ranks.shard import Limits, VocabShard, checked_shard, limits_of, shard_of_dtensor
from lowtide.head.rows import take_rows

_Result = TypeVar("_Result")
_Held = TypeVar("_Held", Tensor, Tensor | None)
_Given = TypeVar("_Given")


class Group:
    """A call's view of the ranks that share its vocabulary, where all tokens are on each."""

    spread, groups = False, 1  # whether each rank holds a part of the tokens, and of how many ranks a chunk has rows

    def chunks(self, plan: Any) -> Iterator[slice]:
        """Yield each chunk's rows in the order of `order`: whole groups of them, the same on every rank."""
        return slices(plan.rows, max(1, plan.chunk_rows // self.groups) * self.groups)

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

    def keep(self, *, kept: bool = True) -> None:
        """Gather each chunk once from here on, and save it for a second pass. Or free all that is saved.

        If no rank trains the hidden states, some ranks may train their weights and others not. Those have no second
        pass, and would not take part in a second gathering.
        """


class Alone(Group):
    """The group of one rank, which has the whole vocabulary: its exchanges return its own numbers at once."""

    alone, first, size = True, 0, 1

    def __init__(self, V: int) -> None:
        self.rows = self.vocab = self.most_rows = V

    def itself(self, x: _Given, *_: object) -> _Given:
        """Return what is given: the sum over all ranks, what this one holds of it, and so on."""
        return x

    sum_of = logsumexp_of = highest_of = add_up_ = put_together_ = whole_rows = own_classes = share_of = itself
    local = whole = result = class_weight = itself

    def here(self, y: Tensor) -> tuple[Tensor, None]:
        """Return each class's row of the weight, and no mask: all are here."""
        return y, None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [1, ...]."""
        return x[None]

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None = None) -> Callable[[Gradients], None]:
        """Return what writes a chunk's gradient of the hidden states where it belongs."""
        return lambda into: into.put_input(part if index is None else index[part], product_CD)

    def compare(self, numbers: dict[str, int], *, known: bool = False) -> bool:  # noqa: ARG002
        """Return ``known``: there are no others to compare with."""
        return known


class Ranks(Group):
    """This rank's classes, and what is exchanged."""

    alone = False

    def __init__(
        self,
        shard: VocabShard,
        leading: Sequence[int],  # sizes of the axes of tokens, all of them
        device: torch.device,
        mesh: Any,  # of the DTensors; None where there are none
        exchanges: int = 0,  # 1 if the hidden states get a gradient, 2 if logit_scale does as well
    ) -> None:
        self.shard, self.mesh, self._group = shard, mesh, shard.group
        self.first, self.rows, self.vocab, self.most_rows = shard.first, shard.rows, shard.vocab, shard.most_rows
        self.size, self.slots = shard.group.size(), math.prod(leading)  # the latter: all chunks' rows
        self._device, self._checked, self._exchanges = device, device.type != "cpu", exchanges
        self._classes: list[int] = []  # of each rank, known after `compare`

    def reordered(self, plan: Any, rows: int) -> Tensor | None:  # noqa: ARG002
        """Return where chunks of another number of ``rows`` have theirs in the order of `order`; None: in the same."""
        return None

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None = None) -> Callable[[Gradients], None]:
        """Begin to add up all ranks' gradients of some rows' hidden states; return what waits, and writes them."""
        under_way, rows = exchange.begin_sum(product_CD, self._group), part if index is None else index[part]
        return lambda into: into.put_input(rows, under_way.get())

    def compare(self, numbers: dict[str, int], *, known: bool = False) -> bool:
        """Check numbers that must be the same on every rank, and learn how many classes each holds; the host waits.

        Returns whether ``known`` is true on all of them. Raises on all, where numbers differ or classes are missing.
        """
        mine = [self.first, self.rows, known, *numbers.values()]
        numbers_of = exchange.numbers_of_all(mine, self._group, self._device)
        firsts, self._classes = ([rank[i] for rank in numbers_of] for i in range(2))
        for i, name in enumerate(numbers):
            seen = [rank[3 + i] for rank in numbers_of]
            if len(set(seen)) > 1:
                raise ArgumentValueError(message(name, "the same on every rank that shares the head", f"{seen}"))
        if firsts != [sum(self._classes[:i]) for i in range(self.size)] or sum(self._classes) != self.vocab:
            expected = f"parts of {self.vocab} classes, one after another in the order of the ranks"
            got = f"first={firsts} and rows={self._classes}"
            raise ArgumentValueError(message("vocab_shard", expected, got))
        return all(rank[2] for rank in numbers_of)

    def share_of(self, part: slice) -> slice:
        """Return the rows of a chunk that are this rank's share: where tokens are spread, its own."""
        rows, rank = self._shares(part.stop - part.start), self._group.rank()
        start = part.start + sum(rows[:rank])
        return slice(start, start + rows[rank])

    def _shares(self, C: int) -> list[int]:
        return [(i + 1) * C // self.size - i * C // self.size for i in range(self.size)]

    def whole_rows(self, z_CV: Tensor) -> Tensor:
        """Return logits of this rank's share of a chunk's rows and of all classes; after `compare`."""
        return exchange.rows_of_all_classes(z_CV, self._shares(len(z_CV)), self._classes, self._group)

    def own_classes(self, g_cV: Tensor, C: int) -> Tensor:
        """Undo `whole_rows` for a gradient: return it for all ``C`` rows of the chunk and this rank's classes."""
        return exchange.classes_of_all_rows(g_cV, self._shares(C), self._classes, self._group)

    def add_up_(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in its memory."""
        return exchange.begin_sum(x, self._group).get()

    def put_together_(self, x: Tensor) -> Tensor:
        """Return ``x``, contiguous, whose entries one rank has and the others 0, of any dtype, in its memory."""
        if x.numel():
            self.add_up_(x.view(-1).view(torch.uint8))  # bytes: 0 added to a number would make 0 of -0
        return x

    @property
    def limits(self) -> Limits:
        """Return what all of them can do: plans are made by it."""
        return limits_of(self._group, self._device)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [W, ...]."""
        return self.begin_gather(x).get()

    def begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange ``x``; return what waits on the device, and returns the sum of all ranks'."""
        gathered = self.begin_gather(x)
        return lambda: gathered.get().sum(0)

    def begin_gather(self, x: Tensor) -> Exchange:
        """Begin to gather it.

        Raises on the CPU where the ranks disagree on whether the hidden states or ``logit_scale`` get a gradient: some
        would wait for the others' parts of it. Elsewhere to look would stop the host, and they do wait.
        """
        if self._checked or not self.slots:
            return exchange.begin_gather(x, self._group)
        self._checked = True  # beside the call's first numbers: no exchange is made for it
        both = exchange.begin_gather(torch.cat((x.reshape(-1), x.new_full((1,), self._exchanges))), self._group).get()
        for name, least in (("logit_scale", 2), ("input", 1)):
            trained = [rank for rank, number in enumerate(both[:, -1].tolist()) if number >= least]
            if 0 < len(trained) < len(both):
                where = "on every rank that shares the head or on none"
                expected = f"to require a gradient, with gradients recorded, {where}"
                hint = f"Enter torch.no_grad, or detach {name}, on all of them alike."
                raise ArgumentValueError(message(name, expected, f"it on ranks {trained} of {len(both)}", hint))
        return Exchange(both[:, :-1].reshape(len(both), *x.shape))

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

    def whole(self, tensor: _Held) -> _Held:
        """Return a tensor as a plain one that is whole; one that is plain is so already."""
        held: Any = tensor
        return held.full_tensor() if is_dtensor(tensor) else tensor

    def gathered(self, input: Tensor) -> tuple[Tensor, "Ranks"]:
        """Return a DTensor's hidden states of all tokens, in autograd's graph, and the ranks with these."""
        held: Any = input
        whole: Tensor = held.redistribute(placements=[_replicate()]).to_local()
        return whole, Ranks(self.shard, input.shape[:-1], self._device, self.mesh, self._exchanges)

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

    def class_weight(self, weight: Tensor | None) -> Tensor | None:
        """Return this rank's of the class weights, which may be all ranks'."""
        return weight if weight is None or len(weight) == self.rows else weight[self.first : self.first + self.rows]

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a trained scale as the factor of the hidden states and of the bias, its gradient's parts summed.

        The bias's part, and with spread tokens the hidden states', is of what this rank holds. Of no tokens all parts
        are 0: forward, which exchanges nothing then, could not have seen a rank that has no backward.
        """
        if not self.slots:
            return scale, scale
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

    A chunk has the same rows of each rank's part, one group a rank; shorter parts are filled up with ignored tokens.
    """

    spread = True

    def __init__(self, shard: VocabShard, leading: Sequence[int], device: torch.device, *given: Any, axis: int) -> None:
        super().__init__(shard, leading, device, *given)
        W, rank, N, T = self.size, self._group.rank(), self.slots, leading[axis]
        size = -(-T // W)  # DTensor's rule
        spans = [slice(min(r * size, T), min((r + 1) * size, T)) for r in range(W)]
        self.groups, self._span, self._axis = W, spans[rank], axis
        self._length = size * (N // T if T else 0)  # rows of a group
        self.slots = W * self._length
        self._order_GL = torch.full((W, self._length), N, device=device)  # place among the N; N: no token
        place = torch.arange(N, device=device).view(*leading)
        for row, span in zip(self._order_GL, spans, strict=True):
            held = place.narrow(axis, span.start, span.stop - span.start).reshape(-1)
            row[: held.numel()] = held
        self._kept: list[tuple[slice, Tensor]] | None = None  # gathered parts in order, each [W, rows, D]

    def order(self, plan: Any) -> Tensor | None:
        """See `Group.order`."""
        return self._order_GL.view(-1)[self._slots(*self._steps(plan))]

    def reordered(self, plan: Any, rows: int) -> Tensor | None:
        """See `Ranks.reordered`."""
        step = max(1, rows // self.groups)
        slots, others = self._slots(*self._steps(plan)), self._slots(step, step)
        return torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=slots.device))[others]

    def _steps(self, plan: Any) -> tuple[int, int]:
        """Return a group's rows of a chunk, and of the pieces in which the exponential path computes it."""
        in_pieces = plan.backend == "exp" and plan.schedule == "chunks"
        rows = plan.chunk_rows, plan.product_rows if in_pieces else plan.chunk_rows
        return max(1, rows[0] // self.groups), max(1, rows[1] // self.groups)

    def _slots(self, step: int, piece: int) -> Tensor:
        """Return the places of chunks' rows, piece by piece, among all ranks' rows one after another.

        Chunks have ``step`` rows a group, and are computed in pieces of ``piece``, which follow one another.
        """
        slot_GL = torch.arange(self._order_GL.numel(), device=self._order_GL.device).view_as(self._order_GL)
        pieces = [
            slot_GL[:, at : min(at + piece, start + step)].reshape(-1)
            for start in range(0, self._length, step)
            for at in range(start, min(start + step, self._length), piece)
        ]
        return torch.cat(pieces) if pieces else slot_GL.view(-1)

    def mine(self, x: Tensor) -> Tensor:
        """See `Group.mine`."""
        return x[(slice(None),) * self._axis + (self._span,)]

    def keep(self, *, kept: bool = True) -> None:
        """See `Group.keep`."""
        self._kept = [] if kept else None

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> Exchange:  # noqa: ARG002
        """See `Group.begin_rows`."""
        start, stop = part.start // self.groups, part.stop // self.groups  # of each rank's rows
        D, here = input.shape[-1], math.prod(input.shape[:-1])
        if self._kept and stop <= self._kept[-1][0].stop:
            pieces = [
                held[:, max(start, its.start) - its.start : stop - its.start]
                for its, held in self._kept
                if its.start < stop and start < its.stop
            ]
            return Exchange(torch.cat(pieces, 1).view(-1, D))
        rows = slice(start, min(stop, here))
        if stop <= here:
            mine = take_rows(input, None, rows, dtype)
        else:
            mine = input.new_zeros(stop - start, D, dtype=dtype)
            if start < here:
                mine[: here - start] = take_rows(input, None, rows, dtype)
        gathered = exchange.begin_gather(mine, self._group)
        if self._kept is not None:
            self._kept.append((slice(start, stop), gathered.value))
        return gathered._replace(value=gathered.value.view(-1, D))

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None = None) -> Callable[[Gradients], None]:  # noqa: ARG002
        """See `Ranks.begin_sum`."""
        under_way, start = exchange.begin_scattered_sum(product_CD, self._group), part.start // self.groups

        def write(into: Gradients) -> None:
            summed, input_ND = under_way.get(), into.input_ND
            assert input_ND is not None
            rows = min(len(summed), len(input_ND) - start)  # of the last chunk a rank may have fewer
            if rows > 0:
                into.put_input(slice(start, start + rows), summed[:rows])

        return write


def ranks_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object, *, scale: Tensor | None = None
) -> Ranks:
    """Return how the ranks share a head of DTensors, or with ``shard`` of this rank's rows, all of which is checked."""
    recorded = torch.is_grad_enabled()
    scale_trained = recorded and scale is not None and scale.requires_grad
    trained = scale_trained or (recorded and input.requires_grad)
    exchanges = trained + scale_trained  # a trained scale makes ``trained`` true as well
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    mesh = axis = None
    if shard is not None:
        shard = checked_shard(tensors, shard)
    else:
        placed: Any = input if is_dtensor(input) else linear_weight
        for name, tensor in tensors.items():
            if tensor is not None and not is_dtensor(tensor):
                hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
                raise ArgumentTypeError(message(name, "a DTensor, as others of this call are", "a plain tensor", hint))
        mesh = placed.device_mesh
        shard = shard_of_dtensor("linear_weight", linear_weight, mesh)
        if linear_bias is not None:
            shard_of_dtensor("linear_bias", linear_bias, mesh)
        axis = _axis_of(input)
    of_call = shard, input.shape[:-1], input.device, mesh, exchanges
    return Ranks(*of_call) if axis is None else SpreadRanks(*of_call, axis=axis)


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

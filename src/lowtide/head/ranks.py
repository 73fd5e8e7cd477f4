"""Ranks that share a vocabulary: each one's part of it and of the tensors, and what they exchange.

W ranks, V classes of which this one holds V_r, N tokens, C rows of a chunk, D hidden size. Ranks pass the same
arguments, as to torch.distributed itself, on GPUs of one kind: so all plan alike, and make the same exchanges in the
same order. What is exchanged has the shape of tokens, never of the vocabulary: a rank that holds no target takes part.
What is computed of gathered numbers is the same on every rank, bit for bit. Hidden states are the same on every rank,
or each holds its part of the sequence; so is their gradient, never a part of a sum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from lowtide.arguments import check_tensor, is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.graph import node, run_in_eager
from lowtide.head.rows import take_rows

_Result = TypeVar("_Result")
_Given = TypeVar("_Given")
Put = Callable[[slice | Tensor, Tensor], None]  # writes rows of a gradient


class Exchange(NamedTuple):
    """An exchange under way: host and device continue, and wait for it in `get`."""

    value: Tensor
    work: Any = None  # None: nothing is

    def get(self) -> Tensor:
        """Return its result, for the next operations."""
        if self.work is not None:
            self.work.wait()
        return self.value


def begin_gather(x: Tensor, group: Any) -> Exchange:
    """Begin to gather every rank's ``x`` [W, ...]."""
    out = x.new_empty(group.size(), *x.shape)
    if not out.numel():
        return Exchange(out)
    # torch 2.13's name for what was all_gather_into_tensor
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Exchange(out, all_gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True))


def begin_scattered_sum(part_CD: Tensor, group: Any) -> Exchange:
    """Begin to add up all ranks' ``part_CD``, contiguous; each rank gets its own rows of the sum."""
    out = part_CD.new_empty(part_CD.shape[0] // group.size(), part_CD.shape[1])
    # torch 2.13's name for what was reduce_scatter_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Exchange(out, reduce_scatter(out, part_CD, group=group, async_op=True))


def swapped(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send each rank its part of ``x``, of these lengths; return what each has sent here, one after another."""
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out


def _numbers_of_all(number: int, group: Any, device: torch.device) -> list[int]:
    """Return each rank's whole number; the host waits for them."""
    of_ranks: list[int] = begin_gather(torch.tensor(number, device=device), group).get().tolist()
    return of_ranks


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which classes this rank holds of a vocabulary that is sharded over the ranks of a group, in their order.

    Made once by `VocabShard.of`, or from known numbers; ranks may hold different numbers of classes, or none.

    Args:
        group: The ranks that together hold the vocabulary. None: all ranks.
        first: This rank's first class.
        rows: How many it holds: rows of its ``linear_weight``.
        vocab: V, the classes of all ranks.
        largest: Most rows that any rank holds, the same number on every rank: all plan by it, and so all plan alike.
            None: none holds more than ``vocab`` in as many parts of one size has.

    Raises:
        ArgumentValueError: Numbers that do not fit each other, or no process group.
    """

    group: Any
    first: int
    rows: int
    vocab: int
    largest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", group_of(self.group))
        if min(self.first, self.rows) < 0 or self.first + self.rows > self.vocab:
            got = f"first={self.first}, rows={self.rows}, vocab={self.vocab}"
            raise ArgumentValueError(message("VocabShard", "first and rows of 0 or more that end within vocab", got))
        if self.largest is not None and not self.rows <= self.largest <= self.vocab:
            expected = f"largest from {self.rows}, this rank's rows, to {self.vocab}, the vocabulary"
            raise ArgumentValueError(message("VocabShard", expected, str(self.largest)))
        if self.rows > self.most_rows:
            expected = f"at most {self.most_rows} rows, {self.vocab} classes in equal parts, where largest is None"
            hint = "Give every rank largest=, the most rows that any of them holds; VocabShard.of finds it."
            raise ArgumentValueError(message("VocabShard", expected, f"rows={self.rows}", hint))

    @classmethod
    def of(cls, linear_weight: Tensor, group: Any = None) -> "VocabShard":
        """Return the shard that ``linear_weight`` [V_r, D] is. Every rank of the group has to call this.

        The ranks exchange their numbers of rows, and the host waits: do it once, not in each step.

        Args:
            linear_weight: This rank's rows.
            group: A process group. None: all ranks.
        """
        rows = check_tensor("linear_weight", linear_weight).shape[0]
        group = group_of(group)
        sizes = _numbers_of_all(rows, group, linear_weight.device)
        first = sum(sizes[: group.rank()])
        return cls(group=group, first=first, rows=rows, vocab=sum(sizes), largest=max(sizes))

    @property
    def most_rows(self) -> int:
        """Return the most rows that any rank holds."""
        return -(-self.vocab // self.group.size()) if self.largest is None else self.largest


def group_of(group: Any) -> Any:
    """Return a process group that this rank is in, all ranks for None; raise for what is none."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        hint = "Call torch.distributed.init_process_group first, and this on the group's ranks alone."
        raise ArgumentValueError(message("group", "a process group that this rank is in", repr(group), hint))
    return found


class Group:
    """A call's view of the ranks that share its vocabulary, where all tokens are on each."""

    spread, groups = False, 1  # whether each rank holds a part of the tokens, and of how many ranks a chunk has rows
    slots: int  # where it does: rows of all parts

    def order(self, plan: Any) -> Tensor | None:  # noqa: ARG002
        """Return the indices of all chunks' rows among the N tokens, N where a rank has none; None: in order."""
        return None

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> Exchange:
        """Begin to gather a chunk's hidden states [C, D], the rows ``part`` in the order of `order`.

        Where all tokens are on every rank, ``index`` may be of some of them, the same on each.
        """
        return Exchange(take_rows(input, index, part, dtype))


class Alone(Group):
    """The group of one rank, which has the whole vocabulary: its exchanges return its own numbers at once."""

    alone, first, size = True, 0, 1

    def __init__(self, V: int) -> None:
        self.rows = self.vocab = self.most_rows = V

    def itself(self, x: _Given, *_: object) -> _Given:
        """Return what is given: the sum over all ranks, what this one holds of it, and so on."""
        return x

    sum_of = logsumexp_of = highest_of = whole_rows = itself
    hidden = local = whole = result = own_classes = itself

    def here(self, y: Tensor) -> tuple[Tensor, None]:
        """Return each class's row of the weight, and no mask: all are here."""
        return y, None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [1, ...]."""
        return x[None]

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None, put: Put) -> Callable[[], None]:
        """Write a chunk's gradient of the hidden states where it belongs."""
        put(part if index is None else index[part], product_CD)
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
        return _numbers_of_all(self.rows, self._group, self._device)

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None, put: Put) -> Callable[[], None]:
        """Begin to add up all ranks' gradients of some rows' hidden states; return what waits, and writes them."""
        work: Any = dist.all_reduce(product_CD, group=self._group, async_op=True)
        under_way, rows = Exchange(product_CD, work), part if index is None else index[part]
        return lambda: put(rows, under_way.get())

    def whole_rows(self, z_CV: Tensor) -> Tensor:
        """Return a chunk's logits of all classes."""
        blocks = zip(self.gather(pad(z_CV, [0, self.most_rows - self.rows])), self._classes, strict=True)
        return torch.cat([block[:, :V] for block, V in blocks], 1)

    def begin_gather(self, x: Tensor) -> Exchange:
        """Begin to gather every rank's ``x`` [W, ...]."""
        return begin_gather(x, self._group)

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

    def local(self, tensor: Any) -> Any:
        """Return what this rank holds of a tensor, in autograd's graph."""
        return tensor.to_local() if is_dtensor(tensor) else tensor

    def hidden(self, input: Any) -> Any:
        """Return the hidden states as the chunks read them, in autograd's graph: of all tokens."""
        spread = is_dtensor(input) and not input.placements[0].is_replicate()
        return self.local(input.redistribute(placements=[_replicate()]) if spread else input)

    def whole(self, tensor: Any) -> Any:
        """Return a tensor as a plain one that is whole; one that is plain is so already."""
        return tensor.full_tensor() if is_dtensor(tensor) else tensor

    def own_classes(self, x_V: Any) -> Any:
        """Return what belongs to this rank's classes of something [V, ...]."""
        return None if x_V is None else x_V[self.first : self.first + self.rows]

    def check_alike(self, name: str, weight: Tensor) -> None:
        """Check that another head is sharded as this one: by DTensors or not, and the same classes on each rank."""
        if is_dtensor(weight) != (self.mesh is not None):
            own, other = ("a plain tensor", "a DTensor")[:: 1 if self.mesh is None else -1]
            raise ArgumentTypeError(message(name, f"{own}, as input is", other))
        if self.mesh is not None:
            _shard_of_dtensor(name, weight, self.mesh)
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
        self.slots = self.size * self._length * math.prod((*leading[:axis], *leading[axis + 1 :]))

    def _filled(self, x: Tensor, length: int, fill: int = 0) -> Tensor:
        axis = self._axis
        missing = length - x.shape[axis]
        return pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, missing], value=fill) if missing else x

    def order(self, plan: Any) -> Tensor | None:
        """See `Group.order`."""
        N, axis = math.prod(self._leading), self._axis
        tokens = torch.arange(N, device=self._device).view(*self._leading)
        tokens = self._filled(tokens, self.size * self._length, N)
        parts_WL = torch.stack(torch.split(tokens, self._length, axis)).flatten(1)
        rows = plan.product_rows // self.size  # a piece's, of each part
        return torch.cat([piece.reshape(-1) for piece in torch.split(parts_WL, rows, 1)])

    def hidden(self, input: Any) -> Any:
        """See `Ranks.hidden`; of this rank's part."""
        return self._filled(self.local(input), self._length)

    def begin_rows(self, input: Tensor, _index: Tensor | None, part: slice, dtype: torch.dtype) -> Exchange:
        """See `Group.begin_rows`."""
        gathered = self.begin_gather(take_rows(input, None, self._of_part(part), dtype))
        return gathered._replace(value=gathered.value.flatten(0, 1))

    def begin_sum(self, product_CD: Tensor, part: slice, _index: Tensor | None, put: Put) -> Callable[[], None]:
        """See `Ranks.begin_sum`."""
        under_way = begin_scattered_sum(product_CD, self._group)
        return lambda: put(self._of_part(part), under_way.get())

    def _of_part(self, rows: slice) -> slice:
        return slice(rows.start // self.size, rows.stop // self.size)


def ranks_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object, *, gathered: bool
) -> Ranks:
    """Return how the ranks share a head of DTensors, or with ``shard`` of this rank's rows, all of which is checked.

    ``gathered``: hidden states are to be whole on each rank, and not in parts of the sequence.
    """
    if shard is not None and not isinstance(shard, VocabShard):
        raise ArgumentTypeError(message("vocab_shard", "lowtide.VocabShard or None", type(shard).__name__))
    for name, tensor in {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}.items():
        if tensor is not None and is_dtensor(tensor) != (shard is None):
            got, expected = "a DTensor", "a plain tensor with vocab_shard"
            hint = "The placements of a DTensor are its shard: leave vocab_shard out."
            if shard is None:
                got, expected = "a plain tensor", "a DTensor, as others of this call are"
                hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
            raise ArgumentTypeError(message(name, expected, got, hint))
    if shard is not None:
        if linear_weight.dim() and linear_weight.shape[0] != shard.rows:
            expected = f"shape [{shard.rows}, D], as vocab_shard has"
            raise ArgumentValueError(message("linear_weight", expected, str(list(linear_weight.shape))))
        return Ranks(shard, input.shape[:-1], input.device, None)
    spread: Any = input
    mesh, placement = spread.device_mesh, spread.placements[0]
    of_call = _shard_of_dtensor("linear_weight", linear_weight, mesh), input.shape[:-1], input.device, mesh
    if linear_bias is not None:
        _shard_of_dtensor("linear_bias", linear_bias, mesh)
    of_tokens = mesh.ndim == 1 and placement.is_shard() and placement.dim < input.dim() - 1
    if not (of_tokens or placement.is_replicate()):
        expected = "placement Replicate(), or Shard of one axis of tokens"
        raise ArgumentValueError(message("input", expected, str(spread.placements), "Redistribute it first."))
    return SpreadRanks(*of_call, axis=placement.dim) if of_tokens and not gathered else Ranks(*of_call)


def _shard_of_dtensor(name: str, weight: Any, mesh: Any) -> VocabShard:
    """Return the shard that a DTensor [V, ...] holds here: it must be ``Shard(0)`` on one axis, that of ``mesh``."""
    if weight.device_mesh != mesh or mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        hint = (
            'Place all of them on the axis of the vocabulary alone, such as mesh["tp"]; inside the forward of what'
            " fully_shard wraps its weights are so already. Or redistribute it."
        )
        got = f"{weight.placements} on {weight.device_mesh}"
        expected = "a DTensor with Shard(0) on a mesh of one axis, the one of the other DTensors"
        raise ArgumentValueError(message(name, expected, got, hint))
    vocab, size = weight.shape[0], -(-weight.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * size, vocab)
    rows = min(size, vocab - first)
    if weight._local_tensor.shape[0] != rows:
        hint = "Pass the local tensors with vocab_shard=VocabShard.of(local_weight, group)."
        raise ArgumentValueError(message(name, f"{rows} rows here", str(weight._local_tensor.shape[0]), hint))
    return VocabShard(group=mesh.get_group(), first=first, rows=rows, vocab=vocab, largest=size)


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

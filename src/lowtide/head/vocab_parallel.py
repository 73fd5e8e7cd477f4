"""The vocabulary in parts, one a rank: what the ranks tell each other. The one file here that speaks to other ranks.

W ranks, V classes of which this one holds V_r, N tokens, C rows of a chunk. Everything that is exchanged has the shape
of the tokens, never that of the vocabulary: no logits are gathered. What is exchanged, and how often, follows from
shapes and options alone, never from numbers: a rank whose tokens are all ignored, or that holds no target, still takes
part. What is computed from gathered numbers is the same on every rank, bit for bit.

The hidden states are the same on every rank, or each rank holds its part of the sequence. Their gradient then is the
whole one on every rank, summed here, or each rank's part of it: never a part of the sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.arguments import check_tensor, is_dtensor
from lowtide.head.head_plan import HeadPlan
from lowtide.head.matmul import HeadMatmul
from lowtide.head.options import HeadOptions
from lowtide.head.schedules import Gradients, take_rows

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which classes this rank holds of a vocabulary that is sharded over the ranks of a group, in their order.

    Made once by `VocabShard.of`, or from known numbers; ranks may hold different numbers of classes, or none.

    Args:
        group: The ranks that together hold the vocabulary.
        first: This rank's first class.
        rows: How many it holds: rows of its ``linear_weight``.
        vocab: V, the classes of all ranks.
        largest: Most rows that any rank holds, by which all plan alike. None: ``vocab`` in as many parts of one size.

    Raises:
        ArgumentValueError: Numbers that do not fit each other.
    """

    group: Any
    first: int
    rows: int
    vocab: int
    largest: int | None = None

    def __post_init__(self) -> None:
        if min(self.first, self.rows) < 0 or self.first + self.rows > self.vocab:
            got = f"first={self.first}, rows={self.rows}, vocab={self.vocab}"
            raise ArgumentValueError(message("VocabShard", "first and rows of 0 or more that end within vocab", got))
        if self.largest is not None and not self.rows <= self.largest <= self.vocab:
            expected = f"largest from {self.rows}, this rank's rows, to {self.vocab}, the vocabulary"
            raise ArgumentValueError(message("VocabShard", expected, str(self.largest)))

    @classmethod
    def of(cls, linear_weight: Tensor, group: Any = None) -> "VocabShard":
        """Return the shard that ``linear_weight`` [V_r, D] is. Every rank of the group has to call this.

        The ranks tell each other their numbers of rows, and the host waits: do it once, not in each step.

        Args:
            linear_weight: This rank's rows.
            group: A process group. None: all ranks.
        """
        rows = check_tensor("linear_weight", linear_weight).shape[0]
        group = dist.group.WORLD if group is None else group
        told = [
            torch.zeros(1, dtype=torch.long, device=linear_weight.device) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(told, torch.full_like(told[0], rows), group=group)
        sizes = [int(size) for size in told]
        first = sum(sizes[: dist.get_rank(group)])
        return cls(group=group, first=first, rows=rows, vocab=sum(sizes), largest=max(sizes))

    @property
    def most_rows(self) -> int:
        """Return the most rows that any rank holds."""
        return -(-self.vocab // dist.get_world_size(self.group)) if self.largest is None else self.largest


class SameTokens:
    """All tokens on every rank.

    A chunk's rows are [groups, rows]: here one group.
    """

    groups = 1

    def __init__(self, ranks: "Ranks", leading: Sequence[int]) -> None:
        self._ranks, self.N = ranks, math.prod(leading)
        self.length = self.N  # rows of a group

    def arranged(self, x_N: Tensor, fill: float) -> Tensor:  # noqa: ARG002
        """Return values [N, ...] of all tokens as [groups, length, ...], ``fill`` where there is no token."""
        return x_N[None]

    def put_back(self, x_GL: Tensor) -> Tensor:
        """Undo `arranged`."""
        return x_GL[0]

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return x

    def rows(self, input: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the hidden states of a chunk [C, D]."""
        return take_rows(input, None, part, dtype)

    def reduce(self, part_CD: Tensor) -> "Reduced":
        """Begin to add up all ranks' parts of a chunk's gradient [C, D], in its memory."""
        return Reduced(part_CD, dist.all_reduce(part_CD, group=self._ranks.shard.group, async_op=True))


class SpreadTokens:
    """Each rank holds its part of one axis of tokens; chunks are gathered as they are needed, and never all at once.

    A chunk has the same rows of each rank's part, one group a rank; shorter parts are filled up with ignored tokens.
    """

    def __init__(self, ranks: "Ranks", leading: Sequence[int], axis: int, device: torch.device) -> None:
        self._ranks, self.N, self._axis = ranks, math.prod(leading), axis
        self.groups = W = ranks.size
        T = leading[axis]
        size = -(-T // W)  # DTensor's rule
        self._span = slice(min(ranks.rank * size, T), min((ranks.rank + 1) * size, T))
        beside = self.N // T if T else 0
        self.length = size * beside
        place = torch.arange(self.N, device=device).view(*leading)
        order = torch.full((W, self.length), self.N, device=device)
        for rank in range(W):
            held = place.narrow(axis, min(rank * size, T), max(0, min(size, T - rank * size))).reshape(-1)
            order[rank, : held.numel()] = held
        self._order_GL = order

    def arranged(self, x_N: Tensor, fill: float) -> Tensor:
        """Return values [N, ...] of all tokens as [groups, length, ...], ``fill`` where there is no token."""
        return torch.cat((x_N, x_N.new_full((1, *x_N.shape[1:]), fill)))[self._order_GL]

    def put_back(self, x_GL: Tensor) -> Tensor:
        """Undo `arranged`."""
        out = x_GL.new_zeros(self.N + 1, *x_GL.shape[2:])
        return out.index_copy_(0, self._order_GL.view(-1), x_GL.flatten(0, 1))[: self.N]

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return x.narrow(self._axis, self._span.start, self._span.stop - self._span.start)

    def rows(self, input: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the hidden states of a chunk [C, D], gathered."""
        D = input.shape[-1]
        mine = input.new_zeros(part.stop - part.start, D, dtype=dtype)
        held = slice(part.start, min(part.stop, math.prod(input.shape[:-1])))
        if held.start < held.stop:
            mine[: held.stop - held.start] = take_rows(input, None, held, dtype)
        return self._ranks.gather(mine).view(-1, D)

    def reduce(self, part_CD: Tensor) -> "Reduced":
        """Begin to add up all ranks' parts of a chunk's gradient [C, D]; each rank gets its own rows of the sum."""
        out = part_CD.new_empty(part_CD.shape[0] // self.groups, part_CD.shape[1])
        # torch 2.13's name for what was reduce_scatter_tensor
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Reduced(out, reduce_scatter(out, part_CD, group=self._ranks.shard.group, async_op=True))


class Reduced(NamedTuple):
    """A sum over the ranks that is under way: the host goes on, and what comes next on the device need not wait."""

    value: Tensor
    work: Any

    def write(self, out_ND: Tensor, start: int) -> None:
        """Write the sum to the rows of ``out_ND`` from ``start`` on, as many as there are."""
        self.work.wait()
        rows = min(self.value.shape[0], out_ND.shape[0] - start)
        if rows > 0:
            out_ND[start : start + rows].copy_(self.value[:rows])


class Ranks:
    """One call's view of the ranks: this rank's classes, how tokens lie, and what is exchanged.

    Args:
        shard: This rank's classes.
        leading: Sizes of the axes of tokens, all of them.
        device: Of the tensors.
        axis: Which of these axes the hidden states are sharded on; None: none.
        mesh: Of the DTensors; None where there are none.
    """

    def __init__(
        self, shard: VocabShard, leading: Sequence[int], device: torch.device, axis: int | None, mesh: Any
    ) -> None:
        self.shard, self.mesh = shard, mesh
        self.rank, self.size = dist.get_rank(shard.group), dist.get_world_size(shard.group)
        self.leading = tuple(leading)
        self.tokens: SameTokens | SpreadTokens
        if axis is None:
            self.tokens = SameTokens(self, leading)
        else:
            self.tokens = SpreadTokens(self, leading, axis, device)

    @property
    def spread(self) -> bool:
        """Return whether each rank holds a part of the tokens."""
        return isinstance(self.tokens, SpreadTokens)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [W, ...]."""
        out = x.new_empty(self.size, *x.shape)
        if not out.numel():
            return out
        # torch 2.13's name for what was all_gather_into_tensor
        all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(out.view(-1), x.contiguous().view(-1), group=self.shard.group)
        return out

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
        here = (y >= self.shard.first) & (y < self.shard.first + self.shard.rows)
        return (y - self.shard.first).where(here, self.shard.rows), here

    def local(self, tensor: _Maybe) -> _Maybe:
        """Return what this rank holds of a tensor, in autograd's graph."""
        held: Any = tensor
        return held.to_local() if is_dtensor(tensor) else tensor

    def whole(self, tensor: _Maybe) -> _Maybe:
        """Return a tensor as a plain one that is whole; one that is plain is so already."""
        held: Any = tensor
        return held.full_tensor() if is_dtensor(tensor) else tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return a DTensor that is replicated, in autograd's graph."""
        held: Any = tensor
        replicated: Tensor = held.redistribute(placements=[_replicate()])
        return replicated

    def check_alike(self, name: str, weight: Tensor) -> None:
        """Check that another head is sharded as this one: the same classes on each rank.

        Raises:
            ArgumentTypeError: A DTensor beside plain tensors, or the other way round.
            ArgumentValueError: Other classes.
        """
        if is_dtensor(weight) != (self.mesh is not None):
            kinds = ("a plain tensor", "a DTensor")
            raise ArgumentTypeError(
                message(name, f"{kinds[self.mesh is not None]}, as input is", kinds[is_dtensor(weight)])
            )
        vocab, rows = self.shard.vocab, self.shard.rows
        if self.mesh is not None:
            shard_of_dtensor(name, weight, self.mesh)
        if weight.shape[0] != (rows if self.mesh is None else vocab):
            expected = f"the student's classes: {rows} of {vocab} on this rank"
            raise ArgumentValueError(message(name, expected, f"shape {list(weight.shape)}"))

    def class_weight(self, weight: Tensor | None) -> Tensor | None:
        """Return this rank's of the class weights, which may be all ranks'."""
        if weight is None or weight.shape[0] == self.shard.rows:
            return weight
        return weight[self.shard.first : self.shard.first + self.shard.rows]

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a trained scale as the factor of the hidden states and of the bias, its gradient's parts summed.

        The bias's part, and with spread tokens the hidden states', is of what this rank holds.
        """
        summed: Tensor = _SummedGradient.apply(scale, self)  # type: ignore[no-untyped-call]
        return summed if self.spread else scale, summed

    def result(self, value: Tensor) -> Tensor:
        """Return a result, the same on every rank, as what the hidden states came as."""
        if self.mesh is None:
            return value
        from torch.distributed.tensor import DTensor

        replicated: Tensor = DTensor.from_local(value, self.mesh, [_replicate()], run_check=False)
        return replicated


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate  # slow to import, and loaded where there are DTensors

    return Replicate()


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_of(upstream), None


def ranks_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object) -> Ranks | None:
    """Return how the ranks share the head, None where this one has all of it.

    Args:
        input: Hidden states, perhaps a DTensor.
        linear_weight: The weight: a DTensor, or with ``shard`` this rank's rows.
        linear_bias: Likewise.
        shard: What the user gave as ``vocab_shard``.

    Raises:
        ArgumentTypeError: DTensors beside plain tensors, or something that is no `VocabShard`.
        ArgumentValueError: A mesh or placements that are not those of tensor parallelism, or other sizes.
    """
    if shard is None and not (is_dtensor(input) or is_dtensor(linear_weight)):
        return None
    if shard is not None:
        return _ranks_of_shard(input, linear_weight, linear_bias, shard)
    placed: Any = input if is_dtensor(input) else linear_weight
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and not is_dtensor(tensor):
            hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
            raise ArgumentTypeError(message(name, "a DTensor, as others of this call are", "a plain tensor", hint))
    mesh = placed.device_mesh
    shard = shard_of_dtensor("linear_weight", linear_weight, mesh)
    if linear_bias is not None:
        shard_of_dtensor("linear_bias", linear_bias, mesh)
    return Ranks(shard, input.shape[:-1], input.device, _axis_of(input), mesh)


def shard_of_dtensor(name: str, weight: Any, mesh: Any) -> VocabShard:
    """Return the shard that a DTensor [V, ...] holds here.

    Raises:
        ArgumentValueError: Another mesh or placement than ``Shard(0)`` on one axis.
    """
    if weight.device_mesh != mesh or mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        hint = (
            "Call it where only the tensor-parallel axis is left (inside the forward of what fully_shard wraps), or"
            " redistribute it."
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


def _axis_of(input: Any) -> int | None:
    placement = input.placements[0]
    if placement.is_replicate():
        return None
    if input.device_mesh.ndim == 1 and placement.is_shard() and placement.dim < input.dim() - 1:
        return int(placement.dim)
    expected = "placement Replicate(), or Shard of one axis of tokens"
    raise ArgumentValueError(message("input", expected, str(input.placements), "Redistribute it first."))


def _ranks_of_shard(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object) -> Ranks:
    if not isinstance(shard, VocabShard):
        raise ArgumentTypeError(message("vocab_shard", "lowtide.VocabShard or None", type(shard).__name__))
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if is_dtensor(tensor):
            hint = "A DTensor says itself what it holds."
            raise ArgumentTypeError(message(name, "a plain tensor with vocab_shard", "a DTensor", hint))
    if linear_weight.dim() and linear_weight.shape[0] != shard.rows:
        expected = f"shape [{shard.rows}, D], as vocab_shard says"
        raise ArgumentValueError(message("linear_weight", expected, str(list(linear_weight.shape))))
    return Ranks(shard, input.shape[:-1], input.device, None, None)


def chunks_of(ranks: Ranks, plan: HeadPlan) -> list[slice]:
    """Return each chunk's rows within a group of tokens."""
    length, step = ranks.tokens.length, max(1, plan.chunk_rows // ranks.tokens.groups)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def plain_options(options: HeadOptions) -> HeadOptions:
    """Return the options for a part of the vocabulary.

    Raises:
        UnsupportedError: An implementation asked for by name that cannot share a vocabulary.
    """
    if options.backend not in ("auto", "torch"):
        hint = "Its kernels do not know other ranks' classes; cross entropy's of 'exp' do."
        expected = "'auto' or 'torch' where the vocabulary is sharded"
        raise UnsupportedError(message("backend", expected, f"{options.backend!r}", hint))
    return replace(options, backend="torch")


def add_products(
    matmul: HeadMatmul,
    z_CV: Tensor,
    outside_C: Tensor | None,
    x_CD: Tensor,
    into: Gradients,
    ranks: Ranks,
    part: slice,
    *,
    begun: bool,
) -> None:
    """Add a chunk's gradients: the sum of the hidden states' over the ranks runs beside the weight's own product.

    Args:
        matmul: The GEMMs.
        z_CV: The gradient of this rank's logits, each row's still to be multiplied with ``outside_C``.
        outside_C: See there; None: 1.
        x_CD: The chunk's hidden states.
        into: Takes the gradients.
        ranks: The others.
        part: The chunk's rows within a group.
        begun: Whether the weight's gradient holds something already.
    """
    if into.bias_V is not None:
        into.bias_V += z_CV.sum(0) if outside_C is None else outside_C @ z_CV
    if into.input_ND is None and into.weight_VD is None:
        return
    g_CV = matmul.operand(z_CV)
    reduced = None
    if into.input_ND is not None:
        part_CD = torch.empty_like(x_CD, dtype=matmul.wide)  # summed before it is rounded
        matmul.input_grad(g_CV, outside_C, part_CD)
        reduced = ranks.tokens.reduce(part_CD)
    if into.weight_VD is not None:
        matmul.weight_grad(g_CV, outside_C, x_CD, into.weight_VD, not begun)
    if reduced is not None and into.input_ND is not None:
        reduced.write(into.input_ND, part.start)

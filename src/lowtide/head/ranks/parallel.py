"""The vocabulary in parts, one a rank: what the ranks of a call have of its tensors, and what they exchange.

W ranks, V classes of which this one holds V_r, N tokens, C rows of a chunk. Everything that is exchanged has the shape
of the tokens, never that of the vocabulary: no logits are gathered. What is exchanged, and how often, follows from
shapes and options alone, never from numbers: a rank whose tokens are all ignored, or that holds no target, still takes
part. What is computed from gathered numbers is the same on every rank, bit for bit.

The hidden states are the same on every rank, or each rank holds its part of the sequence. Their gradient then is the
whole one on every rank, summed here, or each rank's part of it: never a part of the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.arguments import is_dtensor
from lowtide.head.gradients import Gradients
from lowtide.head.ranks import exchange as exchange
from lowtide.head.ranks.shard import Limits, VocabShard, limits_of, shard_of_dtensor
from lowtide.head.ranks.tokens import SameTokens, SpreadTokens

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)
_Result = TypeVar("_Result")


class Ranks:
    """One call's view of the ranks: this rank's classes, how tokens lie, and what is exchanged.

    Args:
        shard: This rank's classes.
        leading: Sizes of the axes of tokens, all of them.
        device: Of the tensors.
        axis: Which of these axes the hidden states are sharded on; None: none.
        mesh: Of the DTensors; None where there are none.
        trained: Whether the hidden states get a gradient, or their product with a trained scale: it is summed over
            the ranks.
        scale_trained: Whether ``logit_scale`` gets one, of which backward sums parts.
    """

    def __init__(
        self,
        shard: VocabShard,
        leading: Sequence[int],
        device: torch.device,
        axis: int | None,
        mesh: Any,
        *,
        trained: bool = False,
        scale_trained: bool = False,
    ) -> None:
        self.shard, self.mesh = shard, mesh
        self._device, self._checked = device, device.type != "cpu"
        self._exchanges = trained + scale_trained  # a trained scale makes ``trained`` true as well
        self.tokens: SameTokens | SpreadTokens
        if axis is None:
            self.tokens = SameTokens(shard.group, leading)
        else:
            self.tokens = SpreadTokens(shard.group, leading, axis, device)

    alone = False

    @property
    def spread(self) -> bool:
        """Return whether each rank holds a part of the tokens."""
        return isinstance(self.tokens, SpreadTokens)

    @property
    def groups(self) -> int:
        """Return how many groups of rows a chunk has: one for each rank where tokens are spread, else one."""
        return self.tokens.groups

    @property
    def first(self) -> int:
        """Return this rank's first class."""
        return self.shard.first

    @property
    def rows(self) -> int:
        """Return V_r."""
        return self.shard.rows

    @property
    def vocab(self) -> int:
        """Return V."""
        return self.shard.vocab

    @property
    def most_rows(self) -> int:
        """Return the most classes that any rank holds: plans are made by it."""
        return self.shard.most_rows

    def chunks(self, plan: Any) -> Iterator[slice]:
        """Yield each chunk's rows in the order of `order`: whole groups of them, the same on every rank."""
        total, step = self.groups * self.tokens.length, self._step(plan.chunk_rows) * self.groups
        for start in range(0, total, step):
            yield slice(start, min(start + step, total))

    def order(self, plan: Any) -> Tensor | None:
        """Return where the rows of all chunks stand among the N tokens, N where a rank has none; None: in order."""
        return self.tokens.order(*self._steps(plan))

    def reordered(self, plan: Any, rows: int) -> Tensor | None:
        """Return where chunks of another number of ``rows`` have theirs in the order of `order`; None: in the same."""
        return self.tokens.reordered(*self._steps(plan), self._step(rows))

    def _steps(self, plan: Any) -> tuple[int, int]:
        """Return a group's rows of a chunk, and of the pieces in which the exponential path computes it."""
        in_pieces = plan.backend == "exp" and plan.schedule == "chunks"
        return self._step(plan.chunk_rows), self._step(plan.product_rows if in_pieces else plan.chunk_rows)

    def _step(self, rows: int) -> int:
        return max(1, rows // self.groups)

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> exchange.Told:  # noqa: ARG002
        """Begin to gather a chunk's hidden states [C, D], the rows ``part`` in the order of `order`."""
        return self.tokens.begin_rows(input, self._within(part), dtype)

    def _within(self, part: slice) -> slice:
        """Return a chunk's rows within each group."""
        return slice(part.start // self.groups, part.stop // self.groups)

    def begin_sum(self, product_CD: Tensor, part: slice) -> Callable[[Gradients], None]:
        """Begin to add up all ranks' gradients of a chunk's hidden states; return what waits, and writes them."""
        reduced, start = self.tokens.reduce(product_CD), self._within(part).start
        return lambda into: reduced.write(into, start)

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return self.tokens.mine(x)

    def keep(self) -> None:
        """Gather each chunk once from here on: a second pass finds it here. See `SpreadTokens.keep`."""
        self.tokens.keep()

    def let_go(self) -> None:
        """Undo `keep`."""
        self.tokens.let_go()

    @property
    def limits(self) -> Limits:
        """Return what all of them can do: plans are made by it."""
        return limits_of(self.shard.group, self._device)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [W, ...]."""
        return self.begin_gather(x).get()

    def begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange ``x``; return what waits on the device, and returns the sum of all ranks'."""
        told = self.begin_gather(x)
        return lambda: told.get().sum(0)

    def begin_gather(self, x: Tensor) -> exchange.Told:
        """Begin to gather it.

        Raises:
            ArgumentValueError: On the CPU, the ranks disagree on whether the hidden states or ``logit_scale`` get a
                gradient: some would wait for the others' parts of it. Elsewhere to look would stop the host, and they
                do wait.
        """
        if self._checked or not x.numel():
            return exchange.begin_gather(x, self.shard.group)
        self._checked = True  # beside the call's first numbers: no exchange is made for it
        told = exchange.begin_gather(torch.cat((x.reshape(-1), x.new_full((1,), self._exchanges))), self.shard.group)
        both = told.get()
        for name, least in (("logit_scale", 2), ("input", 1)):
            trained = [rank for rank, number in enumerate(both[:, -1].tolist()) if number >= least]
            if 0 < len(trained) < len(both):
                expected = (
                    "to require a gradient, with gradients recorded, on every rank that shares the head or on none"
                )
                hint = f"Enter torch.no_grad, or detach {name}, on all of them alike."
                raise ArgumentValueError(message(name, expected, f"it on ranks {trained} of {len(both)}", hint))
        return exchange.Told(both[:, :-1].reshape(-1, *x.shape), None)

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

        The bias's part, and with spread tokens the hidden states', is of what this rank holds. Of no tokens all parts
        are 0: forward, which exchanges nothing then, could not have seen a rank that has no backward.
        """
        if not self.tokens.N:
            return scale, scale
        summed: Tensor = _SummedGradient.apply(scale, self)  # type: ignore[no-untyped-call]
        return summed if self.spread else scale, summed

    def result(self, value: Tensor) -> Tensor:
        """Return a result, the same on every rank, as what the hidden states came as."""
        if self.mesh is None:
            return value
        from torch.distributed.tensor import DTensor

        replicated: Tensor = DTensor.from_local(value, self.mesh, [_replicate()], run_check=False)
        return replicated


def with_ranks(ranks: Ranks | None, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result:
    """Return ``function(*args, **kwargs)``; where ranks exchange in it, a compiler ends its graph and begins anew.

    Exchanges are no operators of a graph here: with ``fullgraph=True`` the compiler's error names the function below.
    """
    if ranks is not None and torch.compiler.is_compiling():
        return exchanges_between_ranks_run_in_eager(function, *args, **kwargs)
    return function(*args, **kwargs)


@_disable_dynamo  # torch.compiler.disable, without importing the compiler
def exchanges_between_ranks_run_in_eager(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call ``function``; its name is what the compiler says."""
    return function(*args, **kwargs)


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


def ranks_of(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    shard: object,
    *,
    scale: Tensor | None = None,
    differentiable: bool = True,
) -> Ranks | None:
    """Return how the ranks share the head, None where this one has all of it.

    Args:
        input: Hidden states, perhaps a DTensor.
        linear_weight: The weight: a DTensor, or with ``shard`` this rank's rows.
        linear_bias: Likewise.
        shard: What the user gave as ``ranks/shard``.
        scale: ``logit_scale`` where it is a tensor.
        differentiable: Whether any result is: else no gradients are exchanged, whatever requires one.

    Raises:
        ArgumentTypeError: DTensors beside plain tensors, or something that is no `VocabShard`.
        ArgumentValueError: A mesh or placements that are not those of tensor parallelism, or other sizes.
    """
    if shard is None and not (is_dtensor(input) or is_dtensor(linear_weight)):
        return None
    recorded = differentiable and torch.is_grad_enabled()
    scale_trained = recorded and scale is not None and scale.requires_grad
    trained = scale_trained or (recorded and input.requires_grad)
    leading, device = input.shape[:-1], input.device
    if shard is not None:
        shard = _given_shard(input, linear_weight, linear_bias, shard)
        return Ranks(shard, leading, device, None, None, trained=trained, scale_trained=scale_trained)
    placed: Any = input if is_dtensor(input) else linear_weight
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and not is_dtensor(tensor):
            hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
            raise ArgumentTypeError(message(name, "a DTensor, as others of this call are", "a plain tensor", hint))
    mesh = placed.device_mesh
    shard = shard_of_dtensor("linear_weight", linear_weight, mesh)
    if linear_bias is not None:
        shard_of_dtensor("linear_bias", linear_bias, mesh)
    return Ranks(shard, leading, device, _axis_of(input), mesh, trained=trained, scale_trained=scale_trained)


def _axis_of(input: Any) -> int | None:
    placement = input.placements[0]
    if placement.is_replicate():
        return None
    if input.device_mesh.ndim == 1 and placement.is_shard() and placement.dim < input.dim() - 1:
        return int(placement.dim)
    expected = "placement Replicate(), or Shard of one axis of tokens"
    raise ArgumentValueError(message("input", expected, str(input.placements), "Redistribute it first."))


def _given_shard(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object) -> VocabShard:
    if not isinstance(shard, VocabShard):
        raise ArgumentTypeError(message("vocab_shard", "lowtide.VocabShard or None", type(shard).__name__))
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if is_dtensor(tensor):
            hint = "A DTensor says itself what it holds."
            raise ArgumentTypeError(message(name, "a plain tensor with vocab_shard", "a DTensor", hint))
    if linear_weight.dim() and linear_weight.shape[0] != shard.rows:
        expected = f"shape [{shard.rows}, D], as vocab_shard says"
        raise ArgumentValueError(message("linear_weight", expected, str(list(linear_weight.shape))))
    return shard

"""The arguments of the experts' operators, and their FLOP.

T tokens, K experts per token, S = T K rows, E experts, D hidden size, F intermediate size of an expert.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """What an expert computes between its GEMMs: ``h = act(g) (u + shift)``.

    g is gate, at most ``limit``, and u is up, from ``-limit`` to ``limit``. act is ``g sigmoid(alpha g)`` for
    ``"silu"``, and ``"gelu_tanh"`` has no alpha.
    """

    activation: str
    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0
    joined: str = "gate first"  # where gate and up are among the 2F columns: a key of `lowtide.mlp.call.JOINED`


class ExpertsCall(NamedTuple):
    """The experts of one layer and their routing, as plain tensors and scalars.

    The S rows are the pairs of a token and one of its experts, sorted by expert: row s is pair ``order[s]`` of the T K,
    and expert e has the rows from ``ends[e - 1]`` to ``ends[e]``. Pairs with an id of E or more, which no expert has,
    come last; they add nothing and get the gradient 0.
    """

    input: Tensor  # [T, D]
    routing: Tensor  # [T, K], the weight of each expert of a token
    gate_up: Tensor  # [E, 2F, D]
    down: Tensor  # [E, D, F]
    gate_up_bias: Tensor | None  # [E, 2F]
    down_bias: Tensor | None  # [E, D]
    ids: Tensor  # [T, K], integers
    order: Tensor  # [S], int32
    ends: Tensor  # [E], int32
    dtype: torch.dtype  # of the GEMMs' operands
    checkpoint_level: int
    transposed: bool  # gate_up is [E, D, 2F], and down [E, F, D]
    activation: str  # this and what follows: `Form`
    limit: float
    alpha: float
    shift: float
    joined: str

    @property
    def form(self) -> Form:
        """Return what is between the GEMMs."""
        return Form(*self[12:])

    @property
    def rows(self) -> int:
        """Return S."""
        return self.ids.shape[0] * self.ids.shape[1]

    @property
    def width(self) -> int:
        """Return F."""
        return self.down.shape[1 if self.transposed else 2]

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that may get a gradient, in the order of the fields."""
        return self[:6]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that an autograd node saves: those, and the order of the pairs."""
        return self[:9]

    @property
    def scalars(self) -> tuple[Any, ...]:
        """Return the other fields."""
        return self[9:]

    @classmethod
    def joined_from(cls, tensors: Sequence[Any], scalars: Sequence[Any]) -> "ExpertsCall":
        """Return the call with these `tensors` and `scalars`."""
        return cls(*tensors, *scalars)

    @property
    def projections_shape(self) -> tuple[int, int]:
        """Return the shape [S, 2F] of gate and up."""
        return self.rows, 2 * self.width

    @property
    def output_shape(self) -> Sequence[int]:
        """Return the shape [T, D] of the output."""
        return self.input.shape

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        return self.input.dtype

    @property
    def saved_dtype(self) -> torch.dtype:
        """Return the dtype of gate and up while they are saved."""
        return self.dtype


class Inner(NamedTuple):
    """Gate and up of all rows, without their bias."""

    gate_up: Tensor  # [S, 2F]
    bias: Tensor | None  # [E, 2F]
    expert: Tensor  # [S], int32: the expert of each row, E for rows of none
    experts: int  # E
    form: Form


class Pairs(NamedTuple):
    """The pairs of each token and one of its experts."""

    inverse: Tensor  # [T, K], int32: the row of each
    ids: Tensor  # [T, K], int64: its expert, E for those that add nothing
    experts: int  # E


class ExpertsWanted(NamedTuple):
    """Which gradients are needed: a flag for each of the first tensors of `ExpertsCall`, in the same order."""

    input: bool
    routing: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool

    @property
    def inner(self) -> bool:
        """Return whether the gradients of gate and up are needed."""
        return self.input or self.gate_up or self.gate_up_bias

    @property
    def projections(self) -> bool:
        """Return whether backward needs gate and up."""
        return self.inner or self.routing or self.down

    @property
    def reads_input(self) -> bool:
        """Return whether backward reads the input if gate and up were saved."""
        return self.gate_up


def projections_flop(call: ExpertsCall) -> int:
    """Return the FLOP of gate and up: two per row and element of an expert's weight."""
    return 2 * call.rows * _size(call.gate_up)


def forward_flop(call: ExpertsCall, *, saved: bool) -> int:
    """Return the FLOP of the output from gate and up, or from the input if these are not ``saved``."""
    output = 2 * call.rows * _size(call.down)
    return output if saved else output + projections_flop(call)


def backward_flop(call: ExpertsCall, wanted: ExpertsWanted, *, saved: bool) -> int:
    """Return the FLOP of the gradients that are ``wanted``."""
    recomputed = projections_flop(call) if wanted.projections and not saved else 0
    of_down = (wanted.inner or wanted.routing) + wanted.down
    into = wanted.input + wanted.gate_up
    return recomputed + 2 * call.rows * (of_down * _size(call.down) + into * _size(call.gate_up))


def _size(weight: Tensor) -> int:
    """Return the elements of one expert's weight."""
    return weight.shape[1] * weight.shape[2]

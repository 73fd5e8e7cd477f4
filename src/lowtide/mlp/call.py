"""The arguments of the gated MLP's operators, and their FLOP. N tokens, D hidden size, F intermediate size."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import operand_dtype
from lowtide.mlp.packed import Packed, Weight, packed_of


class Adapter(NamedTuple):
    """An adapter of a projection: ``x W^T`` becomes ``x W^T + scale (drop(x) A^T) B^T``."""

    a: Tensor | None  # [r, in]; None: no adapter
    b: Tensor | None  # [out, r], of the dtype of a
    scale: float
    dropout: float  # the probability p that an element of x is dropped; the others are divided by 1 - p


class Projection(NamedTuple):
    """A projection of the MLP."""

    weight: Weight  # [out, in]
    bias: Tensor | None  # [out]
    adapter: Adapter | None = None


# Of one projection, as plain tuples, which take the host less time: weight, bias, A, B, scale and dropout.
Parts = tuple[Weight, Tensor | None, Tensor | None, Tensor | None, float, float]

# Where the rows of gate and of up are in one projection [2F, D] of both; empty: they are two projections.
JOINED: dict[str, Callable[[int], tuple[slice | None, slice | None]]] = {
    "": lambda _: (None, None),
    "gate first": lambda F: (slice(0, F), slice(F, 2 * F)),
    "up first": lambda F: (slice(F, 2 * F), slice(0, F)),
    "interleaved": lambda F: (slice(0, 2 * F, 2), slice(1, 2 * F, 2)),
}


class SwigluCall(NamedTuple):
    """The arguments of `lowtide.swiglu_mlp`, checked, as plain tensors and scalars.

    With ``joined`` gate's weight, bias and B have the rows of both, 2F, and those of up are None. A weight in 4 bits is
    None as well, and in ``packed``: it is no activation, which what saves and moves activations would take it for.
    """

    input: Tensor  # [..., D]
    gate_weight: Tensor | None  # [F, D]
    up_weight: Tensor | None  # [F, D]
    down_weight: Tensor | None  # [D, F]
    gate_bias: Tensor | None  # [F]
    up_bias: Tensor | None  # [F]
    down_bias: Tensor | None  # [D]
    dtype: torch.dtype  # of the GEMMs' operands and of the output
    activation: str
    checkpoint_level: int
    tile_tokens: int | None
    # of adapters (see `lowtide.mlp.low_rank`), None where a projection has none
    gate_a: Tensor | None  # [r, D]
    gate_b: Tensor | None  # [F, r]
    up_a: Tensor | None  # [r, D]
    up_b: Tensor | None  # [F, r]
    down_a: Tensor | None  # [r, F]
    down_b: Tensor | None  # [D, r]
    low_rank_dtype: torch.dtype  # of their GEMMs' operands
    gate_scale: float
    up_scale: float
    down_scale: float
    gate_dropout: float
    up_dropout: float
    down_dropout: float
    seed: int  # of the dropouts
    joined: str = ""  # a key of `JOINED`
    # the tensors of gate, up and down where they are in 4 bits (`lowtide.mlp.packed`), and their forms, else empty
    packed: Sequence[Tensor] = ()
    gate_form: str = ""
    up_form: str = ""
    down_form: str = ""

    @classmethod
    def of(
        cls,
        tensors: Sequence[Any],
        adapters: Sequence[Adapter] = (),
        *,
        dtype: torch.dtype,
        activation: str,
        checkpoint_level: int,
        tile_tokens: int | None,
        joined: str = "",
    ) -> "SwigluCall":
        """Return a call, from the tensors from the input to the down projection's bias, and three adapters or none.

        Each of the three weights may be `Packed`.

        The numbers are here and not defaults of the fields: torch.compile(dynamic=True) makes variables of those, which
        belong to the checkpoint or autograd node that reads them first, and no other node can read them.
        """
        sides: Sequence[Tensor | None] = (None,) * 6
        scales, dropouts = (1.0,) * 3, (0.0,) * 3
        low_rank_dtype, seed = torch.float32, 0
        if adapters:
            sides = [side for adapter in adapters for side in adapter[:2]]
            scales, dropouts = zip(*(adapter[2:] for adapter in adapters), strict=True)
            low_rank_dtype = operand_dtype(next((side for side in sides if side is not None), tensors[0]))
            seed = int(torch.randint(2**48, (), device="cpu")) if any(dropouts) else 0
        settings = (dtype, activation, checkpoint_level, tile_tokens)
        packed: list[Tensor] = []
        forms = ["", "", ""]
        if Packed in (type(tensors[1]), type(tensors[2]), type(tensors[3])):  # not any(), which takes the host longer
            tensors = list(tensors)
            for i, weight in enumerate(tensors[1:4]):
                if type(weight) is Packed:
                    tensors[1 + i], forms[i] = None, weight.form
                    packed += weight.tensors
        numbers = (low_rank_dtype, *scales, *dropouts, seed)
        fields: list[Any] = [*tensors, *settings, *sides, *numbers, joined, packed, *forms]
        return cls(*fields)

    @property
    def trained(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that may get a gradient, in the order of the fields."""
        adapters = (self.gate_a, self.gate_b, self.up_a, self.up_b, self.down_a, self.down_b)
        return (*self[:7], *adapters)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that an autograd node saves."""
        return self.trained

    @property
    def scalars(self) -> tuple[Any, ...]:
        """Return the other fields, in their order."""
        return (*self[7:11], *self[17:])

    @classmethod
    def joined_from(cls, trained: Sequence[Tensor | None], scalars: Sequence[Any]) -> "SwigluCall":
        """Return the call with these tensors, as in `trained`, and these `scalars`."""
        return cls(*trained[:7], *scalars[:4], *trained[7:], *scalars[4:])  # type: ignore[arg-type]

    @property
    def weights(self) -> tuple[Weight, Weight | None, Weight]:
        """Return the weights of gate, up and down, dense or in 4 bits."""
        plain: Any = (self.gate_weight, self.up_weight, self.down_weight)
        found = packed_of(self.packed, (self.gate_form, self.up_form, self.down_form), self.dtype)
        gate, up, down = (weight if one is None else one for weight, one in zip(plain, found, strict=True))
        return gate, up, down

    @property
    def down_shape(self) -> Sequence[int]:
        """Return [D, F]."""
        weight = self.weights[2] if self.down_weight is None else self.down_weight
        return weight.shape

    @property
    def rows(self) -> tuple[slice | None, slice | None]:
        """Return the rows of gate and of up in their one projection; None: each has its own."""
        return JOINED[self.joined](self.down_shape[1]) if self.joined else (None, None)

    @property
    def projections(self) -> tuple[Parts, Parts, Parts]:
        """Return gate, up and down. Gate and up of one projection are views of its rows, with the same A."""
        plain: Any = (self.gate_weight, self.up_weight, self.down_weight)
        of_gate, of_up, of_down = self.weights if self.packed else plain
        gate = (of_gate, self.gate_bias, self.gate_a, self.gate_b, self.gate_scale, self.gate_dropout)
        down = (of_down, self.down_bias, self.down_a, self.down_b, self.down_scale, self.down_dropout)
        if of_up is not None:
            up = (of_up, self.up_bias, self.up_a, self.up_b, self.up_scale, self.up_dropout)
            return gate, up, down
        weight: Any
        weight, bias, a, b, scale, dropout = gate
        first, second = (
            (weight[rows], bias if bias is None else bias[rows], a, b if b is None else b[rows], scale, dropout)
            for rows in self.rows
        )
        return first, second, down

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])  # Size.numel() would make a compiler take N for a constant

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape [..., D] of the output."""
        return (*self.input.shape[:-1], self.down_shape[0])

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        return self.dtype

    @property
    def projections_shape(self) -> tuple[int, int]:
        """Return the shape [N, F] of gate, and of up."""
        return self.tokens, self.down_shape[1]

    @property
    def saved_dtype(self) -> torch.dtype:
        """Return the dtype of gate and up while they are saved: the input's if that is narrower than the GEMMs'."""
        return min(self.dtype, self.input.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of sums over tiles."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def tiles(self) -> list[slice]:
        """Return the rows of each tile, in order; one empty tile if there are no tokens."""
        N = self.tokens
        step = self.tile_tokens or N
        if step >= N:
            return [slice(0, N)]
        return [slice(start, min(start + step, N)) for start in range(0, N, step)]


class Wanted(NamedTuple):
    """Which gradients are needed: a flag for each tensor of `SwigluCall`, in the same order."""

    input: bool
    gate_weight: bool
    up_weight: bool
    down_weight: bool
    gate_bias: bool
    up_bias: bool
    down_bias: bool
    gate_a: bool = False
    gate_b: bool = False
    up_a: bool = False
    up_b: bool = False
    down_a: bool = False
    down_b: bool = False

    @property
    def gate(self) -> bool:
        """Return whether the gradient of ``gate = x Wg^T + bg`` is needed for another."""
        return self.input or self.gate_weight or self.gate_bias or self.gate_a or self.gate_b

    @property
    def up(self) -> bool:
        """Return the same for ``up = x Wu^T + bu``."""
        return self.input or self.up_weight or self.up_bias or self.up_a or self.up_b

    @property
    def product(self) -> bool:
        """Return whether ``act(gate) * up``, the input of the down projection, is needed again."""
        return self.down_weight or self.down_a or self.down_b

    @property
    def projections(self) -> bool:
        """Return whether backward needs gate and up; the gradient of the down projection's bias alone does not."""
        return self.gate or self.up or self.product

    @property
    def reads_input(self) -> bool:
        """Return whether backward reads the input if gate and up were saved."""
        return self.gate_weight or self.up_weight or self.gate_a or self.gate_b or self.up_a or self.up_b


def of_both(wanted: Wanted, joined: str) -> Wanted:
    """Return the flags of gate and up apart, those of one projection for both."""
    if not joined:
        return wanted
    weight, bias, a, b = wanted.gate_weight, wanted.gate_bias, wanted.gate_a, wanted.gate_b
    return wanted._replace(up_weight=weight, up_bias=bias, up_a=a, up_b=b)


# The FLOP of the GEMMs, by formula: two per token and element of each weight that is read.


def projections_flop(call: SwigluCall) -> int:
    """Return the FLOP of gate and up."""
    gate, up, _down = call.projections
    return _of_output(call, gate) + _of_output(call, up)


def forward_flop(call: SwigluCall, *, saved: bool) -> int:
    """Return the FLOP of the output from gate and up, or from the input if these are not ``saved``."""
    output = _of_output(call, call.projections[2])
    return output if saved else output + projections_flop(call)


def backward_flop(call: SwigluCall, wanted: Wanted, *, saved: bool) -> int:
    """Return the FLOP of the gradients that are ``wanted``."""
    if not wanted.projections:
        return 0
    wanted = of_both(wanted, call.joined)
    gate, up, down = call.projections
    flop = 0 if saved else projections_flop(call)
    if wanted.gate or wanted.up:
        flop += _of_output(call, down)
    if wanted.down_weight:
        flop += _flop(call, call.down_weight)
    if wanted.product:
        flop += _of_adapter(call, down, wanted.down_a, wanted.down_b, through=False)
    for projection, of_weight, of_a, of_b in (
        (gate, wanted.gate_weight, wanted.gate_a, wanted.gate_b),
        (up, wanted.up_weight, wanted.up_a, wanted.up_b),
    ):
        flop += (of_weight + wanted.input) * _flop(call, projection[0])
        flop += _of_adapter(call, projection, of_a, of_b, through=wanted.input)
    return flop


def _of_output(call: SwigluCall, projection: Parts) -> int:
    """Return the FLOP of a projection's output, or of its gradient with respect to the projection's input."""
    weight, _bias, a, b, *_ = projection
    return _flop(call, weight, a, b)


def _of_adapter(call: SwigluCall, projection: Parts, of_a: bool, of_b: bool, *, through: bool) -> int:
    """Return the FLOP of an adapter's gradients, and with ``through`` of its part of the input's."""
    _weight, _bias, a, b, *_ = projection
    reads_b = of_b + (of_a or through)  # dy^T (x A^T); dy B
    reads_a = of_b + of_a + through  # x A^T; (dy B)^T x; (dy B) A
    return reads_a * _flop(call, a) + reads_b * _flop(call, b)


def _flop(call: SwigluCall, *weights: Weight | None) -> int:
    return 2 * call.tokens * sum(weight.numel() for weight in weights if weight is not None)

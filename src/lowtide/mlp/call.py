"""One call of the gated MLP: its arguments, forward and backward over tiles of tokens, and their FLOP.

The GEMMs are in the order that needs the least memory. N tokens, C rows of a tile (all N, or ``tile_tokens`` of them),
D hidden size, F intermediate size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.mlp.elementwise import gated, gated_backward
from lowtide.mlp.projection import Packed, ProjectionPass, Sum

# Where the rows of gate and of up are in one projection [2F, D] of both.
JOINED: dict[str, Callable[[int], tuple[slice, slice]]] = {
    "gate first": lambda F: (slice(0, F), slice(F, 2 * F)),
    "up first": lambda F: (slice(F, 2 * F), slice(0, F)),
    "interleaved": lambda F: (slice(0, 2 * F, 2), slice(1, 2 * F, 2)),
}


class Needs(NamedTuple):
    """What backward computes or reads for the gradients that are wanted."""

    gate: bool  # the gradient of ``gate = x Wg^T + bg``, for another
    up: bool  # the same of ``up = x Wu^T + bu``
    product: bool  # ``act(gate) * up``, the input of the down projection
    reads_input: bool  # even if gate and up were saved

    @property
    def projections(self) -> bool:
        """Return whether backward needs gate and up; the gradient of the down projection's bias alone does not."""
        return self.gate or self.up or self.product


class SwigluCall(NamedTuple):
    """One call of `lowtide.swiglu_mlp`, its arguments checked: see `lowtide.mlp.operators`.

    With ``joined`` gate's weight, bias and B have the rows of both, 2F, and those of up are None. A weight in 4 bits is
    None as well, and in ``packed``: it is no activation, which what saves and moves activations would take it for.
    """

    tensors: Sequence[Tensor | None]  # x [..., D], and weight, bias, A and B of gate, of up and of down
    dtype: torch.dtype  # of the GEMMs' operands and of the output
    activation: str
    checkpoint_level: int
    tile_tokens: int | None
    joined: str  # a key of `JOINED`; empty: gate and up are two projections
    packed: Sequence[Tensor]  # of the weights in 4 bits (`lowtide.mlp.projection.Packed`)
    forms: str  # of gate, up and down, between commas: the form of a weight in 4 bits
    low_rank_dtype: torch.dtype  # of the operands of the adapters' GEMMs
    scales: Sequence[float]  # of the adapters of gate, up and down
    dropouts: Sequence[float]
    seed: int  # of the dropouts

    @property
    def input(self) -> Any:
        """Return x."""
        return self.tensors[0]

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])  # Size.numel() would make a compiler take N for a constant

    @property
    def down_shape(self) -> Sequence[int]:
        """Return [D, F]."""
        down = self.tensors[9]
        return Packed((), self.forms.split(",")[2], self.dtype).shape if down is None else down.shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape [..., D] of the output."""
        return (*self.input.shape[:-1], self.down_shape[0])

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        return self.dtype

    def needs(self, wanted: Sequence[bool]) -> Needs:
        """Return what backward needs for the gradients of `tensors` that are ``wanted``."""
        sides = [wanted[i : i + 4] for i in (1, 1 if self.joined else 5, 9)]
        gate, up = (wanted[0] or any(side) for side in sides[:2])
        reads = [of_weight or of_a or of_b for of_weight, _, of_a, of_b in sides]
        return Needs(gate, up, reads[2], reads[0] or reads[1])

    def empty_projections(self) -> list[Tensor]:
        """Return memory for gate and up [N, F] as they are saved: in the input's dtype if the GEMMs' is wider."""
        dtype = min(self.dtype, self.input.dtype, key=lambda dtype: dtype.itemsize)
        return [self.input.new_empty(self.tokens, self.down_shape[1], dtype=dtype) for _ in range(2)]

    def project(self) -> list[Tensor]:
        """Return gate and up [N, F]."""
        gate, up, _ = self._projections()
        x_ND, made = rows_of(self.input), self.empty_projections()
        for tile in self._tiles():
            x = _part(x_ND, tile).to(self.dtype)
            for projection, out_NF in zip((gate, up), made, strict=True):
                out = _part(out_NF, tile)
                if out.dtype == self.dtype:
                    projection.output(x, out, tile.start)
                else:
                    out.copy_(projection.output(x, None, tile.start))
        return made

    def output(self, held: Sequence[Tensor]) -> Tensor:
        """Return the output [..., D] from gate and up [N, F], or if there are none from the input."""
        gate, up, down = self._projections()
        x_ND = rows_of(self.input)
        y: Tensor = x_ND.new_empty(self.output_shape, dtype=self.dtype)
        y_ND = rows_of(y)
        for tile in self._tiles():
            if held:
                g, u = (_part(t, tile) for t in held)
                p = torch.empty_like(g, dtype=self.dtype)
            else:
                x = _part(x_ND, tile).to(self.dtype)
                p = g = gate.output(x, None, tile.start)
                u = up.output(x, None, tile.start)
                del x
            gated(g, u, self.activation, p)
            del g, u
            down.output(p, _part(y_ND, tile), tile.start)
            del p
        return y  # itself, not a view: FSDP2 warns of views that a module returns

    def gradients(
        self, wanted: Sequence[bool], upstream: Tensor, held: list[Tensor], *, in_place: bool
    ) -> list[Tensor | None]:
        """Return the gradients of `tensors` in their shapes and dtypes, None for those that are not ``wanted``.

        ``upstream`` is the output's gradient [..., D]; ``held`` gate and up [N, F], which may be overwritten
        ``in_place``, or nothing if forward saved neither. They are removed from the list before the last tile, so that
        their memory is freed once nothing else refers to them.
        """
        needs, tiles = self.needs(wanted), self._tiles()
        wide = torch.promote_types(self.dtype, torch.float32)  # of sums over tiles
        sums = [
            Sum(t, wide if len(tiles) > 1 or t.dim() == 1 or i % 4 > 1 else t.dtype) if flag and t is not None else None
            for i, (t, flag) in enumerate(zip(self.tensors[1:], wanted[1:], strict=True))
        ]
        projections = self._projections(sums)
        x_ND, dy_ND = rows_of(self.input), rows_of(upstream)
        dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wanted[0] else None
        for tile in tiles:
            sides = [_part(t, tile) for t in held]
            if tile is tiles[-1]:
                held.clear()
            rows = _part(x_ND, tile), _part(dy_ND, tile), None if dx_ND is None else _part(dx_ND, tile)
            self._backward_tile(needs, projections, rows, sides, tile.start, in_place=in_place)
        grads = [
            None if total is None else total.finished(self.scales[i // 4] if i % 4 > 1 else 1.0)
            for i, total in enumerate(sums)
        ]
        return [None if dx_ND is None else dx_ND.view(self.input.shape), *grads]

    def _backward_tile(
        self,
        needs: Needs,
        projections: list[ProjectionPass],
        rows: tuple[Tensor, Tensor, Tensor | None],
        sides: list[Tensor],
        start: int,
        *,
        in_place: bool,
    ) -> None:
        """Add one tile's part to every gradient; each buffer is freed after the last GEMM that reads it.

        ``rows`` are the tile's of x, dy and dx; ``sides`` gate and up, which are removed from it, or empty if they are
        to be recomputed; ``start`` is the tile's first row.
        """
        gate, up, down = projections
        x, dy, dx = rows
        dy = dy.to(self.dtype)
        down.add_bias(dy)
        if not needs.projections:
            return
        if needs.reads_input or not sides:
            x = x.to(self.dtype)
        in_place = in_place or not sides or sides[0].dtype != self.dtype
        g, u = (t.to(self.dtype) for t in sides) if sides else (side.output(x, None, start) for side in (gate, up))
        sides.clear()
        dg = du = p = None
        if needs.gate or needs.up:
            dp = torch.empty_like(g)
            down.backward(dy, None, dp, start)
            dg, du = (
                None if not needed else side if in_place else torch.empty_like(side)
                for side, needed in ((g, needs.gate), (u, needs.up))
            )
            p = dp if needs.product else None
            gated_backward(g, u, dp, self.activation, dg, du, p)
            del dp
        elif needs.product:
            p = g if in_place else torch.empty_like(g)
            gated(g, u, self.activation, p)
        del g, u
        if p is not None:
            down.backward(dy, p, None, start)
        del p, dy
        if dg is not None:
            gate.add_bias(dg)
            gate.backward(dg, x, dx, start)
        del dg
        if du is not None:
            up.add_bias(du)
            up.backward(du, x, dx, start, add=True)

    def _tiles(self) -> list[slice]:
        """Return the rows of each tile, in order; one empty tile if there are no tokens."""
        N = self.tokens
        step = max(1, self.tile_tokens or N)
        return [slice(start, min(start + step, N)) for start in range(0, max(1, N), step)]

    def _projections(self, sums: Sequence[Sum | None] = (None,) * 12) -> list[ProjectionPass]:
        """Return gate, up and down, with the ``sums`` of the gradients of `tensors` but the first."""
        packed = iter(self.packed)
        weights: list[Any] = [
            Packed.taken(packed, form, self.dtype) if form else weight
            for form, weight in zip(self.forms.split(","), self.tensors[1::4], strict=True)
        ]
        of_gate, of_up = JOINED[self.joined](self.down_shape[1]) if self.joined else (None, None)
        made = []
        for i, rows in ((0, of_gate), (0 if self.joined else 1, of_up), (2, None)):
            bias, a, b = self.tensors[2 + 4 * i : 5 + 4 * i]
            if rows is not None:
                bias, b = (t if t is None else t[rows] for t in (bias, b))
            a, b = (t if t is None else t.to(self.low_rank_dtype) for t in (a, b))
            adapter = a, b, self.scales[i], self.dropouts[i], self.seed + i
            made.append(ProjectionPass(weights[i], bias, *adapter, self.dtype, rows, sums[4 * i : 4 * i + 4]))
        return made

    # The FLOP of the GEMMs, by formula: two per token and element of each weight that is read. Not of the adapters'.

    def project_flop(self) -> int:
        """Return the FLOP of gate and up."""
        return 2 * self._flop(self.input.shape[-1])

    def output_flop(self, held: Sequence[Tensor]) -> int:
        """Return the FLOP of the output."""
        return self._flop(self.output_shape[-1]) + (0 if held else self.project_flop())

    def gradients_flop(self, wanted: Sequence[bool], _upstream: Tensor, held: Sequence[Tensor]) -> int:
        """Return the FLOP of the gradients that are ``wanted``."""
        needs = self.needs(wanted)
        into = 2 * wanted[0] + wanted[1] * (2 if self.joined else 1) + wanted[5]
        out = (needs.gate or needs.up) + wanted[9]
        again = 0 if held or not needs.projections else self.project_flop()
        return into * self._flop(self.input.shape[-1]) + out * self._flop(self.output_shape[-1]) + again

    def _flop(self, hidden: int) -> int:
        return 2 * self.tokens * self.down_shape[1] * hidden


def rows_of(tensor: Tensor) -> Tensor:
    """Return [..., D] as [N, D], itself or a view where its strides allow."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _part(tensor: Tensor, tile: slice) -> Tensor:
    """Return the rows of a tile; if these are all, the tensor itself, which takes the host less time than a view."""
    return tensor if tile.stop - tile.start == tensor.shape[0] else tensor[tile]

"""What one layer took when it ran on the meta device: `meta_model` reads it, `layer_costs` makes costs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from lowtide.plan.arguments import Adapters


class Work(NamedTuple):
    """Sums over the operators that ran."""

    flop: float = 0.0  # of GEMMs
    rows: float = 0.0  # of all GEMMs' outputs: what small weights add to their time
    attention: float = 0.0  # FLOP of fused attention in forward, the masked half not counted
    thin: float = 0.0  # bytes that all other operators read and write
    operators: float = 0.0  # calls that launch a kernel

    def plus(self, other: Work, sign: int = 1) -> Work:
        """Return the sum, or with ``sign=-1`` the difference."""
        return Work(*(a + sign * b for a, b in zip(self, other, strict=True)))


class Reading(NamedTuple):
    """What one layer took at one size: bytes, and the work of forward, of its recompute and of backward."""

    input: float  # its hidden states
    saved: float  # for backward, its input among them where an operator of its saves that
    with_input: float  # the same, always with its input, which a checkpoint saves
    attended: float  # the outputs of fused attention; 0: it ran none
    forward_peak: float  # the most that lives within its forward beyond what it saves
    checkpointed_peak: float  # the same where it saves nothing but its input
    backward_peak: float  # the most that lives within its backward beyond what it saved, its weights' gradients too
    forward: Work
    recompute: Work  # up to the last tensor that is saved
    backward: Work


class LayerRun(NamedTuple):
    """A model's layers, and how they run."""

    config: str  # its fields, as JSON
    dtype: torch.dtype  # of the parameters
    fused_mlp: bool = True  # `lowtide.patch` fuses the MLPs
    adapters: Adapters | None = None
    batch_size: int = 1
    seq_len: int = 64
    level: int | None = None  # of the fused MLPs; None: as patched
    tile_tokens: int | None = None  # of their tiles
    frozen: bool = False  # weights have no gradients
    keep_gradients: bool = False  # gradients are there when backward begins
    autocast: bool = False  # GEMMs and attention run in bfloat16
    masked: bool = False  # attention takes a [T, T] mask for each sequence


def mixed(readings: list[Reading], shares: list[float]) -> Reading:
    """Return a linear combination of readings, none of its figures below 0."""

    def mix(values: tuple[Any, ...]) -> Any:
        if isinstance(values[0], Work):
            return Work(*(mix(fields) for fields in zip(*values, strict=True)))
        return max(0.0, sum(value * share for value, share in zip(values, shares, strict=True)))

    return Reading(*(mix(values) for values in zip(*readings, strict=True)))

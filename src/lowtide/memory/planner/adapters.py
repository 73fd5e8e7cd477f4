"""LoRA in a planned step: which projections are adapted, and with how many parameters."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.shapes import ModelShape
from lowtide.memory.policy import check_count

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapters:
    """Adapters by peft, float32 and without dropout, on projections of each layer; all else is frozen.

    With r the rank, an adapted projection saves the output of ``lora_A``, r numbers per token, and with 16-bit GEMMs a
    copy of its input of its own, since peft casts it to float32 and autocast casts it back; the adapters of a fused MLP
    save nothing but the MLP's input. A frozen projection saves no input.

    Attributes:
        rank: r.
        targets: Names of the projections.

    Raises:
        ArgumentTypeError: A rank that is no whole number.
        ArgumentValueError: A rank below 1, or another name.
    """

    rank: int
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        if not self.targets or set(self.targets) - set(PROJECTIONS):
            raise ArgumentValueError(message("targets", f"names of {', '.join(PROJECTIONS)}", f"{self.targets!r}"))

    def numbers(self, shape: ModelShape) -> int:
        """Return how many parameters are trained."""
        return shape.layers * sum(self.sizes(shape).values())

    def sizes(self, shape: ModelShape) -> dict[str, int]:
        """Return the parameters of one layer's adapters, by projection."""
        widths = projection_widths(shape)
        return {name: self.rank * sum(widths[name]) for name in PROJECTIONS if name in self.targets}

    def __str__(self) -> str:
        return f"rank {self.rank} on {' '.join(self.targets)}"


def projection_widths(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the widths of each projection's input and output."""
    h, f, q, kv = shape.hidden, shape.intermediate, shape.query_width, shape.kv_width
    attention = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
    return {**attention, "gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}


def numbers_alone(shape: ModelShape) -> str:
    """Return the kind of model whose adapters are planned by their number of parameters; empty: by their layers."""
    if shape.traced is not None:
        return "a model whose layers are traced"
    if shape.stacked:
        return "a model of stacked projections"
    return "a mixture of experts" if shape.experts else ""

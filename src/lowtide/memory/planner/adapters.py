"""LoRA in a planned step: how many numbers are trained, and what a layer keeps beside them and does not keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.memory.planner.shapes import ModelShape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapters:
    """Adapters by peft, float32 and without dropout, on projections of each layer; all else is frozen.

    With r the rank, an adapted projection of attention keeps what ``lora_A`` puts out, r numbers a token, and where the
    products are of 16 bits a copy of its input of its own, for peft makes one in float32 and autocast another; the
    adapters of a fused MLP keep nothing but the MLP's input. A frozen projection keeps no input.

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
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise ArgumentTypeError(message("rank", "a whole number", f"{self.rank!r}"))
        if self.rank < 1:
            raise ArgumentValueError(message("rank", "at least 1", str(self.rank)))
        if not self.targets or set(self.targets) - set(PROJECTIONS):
            raise ArgumentValueError(message("targets", f"names of {', '.join(PROJECTIONS)}", f"{self.targets!r}"))

    def numbers(self, shape: ModelShape) -> int:
        """Return how many numbers are trained."""
        return shape.layers * sum(self._each(shape).values())

    def kept(self, shape: ModelShape, *, stream: int, narrow: int, mlp_level: int) -> Mapping[str, int]:
        """Return the bytes a token that a layer keeps otherwise than one that is trained itself, by what they are.

        Args:
            shape: The model.
            stream: Bytes of a token in the residual stream.
            narrow: Bytes of a number that a product reads.
            mlp_level: Of the fused MLP.
        """
        copied = narrow < 4
        readers = sum(name in self.targets for name in ATTENTION[:3])
        wide, at_output = shape.query_width * narrow, "o_proj" in self.targets
        of_mlp = mlp_level == 1 or bool({"gate_proj", "up_proj"} & set(self.targets))
        kept = {
            "attention's input": shape.hidden * narrow * (readers if copied else min(readers, 1)),
            "output projection's input": wide if at_output and copied else 0,
            "adapters' inner products": self.rank * narrow * (readers + at_output),
            "MLP's input": stream * (1 + of_mlp),
        }
        if shape.heads_first:
            kept["attention's output, tokens first"] = wide if at_output and not copied else 0
        return kept

    def copies(self, shape: ModelShape, narrow: int) -> int:
        """Return the bytes of the copies that autocast makes of a layer's adapters outside the MLP."""
        each = self._each(shape)
        return narrow * sum(each.get(name, 0) for name in ATTENTION) if narrow < 4 else 0

    def _each(self, shape: ModelShape) -> dict[str, int]:
        h, f, q, kv = shape.hidden, shape.intermediate, shape.query_width, shape.kv_width
        sides = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + f)
        return {name: self.rank * sides[name] for name in set(self.targets)}

    def __str__(self) -> str:
        return f"rank {self.rank} on {' '.join(self.targets)}"

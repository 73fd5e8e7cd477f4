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

    With r the rank, an adapted projection keeps what ``lora_A`` puts out, r numbers a token, and where the products are
    of 16 bits a copy of its input of its own, for peft makes one in float32 and autocast another; the adapters of a
    fused MLP keep nothing but the MLP's input. A frozen projection keeps no input.

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

    def kept(
        self, shape: ModelShape, *, stream: int, narrow: int, mlp_level: int, fused_mlp: bool
    ) -> Mapping[str, int]:
        """Return the bytes a token that a layer keeps otherwise than one that is trained itself, by what they are.

        Args:
            shape: The model.
            stream: Bytes of a token in the residual stream.
            narrow: Bytes of a number that a product reads.
            mlp_level: Of the MLP, where it is a fused one.
            fused_mlp: Whether it is.
        """
        copied, hidden = narrow < 4, shape.hidden * narrow
        readers = sum(name in self.targets for name in ATTENTION[:3])
        wide, at_output = shape.query_width * narrow, "o_proj" in self.targets
        of_mlp = sum(name in self.targets for name in ("gate_proj", "up_proj"))
        kept = {
            "attention's input": hidden * (readers if copied else min(readers, 1)),
            "output projection's input": wide if at_output and copied else 0,
            "adapters' inner products": self.rank * narrow * len(self._apart(fused_mlp)),
        }
        if fused_mlp:
            kept["MLP's input"] = stream * (1 + (mlp_level == 1 or of_mlp > 0))
        else:
            kept["MLP's input"] = stream + hidden * (of_mlp if copied else min(of_mlp, 1))
            kept["gate, up, activation and product"] = (3 + ("down_proj" in self.targets)) * shape.intermediate * narrow
        if shape.heads_first:
            kept["attention's output, tokens first"] = wide if at_output and not copied else 0
        return kept

    def copies(self, shape: ModelShape, narrow: int, *, fused_mlp: bool) -> int:
        """Return the bytes of the copies that autocast makes of a layer's adapters, those of a fused MLP left out."""
        each = self._each(shape)
        return narrow * sum(each[name] for name in self._apart(fused_mlp)) if narrow < 4 else 0

    def _apart(self, fused_mlp: bool) -> list[str]:
        """Return the projections whose adapters run by themselves."""
        return [name for name in (ATTENTION if fused_mlp else PROJECTIONS) if name in self.targets]

    def _each(self, shape: ModelShape) -> dict[str, int]:
        h, f, q, kv = shape.hidden, shape.intermediate, shape.query_width, shape.kv_width
        sides = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + f)
        return {name: self.rank * sides[name] for name in set(self.targets)}

    def __str__(self) -> str:
        return f"rank {self.rank} on {' '.join(self.targets)}"


def numbers_alone(shape: ModelShape) -> str:
    """Return the kind of model whose adapters are planned by how many numbers they have; empty: by their layers."""
    if shape.stacked:
        return "a model of stacked projections"
    return "a mixture of experts" if shape.experts else ""

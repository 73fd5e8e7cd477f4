"""LoRA in a planned step: which projections are adapted, and by which rank."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.policy import check_count

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapters:
    """Adapters by peft, float32 and without dropout, on projections of each layer; all else is frozen.

    Attributes:
        rank: r.
        targets: Names of the projections, as peft's ``target_modules``.

    Raises:
        ArgumentTypeError: A rank that is no whole number.
        ArgumentValueError: A rank below 1, or no names.
    """

    rank: int
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        if not self.targets or not all(isinstance(name, str) and name for name in self.targets):
            raise ArgumentValueError(message("targets", "names of projections", f"{self.targets!r}"))

    def __str__(self) -> str:
        return f"rank {self.rank} on {' '.join(self.targets)}"

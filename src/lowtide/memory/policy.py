"""What a decoder layer saves for backward: `ActivationPolicy`."""

from dataclasses import dataclass
from typing import Literal, get_args

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

Keep = Literal["all", "attention", "input"]


def check_count(name: str, value: object, also: str = "") -> None:
    """Check that a value is a whole number of at least 1; ``also`` names what else is allowed."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(message(name, f"a whole number{also}", f"{value!r}"))
    if value < 1:
        raise ArgumentValueError(message(name, f"at least 1{also}", f"{value}"))


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """What one decoder layer saves between its forward and its backward.

    Args:
        keep: ``"all"``: every activation that its operations save. ``"attention"``: the layer's input and attention's
            output; the rest is recomputed in backward. ``"input"``: the layer's input alone; everything is recomputed.
        mlp_level: ``checkpoint_level`` of the layer's fused SwiGLU: 0 saves gate and up, 1 only the input. None leaves
            it unmodified.
        offload: Whether what the layer saves by ``keep`` "attention" or "input" is in pinned host memory from its
            forward until shortly before its backward. Not with ``keep="all"``.
        mlp_tile_tokens: ``tile_tokens`` of the layer's fused SwiGLU: how many tokens one of its tiles has. What level 1
            holds for a moment in backward, 3f values per token, is then that of a tile: for sequences so long that one
            layer's transients are what does not fit. Level 0 saves gate and up of all tokens even so. None leaves it
            unmodified.

    Raises:
        ArgumentValueError: A value that is none of these.
        ArgumentTypeError: ``offload`` is not a bool, or ``mlp_tile_tokens`` no whole number.
    """

    keep: Keep = "all"
    mlp_level: int | None = None
    offload: bool = False
    mlp_tile_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            expected = f"one of {', '.join(map(repr, get_args(Keep)))}"
            raise ArgumentValueError(message("keep", expected, f"{self.keep!r}"))
        if self.mlp_level not in (None, 0, 1) or type(self.mlp_level) not in (int, type(None)):
            raise ArgumentValueError(message("mlp_level", "0, 1 or None", f"{self.mlp_level!r}"))
        if self.mlp_tile_tokens is not None:
            check_count("mlp_tile_tokens", self.mlp_tile_tokens, ", or None")
        if type(self.offload) is not bool:
            raise ArgumentTypeError(message("offload", "a bool", f"{self.offload!r}"))
        if self.offload and self.keep == "all":
            hint = "Take keep='attention' or keep='input' with offload=True."
            raise ArgumentValueError(message("offload", "False with keep='all'", "True", hint))

"""What a decoder layer keeps for backward: the words for it."""

from dataclasses import dataclass
from typing import Literal, get_args

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

Keep = Literal["all", "attention", "input"]


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """What one decoder layer keeps between its forward and its backward.

    Args:
        keep: ``"all"``: every activation that its operations save. ``"attention"``: the layer's input and attention's
            output; the rest is recomputed in backward. ``"input"``: the layer's input alone; everything is recomputed.
        mlp_level: ``checkpoint_level`` of the layer's fused SwiGLU: 0 keeps gate and up, 1 keeps only the input. None
            leaves it as it is.
        offload: Whether what the layer keeps by ``keep`` "attention" or "input" lies in pinned host memory from its
            forward until shortly before its backward. Not with ``keep="all"``.
        mlp_tile_tokens: ``tile_tokens`` of the layer's fused SwiGLU: how many tokens it works on at a time. What level
            1 holds for a moment in backward, 3f values a token, is then that of a tile: for sequences so long that one
            layer's transients are what does not fit. Level 0 keeps gate and up of all tokens even so. None leaves it
            as it is.

    Raises:
        ArgumentValueError: A value that is none of these.
        ArgumentTypeError: ``offload`` is not a bool, or ``mlp_tile_tokens`` no whole number.
    """

    keep: Keep = "all"
    mlp_level: int | None = None
    offload: bool = False
    mlp_tile_tokens: int | None = None

    def __post_init__(self) -> None:
        allowed = get_args(Keep)
        offload: object = self.offload
        if self.keep not in allowed:
            raise ArgumentValueError(message("keep", f"one of {', '.join(map(repr, allowed))}", f"{self.keep!r}"))
        if self.mlp_level not in (None, 0, 1) or type(self.mlp_level) not in (int, type(None)):
            raise ArgumentValueError(message("mlp_level", "0, 1 or None", f"{self.mlp_level!r}"))
        tile: object = self.mlp_tile_tokens
        if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int)):
            raise ArgumentTypeError(message("mlp_tile_tokens", "a whole number or None", f"{tile!r}"))
        if tile is not None and tile < 1:
            raise ArgumentValueError(message("mlp_tile_tokens", "at least 1, or None", f"{tile}"))
        if not isinstance(offload, bool):
            raise ArgumentTypeError(message("offload", "a bool", f"{offload!r}"))
        if offload and self.keep == "all":
            hint = "Take keep='attention' or keep='input' with offload=True."
            raise ArgumentValueError(message("offload", "False with keep='all'", "True", hint))

"""What a decoder layer saves for backward: `ActivationPolicy`, and as text on command lines and in `lowtide plan`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

Keep = Literal["all", "attention", "input"]

_WORD = re.compile(
    r"(?:(\d+)\s*x\s*)?(all|attention|input)(?:(?:/|-mlp)([01]))?(?:(?:\s+by\s+|-tile)([1-9]\d*))?"
    r"(?:(?:\s+|-)every(?:\s+|-?)([1-9]\d*))?((?:\s+|-)offload(?:ed)?)?"
)
_STATES = re.compile(r"states(?:=(\d+(?:\.\d+)?))?(-late)?")
FORM = (
    "all, attention or input, with /0 or /1 (the MLP's level; or -mlp0), ' by TOKENS' (the MLP's tiles; -tileTOKENS),"
    " for input ' every LAYERS' (-everyLAYERS), ' offloaded' (-offload) behind; or several, as lowtide plan prints"
    " them: '12 x input/1, 4 x all/0' (12xinput/1+4xall/0)"
)
STATES_FORM = (
    "with @states at the end the optimizer's states are offloaded too, @states=2.5 so many GiB of them, -late until"
    " after backward"
)


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
            Not given: ``"all"``, or ``"input"`` where ``every`` is above 1.
        mlp_level: ``checkpoint_level`` of the layer's fused SwiGLU, or experts: 0 saves gate and up, 1 only the input.
            None leaves it unmodified.
        offload: Whether what the layer saves by ``keep`` "attention" or "input" is in pinned host memory from its
            forward until shortly before its backward. Not with ``keep="all"``.
        mlp_tile_tokens: ``tile_tokens`` of the layer's fused SwiGLU: how many tokens one of its tiles has. What level 1
            holds for a moment in backward, 3f values per token, is then that of a tile: for sequences so long that one
            layer's transients are what does not fit. Level 0 saves gate and up of all tokens even so. None leaves it
            unmodified.
        every: With ``keep="input"``, how many consecutive layers of this policy save one input, that of the first.
            Backward recomputes the inputs of the others, and holds them until each is used: one more forward for
            ``every - 1`` layers of ``every``. For sequences so long that even the layers' inputs do not fit.

    Raises:
        ArgumentValueError: A value that is none of these.
        ArgumentTypeError: ``offload`` is not a bool, or ``mlp_tile_tokens`` or ``every`` no whole number.
    """

    keep: Keep = None  # type: ignore[assignment]  # chosen below
    mlp_level: int | None = None
    offload: bool = False
    mlp_tile_tokens: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        check_count("every", self.every)
        given: Any = self.keep
        if given is None:
            object.__setattr__(self, "keep", "input" if self.every > 1 else "all")
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
        if self.every > 1 and self.keep != "input":
            hint = "Take keep='input' with every > 1."
            raise ArgumentValueError(message("every", f"1 with keep={self.keep!r}", f"{self.every}", hint))


Mixture = tuple[tuple[ActivationPolicy, int], ...]  # policies of layers one after another, each with its number of them


def parse_policies(text: str, layers: int | None = None) -> ActivationPolicy | list[ActivationPolicy]:
    """Return the policy that a text names, or one for each layer where it has numbers of layers.

    Args:
        text: What `words_of` returns: ``keep[/LEVEL][ by TOKENS][ every LAYERS][ offloaded]``, or several of
            them, each as ``NUMBER x POLICY``, joined by commas, first layers first. For a shell also
            ``keep[-mlpLEVEL][-tileTOKENS][-everyLAYERS][-offload]``, joined by ``+``.
        layers: How many the model has, to check that the numbers add up; None: not checked.

    Raises:
        ArgumentValueError: It is nothing of the kind.

    Example:
        >>> parse_policies("4xall+12xattention-mlp1", 16)[4] == parse_policies("4 x all, 12 x attention/1", 16)[4]
        True
    """
    found = [_WORD.fullmatch(word) for word in re.split(r"\s*[,+]\s*", text.strip())]
    each = [(match[1], _policy(*match.groups()[1:])) for match in found if match]
    if len(each) < len(found) or (len(each) > 1 and any(count is None for count, _ in each)):
        raise ArgumentValueError(message("policy", FORM, repr(text)))
    if each[0][0] is None:
        return each[0][1]
    policies = [policy for count, policy in each for _ in range(int(count))]
    if layers is not None and len(policies) != layers:
        hint = "Make the numbers before x add up to it, or give one policy without a number for all layers."
        got = f"{len(policies)} in {text!r}"
        raise ArgumentValueError(message("policy", f"one for each of {layers} layers", got, hint))
    return policies


def split_states(text: str) -> tuple[str, dict[str, Any] | None]:
    """Return a policy without its part on optimizer states, and that part.

    Args:
        text: A policy, alone or with ``@states[=GIB][-late]`` behind it.

    Returns:
        The policy's text, and the arguments of `lowtide.memory.offload_optimizer`: None where states stay.

    Raises:
        ArgumentValueError: What is behind the ``@`` is nothing of the kind.

    Example:
        >>> split_states("16xall@states=2.5")
        ('16xall', {'gib': 2.5, 'late': False})
    """
    policy, at, states = text.partition("@")
    if not at:
        return policy, None
    match = _STATES.fullmatch(states)
    if match is None or (match[1] is not None and float(match[1]) == 0):
        raise ArgumentValueError(message("policy", f"{FORM}; {STATES_FORM}", repr(text)))
    return policy, {"gib": float(match[1]) if match[1] else None, "late": bool(match[2])}


def _policy(keep: Any, *numbers_and_offload: str | None) -> ActivationPolicy:
    *numbers, offload = numbers_and_offload
    named = zip(("mlp_level", "mlp_tile_tokens", "every"), numbers, strict=True)
    given: dict[str, Any] = {name: int(number) for name, number in named if number is not None}
    return ActivationPolicy(keep=keep, offload=bool(offload), **given)


def word_of(policy: ActivationPolicy) -> str:
    """Return a policy in a few letters, as `parse_policies` reads it: ``attention/0``, ``input/1 by 512 offloaded``,
    ``input/1 every 4``.
    """
    level = "" if policy.mlp_level is None else f"/{policy.mlp_level}"
    tile = "" if policy.mlp_tile_tokens is None else f" by {policy.mlp_tile_tokens}"
    every = f" every {policy.every}" if policy.every > 1 else ""
    return f"{policy.keep}{level}{tile}{every}{' offloaded' if policy.offload else ''}"


def words_of(mixture: Iterable[tuple[ActivationPolicy, int]]) -> str:
    """Return the policies of a model's layers as `parse_policies` reads them."""
    return ", ".join(f"{count} x {word_of(policy)}" for policy, count in mixture)

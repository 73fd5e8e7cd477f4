"""Activation policies as words: on command lines, and as `lowtide plan` prints them."""

from __future__ import annotations

import re
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.policy import ActivationPolicy

_WORD = re.compile(r"(?:(\d+)x)?(all|attention|input)(-mlp[01])?(-tile[1-9]\d*)?(-offload)?")
_STATES = re.compile(r"states(?:=(\d+(?:\.\d+)?))?(-late)?")
FORM = (
    "all, attention or input, with -mlp0 or -mlp1, -tileTOKENS and -offload behind; or several as 4xall+12xinput; or as"
    " lowtide plan prints them: '12 x input/1, 4 x all/0'"
)
STATES_FORM = (
    "with @states at the end the optimizer's states are offloaded too, @states=2.5 so many GiB of them, -late until"
    " behind backward"
)


def parse_policies(text: str, layers: int | None = None) -> ActivationPolicy | list[ActivationPolicy]:
    """Return the policy that a word says, or one for each layer where it names numbers of layers.

    What ``lowtide plan`` prints (``3 x input/0 offloaded, 13 x all/1``) is understood too.

    Args:
        text: ``keep[-mlpLEVEL][-tileTOKENS][-offload]``; or several of them, each as ``NUMBERxPOLICY``, joined by
            ``+``, first layers first.
        layers: How many the model has, to check that the numbers add up; None: not checked.

    Raises:
        ArgumentValueError: It is nothing of the kind.

    Example:
        >>> parse_policies("4xall+12xattention-mlp1", 16)[4]
        ActivationPolicy(keep='attention', mlp_level=1, offload=False, mlp_tile_tokens=None)
    """
    found = [_WORD.fullmatch(word) for word in _planned(text).split("+")]
    counts = [match[1] for match in found if match]
    if None in found or (len(found) > 1 and None in counts):
        raise ArgumentValueError(message("policy", FORM, repr(text)))
    each = [_policy(match) for match in found if match]
    if counts == [None]:
        return each[0]
    policies = [policy for policy, count in zip(each, counts, strict=True) for _ in range(int(count))]
    if layers is not None and len(policies) != layers:
        raise ArgumentValueError(message("policy", f"one for each of {layers} layers", f"{text}, {len(policies)}"))
    return policies


def layer_policies(text: str, layers: int) -> list[ActivationPolicy]:
    """Return the policy of each of so many layers; otherwise as `parse_policies`.

    Args:
        text: As in `parse_policies`.
        layers: How many the model has.

    Raises:
        ArgumentValueError: It is nothing of the kind, or for another number of layers.
    """
    found = parse_policies(text, layers)
    return found if isinstance(found, list) else [found] * layers


def _planned(text: str) -> str:
    """Return the words for what `lowtide.memory.planner.search.name_of` prints; other texts as they are."""
    for printed, word in (
        (r"\s*,\s*", "+"),
        (r"(\d+)\s+x\s+", r"\1x"),
        (r"/([01])", r"-mlp\1"),
        (r"\s+by\s+(\d+)", r"-tile\1"),
        (r"\s+offloaded", "-offload"),
    ):
        text = re.sub(printed, word, text.strip())
    return text


def split_states(text: str) -> tuple[str, dict[str, Any] | None]:
    """Return a policy without what is said of optimizer states, and that.

    Args:
        text: A policy, alone or with ``@states[=GIB][-late]`` behind it.

    Returns:
        The policy's words, and the arguments of `lowtide.memory.offload_optimizer`: None where states stay.

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


def _policy(match: re.Match[str]) -> ActivationPolicy:
    keep: object = match[2]
    level = int(match[3][-1]) if match[3] else None
    tile = int(match[4].removeprefix("-tile")) if match[4] else None
    return ActivationPolicy(keep=keep, mlp_level=level, mlp_tile_tokens=tile, offload=bool(match[5]))  # type: ignore[arg-type]


def word_of(policy: ActivationPolicy) -> str:
    """Return the word that `parse_policies` makes that policy of."""
    level = "" if policy.mlp_level is None else f"-mlp{policy.mlp_level}"
    tile = "" if policy.mlp_tile_tokens is None else f"-tile{policy.mlp_tile_tokens}"
    return f"{policy.keep}{level}{tile}{'-offload' if policy.offload else ''}"

"""What `lowtide plan` writes, read back: sizes such as 40GiB, and policies such as ``12 x input/1, 4 x all/0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from lowtide.errors import ArgumentValueError, message
from lowtide.memory import ActivationPolicy
from lowtide.memory.policy import Keep

Mixture = tuple[tuple[ActivationPolicy, int], ...]

_UNITS = {"": 2**30, "gib": 2**30, "mib": 2**20, "tib": 2**40, "gb": 10**9, "mb": 10**6, "tb": 10**12}
_ONE = re.compile(r"(?:(\d+)\s*x\s*)?([a-z]+)(?:/([01]))?(\s+offloaded)?")


def parse_gib(name: str, text: str) -> float:
    """Return a size such as ``40GiB``, ``24576MiB``, ``80GB`` or ``40`` (GiB) in GiB.

    Raises:
        ArgumentValueError: it is none, or nothing.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].lower() not in _UNITS or float(found[1]) == 0:
        raise ArgumentValueError(message(name, "a size such as 40GiB or 24576MiB", repr(text)))
    return float(found[1]) * _UNITS[found[2].lower()] / 2**30


def parse_policy(text: str) -> ActivationPolicy | Mixture:
    """Return the policy of all layers, or runs of layers with a policy each, the first layers' first.

    Raises:
        ArgumentValueError: the text is none.
    """
    runs = []
    for part in text.split(","):
        found = _ONE.fullmatch(part.strip())
        if found is None or found[2] not in get_args(Keep):
            raise _no_policy(text)
        level = None if found[3] is None else int(found[3])
        try:
            policy = ActivationPolicy(keep=found[2], mlp_level=level, offload=found[4] is not None)  # type: ignore[arg-type]
        except ArgumentValueError as error:
            raise _no_policy(f"{text} ({error})") from error
        runs.append((policy, found[1]))
    if len(runs) == 1 and runs[0][1] is None:
        return runs[0][0]
    if any(count is None or int(count) == 0 for _, count in runs):
        raise _no_policy(text)
    return tuple((policy, int(count)) for policy, count in runs if count is not None)


def layer_policies(chosen: ActivationPolicy | Mixture, layers: int) -> Sequence[ActivationPolicy]:
    """Return a policy for each of so many layers.

    Raises:
        ArgumentValueError: the mixture is for another number.
    """
    if isinstance(chosen, ActivationPolicy):
        return [chosen] * layers
    policies = [policy for policy, count in chosen for _ in range(count)]
    if len(policies) != layers:
        raise ArgumentValueError(message("policy", f"{layers} layers, as the model has", len(policies)))
    return policies


def _no_policy(text: str) -> ArgumentValueError:
    expected = "all, attention or input, with /0 or /1 for the MLP's level, or counted runs: '12 x input/1, 4 x all/0'"
    return ArgumentValueError(message("policy", expected, repr(text)))

"""The layers' functions beside the head's: the gated MLP, experts, norms and rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contract.function import Function, Mode

FUNCTIONS: dict[str, Function] = {}
MODES: dict[str, Mode] = {}
COMPILED: tuple[str, ...] = ()  # modes whose code torch.compile sees in ways of its own
GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}  # good arguments of a function
BAD: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {}  # changes of them, the error, and what it says

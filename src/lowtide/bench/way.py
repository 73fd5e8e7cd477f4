"""A way to train a model: who computes a step, and what its layers save for backward.

The implementations: ``stock`` is unmodified transformers; ``compile`` the same with each layer and the loss through
torch.compile; ``liger`` with Liger's kernels; ``lowtide`` patched.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.memory.policy import parse_policies

STOCK, COMPILE, LIGER, LOWTIDE = "stock", "compile", "liger", "lowtide"
IMPLEMENTATIONS = (STOCK, COMPILE, LIGER, LOWTIDE)
_PEERS_SAVE = "all, attention or input, the last two with -offload, for all layers alike"


@dataclass(frozen=True, kw_only=True)
class Way:
    """An implementation, and what its layers save for backward.

    Attributes:
        impl: one of `IMPLEMENTATIONS`.
        policy: as `lowtide.memory.policy.parse_policies` reads it; a peer's layers are all alike, and have no
            levels of the MLP.

    Raises:
        ArgumentValueError: no such implementation or policy, or not together.
    """

    impl: str
    policy: str = "input"

    def __post_init__(self) -> None:
        if self.impl not in IMPLEMENTATIONS:
            raise ArgumentValueError(message("impl", f"names out of {', '.join(IMPLEMENTATIONS)}", repr(self.impl)))
        found = parse_policies(self.policy)
        if self.impl == LOWTIDE:
            return
        if isinstance(found, list) or found.mlp_level is not None:
            raise ArgumentValueError(message("policy", f"for {self.impl} {_PEERS_SAVE}", repr(self.policy)))
        if self.impl == COMPILE and found.keep == "attention":
            hint = "A checkpoint cannot look into a compiled layer to keep attention's output."
            raise ArgumentValueError(message("policy", f"for {COMPILE} all or input", repr(self.policy), hint))

    @classmethod
    def named(cls, name: str) -> Way:
        """Return the way of a name: an implementation, ``implementation:policy``, or a peer's ``stock-all``."""
        impl, _, policy = name.partition(":" if ":" in name else "-")
        return cls(impl=impl, policy=policy) if policy else cls(impl=impl)

    def check_installed(self) -> None:
        """Raise `UnsupportedError` where the implementation's package is not installed."""
        if self.impl == LIGER and importlib.util.find_spec("liger_kernel") is None:
            hint = "pip install liger-kernel, or leave liger out."
            raise UnsupportedError(message("impl", "the package liger-kernel to be installed", "none", hint))

"""A variant of a training step: who computes it, and what its layers save for backward.

The implementations: ``stock`` is unmodified transformers; ``compile`` the same with each layer and the loss through
torch.compile; ``liger`` with Liger's kernels; ``lowtide`` patched; ``lowtide-compile`` patched, each layer through
torch.compile.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.memory.policy import parse_policies

STOCK, COMPILE, LIGER, LOWTIDE = "stock", "compile", "liger", "lowtide"
OURS = (LOWTIDE, f"{LOWTIDE}-{COMPILE}")
IMPLEMENTATIONS = (STOCK, COMPILE, LIGER, *OURS)
PEER_POLICIES = ("all", "input", "input-offload", "attention", "attention-offload")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of `IMPLEMENTATIONS`, and a policy as `lowtide.memory.policy.parse_policies` reads it; a peer's is one of
    `PEER_POLICIES`, for all layers alike.

    Raises:
        ArgumentValueError: no such implementation or policy, or not together.
    """

    impl: str
    policy: str = "input"

    def __post_init__(self) -> None:
        if self.impl not in IMPLEMENTATIONS:
            raise ArgumentValueError(message("impl", f"names out of {', '.join(IMPLEMENTATIONS)}", repr(self.impl)))
        parse_policies(self.policy)
        known = PEER_POLICIES[:3] if self.impl == COMPILE else PEER_POLICIES  # no look into a compiled layer
        if self.impl not in OURS and self.policy not in known:
            raise ArgumentValueError(message("policy", f"for {self.impl} {' or '.join(known)}", repr(self.policy)))

    @property
    def compiles_layers(self) -> bool:
        """Whether each layer goes through torch.compile."""
        return self.impl.endswith(COMPILE)

    @classmethod
    def named(cls, name: str, policy: str = "input") -> Variant:
        """Return the variant of a name: an implementation, which has this policy, or ``implementation:policy``."""
        impl, _, own = name.partition(":")
        return cls(impl=impl, policy=own or policy)

    def check_installed(self) -> None:
        """Raise `UnsupportedError` where Liger's package is not installed."""
        if self.impl == LIGER:
            check_installed("impl", "liger-kernel")


def check_installed(option: str, package: str) -> None:
    """Raise `UnsupportedError` where the package that an option's value needs is not installed."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        hint = f"pip install {package}, or take another."
        raise UnsupportedError(message(option, f"the package {package} to be installed", "none", hint))

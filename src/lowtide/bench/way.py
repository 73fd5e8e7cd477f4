"""A way to train a model: who computes a step, and what its layers save for backward.

The implementations: ``stock`` is unmodified transformers; ``compile`` the same with each layer and the loss through
torch.compile; ``liger`` with Liger's kernels; ``lowtide`` patched; ``lowtide-compile`` patched, each layer through
torch.compile. Those of `HEADS` are ``stock`` with another loss, a peer of ``lowtide bench head``, from the hidden
states; torchtune's with each layer through torch.compile too.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.memory.policy import parse_policies

STOCK, COMPILE, LIGER, LOWTIDE = "stock", "compile", "liger", "lowtide"
LOWTIDE_COMPILED = f"{LOWTIDE}-{COMPILE}"
CHUNKS = 8  # of tokens, in the forms that users write
TORCH, TRL, QUACK, LIGER_SM90 = "torch", "trl", "quack", "liger-sm90"
CHECKPOINT, CHECKPOINT_COMPILED, TORCHTUNE = (
    f"{form}-{CHUNKS}" for form in ("checkpoint", "checkpoint-compile", "torchtune")
)
HEADS = (TORCH, TRL, QUACK, LIGER_SM90, CHECKPOINT, CHECKPOINT_COMPILED, TORCHTUNE)
OURS = (LOWTIDE, LOWTIDE_COMPILED)
IMPLEMENTATIONS = (STOCK, COMPILE, LIGER, *OURS, *HEADS)
GPU_ALONE = (LIGER, QUACK, LIGER_SM90)
NEEDS = {  # an implementation's module, and what to install for it
    LIGER: ("liger_kernel", "liger-kernel"),
    LIGER_SM90: ("liger_kernel", "liger-kernel[cutedsl]"),
    QUACK: ("quack", "quack-kernels"),
    TRL: ("trl", "trl"),
}
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
        if self.impl in OURS:
            return
        if isinstance(found, list) or found.mlp_level is not None or found.every > 1:
            raise ArgumentValueError(message("policy", f"for {self.impl} {_PEERS_SAVE}", repr(self.policy)))
        if self.compiles_layers and found.keep == "attention":
            hint = "A checkpoint cannot look into a compiled layer to keep attention's output."
            raise ArgumentValueError(message("policy", f"for {self.impl} all or input", repr(self.policy), hint))

    @property
    def compiles_layers(self) -> bool:
        """Whether each layer goes through torch.compile."""
        return self.impl in (COMPILE, LOWTIDE_COMPILED, TORCHTUNE)

    @classmethod
    def named(cls, name: str) -> Way:
        """Return the way of a name: an implementation, ``implementation:policy``, or a peer's ``stock-all``."""
        known = (impl for impl in IMPLEMENTATIONS if name == impl or name.startswith((f"{impl}:", f"{impl}-")))
        impl = max(known, key=len, default=name)
        return cls(impl=impl, policy=name[len(impl) + 1 :]) if name != impl else cls(impl=impl)

    def check_installed(self) -> None:
        """Raise `UnsupportedError` where the implementation's package is not installed."""
        module, package = NEEDS.get(self.impl, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            hint = f"pip install '{package}', or leave {self.impl} out."
            raise UnsupportedError(message("impl", f"the package {package} to be installed", "none", hint))

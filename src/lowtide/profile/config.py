"""The settings of ``lowtide profile``, their defaults and their checks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lowtide.bench.settings import Settings, setting
from lowtide.bench.variant import IMPLEMENTATIONS, Variant
from lowtide.memory.policy import FORM
from lowtide.train.shapes import SHAPES

Optimizer = Literal["adamw", "adamw-foreach", "adamw-8bit", "sgd", "sgd-momentum"]
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Settings):
    """What ``lowtide profile`` measures and writes; a value that no run could use is an `ArgumentValueError`."""

    benchmark, packages = "profile", ("liger-kernel", "peft", "bitsandbytes")

    model: str = setting(
        AUTO,
        "whose shape, with random weights: a config.json, a folder with one, or a built-in name: "
        f"{', '.join(SHAPES)}; of a multimodal model, the language model inside; "
        "auto: llama-3.2-1b on a GPU, lowtide-small on a CPU",
        metavar="MODEL",
    )
    impl: tuple[str, ...] = setting(
        ("stock", "lowtide"),
        f"which of {', '.join(IMPLEMENTATIONS)}; NAME:POLICY for one with its own policy",
        metavar="NAME",
    )
    seq_len: int = setting(0, "tokens of a sequence; 0: 8192 on a GPU, 1024 on a CPU", least=0)
    batch_size: int = setting(1, "sequences per step", least=1)
    policy: str = setting(
        "input",
        f"what layers save for backward, where NAME:POLICY does not say: {FORM}. "
        "Peers support all, attention, input (layer checkpointing), attention-offload and input-offload (checkpoints "
        "in host memory)",
        metavar="POLICY",
    )
    optimizer: Optimizer = setting("adamw", "the optimizer; adamw: PyTorch's fused one")  # noqa: RUF009
    lora: int = setting(0, "train adapters of this rank on all linear layers but the last, all else frozen", least=0)
    steps: int = setting(3, "steps that count; the median is taken. One more is recorded", least=1)
    warm: int = setting(1, "steps before them", least=1)
    seed: int = setting(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seq_len", self.seq_len != 1, "at least 2 tokens, of which all but the first are predicted")
        self.require("impl", len(self.variants) == len(self.impl), "each name once")

    @property
    def variants(self) -> Mapping[str, Variant]:
        """What is measured, by name; `ArgumentValueError` for an unknown name or policy."""
        return {name: Variant.named(name, self.policy) for name in self.impl}

    def check_here(self) -> None:
        """Raise `ArgumentValueError` where there is no such model, `UnsupportedError` where Liger is not installed."""
        for variant in self.variants.values():
            variant.check_installed()
        super().check_here()

"""The settings of the benchmarks of whole models: each field's default and meaning, and each one's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.settings import RunSettings, Sdpa, numbers, setting
from lowtide.bench.way import HEADS, LOWTIDE, LOWTIDE_COMPILED
from lowtide.memory.policy import FORM, STATES_FORM, parse_policies, split_states

NONE = "none"
SDPA = "attention's kernel, the same for all; auto: as PyTorch chooses"


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RunSettings):
    """Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by stock
    transformers, with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy; and by
    stock transformers with a loss of lowtide bench head, torchtune's with compiled layers too. A peer's layers are
    checkpointed; NAME-attention saves attention's output, NAME-all saves everything. Each way is a process of its own.
    The last column is the time over that of the first way.
    """

    benchmark, summary = "step", "a training step, end to end"
    exit_1 = "lowtide itself failed, other than by running out of memory, or a way of --peer cannot run here"
    by_name = "peer"
    known: ClassVar = {
        "ways": (
            *(f"{who}{saved}" for who in ("liger", "stock") for saved in ("", "-attention", "-all")),
            *(f"{who}{saved}" for who in ("compile", *HEADS) for saved in ("", "-all")),
            NONE,
        )
    }
    examples: ClassVar = {
        "": "a Llama-3.2-1B at three lengths",
        "--tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1 --sdpa cudnn": "layers of two policies",
        "--tokens 32768 --policy 10xattention-mlp0+6xall@states": "idle optimizer states in host memory",
        "--tokens 8192 --model llama-3-8b --peer torchtune-8 torchtune-8-all": "losses that users write",
        "--model lowtide-small --tokens 64 --device cpu --peer stock --policy all input": "a quick run without a GPU",
    }

    tokens: tuple[str, ...] = setting((), "lengths of a sequence (default: 8192 32768 65536)", metavar="T")
    peer: tuple[str, ...] = setting(
        ("liger", "liger-attention", "stock", "compile"), "these peers: {ways}", metavar="PEER", known="ways"
    )
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"),
        f"lowtide with these policies: {FORM}; {STATES_FORM}",
        metavar="POLICY",
    )
    compile_layers: bool = setting(False, "lowtide with each policy a second time, each layer through torch.compile")
    sdpa: Sdpa = setting("auto", SDPA)  # noqa: RUF009
    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    layers: int | None = setting(None, "this many layers instead of the model's: a run in less time", least=1)
    batch: int = setting(1, "sequences of a step", least=1)
    warm: int = setting(2, "steps that do not count", last=True, least=0)
    reps: int = setting(4, "steps that count; the median is taken", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("tokens", all(n > 1 for n in self.lengths), "whole numbers above 1")
        for text in self.policy:
            parse_policies(split_states(text)[0])

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a sequence."""
        return tuple(sorted(numbers("tokens", self.tokens, int))) or (8192, 32768, 65536)

    @property
    def ways(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy, then the same with compiled layers."""
        ours = (LOWTIDE, LOWTIDE_COMPILED) if self.compile_layers else (LOWTIDE,)
        named = (f"{name}:{text}" for name in ours for text in self.policy)
        return (*(peer for peer in self.peer if peer != NONE), *named)

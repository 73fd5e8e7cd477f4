"""The settings of the benchmarks: each field's default and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.settings import RoundSettings, Settings, Shape, ShapeSettings, setting, shape_setting
from lowtide.bench.variant import IMPLEMENTATIONS, LOWTIDE, PEER_POLICIES, Variant
from lowtide.memory.policy import FORM, STATES_FORM, split_states

HEAD_PEERS = (
    "lowtide", "naive", "compile", "liger", "liger-sm90", "liger-native", "cce", "cce-exact", "quack", "trl", "torch",
    "checkpoint-8", "forward-8",
)  # fmt: skip
STATS_PEERS = (
    "lowtide", "naive", "compile", "trl", "liger-scaled", "liger-native", "cce-exact", "torch", "checkpoint-8",
)  # fmt: skip
SEVERAL = 8  # targets of a token
WORKS: dict[str, tuple[str, tuple[str, ...], int]] = {  # of stats: title, values, GEMMs
    "logprob-entropy": ("log-probability and entropy", ("logprob", "entropy"), 4),
    "logprob": ("log-probability", ("logprob",), 4),
    "targets": (f"log-probabilities of {SEVERAL} targets a token", ("logprob",), 4),
    "logprob-forward": ("log-probability", ("logprob",), 1),
    "logprob-entropy-forward": ("log-probability and entropy", ("logprob", "entropy"), 1),
}
"""A policy that is trained, with and without an entropy bonus and on several candidates, and one that only scores."""
MLP_PEERS = ("lowtide-0", "lowtide-1", "lowtide-1-tiled", "liger", "naive", "compile")
MLPS = {
    "llama-8b-32k": (1, 32768, 4096, 14336),
    "llama-70b-8k": (1, 8192, 8192, 28672),
}
AROUND = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 2, 4)  # of the sweep: times the shape's own size


@dataclass(frozen=True, kw_only=True)
class HeadBenchConfig(ShapeSettings):
    """Time, peak memory and errors of linear + cross entropy, forward and backward, of lowtide and every peer that can
    be imported, interleaved in one process with the limit: the bare GEMMs over chunks of 2048, 4096 or all rows,
    whichever is fastest. Peaks are above the inputs and include the gradients; errors are against GEMMs in a wider
    dtype.
    """

    benchmark, summary = "head", "linear + cross entropy"
    examples: ClassVar = {
        "": "a Llama-3.2-1B's head with every peer",
        "--shape all": "the table of all named shapes",
        "--shape 4096,2048,50304 --only lowtide liger": "your own shape, two peers",
        "--shape 1024,256,8192 --device cpu": "a small run without a GPU",
    }

    shape: tuple[str, ...] = shape_setting("llama-1b")
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=HEAD_PEERS)


@dataclass(frozen=True, kw_only=True)
class SweepBenchConfig(HeadBenchConfig):
    """Rate, peak memory and errors of linear + cross entropy, forward and backward, over the number of tokens N, the
    hidden size D and the vocabulary V, each with the other two fixed: lowtide bench head, shape by shape. The rate is
    6NDV over the time for every peer. An axis has powers of two times the shape's own size, from a 16th to 4.
    """

    benchmark, summary = "sweep", "the same over tokens, hidden size and vocabulary"
    examples: ClassVar = {
        "": "around 16384 tokens, hidden size 2048, vocabulary 131072",
        "--shape 8192,4096,128256 --only lowtide liger": "around a shape of your own, two peers",
        "--shape 256,64,2048 --device cpu": "a small run without a GPU",
    }

    @property
    def shapes(self) -> list[Shape]:
        """All shapes, the one where the lines cross first."""
        center, *more = super().shapes
        self.require("shape", not more, "one shape, where the lines cross")
        points = [center]
        for axis in ("N", "D", "V"):
            sizes = [int(vars(center)[axis] * times) for times in AROUND]
            points += [Shape(**{**vars(center), "name": f"{axis}={size}", axis: size}) for size in sizes if size]
        return points


@dataclass(frozen=True, kw_only=True)
class StatsBenchConfig(ShapeSettings):
    """Time, peak memory and errors of per-token statistics, as lowtide bench head measures those of the loss. With
    random upstream gradients, forward and backward: the log-probability of each token's target, with and without the
    entropy, and of several targets. Without gradients: the first two. The limit has four GEMMs with gradients, as no
    logits are saved, else one.
    """

    benchmark, summary = "stats", "log-probabilities and entropies"
    examples: ClassVar = {
        "": "8192 tokens of a Qwen's head with every peer",
        "--work logprob-entropy --only lowtide trl": "one table with two peers",
        "--shape 64,32,1000 --device cpu": "a small run without a GPU",
    }

    shape: tuple[str, ...] = shape_setting("qwen-4k")
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=STATS_PEERS)
    work: tuple[str, ...] = setting((), "these tables alone", metavar="WORK", names=WORKS)


@dataclass(frozen=True, kw_only=True)
class MlpBenchConfig(ShapeSettings):
    """Time and memory of the gated MLP, forward and backward, at both levels of swiglu_mlp and of every peer that can
    be imported, interleaved in one process with the limit: the bare GEMMs, 9, or 11 where gate and up are recomputed.
    "kept" is alive after forward, the input included; peaks are above input and weights and include the gradients.
    """

    benchmark, summary = "mlp", "the gated MLP"
    examples: ClassVar = {
        "--shape all": "a layer of a Llama of 8B at 32768 tokens, and of 70B at 8192",
        "--shape 16,512,1024,4096 --dtype float32": "your own sizes",
        "--shape 2,64,32,96 --device cpu": "a small run without a GPU",
    }

    shape: tuple[str, ...] = shape_setting("llama-8b-32k", ("batch", "seq", "D", "F"), MLPS)
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=MLP_PEERS)


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RoundSettings):
    """Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by stock
    transformers, with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy. A
    peer's layers are checkpointed; NAME:attention saves attention's output, NAME:all saves everything. Each has a
    process of its own. of_first is the time over that of the first row.
    """

    benchmark, summary, packages = "step", "a training step, end to end", ("liger-kernel",)
    examples: ClassVar = {
        "": "a Llama-3.2-1B at three lengths",
        "--tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1": "layers of two policies",
        "--tokens 32768 --policy 10xattention-mlp0+6xall@states": "idle optimizer states in host memory",
        "--model lowtide-small --tokens 64 --device cpu --peer stock --policy all input": "a small run without a GPU",
    }

    tokens: tuple[int, ...] = setting((8192, 32768, 65536), "lengths of a sequence", metavar="T", least=2)
    peer: tuple[str, ...] = setting(
        ("liger", "liger:attention", "stock", "compile"),
        f"out of {', '.join(IMPLEMENTATIONS)}, or NAME:POLICY, out of {', '.join(PEER_POLICIES)}",
        metavar="PEER",
    )
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"),
        f"lowtide with these policies: {FORM}; {STATES_FORM}",
        metavar="POLICY",
    )
    model: str = setting("llama-3.2-1b", "its shape: a built-in name or a config.json; random weights", metavar="NAME")
    batch: int = setting(1, "sequences of a step", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for way in self.variants:
            Variant.named(split_states(way)[0])

    @property
    def variants(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy."""
        return (*self.peer, *(f"{LOWTIDE}:{text}" for text in self.policy))


BENCHMARKS: tuple[type[Settings], ...] = (
    HeadBenchConfig, SweepBenchConfig, StatsBenchConfig, MlpBenchConfig, StepBenchConfig,
)  # fmt: skip

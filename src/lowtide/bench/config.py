"""The settings of the benchmarks: each field's default and meaning, and each one's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.settings import ErrorSettings, PeerSettings, RunSettings, Sdpa, ShapeSettings, TokenSettings, setting
from lowtide.bench.shapes import HEADS, MLPS, TOKENS, Shape
from lowtide.bench.variant import COMPILE, LIGER, LOWTIDE, LOWTIDE_COMPILED, STOCK
from lowtide.memory.policy import FORM, STATES_FORM, parse_policies, split_states

HEAD_PEERS = (
    "lowtide", "naive", "compile", "liger", "liger-large", "liger-sm90", "liger-native", "cce", "cce-exact", "quack",
    "trl", "torch", "checkpoint-8", "checkpoint-compile-8", "torchtune-8", "forward-8",
)  # fmt: skip
AXES = {"tokens": "N", "hidden": "D", "vocab": "V"}  # of the sweep, by option
AROUND = tuple(2.0**k for k in range(-4, 3))  # times the shape's own size, where no sizes are given
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class HeadBenchConfig(ErrorSettings):
    """Time, peak memory and errors of linear + cross entropy, forward and backward, of lowtide and every peer that can
    be imported, interleaved in one process with the limit: the bare GEMMs over chunks of 2048, 4096 or all rows,
    whichever is fastest. Peaks are above the inputs and include the gradients; errors are against GEMMs in a wider
    dtype. A peer that fails is a row with the reason.
    """

    benchmark, summary = "head", "linear + cross entropy"
    choice = HEADS
    known: ClassVar = {"peers": HEAD_PEERS}
    examples: ClassVar = {
        "--sweep": "one shape with every peer, and the plot of time against memory",
        "--shape all": "the table of all named shapes",
        "--shape 4096,2048,50304 --only lowtide liger --no-error": "your own shape, two peers, times and peaks only",
        "--shape 1024,256,8192 --skip compile --device cpu": "a quick run without a GPU",
    }

    sweep: bool = setting(False, "also sweep workspace_mib and plot time against memory, every peer a point")
    workspace_mib: tuple[float, ...] = setting(
        (), "the sweep's values (default: powers of two, from all logits down to a 64th)", metavar="MIB", least=1e-3
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("workspace_mib", self.sweep or not self.workspace_mib, "--sweep beside it")


@dataclass(frozen=True, kw_only=True)
class SweepBenchConfig(PeerSettings):
    """Rate, peak memory and errors of linear + cross entropy, forward and backward, over the number of tokens N, the
    hidden size D and the vocabulary V, each with the other two fixed: lowtide bench head, shape by shape, drawn as nine
    panels. The rate is 6NDV over the time for every peer. The result is written after each row.
    """

    benchmark, summary = "sweep", "the same over tokens, hidden size and vocabulary"
    exit_1 = "lowtide itself failed, other than by running out of memory"
    known: ClassVar = {"peers": HEAD_PEERS, "shapes": HEADS.named}
    examples: ClassVar = {
        "": "around 16384 tokens, hidden size 2048, vocabulary 131072",
        "--tokens 1024 2048 4096 8192 --hidden 512 1024 2048 --vocab 8192 32768 131072": "your own lines",
        "--shape 256,64,2048 --skip compile --device cpu": "a quick run without a GPU",
    }

    shape: str = setting(HEADS.usual, "where the three lines cross: {shapes} or N,D,V", metavar="SHAPE")
    tokens: tuple[str, ...] = setting(
        (),
        "numbers of tokens N, with the shape's D and V; none: no such line (default: powers of two times the shape's"
        " own, from a 16th to 4)",
        metavar="N",
    )
    hidden: tuple[str, ...] = setting((), "hidden sizes D, in the same way", metavar="D")
    vocab: tuple[str, ...] = setting((), "sizes of the vocabulary V, in the same way", metavar="V")
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    reps: int = setting(4, "rounds that count; each runs every peer once, beside the limit", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("tokens", bool(self.shapes), "one line that is not none")

    @property
    def center(self) -> Shape:
        """Where the lines cross."""
        return HEADS.one(self.shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes, each once: where the lines cross, then from the least work to the most."""
        center = {letter: getattr(self.center, letter) for letter in AXES.values()}
        lines = [{**center, letter: size} for axis, letter in AXES.items() for size in self._sizes(axis)]
        found = {HEADS.one(",".join(map(str, sizes.values()))): sizes for sizes in lines}
        return tuple(sorted(found, key=lambda shape: (found[shape] != center, shape.flops(1))))

    def _sizes(self, axis: str) -> set[int]:
        """Return the sizes along an axis; empty where it is left out."""
        given, usual = getattr(self, axis), getattr(self.center, AXES[axis])
        if NONE in given:
            return set()
        self.require(axis, all(text.isdecimal() and int(text) > 0 for text in given), "whole numbers above 0, or none")
        return set(map(int, given)) or {max(1, int(usual * times)) for times in AROUND}


@dataclass(frozen=True, kw_only=True)
class StatsBenchConfig(TokenSettings):
    """Time, peak memory and errors of per-token statistics, of lowtide and every peer that can be imported, interleaved
    in one process with the limit. With random upstream gradients, forward and backward: the log-probability of each
    token's target, with and without the entropy, and of several targets; and backward alone. Without gradients: these,
    all other statistics, and the highest logits. The limit is the bare GEMMs (four with gradients, as no logits are
    saved; three for backward alone; else one) over chunks of 2048, 4096 or all rows, whichever is fastest. Peaks are
    above the inputs and include the gradients; errors are against float32 GEMMs. A peer that fails, or does not offer
    the work, is a row with the reason.
    """

    benchmark, summary = "stats", "log-probabilities and entropies"
    choice = TOKENS
    known: ClassVar = {
        "peers": (
            "lowtide", "naive", "compile", "trl", "liger-grpo", "liger-scaled", "liger-native", "quack", "cce-exact",
            "torch", "checkpoint-8",
        ),
        "works": (
            "logprob-entropy", "logprob-entropy-backward", "logprob", "targets", "logprob-forward",
            "logprob-entropy-forward", "all-forward", "topk-forward",
        ),
    }  # fmt: skip
    examples: ClassVar = {
        "": "8192 tokens of a Qwen's head with every peer",
        "--work logprob-entropy --only lowtide trl": "one table with two peers",
        "--shape 64,32,1000 --device cpu --skip compile": "a quick run without a GPU",
    }


@dataclass(frozen=True, kw_only=True)
class MlpBenchConfig(PeerSettings, ShapeSettings):
    """Time and memory of the gated MLP, forward and backward, at both levels of swiglu_mlp and of every peer that can
    be imported, interleaved in one process with the limit: the bare GEMMs, 9 per layer, or 11 where gate and up are
    recomputed. "saved" is for backward, the input included; peaks are above input and weights and include the
    gradients; "total" counts everything, "accumulating" the same of a step that adds to the gradients of the one
    before. A peer that fails is a row with the reason.
    """

    benchmark, summary, stem = "mlp", "the gated MLP", "{benchmark}-{dtype}"
    choice = MLPS
    known: ClassVar = {"peers": ("lowtide-0", "lowtide-1", "lowtide-1-tiled", "liger", "naive", "compile")}
    examples: ClassVar = {
        "--shape models": "a layer of a Llama of 8B and of 70B, at 8192 and 32768 tokens",
        "--shape 16,512,1024,4096,3 --dtype float32": "three layers of your own sizes",
        "--shape 2,64,32,96,2 --device cpu --skip compile": "a quick run without a GPU",
    }


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RunSettings):
    """Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by stock
    transformers, with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy. A
    peer's layers are checkpointed; NAME-attention saves attention's output, NAME-all saves everything. Each has a
    process of its own. of_first is the time over that of the first row.
    """

    benchmark, summary = "step", "a training step, end to end"
    exit_1 = "lowtide itself failed, other than by running out of memory"
    known: ClassVar = {
        "ways": (
            *(f"{who}{saved}" for who in (LIGER, STOCK) for saved in ("", "-attention", "-all")),
            *(COMPILE, f"{COMPILE}-all", NONE),
        )
    }
    examples: ClassVar = {
        "": "a Llama-3.2-1B at three lengths",
        "--tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1 --sdpa cudnn": "layers of two policies",
        "--tokens 32768 --policy 10xattention-mlp0+6xall@states": "idle optimizer states in host memory",
        "--model lowtide-small --tokens 64 --device cpu --peer stock --policy all input": "a quick run without a GPU",
    }

    tokens: tuple[int, ...] = setting((8192, 32768, 65536), "lengths of a sequence", metavar="T", least=2)
    peer: tuple[str, ...] = setting(
        ("liger", "liger-attention", "stock", "compile"), "these peers: {ways}", metavar="PEER", known="ways"
    )
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"),
        f"lowtide with these policies: {FORM}; {STATES_FORM}",
        metavar="POLICY",
    )
    compile_layers: bool = setting(False, "lowtide with each policy a second time, each layer through torch.compile")
    sdpa: Sdpa = setting("auto", "attention's kernel, the same for all; auto: as PyTorch chooses")  # noqa: RUF009
    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    layers: int | None = setting(None, "this many layers instead of the model's: a run in less time", least=1)
    batch: int = setting(1, "sequences of a step", least=1)
    reps: int = setting(4, "steps that count; the median is taken", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.policy:
            parse_policies(split_states(text)[0])

    @property
    def ways(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy, then the same with compiled layers."""
        names = (LOWTIDE, LOWTIDE_COMPILED) if self.compile_layers else (LOWTIDE,)
        patched = (f"{name}:{text}" for name in names for text in self.policy)
        return (*(peer for peer in self.peer if peer != NONE), *patched)

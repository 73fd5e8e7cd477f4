"""The settings of the benchmarks: each field's default and meaning, and each one's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.settings import PeerSettings, Precision, RunSettings, Sdpa, ShapeSettings, numbers, setting
from lowtide.bench.shapes import HEADS as SHAPES
from lowtide.bench.shapes import MLPS, TOKENS, Shape
from lowtide.bench.way import HEADS, LOWTIDE, LOWTIDE_COMPILED
from lowtide.memory.policy import FORM, STATES_FORM, parse_policies, split_states

HEAD_PEERS = (
    "lowtide", "lowtide-liger-memory", "naive", "compile", "liger", "liger-large", "cce", "cce-exact", *HEADS,
)  # fmt: skip
AXES = {"tokens": "N", "hidden": "D", "vocab": "V"}  # of the sweep, by option
AROUND = tuple(2.0**k for k in range(-4, 3))  # times the shape's own size, where no sizes are given
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ErrorSettings(PeerSettings, ShapeSettings):
    """What benchmarks of values and gradients share: what errors are against, and the precision of float32 GEMMs."""

    error: bool = setting(True, "do not compute the errors of values and gradients")
    matmul_precision: Precision = setting(  # noqa: RUF009
        "highest", "torch.set_float32_matmul_precision, for lowtide and every peer"
    )


@dataclass(frozen=True, kw_only=True)
class HeadBenchConfig(ErrorSettings):
    """Time, peak memory and errors of linear + cross entropy, forward and backward, of lowtide and every peer that can
    be imported, interleaved in one process with the limit: the bare GEMMs over chunks of 2048, 4096 or all rows,
    whichever is fastest. Peaks are above the inputs and include the gradients; errors are against GEMMs in a wider
    dtype. A peer that fails is a row with the reason.
    """

    benchmark, summary = "head", "linear + cross entropy"
    choice = SHAPES
    known: ClassVar = {"peers": HEAD_PEERS}
    examples: ClassVar = {
        "--sweep": "one shape with every peer, and the plot of time against memory",
        "--shape all": "the table of all named shapes",
        "--shape 4096,2048,50304 --only lowtide liger --no-error": "your own shape, two peers, times and peaks only",
        "--no-table --settings": "other uses of the loss, each beside its own limit",
        "--no-table --tokens 1024 16384 262144": "other numbers of tokens",
        "--shape 1024,256,8192 --skip compile --device cpu": "a quick run without a GPU",
    }

    sweep: bool = setting(False, "also sweep workspace_mib and plot time against memory, every peer a point")
    workspace_mib: tuple[str, ...] = setting(
        (), "the sweep's values (default: powers of two, from all logits down to a 64th)", metavar="MIB"
    )
    settings: bool = setting(
        False, "also measure float32 accumulation, autocast, reduction none, a frozen head, no gradient, and a soft cap"
    )
    tokens: tuple[str, ...] = setting(
        (), "also measure lowtide with these numbers of tokens in place of N", metavar="N"
    )
    table: bool = setting(True, "leave out the peers' table and measure only what other options request")

    def __post_init__(self) -> None:
        super().__post_init__()
        sweep_mib, token_counts = self.sweep_mib, self.token_counts  # which checks them
        self._require("workspace_mib", self.sweep or not sweep_mib, "--sweep beside it")
        anything = self.table or self.sweep or self.settings or token_counts
        self._require("table", bool(anything), "--sweep, --settings or --tokens beside --no-table")

    @property
    def sweep_mib(self) -> tuple[float, ...]:
        """The sweep's values; empty: chosen by the shape."""
        return numbers("workspace_mib", self.workspace_mib, float)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens."""
        return numbers("tokens", self.tokens, int)


@dataclass(frozen=True, kw_only=True)
class SweepBenchConfig(PeerSettings):
    """Rate, peak memory and errors of linear + cross entropy, forward and backward, over the number of tokens N, the
    hidden size D and the vocabulary V, each with the other two fixed: lowtide bench head, shape by shape, drawn as nine
    panels. The rate is 6NDV over the time for every peer. The result is written after each row.
    """

    benchmark, summary = "sweep", "the same over tokens, hidden size and vocabulary"
    exit_1 = "lowtide itself failed, other than by running out of memory"
    known: ClassVar = {"peers": HEAD_PEERS, "shapes": SHAPES.named}
    examples: ClassVar = {
        "": "around 16384 tokens, hidden size 2048, vocabulary 131072",
        "--tokens 1024 2048 4096 8192 --hidden 512 1024 2048 --vocab 8192 32768 131072": "your own lines",
        "--shape 256,64,2048 --skip compile --device cpu": "a quick run without a GPU",
    }

    shape: str = setting(SHAPES.usual, "where the three lines cross: {shapes} or N,D,V", metavar="SHAPE")
    tokens: tuple[str, ...] = setting(
        (),
        "numbers of tokens N, with the shape's D and V; none: no such line (default: powers of two times the shape's"
        " own, from a 16th to 4)",
        metavar="N",
    )
    hidden: tuple[str, ...] = setting((), "hidden sizes D, in the same way", metavar="D")
    vocab: tuple[str, ...] = setting((), "sizes of the vocabulary V, in the same way", metavar="V")
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    warm: int = setting(2, "rounds that do not count", last=True, least=0)
    reps: int = setting(4, "rounds that count; each runs every peer once, beside the limit", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("tokens", bool(self.shapes), "one line that is not none")

    @property
    def center(self) -> Shape:
        """Where the lines cross."""
        return SHAPES.one(self.shape)

    def sizes(self, axis: str) -> tuple[int, ...]:
        """Return the sizes along an axis, ascending; empty where it is left out."""
        given: tuple[str, ...] = getattr(self, axis)
        own = getattr(self.center, AXES[axis])
        if NONE in given:
            return ()
        return tuple(sorted(set(numbers(axis, given, int)) or {max(1, int(own * times)) for times in AROUND}))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes, each once: where the lines cross, then from the least work to the most."""
        center = {letter: getattr(self.center, letter) for letter in "NDV"}
        lines = ({**center, letter: size} for axis, letter in AXES.items() for size in self.sizes(axis))
        found = {SHAPES.one(",".join(map(str, sizes.values()))): sizes for sizes in lines}
        return tuple(sorted(found, key=lambda shape: (found[shape] != center, shape.flops(1))))


@dataclass(frozen=True, kw_only=True)
class TokenBenchConfig(ErrorSettings):
    """What benchmarks of values for each token share; ``known`` has the names of their tables as ``works``."""

    work: tuple[str, ...] = setting((), "these tables alone: {works}", metavar="WORK", known="works")


@dataclass(frozen=True, kw_only=True)
class StatsBenchConfig(TokenBenchConfig):
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
            "lowtide", "lowtide-trl-memory", "naive", "compile", "trl", "liger-grpo", "liger-scaled", "quack",
            "cce-exact", "torch", "checkpoint-8",
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
        "--shape published --dtype float32": "the table of a published exercise, in its dtype",
        "--shape 2,64,32,96,2 --device cpu --skip compile": "a quick run without a GPU",
    }


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RunSettings):
    """Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by stock
    transformers, with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy; and by
    stock transformers with a loss of lowtide bench head, torchtune's with compiled layers too. A peer's layers are
    checkpointed; NAME-attention saves attention's output, NAME-all saves everything. Each way is a process of its own.
    The last column is the time over that of the first way.
    """

    benchmark, summary = "step", "a training step, end to end"
    exit_1 = "lowtide itself failed, other than by running out of memory"
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
    sdpa: Sdpa = setting("auto", "attention's kernel, the same for all; auto: as PyTorch chooses")  # noqa: RUF009
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

"""The settings of the benchmarks of single operations: each field's default and meaning, and each one's help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from lowtide.bench.settings import PeerSettings, Precision, RunSettings, ShapeSettings, numbers, setting
from lowtide.bench.shapes import APPLY, BATCHES, EXPERTS, MLPS, PAIRS, TOKENS, Shape
from lowtide.bench.shapes import HEADS as SHAPES
from lowtide.bench.way import HEADS

HEAD_PEERS = (
    "lowtide", "lowtide-float32-head", "lowtide-liger-memory", "naive", "compile", "torch-4096", "liger", "liger-large",
    "cce", "cce-exact", *HEADS,
)  # fmt: skip
TOKEN_COUNTS = tuple(2**k for k in range(10, 19))
AXES = {"tokens": "N", "hidden": "D", "vocab": "V"}  # of the sweep, by option
AROUND = tuple(2.0**k for k in range(-4, 3))  # times the shape's own size, where no sizes are given
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ErrorSettings(PeerSettings, ShapeSettings):
    """What benchmarks of values and gradients share: what errors are against, and the precision of float32 GEMMs."""

    error: bool = setting(True, "do not compute the errors of values and gradients")
    float64: bool = setting(False, "errors against float64 GEMMs, not the next wider dtype's (float32 for bfloat16)")
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
        "--no-table --tokens all": "from 1024 to 262144 tokens",
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
        (), "also measure lowtide with these numbers of tokens in place of N; all: 1024 to 262144", metavar="N"
    )
    table: bool = setting(True, "leave out the peers' table and measure only what other options request")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("workspace_mib", all(0 < v < math.inf for v in self.sweep_mib), "numbers above 0")
        self._require("workspace_mib", self.sweep or not self.workspace_mib, "--sweep beside it")
        self._require("tokens", all(n > 0 for n in self.token_counts), "whole numbers above 0, or all")
        anything = self.table or self.sweep or self.settings or self.tokens
        self._require("table", bool(anything), "--sweep, --settings or --tokens beside --no-table")

    @property
    def sweep_mib(self) -> tuple[float, ...]:
        """The sweep's values; empty: chosen by the shape."""
        return numbers("workspace_mib", self.workspace_mib, float)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens."""
        return TOKEN_COUNTS if "all" in self.tokens else numbers("tokens", self.tokens, int)


@dataclass(frozen=True, kw_only=True)
class SweepBenchConfig(PeerSettings):
    """Rate, peak memory and errors of linear + cross entropy, forward and backward, over the number of tokens N, the
    hidden size D and the vocabulary V, each with the other two fixed: lowtide bench head, shape by shape, drawn as nine
    panels. The rate is 6NDV over the time for every peer. An estimate of the run's time is printed first. The result is
    written after each row: the same command continues a run that was interrupted.
    """

    benchmark, summary = "sweep", "the same over tokens, hidden size and vocabulary"
    exit_1 = "lowtide itself failed, other than by running out of memory"
    usual_peers = (
        "lowtide", "naive", "compile", "liger", "cce", "torch", "torch-cutedsl", "auto-chunker", "trl", "quack",
        "liger-sm90", "checkpoint-8", "checkpoint-compile-8", "forward-8", "forward-triton-8", "torchtune-8",
    )  # fmt: skip
    known: ClassVar = {"peers": HEAD_PEERS, "shapes": SHAPES.named, "usual": usual_peers}
    examples: ClassVar = {
        "": "around 16384 tokens, hidden size 2048, vocabulary 131072",
        "--tokens 1024 2048 4096 8192 --hidden 512 1024 2048 --vocab 8192 32768 131072": "your own lines",
        "--shape gemma-2b --hidden none --only lowtide liger --seconds 60": "two lines, as far as a minute goes",
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
    only: tuple[str, ...] = setting(
        (), "measure these out of {peers} (default: {usual})", metavar="PEER", known="peers"
    )
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    seconds: float | None = setting(
        None, "do not start a shape that would end later; the same command continues from there", metavar="S"
    )
    fresh: bool = setting(False, "start over where the folder has an unfinished result of the same sweep")
    warm: int = setting(2, "rounds that do not count", last=True, least=0)
    reps: int = setting(4, "rounds that count; each runs every peer once, beside the limit", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in AXES:
            self._require(axis, all(size > 0 for size in self.sizes(axis)), "whole numbers above 0, or none")
        self._require("tokens", bool(self.shapes), "one line that is not none")
        self._require_positive("seconds")

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

    @property
    def continued_by(self) -> dict[str, Any]:
        """The settings that a run has to share to continue this one."""
        return {name: value for name, value in self.recorded().items() if name not in ("seconds", "fresh")}


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
            "lowtide", "lowtide-float32-head", "lowtide-trl-memory", "naive", "compile", "trl", "trl-vocabulary",
            "verl-style", "liger-grpo", "liger-scaled", "quack", "cce-exact", "torch", "torch-cutedsl", "auto-chunker",
            "checkpoint-8", "checkpoint-compile-8", "torchtune-8",
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
class DivergenceBenchConfig(TokenBenchConfig):
    """Time, peak memory and errors of a student's mean divergence from a teacher, forward and backward for the student:
    forward KL, reverse KL and JSD(0.5), of lowtide and every peer that can be imported, interleaved in one process with
    the limit: the bare GEMMs of both sides' logits and the student's two gradients. lowtide's first row is of the mean,
    lowtide-none of a value per token. Peaks,
    errors and rows are those of lowtide bench stats.
    """

    benchmark, summary = "divergence", "distance from a teacher"
    choice = PAIRS
    known: ClassVar = {
        "peers": (
            "lowtide", "lowtide-none", "lowtide-float32", "lowtide-trl-memory", "naive", "compile", "checkpoint", "trl",
            "liger-jsd", "liger-chunked", "liger-kl",
        ),
        "works": ("forward-kl", "reverse-kl", "jsd"),
    }  # fmt: skip
    examples: ClassVar = {
        "--shape all": "a Llama of 8B teaches one of 1B, and one of its own size",
        "--shape 8192,1024,151936,2560 --work jsd": "your own shape: tokens, student's D, vocabulary, teacher's D",
        "--shape 64,32,1000,48 --device cpu --skip compile liger-chunked": "a quick run without a GPU",
    }


@dataclass(frozen=True, kw_only=True)
class ContrastiveBenchConfig(TokenBenchConfig):
    """Time, peak memory and errors of the contrastive loss of Q queries among K keys, forward and backward, from
    normalised embeddings: in-batch, and with a mask of 1% of the keys; of lowtide and every peer that can be imported,
    interleaved in one process with the limit, the three bare GEMMs. cached-mnrl is the loss step of
    sentence-transformers' CachedMultipleNegativesRankingLoss in its mini-batches of 32 queries. Peaks, errors and rows
    are those of lowtide bench stats.
    """

    benchmark, summary = "contrastive", "InfoNCE without the similarities"
    choice = BATCHES
    known: ClassVar = {
        "peers": ("lowtide", "naive", "compile", "checkpoint", "cached-mnrl", "cached-mnrl-1024"),
        "works": ("in-batch", "masked"),
    }
    examples: ClassVar = {
        "": "65536 queries and keys with every peer",
        "--shape 32768,768,65536 --only lowtide cached-mnrl --no-error": "a hard negative for each query, two peers",
        "--shape 256,64,512 --device cpu --skip compile": "a quick run without a GPU",
    }


@dataclass(frozen=True, kw_only=True)
class ApplyBenchConfig(ShapeSettings):
    """Peak memory, time and errors of functions of the logits, forward and backward: with all logits in float32, and
    with linear_apply in two chunks, in its default chunks, and with one result per token. Peaks are above the inputs
    and include the gradients; errors of the value and of the gradients (hidden states, weight, bias) are against
    autograd on GEMMs in a wider dtype.
    """

    benchmark, summary = "apply", "any function of the logits"
    exit_1 = "linear_apply failed"
    choice = APPLY
    known: ClassVar = {"functions": ("cross-entropy", "focal", "entropy", "top-k")}
    examples: ClassVar = {
        "--shape all": "4 x 4096 tokens, hidden size 4096, vocabulary 128256; and 64 x 512 tokens, 768, 32000",
        "--shape 256,64,4096 --device cpu": "a quick run without a GPU",
        "--no-table --train --grpo": "50 steps of a Llama of 1B, with the stock loss and linear_apply; then with GRPO",
    }

    only: tuple[str, ...] = setting((), "these functions alone: {functions}", metavar="FUNCTION", known="functions")
    table: bool = setting(True, "leave out the functions' table and only train")
    train: bool = setting(False, "also train a Llama with the stock loss and with linear_apply, from the same weights")
    grpo: bool = setting(False, "the same with GRPO's objective, on all logits and with linear_apply")
    model: str = setting(
        "auto",
        "shape of that Llama, as in lowtide train --model; auto: llama-3.2-1b on a GPU, lowtide-small on a CPU",
        metavar="NAME",
    )
    steps: int = setting(50, "of training", least=1)
    batch: int = setting(4, "sequences of a training step", least=1)
    seq_len: int = setting(1024, "tokens of a sequence", least=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("table", self.table or self.train or self.grpo, "--train or --grpo beside --no-table")


@dataclass(frozen=True, kw_only=True)
class LayersBenchConfig(RunSettings):
    """Time and bandwidth of what stands between a decoder layer's GEMMs, forward and backward: RMS normalisation, the
    same after a residual sum, and rotary embedding, by lowtide, PyTorch (eager, compiled, its own fused operation) and
    Liger. GB/s counts the bytes that have to be read and written, whatever a peer moves. "saved" is what
    autograd saves for backward beyond inputs and the residual stream.
    """

    benchmark, summary = "layers", "norm and rotary embedding"
    exit_1 = "lowtide failed"
    known: ClassVar = {
        "ops": ("norm", "add-norm", "rotary"),
        "names": ("lowtide", "F.rms_norm", "liger", "compile", "eager"),
    }
    examples: ClassVar = {
        "": "65536 tokens of a Llama-3.2-1B",
        "--hidden 4096 --head-dim 128": "of a Llama-3-8B",
        "--tokens 256 --hidden 64 --device cpu": "a quick run without a GPU",
    }

    op: tuple[str, ...] = setting((), "these operations alone: {ops}", metavar="OP", known="ops")
    only: tuple[str, ...] = setting((), "these peers alone: {names}", metavar="PEER", known="names")
    tokens: int = setting(65536, "N", least=64)
    hidden: int = setting(2048, "D, of the norms", least=1)
    heads: int = setting(32, "of the queries", least=1)
    kv_heads: int = setting(8, "of the keys", least=1)
    head_dim: int = setting(64, "of a head; all of it is rotated", least=2)
    warm: int = setting(3, "rounds that do not count", last=True, least=0)
    reps: int = setting(10, "rounds that count; each runs all peers of an operation once", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("head_dim", self.head_dim % 2 == 0, "an even number")


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
class ExpertsBenchConfig(PeerSettings, ShapeSettings):
    """Time and memory of a mixture's experts, forward and backward with a fixed routing, at both levels of lowtide's
    and of every peer that can be imported, interleaved in one process with the limit: the bare grouped GEMMs, 6, or 7
    where gate and up are recomputed. gpt-oss-20b has its limits, biases and layout. Figures as in lowtide bench mlp. A
    peer that fails is a row with the reason.
    """

    benchmark, summary, stem = "experts", "a mixture's experts", "{benchmark}-{dtype}"
    choice = EXPERTS
    known: ClassVar = {"peers": ("lowtide-0", "lowtide-1", "liger", "grouped_mm", "eager")}
    examples: ClassVar = {
        "--shape all": "a layer of Qwen3-30B-A3B and of gpt-oss-20b, at 16384 tokens",
        "--shape 4096,2048,1408,64,6 --skip eager": "your own sizes, without the loop over experts",
        "--shape 64,32,24,8,2 --device cpu": "a quick run without a GPU",
    }

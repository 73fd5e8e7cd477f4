"""Every setting of the benchmarks, its default and its meaning, once; the command line is made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from lowtide.bench.divergence import KINDS, PAIR_SHAPES, PairShape, parse_pair
from lowtide.bench.divergence_peers import DIVERGENCE_PEERS
from lowtide.bench.harness import Peer
from lowtide.bench.mlp_peers import MLP_PEERS, MlpShape, parse_mlp
from lowtide.bench.peers import PEERS
from lowtide.bench.settings import Dtype, RunSettings, Settings, command_of, number, setting
from lowtide.bench.shapes import APPLY_SHAPES, SHAPES, Shape, parse_numbers, parse_shape
from lowtide.bench.stats import WORKS
from lowtide.bench.stats_peers import STATS_PEERS
from lowtide.errors import ArgumentValueError, message
from lowtide.memory.policy_words import parse_policies, split_states

ALL = "all"
TOKENS = tuple(2**k for k in range(10, 19))


@dataclass(frozen=True, kw_only=True)
class HeadBenchConfig(RunSettings):
    """What `lowtide.bench.head.run` measures; each field is the option of ``lowtide bench head`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    shape: tuple[str, ...] = setting(
        (), "named shapes ({shapes}), three numbers N,D,V, or all; without it, llama-1b", metavar="SHAPE"
    )
    only: tuple[str, ...] = setting((), "measure these alone: {peers}", metavar="PEER")
    skip: tuple[str, ...] = setting((), "leave these out", metavar="PEER")
    sweep: bool = setting(False, "also sweep workspace_mib and draw time against memory, every peer a point")
    workspace_mib: tuple[str, ...] = setting(
        (), "the sweep's values; without it, powers of two from all logits down to a 64th", metavar="MIB"
    )
    settings: bool = setting(False, "also measure other uses of the loss: {settings}")
    tokens: tuple[str, ...] = setting(
        (), "also measure lowtide with these numbers of tokens in place of N; all: 1024 to 262144", metavar="N"
    )
    table: bool = setting(True, "leave out the peers' table and measure only what other options ask for")
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    dtype: Dtype = setting("auto", "of the products' operands; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    output: str = setting(".", "folder for the result (json) and the pictures (png)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("only", "skip"):
            for peer in getattr(self, name):
                if peer not in PEERS:
                    raise ArgumentValueError(message(name, f"names out of {', '.join(PEERS)}", repr(peer)))
        self._require("workspace_mib", all(0 < v < math.inf for v in self.sweep_mib), "numbers above 0")
        self._require("workspace_mib", self.sweep or not self.workspace_mib, "--sweep beside it")
        self._require("tokens", all(n > 0 for n in self.token_counts), "whole numbers above 0, or all")
        anything = self.table or self.sweep or self.settings or self.tokens
        self._require("table", bool(anything), "--sweep, --settings or --tokens beside --no-table")
        self._require("skip", bool(self.peers), "at least one peer that is left")
        assert self.shapes

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes, each once."""
        if ALL in self.shape:
            return tuple(SHAPES.values())
        return tuple(dict.fromkeys(parse_shape(text) for text in self.shape or ("llama-1b",)))

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        return tuple(name for name in PEERS if name not in self.skip and (not self.only or name in self.only))

    @property
    def sweep_mib(self) -> tuple[float, ...]:
        """The sweep's values; empty: chosen by the shape."""
        return tuple(number("workspace_mib", text, float) for text in self.workspace_mib)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens."""
        if ALL in self.tokens:
            return TOKENS
        return tuple(number("tokens", text, int) for text in self.tokens)

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("head", self)


@dataclass(frozen=True, kw_only=True)
class MlpBenchConfig(RunSettings):
    """What `lowtide.bench.mlp.run` measures; each field is the option of ``lowtide bench mlp`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    shape: tuple[str, ...] = setting(
        (), "named shapes ({shapes}), five numbers batch,seq,hidden,intermediate,layers, or {groups}; without it,"
        " llama-8b-32k", metavar="SHAPE",
    )  # fmt: skip
    only: tuple[str, ...] = setting((), "measure these alone: {peers}", metavar="PEER")
    skip: tuple[str, ...] = setting((), "leave these out", metavar="PEER")
    dtype: Dtype = setting("auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("only", "skip"):
            self._require(name, set(getattr(self, name)) <= set(MLP_PEERS), f"names out of {', '.join(MLP_PEERS)}")
        self._require("skip", bool(self.peers), "at least one peer that is left")
        assert self.shapes

    @property
    def shapes(self) -> tuple[MlpShape, ...]:
        """The shapes, each once."""
        named = [shape for text in self.shape or ("llama-8b-32k",) for shape in parse_mlp(text)]
        return tuple(dict.fromkeys(named))

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        return tuple(name for name in MLP_PEERS if name not in self.skip and (not self.only or name in self.only))

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("mlp", self)


APPLY_FUNCTIONS = ("cross-entropy", "focal", "entropy", "top-k")


@dataclass(frozen=True, kw_only=True)
class ApplyBenchConfig(RunSettings):
    """What `lowtide.bench.apply.run` measures; each field is the option of ``lowtide bench apply`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    shape: tuple[str, ...] = setting(
        (), "named shapes ({shapes}), three numbers N,D,V, or all; without it, 4x4096", metavar="SHAPE"
    )
    only: tuple[str, ...] = setting((), "these functions alone: {functions}", metavar="FUNCTION")
    table: bool = setting(True, "leave out the functions' table and only train")
    train: bool = setting(False, "also train a Llama with the stock loss and with linear_apply, from the same weights")
    grpo: bool = setting(False, "likewise with GRPO's objective and with that of logits in full")
    model: str = setting(
        "auto", "shape of that Llama, as in lowtide train --model; auto: llama-3.2-1b on a GPU, lowtide-small on a CPU",
        metavar="NAME",
    )  # fmt: skip
    steps: int = setting(50, "of training")
    batch: int = setting(4, "sequences of a training step")
    seq_len: int = setting(1024, "tokens of a sequence")
    reps: int = setting(6, "rounds that count", last=True)
    dtype: Dtype = setting("auto", "of inputs and model; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("steps", 1), ("batch", 1), ("seq_len", 8)):
            self._require_at_least(name, least)
        self._require("only", set(self.only) <= set(APPLY_FUNCTIONS), f"names out of {', '.join(APPLY_FUNCTIONS)}")
        self._require("table", self.table or self.train or self.grpo, "--train or --grpo beside --no-table")
        assert self.shapes

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes, each once."""
        if ALL in self.shape:
            return tuple(APPLY_SHAPES.values())
        return tuple(dict.fromkeys(parse_shape(text, APPLY_SHAPES) for text in self.shape or ("4x4096",)))

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions, in the table's order."""
        return tuple(name for name in APPLY_FUNCTIONS if not self.only or name in self.only)

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("apply", self)


LAYER_OPS = ("norm", "add-norm", "rotary")


@dataclass(frozen=True, kw_only=True)
class LayersBenchConfig(RunSettings):
    """What `lowtide.bench.layers.run` measures; each field is the option of ``lowtide bench layers`` of the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    op: tuple[str, ...] = setting((), "these operations alone: {ops}", metavar="OP")
    only: tuple[str, ...] = setting((), "these peers alone, by the names in the tables", metavar="PEER")
    tokens: int = setting(65536, "N")
    hidden: int = setting(2048, "D, of the norms")
    heads: int = setting(32, "of the queries")
    kv_heads: int = setting(8, "of the keys")
    head_dim: int = setting(64, "of a head; all of it is rotated")
    warm: int = setting(3, "rounds that do not count", last=True)
    reps: int = setting(10, "rounds that count; all peers of an operation take turns", last=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("tokens", 64), ("hidden", 1), ("heads", 1), ("kv_heads", 1), ("head_dim", 2)):
            self._require_at_least(name, least)
        self._require("head_dim", self.head_dim % 2 == 0, "an even number")
        self._require("op", set(self.op) <= set(LAYER_OPS), f"names out of {', '.join(LAYER_OPS)}")

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("layers", self)


STEP_PEERS = (
    *(f"{who}{keep}" for who in ("liger", "stock") for keep in ("", "-attention", "-all")),
    *("compile", "compile-all"),  # a checkpoint cannot look into a compiled layer
)
Sdpa = Literal["auto", "flash", "cudnn", "efficient", "math"]


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RunSettings):
    """What `lowtide.bench.step.run` measures; each field is the option of ``lowtide bench step`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    tokens: tuple[str, ...] = setting((), "lengths of a sequence; without it, 8192 32768 65536", metavar="T")
    peer: tuple[str, ...] = setting(
        ("liger", "liger-attention", "stock", "compile"), "these peers: {peers}, or none", metavar="PEER"
    )
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"), "lowtide with these policies: {policies}", metavar="POLICY"
    )
    sdpa: Sdpa = setting("auto", "attention's kernel, the same for all; auto: as PyTorch chooses")  # noqa: RUF009
    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    batch: int = setting(1, "sequences of a step")
    warm: int = setting(2, "steps that do not count", last=True)
    reps: int = setting(4, "steps that count; the median is taken", last=True)
    dtype: Dtype = setting("auto", "of the weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    seed: int = setting(0, "of weights and tokens", last=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least("batch", 1)
        self._require("tokens", all(n > 1 for n in self.lengths), "whole numbers above 1")
        self._require("peer", set(self.peer) <= {*STEP_PEERS, "none"}, f"names out of {', '.join(STEP_PEERS)}, or none")
        for text in self.policy:
            parse_policies(split_states(text)[0])
        self._require("sdpa", self.sdpa in get_args(Sdpa), " or ".join(get_args(Sdpa)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a sequence."""
        return tuple(sorted(number("tokens", text, int) for text in self.tokens or ("8192", "32768", "65536")))

    @property
    def ways(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy."""
        return (*(peer for peer in self.peer if peer != "none"), *(f"lowtide:{text}" for text in self.policy))

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("step", self)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Settings):
    """How `lowtide.bench.tune.run` searches; each field is the option of ``lowtide bench tune`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    shape: str = setting("2048,2048,32768", "of one chunk: C,D,V rows, hidden size and vocabulary", metavar="C,D,V")
    seconds: float = setting(60.0, "for all of it: a candidate that would end later is not begun", metavar="S")
    warm: int = setting(2, "timed runs that do not count")
    reps: int = setting(7, "timed runs that count, interleaved with torch.mm; the median is taken")
    seed: int = setting(0, "of the random inputs")
    dry_run: bool = setting(False, "measure, and leave the file of tuned GPUs as it is")

    def __post_init__(self) -> None:
        for name, least in (("warm", 0), ("reps", 1), ("seed", 0)):
            self._require_at_least(name, least)
        self._require("seed", self.seed < 2**32, "a whole number below 2**32")
        self._require("seconds", 0 < self.seconds < math.inf, "a number above 0")
        self._require("shape", parse_numbers(self.shape) is not None, "three numbers C,D,V above 0")

    @property
    def chunk(self) -> Shape:
        """The shape, its N being the chunk's rows."""
        return parse_shape(self.shape)


@dataclass(frozen=True, kw_only=True)
class TokenBenchConfig(RunSettings):
    """What benchmarks of values for each token have in common.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark: ClassVar[str]
    known_peers: ClassVar[Mapping[str, Peer]]
    known_works: ClassVar[tuple[str, ...]]

    shape: tuple[str, ...] = setting((), "named shapes ({shapes}), numbers, or all", metavar="SHAPE")
    work: tuple[str, ...] = setting((), "these tables alone: {works}", metavar="WORK")
    only: tuple[str, ...] = setting((), "measure these alone: {peers}", metavar="PEER")
    skip: tuple[str, ...] = setting((), "leave these out", metavar="PEER")
    error: bool = setting(True, "do not compute the errors of values and gradients")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("only", self.known_peers), ("skip", self.known_peers), ("work", self.known_works)):
            self._require(name, set(getattr(self, name)) <= set(known), f"names out of {', '.join(known)}")
        self._require("skip", bool(self.peers), "at least one peer that is left")
        assert self.shapes

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes, each once."""
        raise NotImplementedError

    @property
    def works(self) -> tuple[str, ...]:
        """The names of the tables, in order."""
        return tuple(name for name in self.known_works if not self.work or name in self.work)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of those that are measured, in the table's order."""
        names = self.known_peers
        return tuple(name for name in names if name not in self.skip and (not self.only or name in self.only))

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of(self.benchmark, self)


@dataclass(frozen=True, kw_only=True)
class StatsBenchConfig(TokenBenchConfig):
    """What `lowtide.bench.token_run.run_stats` measures; each field is the option of ``lowtide bench stats``.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "stats"
    known_peers = STATS_PEERS
    known_works = tuple(WORKS)

    shape: tuple[str, ...] = setting(
        (), "named shapes ({shapes}), three numbers N,D,V, or all; without it, qwen-4k", metavar="SHAPE"
    )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes, each once."""
        if ALL in self.shape:
            return tuple(SHAPES.values())
        return tuple(dict.fromkeys(parse_shape(text) for text in self.shape or ("qwen-4k",)))


@dataclass(frozen=True, kw_only=True)
class DivergenceBenchConfig(TokenBenchConfig):
    """What `lowtide.bench.token_run.run_divergence` measures; each field is the option of ``lowtide bench divergence``.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "divergence"
    known_peers = DIVERGENCE_PEERS
    known_works = tuple(KINDS)

    shape: tuple[str, ...] = setting(
        (), "named shapes ({shapes}), four numbers N,D,V,D of the teacher, or all; without it, llama-8b-to-1b",
        metavar="SHAPE",
    )  # fmt: skip

    @property
    def shapes(self) -> tuple[PairShape, ...]:
        """The shapes, each once."""
        if ALL in self.shape:
            return tuple(PAIR_SHAPES.values())
        return tuple(dict.fromkeys(parse_pair(text) for text in self.shape or ("llama-8b-to-1b",)))

"""Every setting of the benchmarks, its default and its meaning, once; the command line is made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from lowtide.bench.divergence import KINDS, PAIR_SHAPES, parse_pair
from lowtide.bench.divergence_peers import DIVERGENCE_PEERS
from lowtide.bench.mlp_peers import GROUPS, MLP_PEERS, MLP_SHAPES, MlpShape, parse_mlp
from lowtide.bench.peers import PEERS
from lowtide.bench.problem import SETTINGS
from lowtide.bench.settings import (
    ALL,
    Dtype,
    PeerSettings,
    RunSettings,
    Sdpa,
    Settings,
    ShapeSettings,
    StepSettings,
    number,
    setting,
)
from lowtide.bench.shapes import APPLY_SHAPES, SHAPES, Shape, parse_numbers, parse_shape
from lowtide.bench.stats import WORKS
from lowtide.bench.stats_peers import STATS_PEERS
from lowtide.memory.policy_words import FORM, STATES_FORM, parse_policies, split_states

TOKENS = tuple(2**k for k in range(10, 19))
_ONLY, _SKIP, _WORK = "measure these alone: {known}", "leave these out", "these tables alone: {known}"


def _shape(named: Mapping[str, object], numbers: str, usual: str) -> Any:
    about = f"named shapes ({', '.join(named)}), {numbers}, or all; without it, {usual}"
    return setting((), about, metavar="SHAPE")


@dataclass(frozen=True, kw_only=True)
class HeadBenchConfig(PeerSettings, ShapeSettings):
    """What `lowtide.bench.head` measures; each field is the option of ``lowtide bench head`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "head"
    known_peers = PEERS
    named_shapes, usual_shape, parse = SHAPES, "llama-1b", staticmethod(parse_shape)

    shape: tuple[str, ...] = _shape(named_shapes, "three numbers N,D,V", usual_shape)
    only: tuple[str, ...] = setting((), _ONLY, metavar="PEER", known=PEERS)
    skip: tuple[str, ...] = setting((), _SKIP, metavar="PEER", known=PEERS)
    sweep: bool = setting(False, "also sweep workspace_mib and draw time against memory, every peer a point")
    workspace_mib: tuple[str, ...] = setting(
        (), "the sweep's values; without it, powers of two from all logits down to a 64th", metavar="MIB"
    )
    settings: bool = setting(
        False, f"also measure other uses of the loss: {', '.join(setting.name for setting in SETTINGS)}"
    )
    tokens: tuple[str, ...] = setting(
        (), "also measure lowtide with these numbers of tokens in place of N; all: 1024 to 262144", metavar="N"
    )
    table: bool = setting(True, "leave out the peers' table and measure only what other options ask for")
    error: bool = setting(True, "do not compute the errors of losses and gradients")
    dtype: Dtype = setting("auto", "of the products' operands; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    output: str = setting(".", "folder for the result (json) and the plots (png)", metavar="DIR", last=True)

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
        return tuple(number("workspace_mib", text, float) for text in self.workspace_mib)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens."""
        if ALL in self.tokens:
            return TOKENS
        return tuple(number("tokens", text, int) for text in self.tokens)


@dataclass(frozen=True, kw_only=True)
class MlpBenchConfig(PeerSettings, ShapeSettings):
    """What `lowtide.bench.mlp` measures; each field is the option of ``lowtide bench mlp`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "mlp"
    known_peers = MLP_PEERS

    shape: tuple[str, ...] = setting(
        (), f"named shapes ({', '.join(MLP_SHAPES)}), five numbers batch,seq,hidden,intermediate,layers, or"
        f" {', '.join(GROUPS)}; without it, llama-8b-32k", metavar="SHAPE",
    )  # fmt: skip
    only: tuple[str, ...] = setting((), _ONLY, metavar="PEER", known=MLP_PEERS)
    skip: tuple[str, ...] = setting((), _SKIP, metavar="PEER", known=MLP_PEERS)
    dtype: Dtype = setting("auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009

    @property
    def shapes(self) -> tuple[MlpShape, ...]:
        """The shapes, each once."""
        named = [shape for text in self.shape or ("llama-8b-32k",) for shape in parse_mlp(text)]
        return tuple(dict.fromkeys(named))


APPLY_FUNCTIONS = ("cross-entropy", "focal", "entropy", "top-k")


@dataclass(frozen=True, kw_only=True)
class ApplyBenchConfig(ShapeSettings):
    """What `lowtide.bench.apply` measures; each field is the option of ``lowtide bench apply`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "apply"
    named_shapes, usual_shape, parse = APPLY_SHAPES, "4x4096", partial(parse_shape, named=APPLY_SHAPES)

    shape: tuple[str, ...] = _shape(named_shapes, "three numbers N,D,V", usual_shape)
    only: tuple[str, ...] = setting((), "these functions alone: {known}", metavar="FUNCTION", known=APPLY_FUNCTIONS)
    table: bool = setting(True, "leave out the functions' table and only train")
    train: bool = setting(False, "also train a Llama with the stock loss and with linear_apply, from the same weights")
    grpo: bool = setting(False, "likewise with GRPO's objective and with that of logits in full")
    model: str = setting(
        "auto", "shape of that Llama, as in lowtide train --model; auto: llama-3.2-1b on a GPU, lowtide-small on a CPU",
        metavar="NAME",
    )  # fmt: skip
    steps: int = setting(50, "of training", least=1)
    batch: int = setting(4, "sequences of a training step", least=1)
    seq_len: int = setting(1024, "tokens of a sequence", least=8)
    reps: int = setting(6, "rounds that count", last=True, least=1)
    dtype: Dtype = setting("auto", "of inputs and model; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("table", self.table or self.train or self.grpo, "--train or --grpo beside --no-table")

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions, in the table's order."""
        return tuple(name for name in APPLY_FUNCTIONS if not self.only or name in self.only)


LAYER_OPS = ("norm", "add-norm", "rotary")


@dataclass(frozen=True, kw_only=True)
class LayersBenchConfig(RunSettings):
    """What `lowtide.bench.layers` measures; each field is the option of ``lowtide bench layers`` of the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "layers"

    op: tuple[str, ...] = setting((), "these operations alone: {known}", metavar="OP", known=LAYER_OPS)
    only: tuple[str, ...] = setting((), "these peers alone, by the names in the tables", metavar="PEER")
    tokens: int = setting(65536, "N", least=64)
    hidden: int = setting(2048, "D, of the norms", least=1)
    heads: int = setting(32, "of the queries", least=1)
    kv_heads: int = setting(8, "of the keys", least=1)
    head_dim: int = setting(64, "of a head; all of it is rotated", least=2)
    warm: int = setting(3, "rounds that do not count", last=True, least=0)
    reps: int = setting(10, "rounds that count; all peers of an operation take turns", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("head_dim", self.head_dim % 2 == 0, "an even number")


STEP_PEERS = (
    *(f"{who}{keep}" for who in ("liger", "stock") for keep in ("", "-attention", "-all")),
    *("compile", "compile-all"),  # a checkpoint cannot look into a compiled layer
)
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(StepSettings, RunSettings):
    """What `lowtide.bench.step` measures; each field is the option of ``lowtide bench step`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "step"

    tokens: tuple[str, ...] = setting((), "lengths of a sequence; without it, 8192 32768 65536", metavar="T")
    peer: tuple[str, ...] = setting(
        ("liger", "liger-attention", "stock", "compile"), "these peers: {known}", metavar="PEER",
        known=(*STEP_PEERS, NONE),
    )  # fmt: skip
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"), f"lowtide with these policies: {FORM}; {STATES_FORM}",
        metavar="POLICY",
    )  # fmt: skip
    sdpa: Sdpa = setting("auto", "attention's kernel, the same for all; auto: as PyTorch chooses")  # noqa: RUF009
    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    batch: int = setting(1, "sequences of a step", least=1)
    warm: int = setting(2, "steps that do not count", last=True, least=0)
    reps: int = setting(4, "steps that count; the median is taken", last=True, least=1)
    dtype: Dtype = setting("auto", "of the weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    seed: int = setting(0, "of weights and tokens", last=True, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("tokens", all(n > 1 for n in self.lengths), "whole numbers above 1")
        for text in self.policy:
            parse_policies(split_states(text)[0])

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a sequence."""
        return tuple(sorted(number("tokens", text, int) for text in self.tokens or ("8192", "32768", "65536")))

    @property
    def ways(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy."""
        return (*(peer for peer in self.peer if peer != NONE), *(f"lowtide:{text}" for text in self.policy))


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Settings):
    """How `lowtide.bench.tune.run` searches; each field is the option of ``lowtide bench tune`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "tune"

    shape: str = setting("2048,2048,32768", "of one chunk: C,D,V rows, hidden size and vocabulary", metavar="C,D,V")
    seconds: float = setting(60.0, "for all of it: a candidate that would end later is not begun", metavar="S")
    warm: int = setting(2, "timed runs that do not count", least=0)
    reps: int = setting(7, "timed runs that count, interleaved with torch.mm; the median is taken", least=1)
    seed: int = setting(0, "of the random inputs", least=0)
    dry_run: bool = setting(False, "measure, and leave the file of tuned GPUs as it is")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("seed", self.seed < 2**32, "a whole number below 2**32")
        self._require_positive("seconds")
        self._require("shape", parse_numbers(self.shape) is not None, "three numbers C,D,V above 0")

    @property
    def chunk(self) -> Shape:
        """The shape, its N being the chunk's rows."""
        return parse_shape(self.shape)


@dataclass(frozen=True, kw_only=True)
class TokenBenchConfig(PeerSettings, ShapeSettings):
    """What benchmarks of values for each token have in common.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    known_works: ClassVar[tuple[str, ...]]

    work: tuple[str, ...] = setting((), _WORK, metavar="WORK")
    error: bool = setting(True, "do not compute the errors of values and gradients")

    @property
    def works(self) -> tuple[str, ...]:
        """The names of the tables, in order."""
        return tuple(name for name in self.known_works if not self.work or name in self.work)


@dataclass(frozen=True, kw_only=True)
class StatsBenchConfig(TokenBenchConfig):
    """What ``lowtide bench stats`` measures; each field is the option with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "stats"
    known_peers, known_works = STATS_PEERS, tuple(WORKS)
    named_shapes, usual_shape, parse = SHAPES, "qwen-4k", staticmethod(parse_shape)

    shape: tuple[str, ...] = _shape(named_shapes, "three numbers N,D,V", usual_shape)
    work: tuple[str, ...] = setting((), _WORK, metavar="WORK", known=WORKS)
    only: tuple[str, ...] = setting((), _ONLY, metavar="PEER", known=STATS_PEERS)
    skip: tuple[str, ...] = setting((), _SKIP, metavar="PEER", known=STATS_PEERS)


@dataclass(frozen=True, kw_only=True)
class DivergenceBenchConfig(TokenBenchConfig):
    """What ``lowtide bench divergence`` measures; each field is the option with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "divergence"
    known_peers, known_works = DIVERGENCE_PEERS, tuple(KINDS)
    named_shapes, usual_shape, parse = PAIR_SHAPES, "llama-8b-to-1b", staticmethod(parse_pair)

    shape: tuple[str, ...] = _shape(named_shapes, "four numbers N,D,V,D of the teacher", usual_shape)
    work: tuple[str, ...] = setting((), _WORK, metavar="WORK", known=KINDS)
    only: tuple[str, ...] = setting((), _ONLY, metavar="PEER", known=DIVERGENCE_PEERS)
    skip: tuple[str, ...] = setting((), _SKIP, metavar="PEER", known=DIVERGENCE_PEERS)

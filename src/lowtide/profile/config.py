"""Every setting of ``lowtide profile``, its default and its meaning, once; the command line is made from it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from lowtide.bench.settings import Device, Dtype, options_of, setting
from lowtide.bench.way import IMPLEMENTATIONS, Way
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import parse_gib
from lowtide.memory.planner.optimizers import OPTIMIZERS

Optimizer = Literal["adamw", "adamw-foreach", "adamw-8bit", "sgd", "sgd-momentum"]
Fsdp = Literal["none", "zero2", "zero3"]
AUTO = "auto"
FULL = "zero3"
NOBODY = "none"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What `lowtide.profile.run.run` does; each field is the option of ``lowtide profile`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    model: str = setting(
        AUTO,
        "whose shape, with random weights: a config.json, a folder with one, or a built-in name: {names}; "
        "of one that sees or hears as well, the language model inside; "
        "auto: llama-3.2-1b on a GPU, lowtide-small on a CPU",
        metavar="MODEL",
    )
    impl: tuple[str, ...] = setting(
        ("stock", "lowtide"),
        "who: {impls}, with commas or spaces between them; NAME:POLICY for one with a policy of its own, also twice; "
        "none: nobody",
        metavar="NAME",
    )
    seq_len: int = setting(0, "tokens of a sequence; 0: 8192 on a GPU, 1024 on a CPU")
    batch_size: int = setting(1, "sequences of a step, on each GPU")
    policy: tuple[str, ...] = setting(
        ("input",),
        "what layers keep for backward: {policies}. For all, or NAME=POLICY for one. "
        "Peers know all, attention, input (layer checkpointing), attention-offload and input-offload (checkpoints in "
        "host memory)",
        metavar="POLICY",
    )
    include: tuple[str, ...] = setting(
        (), "json files of earlier runs, whose implementations are shown too; with --impl none, only these",
        metavar="FILE",
    )  # fmt: skip
    optimizer: Optimizer = setting("adamw", "the optimizer; adamw: PyTorch's fused one")  # noqa: RUF009
    lora: int = setting(0, "train adapters of this rank on all linear layers but the last, all else frozen")
    offload_params: bool = setting(
        False, "parameters, gradients and optimizer states in host memory, by PyTorch's FSDP2; the optimizer runs there"
    )
    fsdp: Fsdp = setting("none", "FSDP2; zero2: gradients and states are sharded; zero3: weights too")  # noqa: RUF009
    gpus: int = setting(1, "processes of each implementation, a GPU each; with --fsdp. The first one is profiled")
    steps: int = setting(
        3, "steps that count; the median is taken. Another is recorded, and without --no-trace one traced"
    )
    warm: int = setting(1, "steps before them")
    memory_limit: str | None = setting(
        None, "what tensors may take on the GPU, such as 40GiB, as if it had no more; without it, all of it",
        metavar="SIZE",
    )  # fmt: skip
    dtype: Dtype = setting("auto", "of the weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    device: Device = setting("auto", "where; auto: a GPU if there is one", last=True)  # noqa: RUF009
    seed: int = setting(0, "of weights and tokens", last=True)
    trace: bool = setting(True, "leave out the profiler's trace, and the memory snapshot of a GPU", last=True)
    json: str | None = setting(None, "the figures; without it, a dated name in --output", metavar="FILE", last=True)
    png: str | None = setting(None, "the picture, the same", metavar="FILE", last=True)
    html: str | None = setting(None, "the page, the same", metavar="FILE", last=True)
    output: str = setting(".", "folder for all files", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        least = {"seq_len": 0, "batch_size": 1, "lora": 0, "gpus": 1, "steps": 1, "warm": 1, "seed": 0}
        for name, value in least.items():
            self._require(name, getattr(self, name) >= value, f"a whole number of at least {value}")
        self._require("seq_len", self.seq_len != 1, "at least 2 tokens, of which all but the first are predicted")
        self._require("seed", self.seed < 2**32 - 1, "a whole number below 2**32 - 1")
        if self.memory_limit is not None:
            self._require("memory_limit", parse_gib("memory_limit", self.memory_limit) > 0, "a size above 0")
        for name, kind in (("dtype", Dtype), ("device", Device), ("optimizer", Optimizer), ("fsdp", Fsdp)):
            self._require(name, getattr(self, name) in get_args(kind), " or ".join(get_args(kind)))
        assert set(get_args(Optimizer)) == set(OPTIMIZERS)
        for name in ("json", "png", "html", "output"):
            self._require(name, getattr(self, name) != "", "a name that is not empty")
        self._require("gpus", self.gpus == 1 or self.sharding != "none", "1, or --fsdp zero2 or zero3 beside it")
        if self.offload_params:
            self._require("fsdp", self.fsdp != "zero2", "none or zero3 with --offload-params")
            hint = "Its states have no kernel for the CPU's memory."
            if self.optimizer == "adamw-8bit":
                raise ArgumentValueError(message("optimizer", "another with --offload-params", self.optimizer, hint))
        assert self.ways or self.include

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            raise ArgumentValueError(message(name, expected, repr(getattr(self, name))))

    @property
    def sharding(self) -> str:
        """How FSDP2 shards; parameters on the host are always sharded whole."""
        return FULL if self.offload_params else self.fsdp

    @property
    def ways(self) -> dict[str, Way]:
        """Who is profiled, by name.

        Raises:
            ArgumentValueError: An unknown name or policy, a name twice, or a policy for nobody.
        """
        between = rf",(?=\s*(?:{'|'.join(IMPLEMENTATIONS)}|{NOBODY})\b|\s*$)"  # a policy has commas of its own
        words = [word.strip() for text in self.impl for word in re.split(between, text) if word.strip()]
        common, own = "input", {}
        for text in (*self.policy, *words):
            if "@" in text:
                hint = "lowtide bench step measures a step with them in host memory."
                raise ArgumentValueError(message("policy", "nothing of optimizer states", repr(text), hint))
        for text in self.policy:
            name, equals, policy = text.partition("=")
            if not equals:
                common = text
            elif name in IMPLEMENTATIONS and name in {word.partition(":")[0] for word in words}:
                own[name] = policy
            else:
                raise ArgumentValueError(message("policy", "NAME=POLICY with a name of --impl", repr(text)))
        found: dict[str, Way] = {}
        if words == [NOBODY] and self.include:
            return found
        for word in words:
            impl, _, policy = word.partition(":")
            if word in found:
                raise ArgumentValueError(message("impl", "each name once", f"{word!r} twice"))
            found[word] = Way(impl=impl, policy=policy or own.get(impl, common))
        if not found:
            raise ArgumentValueError(message("impl", f"names out of {', '.join(IMPLEMENTATIONS)}", "nothing"))
        return found

    def command(self) -> str:
        """Return the command that says the same."""
        return shlex.join(["lowtide", "profile", *options_of(self, but=("output", "json", "png", "html"))])

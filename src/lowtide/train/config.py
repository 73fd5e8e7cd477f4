"""The settings of a training run that are lowtide's own; every other one has TRL's or transformers' name."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import parse_gib
from lowtide.memory.policy import parse_policies
from lowtide.train.rows import COLUMNS
from lowtide.train.shapes import DEFAULT, SHAPES, pretrained_name

DEFAULT_ROOT = Path("lowtide-runs")
NEWEST_IF_ANY = "auto"  # as --resume_from_checkpoint: a new run where --output has none, for commands that are repeated
Parallel = Literal["auto", "ddp", "fsdp2", "fsdp2-zero2", "zero2", "zero3", "zero3-offload"]
ACTIVATIONS = ("memory_budget", "policy")  # ways to choose what layers save for backward: one of them
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def _setting(default: Any, help: str, *, metavar: str | None = None, fixed: bool = False) -> Any:
    """Return a field with its help text; ``fixed``: a resumed run must keep it, or its data order or model changes."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `lowtide.train.train` does; each field but ``options`` is the option of ``lowtide train`` with its name.

    Without arguments it is the small run: a Llama of 1.4 million parameters on the text of Python's standard library.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    model: str = _setting(
        DEFAULT,
        "a folder with a pretrained model or the name of one in the Hub's local cache, which is fine-tuned by TRL's "
        "SFTTrainer; or a config.json, its folder, or a built-in name ({names}), which is trained from random weights",
        metavar="NAME_OR_PATH",
        fixed=True,
    )
    data: tuple[str, ...] = _setting(
        (),
        "files or folders of text, .jsonl, .json, .parquet or .csv, a dataset that `save_to_disk` wrote, or a Hub name "
        "in the local cache. Fine-tuning takes text, messages, ShareGPT's conversations, prompt and completion, or "
        "Alpaca's instructions, recognised by their columns; pre-training takes text (default: the sources of Python's "
        "standard library)",
        metavar="PATH",
        fixed=True,
    )
    columns: tuple[str, ...] = _setting(
        (),
        "the columns of the data that hold text, messages, or prompt and completion, such as prompt=question "
        "completion=answer",
        metavar="FORMAT=COLUMN",
        fixed=True,
    )
    output: str | None = _setting(
        None, f"folder for checkpoints and the model; without it, a new folder under {DEFAULT_ROOT}/", metavar="DIR"
    )
    seq_len: int | None = _setting(
        None, "TRL's max_length: the most tokens of a sequence (default: 256; to fine-tune TRL's 1024)", fixed=True
    )
    lr: float | None = _setting(
        None, "TRL's learning_rate: the peak learning rate (default: 2e-3, or TRL's 2e-5 for fine-tuning)", fixed=True
    )
    max_steps: int | None = _setting(
        None,
        "optimizer steps, those before a resume included (default: 500, or TRL's num_train_epochs for fine-tuning)",
    )
    tokenizer: str | None = _setting(
        None,
        "a folder with a tokenizer, or the name of a Hub model in the local cache; without it, the model's own, or for "
        "random weights a byte-level BPE trained on the data",
        metavar="PATH",
        fixed=True,
    )
    vocab_size: int = _setting(8192, "tokens of a BPE trained here, and the default model's vocabulary", fixed=True)
    held_out: int = _setting(
        64, "rows (pre-training: sequences) to evaluate on and never to train on; at most a tenth", fixed=True
    )
    patch: bool = _setting(True, "use lowtide's loss and layers; --no-patch trains the stock model")
    memory_budget: str | None = _setting(
        None,
        "GPU memory for tensors, such as 40GiB: `lowtide plan` chooses what each layer saves for backward, so that the "
        "step is the fastest that fits",
        metavar="SIZE",
    )
    host_budget: str | None = _setting(
        None,
        "with --memory-budget: pinned host memory that layers, and with --offload-states the optimizer states, may be "
        "offloaded into; with the latter alone: the most that it may take. Per process",
        metavar="SIZE",
    )
    offload_states: bool = _setting(
        False,
        "store the optimizer states in pinned host memory from forward until backward has freed memory for them: with "
        "--memory-budget as many as the plan says, else all; bitwise the same results (GPU only)",
    )
    policy: str | None = _setting(
        None,
        "what each layer saves for backward, as `lowtide plan` prints it: all, attention or input for every layer, or "
        "a mixture such as '12 x input/1, 4 x all/0'",
        metavar="POLICY",
    )
    parallel: Parallel = _setting(  # noqa: RUF009 (a dataclasses.field, like the others)
        "auto",
        "how the processes that torchrun starts share the model. ddp: each has all of it; fsdp2: weights, gradients "
        "and optimizer states are sharded (PyTorch's FSDP2); fsdp2-zero2: the same, but weights stay gathered from "
        "forward to the end of backward; zero2: gradients and states, zero3: weights too "
        "(DeepSpeed); zero3-offload: all three in host memory, the optimizer on the CPU. auto: what accelerate launch "
        "was configured for, else ddp",
    )
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"cli": False})

    def __post_init__(self) -> None:
        for name in ("held_out", "max_steps"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "a whole number of at least 1")
        self._require("seq_len", self.seq_len is None or self.seq_len >= 2, "at least 2 tokens")
        self._require("vocab_size", 300 <= self.vocab_size <= 2**24, "from 300 (256 bytes and some merges) to 2**24")
        for name in ("model", "tokenizer", "output", "policy", "memory_budget", "host_budget"):
            self._require(name, getattr(self, name) != "", "a name that is not empty")
        self._require("data", "" not in self.data, "names that are not empty")
        self._require("lr", self.lr is None or 0 < self.lr < math.inf, "a number above 0")
        self._require("parallel", self.parallel in get_args(Parallel), " or ".join(get_args(Parallel)))
        columns_of(self.columns)
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise where settings of memory exclude each other, or one needs another."""
        if given := [name for name in ACTIVATIONS if getattr(self, name)][1:]:
            expected = f"one of {', '.join(flag(name) for name in ACTIVATIONS)}"
            raise ArgumentValueError(message(given[0], expected, "both"))
        self._require("memory_budget", not self.memory_budget or self.patch, "a patched model: leave --no-patch out")
        alone = not self.memory_budget and not self.offload_states
        self._require("host_budget", not (self.host_budget and alone), "--memory-budget or --offload-states beside it")
        if self.offload_states and self.memory_budget and not self.host_budget:
            expected, hint = "--host-budget beside it and --memory-budget", "The plan needs the host memory's size."
            raise ArgumentValueError(message("offload_states", expected, "none", hint))
        for name in ("memory_budget", "host_budget"):
            if size := getattr(self, name):
                self._require(name, parse_gib(name, size) > 0, "a size above 0")
        if self.policy:
            parse_policies(self.policy)

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            raise ArgumentValueError(message(name, expected, repr(getattr(self, name))))

    @property
    def fine_tunes(self) -> bool:
        """Whether the model has pretrained weights."""
        found = pretrained_name(self.model)
        return isinstance(found, str) or (found is not None and any((found / name).is_file() for name in _WEIGHTS))

    @property
    def named_columns(self) -> dict[str, str]:
        """The data's columns by the name of what they hold."""
        return columns_of(self.columns)

    @property
    def resumes_from(self) -> str | None:
        """The checkpoint that the run is resumed from: "true" for its newest, `NEWEST_IF_ANY`; None for a new run."""
        given = str(self.options.get("resume_from_checkpoint") or "false")
        return None if given.lower() == "false" else given

    @property
    def host_gib(self) -> float | None:
        """``host_budget`` in GiB."""
        return parse_gib("host_budget", self.host_budget) if self.host_budget else None

    def absolute(self) -> TrainConfig:
        """Return the same with every path absolute, for a resume from another folder."""
        changed: dict[str, Any] = {"data": tuple(_absolute(path) for path in self.data)}
        if self.tokenizer is not None:
            changed["tokenizer"] = _absolute(self.tokenizer)
        if self.model not in SHAPES:
            changed["model"] = _absolute(self.model)
        paths = {name: self.options.get(name) for name in ("chat_template_path", "deepspeed")}
        if files := {name: _absolute(str(path)) for name, path in paths.items() if isinstance(path, str | Path)}:
            changed["options"] = {**self.options, **files}
        return dataclasses.replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """Return the config that `to_json` wrote; settings that this version does not have are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in known}
        return cls(**given)


def columns_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the columns of ``FORMAT=COLUMN`` by the name of what they hold.

    Raises:
        ArgumentValueError: one is not of that form, or the format is not known.
    """
    columns = {}
    for pair in pairs:
        name, _, column = pair.partition("=")
        if not column or name not in COLUMNS:
            raise ArgumentValueError(
                message("columns", f"FORMAT=COLUMN with a format of {', '.join(COLUMNS)}", repr(pairs))
            )
        columns[name] = column
    return columns


def flag(name: str) -> str:
    """Return a setting as the command line has it."""
    return "--" + name.replace("_", "-")


def _absolute(path: str) -> str:
    found = Path(path).expanduser()
    return str(found.absolute()) if os.path.exists(found) else path  # noqa: PTH110 (a text of any length)

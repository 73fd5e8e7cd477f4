"""Every setting of a training run, its default and its meaning, once; the command line is made from it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lowtide.errors import ArgumentValueError, message

DEFAULT_ROOT = Path("lowtide-runs")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _setting(default: Any, help: str, *, metavar: str | None = None, fixed: bool = False) -> Any:
    """Return a field with its help text; ``fixed``: a resumed run must keep it, or its data order or model changes."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `lowtide.train.train` does; each field is the option of ``lowtide train`` with the same name.

    With no argument it is the small run: a Llama of 1.4 million parameters on the text of Python's standard library.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    model: str = _setting(
        "lowtide-small",
        "a folder with a pretrained model (or only its config.json: random weights), a config as a .json file, or a "
        "built-in name: {names}. Nothing is fetched from the network",
        metavar="NAME_OR_PATH",
        fixed=True,
    )
    data: tuple[str, ...] = _setting(
        (),
        "files or folders of text (one document a file) or of .jsonl (one a line); "
        "without it, the sources of this Python's standard library",
        metavar="PATH",
        fixed=True,
    )
    text_field: str = _setting("text", "the field of a .jsonl line that holds the text", metavar="NAME", fixed=True)
    tokenizer: str | None = _setting(
        None,
        "a folder with a tokenizer; without it, the pretrained model's own, else a byte-level BPE trained on the data",
        metavar="PATH",
        fixed=True,
    )
    vocab_size: int = _setting(8192, "tokens of a BPE trained here, and the default model's vocabulary", fixed=True)
    seq_len: int = _setting(256, "tokens in a block; documents are packed into blocks without padding", fixed=True)
    batch_size: int = _setting(8, "blocks a device works on at once", fixed=True)
    grad_accum: int = _setting(1, "batches a device adds up before each optimizer step", fixed=True)
    lr: float = _setting(
        2e-3,
        "peak learning rate of AdamW, after a linear warm-up and before a cosine decay; the default suits the small "
        "run, a pretrained model wants far less, such as 1e-5",
    )
    warmup: float = _setting(0.1, "the share of the steps that warm up", metavar="FRACTION")
    max_steps: int = _setting(500, "optimizer steps, those before a resume included")
    dtype: Dtype = _setting(  # noqa: RUF009 (a dataclasses.field, like the others)
        "auto",
        "what the matrix products run in: float32; bfloat16 or float16 under autocast, float16 with a gradient scaler "
        "(GPU only). Weights and optimizer stay float32. auto: bfloat16 on a GPU that has it, else float32",
    )
    gradient_checkpointing: bool = _setting(False, "keep each layer's input alone and recompute the rest in backward")
    patch: bool = _setting(True, "use lowtide's loss; --no-patch trains the stock model")
    workspace_mib: float | None = _setting(None, "scratch memory of the loss in MiB; without it, chosen by lowtide")
    output: str | None = _setting(
        None, f"folder for checkpoints and the model; without it, a new folder under {DEFAULT_ROOT}/", metavar="DIR"
    )
    resume: bool = _setting(False, "go on from the last whole checkpoint in --output (without it, of the newest run)")
    seed: int = _setting(0, "fixes the initial weights, the data order and the held-out text", fixed=True)
    save_every: int = _setting(100, "steps between checkpoints; 0: none before the end")
    keep: int = _setting(2, "checkpoints to keep, the newest ones")
    eval_every: int = _setting(0, "steps between evaluations of held-out text; 0: before and after only")
    eval_blocks: int = _setting(64, "held-out blocks, never trained on", fixed=True)
    progress: bool = _setting(True, "show progress while training; --no-progress prints the result alone")
    trainer_args: tuple[str, ...] = _setting(
        (), "further transformers.TrainingArguments, such as weight_decay=0.1 optim=adafactor", metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "grad_accum", "max_steps", "keep", "eval_blocks"):
            self._require(name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("save_every", "eval_every"):
            self._require(name, getattr(self, name) >= 0, "a whole number of at least 0")
        self._require("seq_len", self.seq_len >= 2, "at least 2 tokens, or there is nothing to predict")
        self._require("vocab_size", self.vocab_size >= 300, "at least 300 (256 bytes, special tokens, some merges)")
        self._require("vocab_size", self.vocab_size <= 2**24, "at most 2**24")
        for name in ("model", "tokenizer", "output"):
            self._require(name, getattr(self, name) != "", "a name that is not empty")
        self._require("data", "" not in self.data, "names that are not empty")
        self._require("lr", 0 < self.lr < math.inf, "a number above 0")
        self._require("warmup", 0 <= self.warmup <= 1, "a fraction from 0 to 1")
        self._require("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1")
        self._require("dtype", self.dtype in get_args(Dtype), " or ".join(get_args(Dtype)))
        self._require("workspace_mib", self.workspace_mib is None or self.workspace_mib > 0, "a number above 0")

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            raise ArgumentValueError(message(name, expected, repr(getattr(self, name))))

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return math.ceil(self.warmup * self.max_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON knows them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> TrainConfig:
        """Return the config that `to_json` wrote; settings this version does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in known}
        return cls(**given)


def fixed_settings() -> tuple[str, ...]:
    """Return the names of the settings that a resumed run must keep."""
    return tuple(f.name for f in dataclasses.fields(TrainConfig) if f.metadata["fixed"])

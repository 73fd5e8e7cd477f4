"""Every setting of a training run, its default and its meaning, once; the command line is made from it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import parse_gib
from lowtide.memory.policy_words import parse_policies
from lowtide.train.shapes import SHAPES

DEFAULT_ROOT = Path("lowtide-runs")
RUN_FILE = "run.json"  # in the folder of a run
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["float32", "bfloat16"]
Packing = Literal["auto", "joined", "separate", "none"]
TooLong = Literal["truncate", "drop"]
Parallel = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
Attention = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"]


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
        "files or folders of text (one document a file) or of .jsonl (one a line): text, or conversations as messages, "
        "ShareGPT's conversations, or prompt and completion, of which the assistant's turns are trained on; "
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
    chat_template: str | None = _setting(
        None, "a file with the Jinja template of conversations; without it, the tokenizer's", metavar="FILE", fixed=True
    )
    packing: Packing = _setting(  # noqa: RUF009 (a dataclasses.field, like the others)
        "auto",
        "how documents share a block. joined: as one text, each looking back on those before it; separate: each its "
        "own positions and attention, as if it were alone; none: a block each, with padding. auto: separate for "
        "conversations, joined for text",
        fixed=True,
    )
    too_long: TooLong = _setting(  # noqa: RUF009
        "truncate", "conversations of more than --seq-len tokens: keep their beginning, or leave them out", fixed=True
    )
    check_data: bool = _setting(
        True,
        "do not read all of the data before the first step: a line that cannot be trained on then ends the run when it "
        "is reached, instead of before it begins",
    )
    vocab_size: int = _setting(8192, "tokens of a BPE trained here, and the default model's vocabulary", fixed=True)
    seq_len: int = _setting(
        256, "tokens in a block, the longest that attention sees; --packing says how documents share one", fixed=True
    )
    batch_size: int = _setting(8, "blocks a device works on at once", fixed=True)
    grad_accum: int = _setting(1, "batches a device adds up before each optimizer step", fixed=True)
    lr: float = _setting(
        2e-3,
        "peak learning rate of AdamW, after a linear warm-up and before a cosine decay; the default suits the small "
        "run, a pretrained model wants far less, such as 1e-5, with LoRA 2e-4",
    )
    warmup: float = _setting(0.1, "the share of the steps that warm up", metavar="FRACTION")
    max_steps: int = _setting(500, "optimizer steps, those before a resume included")
    dtype: Dtype = _setting(  # noqa: RUF009 (a dataclasses.field, like the others)
        "auto",
        "what the matrix products run in: float32; bfloat16 or float16 under autocast, float16 with a gradient scaler "
        "(GPU only). auto: bfloat16 on a GPU that has it, else float32",
    )
    weights: Weights = _setting(  # noqa: RUF009
        "float32",
        "what weights, gradients and optimizer are kept in. bfloat16 halves them, and rounds small updates away: right "
        "for the frozen weights under LoRA, a risk elsewhere",
        fixed=True,
    )
    lora_rank: int = _setting(
        0, "train adapters of this rank (LoRA, by peft) and freeze the model; 0: train all", fixed=True
    )
    lora_alpha: float | None = _setting(
        None, "adapters are scaled by ALPHA / rank (default: twice the rank)", metavar="ALPHA", fixed=True
    )
    lora_targets: tuple[str, ...] = _setting(
        ("all-linear",),
        "names of the linear layers that get adapters, such as q_proj v_proj; all-linear: every one but the output's",
        metavar="NAME",
        fixed=True,
    )
    lora_merge: bool = _setting(False, "besides the adapter, write the model with the adapter merged in, to DIR/merged")
    attention: Attention = _setting(  # noqa: RUF009
        "auto",
        "transformers' implementation of attention. auto: flash_attention_2 for separate documents on a GPU where the "
        "flash-attn package is installed and the products are 16-bit, else the model's own choice (sdpa)",
    )
    gradient_checkpointing: bool = _setting(False, "keep each layer's input alone and recompute the rest in backward")
    memory_budget: str | None = _setting(
        None,
        "GPU memory for tensors, such as 40GiB: what each layer keeps for backward is chosen by `lowtide plan`, so "
        "that the step is the fastest that fits",
        metavar="SIZE",
    )
    host_budget: str | None = _setting(
        None,
        "with --memory-budget: pinned host memory that layers may be offloaded into, and with --offload-states the "
        "optimizer's states; with --offload-states alone: the most that it may take. For each process: several of one "
        "machine take as much each",
        metavar="SIZE",
    )
    offload_states: bool = _setting(
        False,
        "keep the optimizer's states in pinned host memory from forward until backward has made room for them: with "
        "--memory-budget as many as the plan says, else all; the same results to the bit (GPU only)",
    )
    policy: str | None = _setting(
        None,
        "what each layer keeps for backward, as `lowtide plan` writes it: all, attention or input for every layer, or "
        "a mixture such as '12 x input/1, 4 x all/0'",
        metavar="POLICY",
    )
    patch: bool = _setting(True, "use lowtide's loss; --no-patch trains the stock model")
    workspace_mib: float | None = _setting(None, "scratch memory of the loss in MiB; without it, chosen by lowtide")
    parallel: Parallel = _setting(  # noqa: RUF009
        "auto",
        "how the processes that torchrun starts share the model. ddp: each has all of it; fsdp2: weights, gradients "
        "and optimizer states are shared out (PyTorch's FSDP2); zero2: gradients and states, zero3: weights too "
        "(DeepSpeed). auto: what accelerate launch was told, else ddp",
    )
    output: str | None = _setting(
        None, f"folder for checkpoints and the model; without it, a new folder under {DEFAULT_ROOT}/", metavar="DIR"
    )
    resume: bool = _setting(False, "go on from the last whole checkpoint in --output (without it, of the newest run)")
    seed: int = _setting(0, "fixes the initial weights, the data order and the held-out text", fixed=True)
    save_every: int = _setting(100, "steps between checkpoints; 0: none before the end")
    keep: int = _setting(2, "checkpoints to keep, the newest ones")
    eval_every: int = _setting(0, "steps between evaluations of held-out text; 0: before and after only")
    eval_blocks: int = _setting(64, "held-out blocks, never trained on", fixed=True)
    early_stop: int = _setting(
        0,
        "stop after so many evaluations in a row that are no better than the best one; the model is the best one's "
        "then (needs --eval-every); 0: never",
        metavar="PATIENCE",
    )
    tensorboard: bool = _setting(False, "write TensorBoard's files to DIR/tensorboard, besides DIR/log.jsonl")
    progress: bool = _setting(True, "show progress while training; --no-progress prints the result alone")
    trainer_args: tuple[str, ...] = _setting(
        (), "further transformers.TrainingArguments, such as weight_decay=0.1 optim=adafactor", metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "grad_accum", "max_steps", "keep", "eval_blocks"):
            self._require(name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("save_every", "eval_every", "lora_rank", "early_stop"):
            self._require(name, getattr(self, name) >= 0, "a whole number of at least 0")
        self._require("seq_len", self.seq_len >= 2, "at least 2 tokens, or there is nothing to predict")
        self._require("vocab_size", self.vocab_size >= 300, "at least 300 (256 bytes, special tokens, some merges)")
        self._require("vocab_size", self.vocab_size <= 2**24, "at most 2**24")
        for name in ("model", "tokenizer", "output", "chat_template", "policy", "memory_budget", "host_budget"):
            self._require(name, getattr(self, name) != "", "a name that is not empty")
        self._require("data", "" not in self.data, "names that are not empty")
        self._require("lr", 0 < self.lr < math.inf, "a number above 0")
        self._require("warmup", 0 <= self.warmup <= 1, "a fraction from 0 to 1")
        self._require("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1")
        for name, kind in _CHOICES.items():
            self._require(name, getattr(self, name) in get_args(kind), " or ".join(get_args(kind)))
        self._require("workspace_mib", self.workspace_mib is None or self.workspace_mib > 0, "a number above 0")
        self._check_together()

    def _check_together(self) -> None:
        """Raise where settings exclude each other, or one needs another."""
        self._require("lora_alpha", self.lora_alpha is None or 0 < self.lora_alpha < math.inf, "a number above 0")
        self._require("lora_targets", self.lora_targets != () and "" not in self.lora_targets, "names")
        for name in ("lora_alpha", "lora_merge"):
            self._require(name, self.lora_rank > 0 or not getattr(self, name), "--lora-rank beside it")
        self._require(
            "lora_targets", self.lora_rank > 0 or self.lora_targets == ("all-linear",), "--lora-rank beside it"
        )
        if self.weights == "bfloat16":
            self._require("dtype", self.dtype in ("auto", "bfloat16"), "bfloat16, as the weights are")
        given = [name for name in ACTIVATIONS if getattr(self, name)]
        if len(given) > 1:
            expected = f"one of {', '.join(flag(name) for name in ACTIVATIONS)}"
            raise ArgumentValueError(message(given[-1], expected, " and ".join(flag(name) for name in given)))
        if self.memory_budget and not self.patch:
            raise ArgumentValueError(message("memory_budget", "a patched model, as is planned for", "--no-patch"))
        alone = not self.memory_budget and not self.offload_states
        self._require("host_budget", not (self.host_budget and alone), "--memory-budget or --offload-states beside it")
        if self.offload_states and self.memory_budget and not self.host_budget:
            expected, hint = "--host-budget beside it and --memory-budget", "The plan has to know how much host memory."
            raise ArgumentValueError(message("offload_states", expected, "none", hint))
        for name in ("memory_budget", "host_budget"):
            if size := getattr(self, name):
                self._require(name, parse_gib(name, size) > 0, "a size above 0")
        if self.policy:
            parse_policies(self.policy)
        self._require("early_stop", not self.early_stop or self.eval_every > 0, "--eval-every beside it")

    def _require(self, name: str, met: bool, expected: str) -> None:
        if not met:
            raise ArgumentValueError(message(name, expected, repr(getattr(self, name))))

    @property
    def lora_scale(self) -> float:
        """What the adapters are scaled by, times the rank."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return math.ceil(self.warmup * self.max_steps)

    def absolute(self) -> TrainConfig:
        """Return the same with every path absolute: what a resume from another folder needs."""
        changed: dict[str, Any] = {"data": tuple(_absolute(path) for path in self.data)}
        for name in ("tokenizer", "chat_template"):
            if (path := getattr(self, name)) is not None:
                changed[name] = _absolute(path)
        if self.model not in SHAPES:
            changed["model"] = _absolute(self.model)
        return dataclasses.replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON knows them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> TrainConfig:
        """Return the config that `to_json` wrote; settings this version does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in known}
        return cls(**given)


ACTIVATIONS = ("memory_budget", "policy", "gradient_checkpointing")  # ways to say what layers keep: one of them
_CHOICES = {
    "dtype": Dtype,
    "weights": Weights,
    "packing": Packing,
    "too_long": TooLong,
    "attention": Attention,
    "parallel": Parallel,
}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def flag(name: str) -> str:
    """Return a setting as the command line has it."""
    return "--" + name.replace("_", "-")


def fixed_settings() -> tuple[str, ...]:
    """Return the names of the settings that a resumed run must keep."""
    return tuple(f.name for f in dataclasses.fields(TrainConfig) if f.metadata["fixed"])

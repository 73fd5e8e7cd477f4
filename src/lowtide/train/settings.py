"""The trainers' own settings of a run: TRL's and transformers' defaults, lowtide's few in place of them, the user's."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch
from transformers import HfArgumentParser, TrainingArguments

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.train.config import TrainConfig
from lowtide.train.files import why
from lowtide.train.options import words_of
from lowtide.train.parallel import keep_deepspeed, uses_deepspeed, uses_fsdp

_ALWAYS = {  # of every run
    "logging_steps": 1,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,  # a NaN is logged as one
    "log_on_each_node": False,
    "log_level_replica": "error",
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 100,
    "eval_steps": 100,  # transformers' default is logging_steps
    "save_total_limit": 2,
    # To look for unused parameters, DDP reads the model's outputs, which would build the logits.
    "ddp_find_unused_parameters": False,
}
_FROM_RANDOM_WEIGHTS = {
    "learning_rate": 2e-3,
    "max_steps": 500,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
}
_WARMUP = 0.1  # of the steps, from random weights
_WHOLE_PARAMETERS = ("adafactor", "adagrad")  # optimizers that FSDP2 cannot shard
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
}
_REFUSED = {  # what a trainer would take and this run not apply
    "dataset_kwargs": "The data is prepared by TRL: give --columns for other names of columns.",
    "pad_token": "Set it in the tokenizer's configuration.",
    "use_liger_kernel": "It replaces the same functions as lowtide: give --no-patch beside it.",
}


@dataclass
class PretrainArguments:
    """Options of TRL's ModelConfig and SFTConfig that training from random weights has, too."""

    dtype: str = field(default="float32", metadata={"choices": ["float32", "bfloat16", "float16"]})
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    dataset_text_field: str = "text"


@dataclass(frozen=True)
class Settings:
    """The arguments of a run's trainer.

    Attributes:
        args: transformers' TrainingArguments, or TRL's SFTConfig.
        model: TRL's ModelConfig, or `PretrainArguments`.
        keep: checkpoints to keep; None: all.
    """

    args: Any
    model: Any
    keep: int | None

    @property
    def sequences(self) -> int:
        """The sequences of a step, of all processes together."""
        args = self.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)

    @property
    def product_dtype(self) -> str:
        """The dtype that GEMMs run in."""
        if self.args.bf16 or self.args.fp16:
            return "bfloat16" if self.args.bf16 else "float16"
        return str(self.model.dtype)


def trainer_settings(
    config: TrainConfig, output: Path, *, save: bool, text: bool = False, accumulate: int | None = None
) -> Settings:
    """Return the arguments of a run's trainer.

    If the data is ``text`` files, fine-tuning packs them by default: most are longer than a sequence. ``accumulate`` is
    the number of batches per step if another number of processes resumes the run.

    Raises:
        ArgumentValueError: an option has a value that its library refuses, or cannot be used here.
    """
    options = dict(config.options)
    options.pop("resume_from_checkpoint", None)
    for name, hint in _REFUSED.items():
        if options.get(name) not in (None, False, "false", "False") and (name != "use_liger_kernel" or config.patch):
            raise ArgumentValueError(message(f"--{name}", "an option that works here", str(options[name]), hint))
    if accumulate is not None:
        options["gradient_accumulation_steps"] = accumulate
    short = {"learning_rate": config.lr, "max_steps": config.max_steps}
    if config.fine_tunes:
        short["max_length"] = config.seq_len
    options |= {name: value for name, value in short.items() if value is not None}
    merged = _defaults(config, options, text=text) | options
    merged |= {"output_dir": str(output), "push_to_hub": merged.get("push_to_hub", False)}
    merged |= {} if save else {"save_strategy": "no"}
    args, model = _parsed(merged, fine_tunes=config.fine_tunes)
    if args.deepspeed:
        keep_deepspeed()
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if args.mixed_precision != precision:  # the launcher's, which would be used
        expected, hint = f"{precision!r}, as the run's options say", "Set it to 'no' there, or give --bf16 or --fp16."
        raise ArgumentValueError(message("mixed_precision of accelerate", expected, repr(args.mixed_precision), hint))
    _check(config, args, model)
    if args.n_gpu > 1:  # nn.DataParallel would copy the model at each step; several GPUs are torchrun's to start
        args._n_gpu = 1
    keep, args.save_total_limit = args.save_total_limit, None  # a checkpoint is removed once a newer one is complete
    return Settings(args, model, keep)


def _check(config: TrainConfig, args: Any, model: Any) -> None:
    """Raise where the trainers take options that end in a stack trace, some of them after the last step."""
    for name, least in _AT_LEAST.items():
        if (value := getattr(args, name)) < least:
            raise ArgumentValueError(message(f"--{name}", f"a whole number of at least {least}", str(value)))
    if args.max_steps < 1 and not 0 < args.num_train_epochs < math.inf:
        raise ArgumentValueError(message("--num_train_epochs", "a number above 0", str(args.num_train_epochs)))
    for name in ("model_init_kwargs", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        if isinstance(value := getattr(args, name, None), str):
            raise ArgumentValueError(message(f"--{name}", "a JSON object", repr(value)))
    if args.device.type == "cpu":
        for name in ("fp16", "activation_offloading"):
            if getattr(args, name, False):
                raise ArgumentValueError(message(f"--{name}", "a GPU", "a CPU", "Leave it out on a CPU."))
    if args.gradient_checkpointing and (config.policy or config.memory_budget):
        expected, hint = "neither --policy nor --memory-budget beside it", "Layers would be recomputed twice."
        raise ArgumentValueError(message("--gradient_checkpointing", expected, "one of them", hint))
    if getattr(model, "load_in_4bit", False) and model.dtype in ("auto", None):
        expected = "the dtype that the layers in 4 bits compute in, beside --load_in_4bit"
        raise ArgumentValueError(message("--dtype", expected, str(model.dtype), "Give --dtype bfloat16."))
    if args.optim in _WHOLE_PARAMETERS and uses_fsdp():
        hint = "Take adamw_torch_fused, adamw_torch, rmsprop or sgd, or --parallel ddp."
        raise UnsupportedError(message("--optim", "an optimizer that FSDP2 can shard", str(args.optim.value), hint))


def _defaults(config: TrainConfig, options: Mapping[str, Any], *, text: bool) -> dict[str, Any]:
    """Return lowtide's defaults where they differ from TRL's and transformers'."""
    on_gpu = torch.cuda.is_available()
    dtype, fp16 = str(options.get("dtype", "float32")), _is_on(options.get("fp16"))
    sixteen = fp16 or dtype in ("bfloat16", "float16")
    # without bf16 DeepSpeed accumulates and reduces the gradients of bfloat16 weights in float32
    by_deepspeed = uses_deepspeed() or options.get("deepspeed") is not None
    beside = _is_on(options.get("use_peft")) or (by_deepspeed and dtype == "bfloat16" and not fp16)
    own = {
        **_ALWAYS,
        # else bfloat16 is refused where there is no GPU
        "use_cpu": not torch.accelerator.is_available(),
        "bf16": on_gpu and torch.cuda.is_bf16_supported() and (not sixteen or beside),
    }
    if config.fine_tunes:
        own["gradient_checkpointing"] = False  # TRL's default is True: --policy and --memory-budget are better ones
        if _is_on(options.get("use_peft")):
            own["lora_dropout"] = 0.0  # TRL's default is 0.05, with which MLPs that have adapters cannot be fused
        if text:
            own |= {"packing": True, "packing_strategy": "wrapped"}
    else:
        own |= _FROM_RANDOM_WEIGHTS
        if "num_train_epochs" in options:
            own["max_steps"] = -1
        steps = int(options.get("max_steps", own["max_steps"]))
        own["warmup_steps"] = -(-steps // round(1 / _WARMUP)) if steps > 0 else _WARMUP
    evaluates = str(options.get("eval_strategy", "no")) != "no"
    if evaluates and _is_on(options.get("load_best_model_at_end")):
        # every model that may be the best is saved
        own["save_strategy"] = options["eval_strategy"]
        own["save_steps"] = options.get("eval_steps", own["eval_steps"])
    return {name: value for name, value in own.items() if name not in options}


def _parsed(options: Mapping[str, Any], *, fine_tunes: bool) -> tuple[Any, Any]:
    """Return the options as the classes of arguments that the trainer takes."""
    if fine_tunes:
        from trl import ModelConfig, SFTConfig

        classes: tuple[Any, ...] = (SFTConfig, ModelConfig)
    else:
        classes = (TrainingArguments, PretrainArguments)
    parser = _Parser(classes, [name for name, value in options.items() if isinstance(value, list | tuple)])
    try:
        with warnings.catch_warnings():
            # TRL's own defaults have old names of transformers' options
            warnings.filterwarnings("ignore", category=FutureWarning)
            args, model = parser.parse_args_into_dataclasses(list(words_of(options)), look_for_args_file=False)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, ArgumentValueError):
            raise
        expected = f"values that {classes[0].__name__} accepts"
        raise ArgumentValueError(message("options", expected, why(error))) from error
    return args, model


class _Parser(HfArgumentParser):  # type: ignore[misc]
    """transformers' parser of arguments, whose errors are lowtide's; ``lists`` are options with several values."""

    def __init__(self, classes: tuple[Any, ...], lists: Collection[str] = ()) -> None:
        super().__init__(classes, allow_abbrev=False)
        kinds = {name: get_args(kind) for one in classes for name, kind in get_type_hints(one).items()}
        for action in self._actions:  # transformers' parser reads a text or a list as a text, and this dict not at all
            if action.dest in lists and list[str] in kinds.get(action.dest, ()):
                action.nargs = "+"
            elif dict[str, bool] in kinds.get(action.dest, ()):
                action.type = json.loads

    def error(self, text: str) -> NoReturn:
        """Raise what argparse would print: ``argument --NAME/--NAME-WITH-DASHES: what is wrong``."""
        argument, _, wrong = text.partition(": ")
        name = next((word for word in re.split("[ /]", argument) if word.startswith("--")), "options")
        raise ArgumentValueError(message(name, "a value that TRL and transformers accept", wrong or text))


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")

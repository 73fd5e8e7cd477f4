"""The options of `lowtide train`: TRL's and transformers' own, read by their parsers, and few of lowtide's.

A pretrained model takes the options of ``trl sft``, random weights those of transformers' `TrainingArguments`, and of
`ScratchArguments` and `BlockArguments`, whose names are TRL's. Importing this file imports neither torch nor
transformers: whether a configuration file, a data path and a model exist is known before.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, did_you_mean, message
from lowtide.train.shapes import DEFAULT, SHAPES, VOCAB_SIZE, config_file, has_weights

AUTO = "auto"  # as --resume_from_checkpoint: a new run where the folder has no checkpoint
_HUB_DATASET = re.compile(r"(?!.*\.[A-Za-z]\w*$)[\w-][\w.-]*/[\w-][\w.-]*")  # org/Hermes-2.5, not data/rows.jsonl
_LAUNCHED = "LOWTIDE_LAUNCHED"  # in the environment of processes that `lowtide train --accelerate_config` has started
_LAUNCHER = ("accelerate_config", "num_processes")
_EARLY = ("model_name_or_path", "dataset_name", "push_to_hub", "num_train_epochs", "config", *_LAUNCHER)
_SCRATCH = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "warmup_steps": 0.1,  # of all steps
    "logging_steps": 10,
}
_SCRATCH_STEPS = 500
_NEEDS = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "use_peft": "peft"}
_TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio", "comet_ml", "swanlab", "clearml")


def _option(default: Any, help: str, **more: Any) -> Any:
    """Return a field whose metadata are argparse's."""
    return field(default=default, metadata={"help": help, **more})


@dataclass
class RunArguments:
    """The options of `lowtide train` that are lowtide's own."""

    patch: bool = _option(True, "train the stock model")
    memory_budget: str | None = _option(
        None,
        "GPU memory for tensors, such as 40GiB, or auto: 92 percent of what is free. The planner chooses what each "
        "layer saves for backward, so that the step is the fastest that fits",
        metavar="SIZE",
    )
    host_budget: str | None = _option(
        None,
        "with --memory-budget: pinned host memory, for each process, that layers and optimizer states may be offloaded "
        "into",
        metavar="SIZE",
    )
    held_out: int | None = _option(
        None,
        "rows (random weights: sequences) that are never trained on, and evaluated before and after training (default: "
        "none, or 64 sequences)",
        metavar="N",
    )
    compare: bool = _option(
        False,
        "train twice, interleaved, with lowtide and without (pretrained: with TRL's own head), and save nothing",
    )
    teacher: str | None = _option(
        None,
        "distil: a pretrained model with the same vocabulary, or a folder of lowtide.train.write_teacher_states",
    )
    alpha: float = _option(0.5, "with --teacher: the divergence's part of the loss, from 0 to 1")
    divergence: str = _option(
        "forward_kl", "with --teacher: from the teacher", choices=["forward_kl", "reverse_kl", "jsd", "tv"]
    )
    temperature: float = _option(1.0, "with --teacher: divides both sides' logits in the divergence")
    json: str | None = _option(None, "with --compare: write the figures here", metavar="FILE")

    def __post_init__(self) -> None:
        if self.json is not None and not self.compare:
            raise ArgumentValueError(message("--json", "--compare beside it", "none"))
        if self.memory_budget and not self.patch:
            raise ArgumentValueError(message("--no-patch", "no --memory-budget beside it", self.memory_budget))
        if self.teacher and (self.compare or not self.patch):
            raise ArgumentValueError(message("--teacher", "neither --compare nor --no-patch", "one of them"))


@dataclass
class ScratchArguments:
    """What random weights are trained with, by the names of TRL's `ModelConfig`, `ScriptArguments` and `SFTConfig`."""

    model_name_or_path: str = _option(DEFAULT, f"a config.json, or one of {', '.join(SHAPES)}")
    dataset_name: str | None = _option(
        None, "a text file, or a folder of them (default: the sources of Python's standard library)"
    )
    dtype: str = _option("float32", "of the weights", choices=["float32", "bfloat16", "float16"])
    attn_implementation: str | None = _option(None, "transformers' name of it")
    tokenizer_name: str | None = _option(
        None, f"a folder with one (default: {VOCAB_SIZE} tokens are trained on the text)"
    )


@dataclass(frozen=True)
class Arguments:
    """What `parse` makes of a command line.

    Attributes:
        words: the command line.
        run: lowtide's own options.
        training: TRL's `SFTConfig`, or `BlockArguments`.
        model: TRL's `ModelConfig`, or `ScratchArguments`.
        script: TRL's `ScriptArguments`; None for random weights.
        mixture: TRL's `DatasetMixtureConfig`; None for random weights.
    """

    words: tuple[str, ...]
    run: RunArguments
    training: Any
    model: Any
    script: Any = None
    mixture: Any = None

    @property
    def fine_tunes(self) -> bool:
        """Whether the weights are pretrained."""
        return self.script is not None

    @property
    def resume(self) -> str:
        """The command that resumes the run."""
        resuming = ("--resume_from_checkpoint", AUTO)
        words = self.words if self.words[-2:] == resuming else (*self.words, *resuming)  # of options the last one holds
        return shlex.join(["lowtide", "train", *words])

    @property
    def gemm_dtype(self) -> str:
        """The dtype that GEMMs run in."""
        args = self.training
        return "bfloat16" if args.bf16 else "float16" if args.fp16 else str(self.model.dtype)


def peek(words: Sequence[str]) -> dict[str, str]:
    """Return what a command line, and the file that its ``--config`` names, give of few options; no library is loaded.

    Raises:
        ArgumentValueError: that file is none.
    """
    given, _ = _take(words, *_EARLY)
    in_file = _from_file(given["config"]) if "config" in given else {}
    return {**{name: str(in_file[name]) for name in _EARLY if in_file.get(name) is not None}, **given}


def check_early(early: Mapping[str, str]) -> bool:
    """Return whether a run of which `peek` says this is to fine-tune; raise where a file that it names does not exist.

    Raises:
        ArgumentValueError: the model or the data is not there.
    """
    model = early.get("model_name_or_path", DEFAULT)
    if model not in SHAPES:
        config_file(model)
    if data := early.get("dataset_name"):
        check_path(data)
    return has_weights(model)


def check_path(name: str) -> None:
    """Raise where data's name is neither a path that exists nor one of the Hub.

    Raises:
        ArgumentValueError: it is neither, with the nearest name in its folder.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    if not path.exists() and not _HUB_DATASET.fullmatch(name):
        near = did_you_mean(path.name, (one.name for one in path.parent.iterdir())) if path.parent.is_dir() else ""
        expected = "a file, a folder, or a dataset of the Hub as org/name"
        raise ArgumentValueError(message("--dataset_name", expected, f"{name} (No such file or directory)", near))


def launch(early: Mapping[str, str], words: Sequence[str]) -> bool:
    """Start the processes of a run of which `peek` says this, and wait for them; False where it asks for none.

    As in ``trl sft``: ``--accelerate_config``, a file or the name of one that TRL has, and ``--num_processes``. They
    have all the words, to say how the run resumes.

    Raises:
        ArgumentValueError: there is no such file.
    """
    given = [word for name in _LAUNCHER if name in early for word in (f"--{name}", early[name])]
    if not given or _LAUNCHED in os.environ:
        return False
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    try:
        given = resolve_accelerate_config_argument(given)
    except ValueError as error:
        expected = "a file, or one of TRL's, such as multi_gpu, fsdp2, zero2 and zero3"
        raise ArgumentValueError(message("--accelerate_config", expected, early["accelerate_config"])) from error
    os.environ[_LAUNCHED] = "1"
    launch_command(launch_command_parser().parse_args([*given, "--module", "lowtide", "train", *words]))
    return True


def parse(words: Sequence[str]) -> Arguments:
    """Return the options of a command line.

    Raises:
        ArgumentValueError: a file that is not there, an option that there is not, with the nearest one, or a value that
            its library refuses.
    """
    early = peek(words)
    fine_tunes = check_early(early)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # TRL's defaults have old names of options
            found = _parse(words, fine_tunes=fine_tunes, epochs="num_train_epochs" in early)
    except ArgumentValueError:
        raise
    except (argparse.ArgumentError, TypeError, ValueError, ImportError, RuntimeError) as error:
        name, why = "options", str(error)
        if isinstance(error, argparse.ArgumentError):
            name, why = str(error.argument_name).partition("/")[0], error.message
        expected = "what TRL and transformers accept"
        raise ArgumentValueError(message(name, expected, " ".join(why.split()))) from error
    _check(found)
    return found


def _parse(words: Sequence[str], *, fine_tunes: bool, epochs: bool) -> Arguments:
    """Return what a library's parser makes of a command line, and of the file that it names."""
    import torch
    from transformers import HfArgumentParser

    types: tuple[Any, ...]
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    defaults: dict[str, Any] = {
        "use_cpu": not torch.accelerator.is_available(),
        "disable_tqdm": not sys.stderr.isatty(),
        "logging_nan_inf_filter": False,  # a NaN is logged as one
        # To look for unused parameters, DDP reads the model's outputs, which would build the logits.
        "ddp_find_unused_parameters": False,
    }
    if fine_tunes:
        from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

        types = (RunArguments, SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
        # An MLP whose adapters have dropout cannot be fused; bfloat16 is slow on a CPU.
        defaults |= {"lora_dropout": 0.0, **({} if has_bf16 else {"bf16": False})}
    else:
        from lowtide.train.trainers import BlockArguments

        types = (RunArguments, BlockArguments, ScratchArguments)
        defaults |= {**_SCRATCH, "max_steps": -1 if epochs else _SCRATCH_STEPS, "bf16": has_bf16}
    parser: Any = HfArgumentParser(types, allow_abbrev=False, add_help=False, exit_on_error=False)
    given, rest = _take(words, "config", *_LAUNCHER)
    in_file = _from_file(given["config"]) if "config" in given else {}
    os.environ |= {name: str(value) for name, value in in_file.pop("env", {}).items()}  # as TrlParser does
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**defaults | {name: value for name, value in in_file.items() if name in known})
    *parsed, unknown = parser.parse_args_into_dataclasses(rest, return_remaining_strings=True, look_for_args_file=False)
    unknown += [f"--{name}" for name in in_file if name not in {*known, *_LAUNCHER}]
    if unknown:
        name = next((word for word in unknown if word.startswith("--")), unknown[0]).partition("=")[0]
        expected = "an option of `trl sft`, transformers' TrainingArguments or `lowtide train --help`"
        raise ArgumentValueError(
            message(name, expected, "another name", did_you_mean(name, parser._option_string_actions))
        )
    return Arguments(tuple(words), *parsed)


def _check(found: Arguments) -> None:
    """Raise where the trainers take options that end in a stack trace, some of them after the last step."""
    args, model = found.training, found.model
    for name, value, least in (
        ("--per_device_train_batch_size", args.per_device_train_batch_size, 1),
        ("--gradient_accumulation_steps", args.gradient_accumulation_steps, 1),
        ("--held-out", found.run.held_out, 1),
        ("--max_length", args.max_length, 2),
    ):
        if value is not None and value < least:
            raise ArgumentValueError(message(name, f"a whole number of at least {least}", str(value)))
    needs = [(f"--{name}", package) for name, package in _NEEDS.items() if getattr(model, name, False)]
    needs += [(f"--report_to {name}", name) for name in args.report_to if name in _TRACKERS]
    for name, package in needs:
        if find_spec(package) is None:
            raise ArgumentValueError(
                message(name, f"{package} to be installed", "none", f"pip install {package.replace('_', '-')}")
            )
    if args.n_gpu > 1:  # nn.DataParallel would copy the model at each step; a launcher starts several GPUs
        args._n_gpu = 1


def _take(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Return the options of these names that stand in a command line, and its other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true")
    found, rest = parser.parse_known_args(list(words))
    return vars(found), rest


def _from_file(name: str) -> dict[str, Any]:
    """Return the options of a YAML file."""
    import yaml

    expected = "a YAML file of options and their values, such as 'learning_rate: 1e-5'"
    try:
        found = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ArgumentValueError(message("--config", expected, f"{name} ({why})")) from error
    if not isinstance(found, dict):
        raise ArgumentValueError(message("--config", expected, f"something else in {name}"))
    return found

"""The config of a fine-tuning run, TRL's or axolotl's, as what `plan_memory` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lowtide.errors import ArgumentValueError, message
from lowtide.plan.arguments import DDP, FSDP2, ZERO3, Adapters

# Names of the optimizers of transformers, by the planner's.
OPTIMS = {
    "adamw": ("adamw_torch_fused",),
    "adamw-foreach": ("adamw_torch",),
    "adamw-8bit": ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "sgd": ("sgd",),
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class RunFile(NamedTuple):
    """What a run's config says of a step; nothing without one."""

    model: str = ""
    arguments: Mapping[str, Any] = MappingProxyType({})  # fields of `PlanArguments`
    four_bit: bool = False
    nested: bool = False
    checkpointed: bool = False  # the run's own setting: every layer saves its input
    default_targets: bool = False  # peft is to know which projections are adapted


def read_run(file: Path) -> RunFile:
    """Return what a YAML file for ``trl sft``, ``lowtide train`` or ``axolotl train`` says, and the DeepSpeed JSON.

    Raises:
        ArgumentValueError: It cannot be read, names no model, or has something that is not planned.
    """
    run = _read(file)
    axolotl = "base_model" in run
    model = run.get("base_model" if axolotl else "model_name_or_path", run.get("model"))
    if not isinstance(model, str):
        raise ArgumentValueError(message("run", "model_name_or_path, or base_model", f"neither in {file}"))
    four_bit = bool(run.get("load_in_4bit"))
    adapted = run.get("adapter") in ("lora", "qlora") if axolotl else bool(run.get("use_peft"))
    length, batch = ("sequence_len", "micro_batch_size") if axolotl else ("max_length", "per_device_train_batch_size")
    found: dict[str, Any] = {
        "seq_len": run.get(length, run.get("max_seq_length", 1024)),
        "batch_size": run.get(batch, 1 if axolotl else 8),
        "optimizer": optimizer_of(str(run.get("optimizer" if axolotl else "optim", "adamw_torch_fused"))),
        "keep_gradients": (run.get("gradient_accumulation_steps") or 1) > 1,
    }
    names = run.get("lora_target_modules")
    names = names.split() if isinstance(names, str) else names
    every = names == ["all-linear"] or run.get("lora_target_linear")
    if adapted:
        found["adapters"] = Adapters(run.get("lora_r", 16), () if every else tuple(names or ()))
    dtype = run.get("dtype", run.get("torch_dtype"))
    if axolotl:  # which casts the model, where float32 is not asked for
        dtype = next((name for name in _DTYPES if run.get(name)), None)
    if not four_bit and dtype not in (None, "auto"):
        found["dtype"] = _DTYPES.get(dtype, dtype)
    if not axolotl and not run.get("bf16", True) and not run.get("fp16"):
        found["autocast"] = False
    if run.get("fsdp") or run.get("fsdp_config"):
        found["parallel"] = FSDP2
    if deepspeed := run.get("deepspeed"):
        found |= _deepspeed(deepspeed if isinstance(deepspeed, Mapping) else _read(_beside(file, str(deepspeed))))
    checkpointed = bool(run.get("gradient_checkpointing", not axolotl))
    nested, by_peft = bool(run.get("use_bnb_nested_quant", axolotl)), adapted and not (every or names)
    return RunFile(model, found, four_bit, nested, checkpointed, by_peft)


def default_targets(model_type: str) -> tuple[str, ...]:
    """Return the projections that peft adapts in a type of model where a run names none.

    Raises:
        ArgumentValueError: It knows none: the run would end in an error, too.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    if not isinstance(found := TARGETS.get(model_type), list):
        got = f"none, and peft has none for {model_type}"
        raise ArgumentValueError(message("lora_target_modules", "names of projections, or all-linear", got))
    return tuple(found)


def optimizer_of(name: str) -> str:
    """Return the planner's name of one of transformers' optimizers.

    Raises:
        ArgumentValueError: It has none.
    """
    for ours, theirs in OPTIMS.items():
        if name in theirs:
            return ours
    known = ", ".join(one for names in OPTIMS.values() for one in names)
    raise ArgumentValueError(message("optim", f"an optimizer that the planner has, one of {known}", name))


def _deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed's config says of a step."""
    zero = config.get("zero_optimization") or {}
    for name in ("offload_param", "offload_optimizer"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise ArgumentValueError(message(name, "none: DeepSpeed's offloading is not planned", str(zero[name])))
    stage = zero.get("stage", 0)
    if stage in (1, 2):
        hint = "Plan it with stage 0 (ddp) or stage 3: it takes something between the two."
        raise ArgumentValueError(message("stage", "0 or 3", str(stage), hint))
    batch = config.get("train_micro_batch_size_per_gpu", "auto")
    return {"parallel": ZERO3 if stage else DDP, **({"batch_size": batch} if batch != "auto" else {})}


def _beside(file: Path, name: str) -> Path:
    return next((path for path in (Path(name), file.parent / name) if path.is_file()), Path(name))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text)
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentValueError(message("run", "a config in YAML or JSON", f"{file} ({why})")) from error
    except Exception as error:  # of yaml's parser
        raise ArgumentValueError(message("run", "a config in YAML", f"{file} ({error})".replace("\n", " "))) from error
    if not isinstance(found, dict):
        raise ArgumentValueError(message("run", "options with their values", f"something else in {file}"))
    return found

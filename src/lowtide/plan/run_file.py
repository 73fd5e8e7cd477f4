"""The config of a fine-tuning run, TRL's or axolotl's, as what `plan_memory` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lowtide.errors import ArgumentValueError, message
from lowtide.plan.arguments import DDP, FSDP2, ZERO3, Adapters

# The planner's optimizers, by transformers' names.
OPTIMS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw-foreach",
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw-8bit"),
    "sgd": "sgd",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class RunFile(NamedTuple):
    """What a run's config says of a step; nothing without one."""

    model: str = ""
    arguments: Mapping[str, Any] = MappingProxyType({})  # fields of `PlanArguments`
    four_bit: bool = False
    nested: bool = False
    checkpointed: bool = False  # the run's own setting: every layer saves its input


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
        found["adapters"] = Adapters(run.get("lora_r", 16), () if every else tuple(names) if names else None)
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
        if not isinstance(deepspeed, Mapping):
            beside = file.parent / deepspeed
            deepspeed = _read(beside if beside.is_file() else Path(deepspeed))
        found |= _deepspeed(deepspeed)
    checkpointed = bool(run.get("gradient_checkpointing", not axolotl))
    return RunFile(model, found, four_bit, bool(run.get("use_bnb_nested_quant", axolotl)), checkpointed)


def optimizer_of(name: str) -> str:
    """Return the planner's name of one of transformers' optimizers.

    Raises:
        ArgumentValueError: It has none.
    """
    if name not in OPTIMS:
        expected = f"an optimizer that the planner has, one of {', '.join(OPTIMS)}"
        raise ArgumentValueError(message("optim", expected, name))
    return OPTIMS[name]


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


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ArgumentValueError(message("run", "a config in YAML or JSON", f"{file} ({why})")) from error
    if not isinstance(found, dict):
        raise ArgumentValueError(message("run", "options with their values", f"something else in {file}"))
    return found

"""Which engine shares a model among processes: PyTorch's DDP and FSDP2, DeepSpeed's ZeRO, all through accelerate.

An engine is one of accelerate's configuration files, in ``launch/``. ``lowtide train --parallel NAME`` under torchrun
sets what ``accelerate launch --config_file`` sets for the same file, so both ways are one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.train.config import TrainConfig
from lowtide.train.ranks import launched_ranks

AUTO, FSDP2 = "auto", "fsdp2"
_FOLDER = Path(__file__).with_name("launch")
_USE_FSDP, _USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_FIRST_READS = "FSDP_CPU_RAM_EFFICIENT_LOADING"
# accelerate's names in its files, where the variable is not ACCELERATE_ and the name in capitals
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
# what else an accelerate configuration may ask for, that a run has no part for
_UNKNOWN = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")


def launch_file(name: str) -> str:
    """Return the text of an engine's configuration, for ``accelerate launch --config_file``."""
    return (_FOLDER / f"{name}.yaml").read_text()


def variables(name: str) -> dict[str, str]:
    """Return the environment variables by which accelerate knows an engine."""
    import yaml

    told = yaml.safe_load(launch_file(name))
    found = {}
    if "fsdp_config" in told:
        found[_USE_FSDP] = "true"
        found |= {key.upper(): _text(value) for key, value in told["fsdp_config"].items()}
    if "deepspeed_config" in told:
        found |= {_USE_DEEPSPEED: "true", "ACCELERATE_CONFIG_DS_FIELDS": _text(",".join(told["deepspeed_config"]))}
        for key, value in told["deepspeed_config"].items():
            found[f"ACCELERATE_{_DEEPSPEED.get(key, key.upper())}"] = _text(value)
    return found


@contextlib.contextmanager
def engine_of(config: TrainConfig) -> Iterator[None]:
    """Let accelerate find the engine that a run asks for, while it lasts.

    Raises:
        ArgumentValueError: the launcher's configuration asks for another one or for what a run cannot do, or DeepSpeed
            is not installed.
    """
    wanted = variables(config.parallel) if config.parallel != AUTO and launched_ranks() > 1 else {}
    _check(config, wanted)
    before = {name: os.environ.get(name) for name in (*wanted, _USE_FSDP, _USE_DEEPSPEED, _PRECISION, _FIRST_READS)}
    os.environ.update(wanted)
    if launched_ranks() > 1 and importlib.util.find_spec("deepspeed") is not None:
        # accelerate imports it in any run where it is installed. Functions of it have the group of that moment as a
        # default argument: one that is there already would never end, nor its threads (see leave_group).
        with contextlib.suppress(Exception):  # one that is broken is for those to tell who use it
            importlib.import_module("deepspeed")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def uses_fsdp() -> bool:
    """Return whether FSDP is asked for, of several processes."""
    return launched_ranks() > 1 and _is_on(_USE_FSDP)


def first_reads() -> bool:
    """Return whether the first rank alone is to have the weights before FSDP or ZeRO-3 shares them out."""
    return (uses_fsdp() and _is_on(_FIRST_READS)) or uses_zero3()


def all_read() -> None:
    """Let each rank have all of the weights before FSDP shares them out, until `engine_of` ends."""
    os.environ[_FIRST_READS] = "false"


def uses_deepspeed() -> bool:
    """Return whether DeepSpeed is asked for."""
    return _is_on(_USE_DEEPSPEED)


def zero_stage() -> int | None:
    """Return DeepSpeed's stage; None where a configuration of its own has it."""
    stage = os.environ.get(f"ACCELERATE_{_DEEPSPEED['zero_stage']}", "")
    return int(stage) if stage.isdecimal() and not os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") else None


def uses_zero3() -> bool:
    """Return whether DeepSpeed shares out weights, as its launch file here says and not a configuration of its own."""
    return launched_ranks() > 1 and uses_deepspeed() and zero_stage() == 3


def shares_with_deepspeed(name: str) -> bool:
    """Return whether a run of the engine ``name`` would use DeepSpeed, before `engine_of` has said so."""
    return uses_deepspeed() or (launched_ranks() > 1 and name != AUTO and _USE_DEEPSPEED in variables(name))


def shares_with_fsdp(name: str) -> bool:
    """Return the same of FSDP."""
    return uses_fsdp() or (launched_ranks() > 1 and name != AUTO and _USE_FSDP in variables(name))


@contextlib.contextmanager
def built_whole() -> Iterator[None]:
    """Let transformers build models whole while this lasts, as ZeRO-3 would not have it.

    A model is looked at, patched and merged on a process by itself, before the engine shares it out.
    """
    if not uses_deepspeed():
        yield
        return
    from transformers.integrations import deepspeed as integration

    reference = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = reference


def engine_line(config: TrainConfig) -> str | None:
    """Return what shares the model among the processes, for a person to read; None for one process."""
    ranks = launched_ranks()
    if ranks == 1:
        return None if config.parallel == AUTO else f"parallel one process, so nothing is shared ({config.parallel})"
    if uses_deepspeed():
        stage = zero_stage()
        return f"parallel {ranks} processes, DeepSpeed ZeRO" + ("" if stage is None else f"-{stage}")
    if uses_fsdp():
        return f"parallel {ranks} processes, FSDP2: weights, gradients and optimizer states are shared out"
    return f"parallel {ranks} processes, DDP: each has the whole model"


def check_precision(*, bf16: bool, fp16: bool) -> None:
    """Raise where accelerate's configuration asks for products that the run does not: Trainer would take those.

    Raises:
        ArgumentValueError: it does.
    """
    told, run = os.environ.get(_PRECISION, "no"), "bf16" if bf16 else "fp16" if fp16 else "no"
    if told not in ("no", run):
        hint = "Set mixed_precision to 'no' there: --dtype decides."
        raise ArgumentValueError(message("dtype", f"{run}, as --dtype and --weights say", f"{_PRECISION}={told}", hint))


def settle(accelerator: Any) -> None:
    """Put right what accelerate makes of FSDP2, before it prepares a model.

    Raises:
        ArgumentValueError: FSDP is asked for in its first version.
    """
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    state = accelerator.state
    if uses_fsdp() and state.distributed_type == DistributedType.MULTI_CPU:
        # accelerate leaves FSDP out without a word where there is no GPU; its code for it runs there all the same
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = DistributedType.FSDP
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        hint = "Set fsdp_version to 2 in accelerate's configuration, or start with torchrun and --parallel fsdp2."
        raise ArgumentValueError(message("parallel", "FSDP in its second version", plugin.fsdp_version, hint))
    if state.mixed_precision != "no":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's policy adds up gradients of all ranks in 16 bits, and rounds the loss to them
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[state.mixed_precision]
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _check(config: TrainConfig, wanted: dict[str, str]) -> None:
    """Raise where launcher and run do not go together."""
    for name in _UNKNOWN:
        if _is_on(name):
            hint = "Choose none of it in accelerate's configuration: DDP, FSDP2 and DeepSpeed's ZeRO work."
            raise ArgumentValueError(message("parallel", "an engine that a run knows", f"{name}=true", hint))
    for name in (_USE_FSDP, _USE_DEEPSPEED):
        if config.parallel != AUTO and _is_on(name) and name not in wanted:
            hint = "Name the engine in one place: leave --parallel out, or start with torchrun."
            got = f"{config.parallel}, and {name}=true from accelerate's configuration"
            raise ArgumentValueError(message("parallel", "what the launcher was told", got, hint))
    if (_USE_DEEPSPEED in wanted or uses_deepspeed()) and importlib.util.find_spec("deepspeed") is None:
        hint = "pip install deepspeed, or take --parallel fsdp2."
        raise ArgumentValueError(message("parallel", "DeepSpeed to be installed", config.parallel, hint))


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

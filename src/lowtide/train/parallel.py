"""Which engine shares a model among processes: PyTorch's DDP and FSDP2, DeepSpeed's ZeRO, all through accelerate.

An engine is one of accelerate's configuration files, in ``launch/``. ``lowtide train --parallel NAME`` under torchrun
sets what ``accelerate launch --config_file`` sets for the same file.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.train.files import find_data

if TYPE_CHECKING:
    from lowtide.train.config import TrainConfig

AUTO = "auto"
_FOLDER = Path(__file__).with_name("launch")
_USE_FSDP, _USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
# of accelerate's configurations, what a run does not have
_UNKNOWN = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
_RESHARDS = "FSDP_RESHARD_AFTER_FORWARD"
_FIRST_READS = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_FIRST_REPORTS_SECONDS = 3.0
_GATHERS = "stage3_gather_16bit_weights_on_model_save"  # in DeepSpeed's configuration
# accelerate's names in its files, where the variable is not ACCELERATE_ and the name in capitals
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}


def launch_file(name: str) -> str:
    """Return the text of an engine's configuration, for ``accelerate launch --config_file``."""
    return (_FOLDER / f"{name}.yaml").read_text()


def variables(name: str) -> dict[str, str]:
    """Return the environment variables by which accelerate selects an engine."""
    import yaml

    content = yaml.safe_load(launch_file(name))
    found = {}
    if "fsdp_config" in content:
        found[_USE_FSDP] = "true"
        found |= {key.upper(): _text(value) for key, value in content["fsdp_config"].items()}
    if "deepspeed_config" in content:
        found |= {_USE_DEEPSPEED: "true", "ACCELERATE_CONFIG_DS_FIELDS": _text(",".join(content["deepspeed_config"]))}
        for key, value in content["deepspeed_config"].items():
            found[f"ACCELERATE_{_DEEPSPEED.get(key, key.upper())}"] = _text(value)
    return found


def _of_config(given: Any) -> dict[str, str]:
    """Return the variables that `engine_line` and `zero_stage` read, for a DeepSpeed configuration or its file.

    Raises:
        ArgumentValueError: it is no configuration, or one by which the saved model would have no weights.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    try:
        value = HfDeepSpeedConfig(str(given) if isinstance(given, Path) else given).get_value
    except (AttributeError, OSError, TypeError, ValueError) as error:
        expected = "a file with a DeepSpeed configuration in JSON, or the JSON itself"
        raise ArgumentValueError(message("--deepspeed", expected, str(given))) from error
    stage, place = value("zero_optimization.stage"), value("zero_optimization.offload_param.device")
    if stage == 3 and not value(f"zero_optimization.{_GATHERS}"):
        expected, hint = f'"{_GATHERS}": true beside stage 3', "Without it DeepSpeed writes a model without weights."
        raise ArgumentValueError(message("--deepspeed", expected, "none", hint))
    found = {"zero_stage": str(stage or 0), "offload_param_device": place or "none"}
    return {_USE_DEEPSPEED: "true", **{f"ACCELERATE_{_DEEPSPEED[name]}": text for name, text in found.items()}}


@contextlib.contextmanager
def engine_of(config: TrainConfig) -> Iterator[None]:
    """Set accelerate's variables for the engine of a run, while it lasts.

    Raises:
        ArgumentValueError: the launcher is configured for another engine, or one that a run does not have, or DeepSpeed
            is not installed.
    """
    for name in filter(_is_on, _UNKNOWN):
        hint = "Choose none of it in accelerate's configuration: DDP, FSDP2 and DeepSpeed's ZeRO work."
        raise ArgumentValueError(message("parallel", "an engine of lowtide train", f"{name}=true", hint))
    own = variables(config.parallel) if config.parallel != AUTO and launched_ranks() > 1 else {}
    if given := config.options.get("deepspeed"):
        own |= _of_config(given)
    if given and config.parallel != AUTO:
        hint = "Name the engine in one place: leave one of them out."
        raise ArgumentValueError(message("parallel", "auto beside --deepspeed", config.parallel, hint))
    deepspeed = _USE_DEEPSPEED in own or uses_deepspeed()
    for name in (_USE_FSDP, _USE_DEEPSPEED):
        if config.parallel != AUTO and _is_on(name) and name not in own:
            hint = "Name the engine in one place: leave --parallel out, or start with torchrun."
            got = f"{config.parallel}, and {name}=true from accelerate's configuration"
            raise ArgumentValueError(message("parallel", "what the launcher is configured for", got, hint))
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        hint = "pip install deepspeed, or take --parallel fsdp2."
        raise ArgumentValueError(message("parallel", "DeepSpeed to be installed", config.parallel, hint))
    if given and "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None and not in_group():
        hint = "For one process: torchrun --nproc-per-node 1 -m lowtide train ..."
        raise ArgumentValueError(message("--deepspeed", "processes that a launcher started", "none", hint))
    before = {name: os.environ.get(name) for name in (*own, _USE_FSDP, _USE_DEEPSPEED, _FIRST_READS)}
    os.environ.update(own)
    # accelerate and transformers import these wherever they are installed: seconds, and 200 MiB. Functions of DeepSpeed
    # have the process group of that moment as a default argument, which could not end then (see leave_group)
    unused = {"deepspeed": not deepspeed, "datasets": not config.fine_tunes and find_data(config.data).is_text}
    hidden = [name for name, is_unused in unused.items() if is_unused and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def uses_fsdp() -> bool:
    """Return whether several processes share the model by FSDP."""
    return launched_ranks() > 1 and _is_on(_USE_FSDP)


def reshards() -> bool:
    """Return whether FSDP frees the weights of a layer after its forward, and gathers them again in backward."""
    return os.environ.get(_RESHARDS, "true").lower() in ("true", "full_shard")


def uses_deepspeed() -> bool:
    """Return whether the run uses DeepSpeed."""
    return _is_on(_USE_DEEPSPEED)


def keep_deepspeed() -> None:
    """Name the engine of ``--deepspeed`` again until `engine_of` ends: transformers takes the name away."""
    os.environ[_USE_DEEPSPEED] = "true"


def zero_stage() -> int | None:
    """Return DeepSpeed's stage; None where a configuration of its own has it."""
    stage = os.environ.get(f"ACCELERATE_{_DEEPSPEED['zero_stage']}", "")
    return int(stage) if stage.isdecimal() else None


def receives_weights() -> bool:
    """Return whether FSDP gives this process its shard of the first one's weights, whatever it has itself."""
    return uses_fsdp() and _is_on(_FIRST_READS) and not is_first_rank()


@contextlib.contextmanager
def built_whole(args: Any) -> Iterator[None]:
    """Let transformers build a whole model on each rank, also for ZeRO-3: random weights depend on the seed alone."""
    if args.deepspeed_plugin is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(args.hf_deepspeed_config if args.deepspeed else args.deepspeed_plugin.dschf)


def engine_line(config: TrainConfig) -> str | None:
    """Return how the processes of a run share the model, as a line to print; None for one process."""
    ranks, name = launched_ranks(), config.parallel
    if ranks == 1:
        return None if name == AUTO else f"parallel one process, so nothing is sharded ({name})"
    if uses_deepspeed():
        stage, place = zero_stage(), os.environ.get(f"ACCELERATE_{_DEEPSPEED['offload_param_device']}")
        line = f"parallel {ranks} processes, DeepSpeed ZeRO" + (f"-{stage}" if stage is not None else "")
        return line + {"cpu": ", weights in host memory", "nvme": ", weights on disk"}.get(place or "", "")
    if uses_fsdp():
        gathered = "" if reshards() else ", and weights stay gathered until backward ends"
        return f"parallel {ranks} processes, FSDP2: weights, gradients and optimizer states are sharded{gathered}"
    return f"parallel {ranks} processes, DDP: each has the whole model"


def correct_fsdp2(accelerator: Any) -> None:
    """Correct what accelerate makes of FSDP2, before it prepares a model.

    Raises:
        ArgumentValueError: FSDP is configured in its first version.
    """
    import torch
    from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState

    state = accelerator.state
    if uses_fsdp() and state.distributed_type == DistributedType.MULTI_CPU:
        # accelerate leaves FSDP out where there is no GPU, without a warning, though its code runs there
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        hint = "Set fsdp_version to 2 in accelerate's configuration, or start with torchrun and --parallel fsdp2."
        raise ArgumentValueError(message("parallel", "FSDP in its second version", plugin.fsdp_version, hint))
    if state.mixed_precision != "no":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's policy reduces gradients across ranks in 16 bits, and rounds the loss to them
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[state.mixed_precision]
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def launched_ranks() -> int:
    """Return how many processes the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process is the launcher's first, also before there is a group."""
    return os.environ.get("RANK", "0") == "0"


def let_first_report() -> None:
    """Wait on other ranks than the first: it prints the error that all have, and the launcher then ends the others."""
    if not is_first_rank():
        time.sleep(_FIRST_REPORTS_SECONDS)


def first_does(do: Callable[[], Any]) -> Any:
    """Return on all ranks what ``do`` returns on the first, which alone runs it.

    Raises:
        LowtideError: ``do`` raised it; on all ranks. Any other error is the first rank's alone, and ends it.
    """
    if launched_ranks() == 1:
        return do()
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    PartialState()
    result: list[Any] = [None, None]
    if is_first_rank():
        try:
            result[0] = do()
        except LowtideError as error:
            result[1] = error
    result = broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    return result[0]


def in_group() -> bool:
    """Return whether this process belongs to a process group."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_group() -> None:
    """End the default process group, with its threads, once all ranks are here; nothing where there is none.

    gloo's threads hold the tensors of the last collectives, and NCCL's watch over them: if they are still there when
    the interpreter is finalised, releasing a tensor aborts the process. A group's threads are joined when the last
    reference to it goes, and the model that DDP wraps has one: what made the group must be out of reach before.
    """
    if not in_group():
        return
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    gc.collect()  # trainer, model and callbacks refer to each other
    PartialState().wait_for_everyone()  # nobody closes a connection that another rank's last collective still uses
    torch.distributed.destroy_process_group()
    # accelerate remembers the group in the process, and would use it in a second run
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

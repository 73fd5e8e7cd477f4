"""The processes of a run: what the launcher and accelerate have set, and what is corrected of FSDP2.

Processes and engines (DDP, FSDP2, DeepSpeed) are those of torchrun and of `accelerate launch`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_FIRST_REPORTS_SECONDS = 3.0


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


def uses_fsdp() -> bool:
    """Return whether several processes share the model by FSDP."""
    return launched_ranks() > 1 and _is_on("ACCELERATE_USE_FSDP")


def uses_deepspeed() -> bool:
    """Return whether accelerate is configured for DeepSpeed."""
    return _is_on("ACCELERATE_USE_DEEPSPEED")


def engine_line() -> str | None:
    """Return how the processes of a run share the model, as a line to print; None for one process."""
    ranks = launched_ranks()
    if ranks == 1:
        return None
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    engine = f"DeepSpeed ZeRO-{stage or '?'}" if uses_deepspeed() else "FSDP2: each has a shard" if uses_fsdp() else ""
    return f"parallel {ranks} processes, {engine or 'DDP: each has the whole model'}"


@contextlib.contextmanager
def without_deepspeed() -> Iterator[None]:
    """Keep accelerate and transformers from importing DeepSpeed for the block, if the run does not use it.

    They do wherever it is installed, for seconds and 200 MiB; and functions of it have the process group of that moment
    as a default argument, which could not end then (see `leave_group`).
    """
    hidden = not uses_deepspeed() and "deepspeed" not in sys.modules
    if hidden:
        sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["deepspeed"]


def in_group() -> bool:
    """Return whether this process belongs to a process group."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def first_does(do: Callable[[], Any]) -> Any:
    """Return on all ranks what ``do`` returns on the first, which alone runs it.

    Raises:
        LowtideError: ``do`` raised it; on all ranks. Any other error is the first rank's alone, and ends it.
    """
    if launched_ranks() == 1:
        return do()
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    from lowtide.errors import LowtideError

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


def correct_fsdp2(accelerator: Any) -> None:
    """Correct what accelerate makes of FSDP2, before it prepares a model."""
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
    if plugin is not None and plugin.fsdp_version == 2 and state.mixed_precision != "no":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's policy reduces gradients across ranks in 16 bits, and rounds the loss to them
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[state.mixed_precision]
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")

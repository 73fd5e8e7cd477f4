"""The optimizer's states in host memory while nobody needs them, in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from lowtide.errors import UnsupportedError, message
from lowtide.memory import offload_optimizer
from lowtide.memory.offload import available
from lowtide.train.config import TrainConfig
from lowtide.train.parallel import shares_with_deepspeed, shares_with_fsdp, uses_deepspeed, uses_fsdp


@dataclass(frozen=True)
class StatesAway:
    """What `lowtide.memory.offload_optimizer` is told.

    Attributes:
        gib: the most that leaves the GPU; None: all.
        host_gib: the most host memory for it; None: what is free.
        late: they come back only behind backward.
    """

    gib: float | None = None
    host_gib: float | None = None
    late: bool = False


class OffloadStates(TrainerCallback):  # type: ignore[misc]
    """Offloads the states of Trainer's optimizer once there is one, those of a resumed run included."""

    def __init__(self, away: StatesAway) -> None:
        self._away = away
        self.handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        """Hang the hooks: of a step's backward passes it is the last one that brings the states back."""
        del state, control
        self.handle = offload_optimizer(
            optimizer,
            model,
            gib=self._away.gib,
            host_gib=self._away.host_gib,
            late=self._away.late,
            backwards_per_step=args.gradient_accumulation_steps,
        )


def can_offload(parallel: str) -> bool:
    """Return whether ``--offload-states`` can be had here with an engine, before `engine_of` has made it known."""
    return available() and not shares_with_fsdp(parallel) and not shares_with_deepspeed(parallel)


def check_states(config: TrainConfig, args: Any) -> None:
    """Raise where ``--offload-states`` is given and cannot be had.

    Raises:
        UnsupportedError: there is no GPU, or each has a part of the parameters alone.
    """
    if not config.offload_states:
        return
    if not available():
        hint = "On a CPU there is nothing to offload from: leave it out."
        raise UnsupportedError(message("offload_states", "a CUDA GPU", f"a run on the {args.device.type}", hint))
    if uses_fsdp() or uses_deepspeed():
        hint = "FSDP and DeepSpeed offload by themselves, by settings of their own."
        got = "sharded ones"
        raise UnsupportedError(message("offload_states", "parameters that are whole on each GPU", got, hint))

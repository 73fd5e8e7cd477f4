"""What a resumed run takes over: its settings, and a checkpoint that the same engine has written.

One process and DDP read each other's checkpoints, FSDP2's with whole states any number of processes; DeepSpeed's are
read on as many processes as wrote them.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.checkpoints import checkpoint_to_resume, checkpoints, read_run_file
from lowtide.train.config import ACTIVATIONS, NEWEST_IF_ANY, TrainConfig
from lowtide.train.model import pretrained_model
from lowtide.train.parallel import launched_ranks, uses_deepspeed, uses_fsdp, zero_stage

_WHOLE, _FSDP2, _SHARDS = "one process or DDP", "FSDP2", "FSDP2 with SHARDED_STATE_DICT"
_STATES = {_WHOLE: "optimizer.pt", _FSDP2: "optimizer.bin", _SHARDS: "optimizer_0"}  # accelerate's names
_SCHEDULE = "scheduler.pt"
_MAY_CHANGE = re.compile(  # options of the trainers that a resumed run may be given anew
    "resume_from_checkpoint|save_|eval_|logging_|log_|report_to|disable_tqdm|run_name|hub_|push_to_hub|num_train_epochs|"
    "per_device_train_batch_size|dataloader_|torch_empty_cache_steps"
)


def resumed(config: TrainConfig) -> tuple[TrainConfig, Path | None]:
    """Return a run's config and checkpoint: for a resumed run the settings it began with, and those given now.

    Raises:
        ArgumentValueError: there is no such run, or a setting that it must keep is another one now.
    """
    if config.resumes_from == NEWEST_IF_ANY:
        if config.output is None:
            hint = "Name it with --output, or give `true` for the newest run."
            raise ArgumentValueError(message("output", f"a folder beside {NEWEST_IF_ANY}", "none", hint))
        if not checkpoints(Path(config.output).expanduser()):
            config = replace(config, options={**config.options, "resume_from_checkpoint": "false"})
    if config.resumes_from is None:
        return config, None
    checkpoint = checkpoint_to_resume(config.output, config.resumes_from)
    output = checkpoint.parent
    if config.output is not None and Path(config.output).expanduser().resolve() != output.resolve():
        expected, hint = f"{output}, the folder of the checkpoint", "Copy the folder to keep both."
        raise ArgumentValueError(message("output", expected, config.output, hint))
    before = TrainConfig.from_json(read_run_file(output)["config"])
    default, now = TrainConfig(), config.absolute()
    given = [each for each in fields(config) if getattr(now, each.name) != getattr(default, each.name)]
    changed = {each.name: getattr(now, each.name) for each in given if each.name not in ("options", "output")}
    for each in given:
        if each.metadata.get("fixed"):
            _check_kept(each.name, getattr(before, each.name), changed[each.name])
    for name, value in now.options.items():
        if not _MAY_CHANGE.match(name) and str(value) != str(old := before.options.get(name)):
            _check_kept(f"--{name}", old, value)
    if any(name in changed for name in ACTIVATIONS):  # in place of the one that the run began with
        changed = {**dict.fromkeys(ACTIVATIONS), **changed}
        if not changed["memory_budget"] and not changed.get("offload_states", before.offload_states):
            changed.setdefault("host_budget", None)  # nothing has a use for it
    options = {**before.options, **config.options}
    del options["resume_from_checkpoint"]
    return replace(before, **changed, output=str(output), options=options), checkpoint


def _check_kept(name: str, old: object, new: object) -> None:
    """Raise if a setting differs from the run's."""
    if new != old:
        expected = f"{'the default' if old is None else repr(old)}, as the run began"
        hint = "A resumed run keeps its model, data order and schedule: leave it out, or begin a new run."
        raise ArgumentValueError(message(name, expected, repr(new), hint))


def check_engine(checkpoint: Path) -> None:
    """Raise where the engine of this run cannot read a checkpoint.

    Raises:
        ArgumentValueError: another engine, DeepSpeed stage or number of processes wrote it.
    """
    wrote, now = read_run_file(checkpoint.parent)["engine"], current_engine()
    if wrote != now:
        expected = f"{wrote}, which wrote {checkpoint.name}"
        hint = "Resume with the engine that the run began with."
        raise ArgumentValueError(message("parallel", expected, now, hint))


def check_states(checkpoint: Path) -> None:
    """Check that a checkpoint has the states of the optimizer and of the schedule: Trainer would begin with new ones.

    DeepSpeed checks its own.

    Raises:
        ArgumentValueError: it lacks some.
    """
    states = _STATES.get(current_engine())
    needed = (states, _SCHEDULE) if states else ()
    if missing := [name for name in needed if not (checkpoint / name).exists()]:
        got = f"{checkpoint}, which has no {' and no '.join(missing)}"
        hint = "Resume from another one, or begin a new run; --save_only_model saves what no run can go on from."
        raise ArgumentValueError(message("--resume_from_checkpoint", "a complete checkpoint", got, hint))


def load_experts(checkpoint: Path, model: Any) -> None:
    """Load the weights that files have by other names, such as one for each expert: Trainer leaves them out."""
    from safetensors import safe_open

    if current_engine() != _WHOLE or hasattr(model, "peft_config"):
        return
    names: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    for file in checkpoint.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as content:
            names |= set(content.keys())
    if model.state_dict().keys() - names:
        model.load_state_dict(pretrained_model(checkpoint, alone=True).state_dict())


def current_engine() -> str:
    """Return what writes the checkpoints of this run, of DeepSpeed with the number of processes."""
    if uses_deepspeed():
        return _deepspeed(zero_stage(), launched_ranks())
    if uses_fsdp():
        return _FSDP2 if os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT" else _SHARDS
    return _WHOLE


def _deepspeed(stage: int | None, ranks: int) -> str:
    if stage == 0:  # each process has all states, and the first one writes them
        return "DeepSpeed ZeRO-0"
    # ZeRO-1 has the files of ZeRO-2
    return f"DeepSpeed ZeRO-{3 if stage == 3 else 2} on {ranks} processes"

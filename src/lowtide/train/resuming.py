"""What a resumed run takes over: its settings, and a checkpoint, which another engine may have written.

FSDP2 reads what one process or DDP wrote, and they what it wrote, though Trainer reads only what its own engine writes.
Weights and optimizer states are whole in both formats; FSDP2's names the states by parameter, the other one numbers
them in the optimizer's order. DeepSpeed's files are read by DeepSpeed alone, on as many processes as wrote them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.checkpoints import checkpoint_to_resume, checkpoints, read_run_file
from lowtide.train.config import ACTIVATIONS, NEWEST_IF_ANY, TrainConfig
from lowtide.train.model import pretrained_model
from lowtide.train.parallel import first_does, is_first_rank, launched_ranks, uses_deepspeed, uses_fsdp, zero_stage

_WHOLE, _FSDP2, _SHARDS = "one process or DDP", "FSDP2", "FSDP2 with SHARDED_STATE_DICT"
_FSDP_WEIGHTS = "pytorch_model_fsdp"  # accelerate's name of the file, or with its number of the folder of shards
_FSDP_STATES, _WHOLE_STATES = "optimizer.bin", "optimizer.pt"
_STATES = {_WHOLE: _WHOLE_STATES, _FSDP2: _FSDP_STATES, _SHARDS: "optimizer_0"}
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
        changed = {**dict.fromkeys(_without_use(before, changed)), **changed}
    options = {**before.options, **config.options}
    del options["resume_from_checkpoint"]
    return replace(before, **changed, output=str(output), options=options), checkpoint


def _without_use(before: TrainConfig, changed: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of host and disk that a run began with, where other activations have no use for them."""
    budget, policy = changed["memory_budget"], changed["policy"] or ""
    host = "host_budget" in changed or bool(before.host_budget)
    if not budget and not changed.get("offload_states", before.offload_states):
        yield "host_budget"
    if not ("offload" in policy or (budget and host)):
        yield "disk"


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
    wrote, now = _wrote(checkpoint), _now()
    if wrote != now and {wrote, now} != {_WHOLE, _FSDP2}:
        expected = f"{wrote}, which wrote {checkpoint.name}"
        hint = "Only one process, DDP and FSDP2 with FULL_STATE_DICT read each other's checkpoints."
        raise ArgumentValueError(message("parallel", expected, now, hint))


def check_states(checkpoint: Path) -> None:
    """Check that a checkpoint has the states of the optimizer and of the schedule: Trainer would begin with new ones.

    DeepSpeed checks its own.

    Raises:
        ArgumentValueError: it lacks some.
    """
    wrote = _wrote(checkpoint)
    needed = (_STATES[wrote], _SCHEDULE) if wrote in _STATES else ()
    if missing := [name for name in needed if not (checkpoint / name).exists()]:
        got = f"{checkpoint}, which has no {' and no '.join(missing)}"
        hint = "Resume from another one, or begin a new run; --save_only_model saves what no run can go on from."
        raise ArgumentValueError(message("--resume_from_checkpoint", "a complete checkpoint", got, hint))


@contextlib.contextmanager
def readable(checkpoint: Path, trainer: Any, staging: Path) -> Iterator[Path]:
    """Give a checkpoint in the format that a trainer reads: itself, or a converted one while this lasts.

    `check_engine` has let it pass, and the trainer's engine has not yet sharded the model. A converted one takes as
    much room in ``staging`` as its weights and states.
    """
    wrote, now = _wrote(checkpoint), _now()
    load_experts(checkpoint, trainer.model)
    if wrote == now:
        yield checkpoint
        return
    folder = staging / checkpoint.name
    try:
        first_does(lambda: _convert(checkpoint, folder, trainer, for_fsdp2=now == _FSDP2))
        yield folder
    finally:
        if is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)


def load_experts(checkpoint: Path, model: Any) -> None:
    """Load the weights that files have by other names, such as one for each expert: Trainer leaves them out."""
    from safetensors import safe_open

    if _now() != _WHOLE or hasattr(model, "peft_config"):
        return
    names: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    for file in checkpoint.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as content:
            names |= set(content.keys())
    if model.state_dict().keys() - names:
        model.load_state_dict(_weights(checkpoint, model))


def _wrote(checkpoint: Path) -> str:
    """Return the engine that wrote a checkpoint."""
    if states := list(checkpoint.glob("global_step*/*optim_states.pt")):
        # the weights' files are named by the rank where each rank has a shard of them
        stage = 3 if list(checkpoint.glob("global_step*/*zero_pp_rank_0_*model_states.pt")) else 2
        return _deepspeed(stage, len(states))
    if list(checkpoint.glob("global_step*/*model_states.pt")):
        return _deepspeed(0, 0)
    if (checkpoint / f"{_FSDP_WEIGHTS}.bin").exists():
        return _FSDP2
    return _SHARDS if (checkpoint / f"{_FSDP_WEIGHTS}_0").exists() else _WHOLE


def _now() -> str:
    """Return the engine of this run."""
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


def _convert(checkpoint: Path, folder: Path, trainer: Any, *, for_fsdp2: bool) -> None:
    """Write a checkpoint in the other format; files that both have are links."""
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name not in (f"{_FSDP_WEIGHTS}.bin", _FSDP_STATES, _WHOLE_STATES):
            (folder / file.name).symlink_to(file.absolute())
    before, after = (_WHOLE_STATES, _FSDP_STATES) if for_fsdp2 else (_FSDP_STATES, _WHOLE_STATES)
    states = torch.load(checkpoint / before, weights_only=True, map_location="cpu", mmap=True)
    names = _names(trainer)
    key: dict[Any, Any] = dict(enumerate(names)) if for_fsdp2 else {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [key[one] for one in group["params"]]} for group in states["param_groups"]]
    torch.save({"state": {key[k]: v for k, v in states["state"].items()}, "param_groups": groups}, folder / after)
    if for_fsdp2:
        torch.save(_weights(checkpoint, trainer.model), folder / f"{_FSDP_WEIGHTS}.bin")


def _names(trainer: Any) -> list[str]:
    """Return the names of the parameters in the order in which the trainer's optimizer has them."""
    of = {parameter: name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer.create_optimizer()
    trainer.optimizer = None  # made anew, of the sharded parameters
    return [of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _weights(checkpoint: Path, model: Any) -> dict[str, Any]:
    """Return the weights of a checkpoint by their names in the model; of adapters those that are trained."""
    if hasattr(model, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(checkpoint), device="cpu"))
        return {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
    weights: dict[str, Any] = pretrained_model(checkpoint, alone=True).state_dict()
    return weights

"""The settings of a run that goes on: those it began with, and what is given anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train import checkpoints
from lowtide.train.config import ACTIVATIONS, TrainConfig, fixed_settings
from lowtide.train.offloading import can_offload
from lowtide.train.parallel import AUTO, shares_with_deepspeed

# of the optimizer, given by --trainer-args, what DeepSpeed's keeps
_DEEPSPEEDS_OWN = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def resumed_config(given: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run to go on with: those it began with, and over them the ones given now.

    Args:
        given: settings named by the user now, ``resume`` and ``output`` among them.

    Raises:
        ArgumentValueError: there is no such run, or a setting that fixes its model or data order is another one now.
    """
    output = checkpoints.run_to_resume(given.get("output"))
    before = checkpoints.read_run_file(output)["config"]
    kept = dict(before)
    engine = given.get("parallel", before.get("parallel", AUTO))
    if "offload_states" not in given and not can_offload(engine):
        kept["offload_states"] = False  # the run says so when it begins
    if any(given.get(name) for name in ACTIVATIONS):  # one of these takes the place of what the run began with
        kept = {name: value for name, value in kept.items() if name not in ACTIVATIONS}
    if not any({**kept, **given}.get(name) for name in ("memory_budget", "offload_states")):
        kept["host_budget"] = None
    given = {**given, "output": str(output)}
    if "trainer_args" in given:
        given["trainer_args"] = _merged(before.get("trainer_args") or (), given["trainer_args"])
    now = TrainConfig.from_json({**kept, **given}).absolute().to_json()
    _check(before, now, given, engine)
    return TrainConfig.from_json(now)


def _check(before: dict[str, Any], now: dict[str, Any], given: dict[str, Any], engine: str) -> None:
    """Raise where what is asked for now is another run."""
    if (kind := _optimizer(now)) != (began := _optimizer(before)):
        hint = "Its states are another optimizer's: leave it out, or begin a new run."
        raise ArgumentValueError(message("trainer_args", f"{began}, as the run began", kind, hint))
    if shares_with_deepspeed(engine):
        for name in ("lr", *_DEEPSPEEDS_OWN):
            if (new := _value(now, name)) != (old := _value(before, name)):
                hint = "DeepSpeed's optimizer is loaded with what it had: leave it out, or begin a new run."
                where = name if name == "lr" else "trainer_args"
                raise ArgumentValueError(message(where, f"{name} as the run began, {old}", new, hint))
    for name in fixed_settings():
        if name in given and now[name] != before.get(name):
            hint = "A run keeps what fixes its model and data order: leave the option out, or begin a new run."
            raise ArgumentValueError(message(name, f"{before.get(name)!r}, as the run began", repr(now[name]), hint))


def _merged(before: Iterable[str], now: Iterable[str]) -> tuple[str, ...]:
    """Return KEY=VALUE pairs, those given now in place of earlier ones of the same key."""
    return tuple({pair.partition("=")[0]: pair for pair in (*before, *now)}.values())


def _value(settings: dict[str, Any], name: str) -> Any:
    """Return a setting, or what ``--trainer-args`` say of it."""
    pairs = dict(pair.split("=", 1) for pair in settings.get("trainer_args") or () if "=" in pair)
    return settings.get(name, pairs.get(name, "Trainer's own"))


def _optimizer(settings: dict[str, Any]) -> str:
    """Return the ``--trainer-args`` that name the optimizer."""
    pairs = settings.get("trainer_args") or ()
    return " ".join(sorted(p for p in pairs if p.startswith(("optim=", "optim_args=")))) or "Trainer's own optimizer"

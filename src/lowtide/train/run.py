"""One training run, from its settings to the saved model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_callback import PrinterCallback

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import cuda_peak_bytes, peak_resident_bytes, reset_cuda_peak
from lowtide.train import checkpoints
from lowtide.train.activations import OffloadStates
from lowtide.train.advice import advise
from lowtide.train.checkpoints import Complete, claimed, how_to_resume, write_folder
from lowtide.train.config import TrainConfig
from lowtide.train.ending import SaveAndStop, Terminated, is_lost_rank, lost_rank
from lowtide.train.files import find_data, why
from lowtide.train.monitor import Monitor
from lowtide.train.parallel import engine_of, first_does, in_group, launched_ranks, leave_group
from lowtide.train.prepare import prepare
from lowtide.train.report import show_result, show_start
from lowtide.train.result import TrainResult
from lowtide.train.resuming import check_engine, check_states, current_engine, load_experts, resumed
from lowtide.train.run_state import RunState, Side
from lowtide.train.settings import Settings, trainer_settings

_HUB = ("huggingface_hub", "httpx")  # modules of its client's errors, and of its connection's


def run(config: TrainConfig, *, console: Console | None = None, side: Side | None = None) -> TrainResult:
    """Do what `lowtide.train.train` documents; with a ``side`` as one side of a comparison."""
    group_was_there = in_group()
    result = _run(config, console or Console(), side)
    if not group_was_there:
        leave_group()  # here, where nothing of the run is left that its threads could hold
    if isinstance(result, Terminated):
        raise result
    return result


def _run(config: TrainConfig, console: Console, side: Side | None) -> TrainResult | Terminated:
    """Train, and return what was measured, or the signal that ended the run; turn errors into lowtide's."""
    config, checkpoint = resumed(config)
    with engine_of(config):
        one = RunState(config, _output(config, checkpoint, side), checkpoint=checkpoint, side=side)
        reset_cuda_peak()  # what ran in this process before has one of its own
        try:
            return _trained(one, console)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(how_to_resume(one.output)) from interrupt
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if is_out_of_memory(error):
                error.__traceback__ = None  # its frames hold the step's tensors
                raise advise(error, one) from error
            if is_lost_rank(error):
                raise lost_rank(error, how_to_resume(one.output)) from error
            if one.settings is not None and one.settings.args.push_to_hub and type(error).__module__.startswith(_HUB):
                expected, hint = "a Hub that takes the model", "Log in with `hf auth login`, or leave it out."
                raise ArgumentValueError(message("--push_to_hub", expected, why(error), hint)) from error
            if checkpoints.is_not_written(error) and one.saves and one.step is not None:
                raise checkpoints.save_error(one.output / f"checkpoint-{one.step}", error) from error
            raise


def _output(config: TrainConfig, checkpoint: Path | None, side: Side | None) -> Path:
    """Return the run's folder."""
    if checkpoint is not None:
        return checkpoint.parent
    if side is not None:
        return Path(str(config.output))
    if config.output is None and launched_ranks() > 1:
        got, hint = "none: by the clock each would make its own", "Name it with --output."
        raise ArgumentValueError(message("output", "a folder that all ranks share", got, hint))
    return checkpoints.new_output(config.output, time.strftime("%Y%m%d-%H%M%S"))


def _trained(one: RunState, console: Console) -> TrainResult | Terminated:
    one.settings = _settings(one)
    with ExitStack() as stack:
        if one.saves:
            first_does(lambda: _take_folder(one, stack))
        return _trained_there(one, console)


def _take_folder(one: RunState, stack: ExitStack) -> None:
    """Keep other runs out of the run's folder until the stack ends."""
    try:
        stack.enter_context(claimed(one.output))
    except OSError as error:
        raise checkpoints.save_error(one.output, error) from error
    if one.checkpoint is None:
        checkpoints.new_output(str(one.output), "")  # another run may have ended there in between


def _trained_there(one: RunState, console: Console) -> TrainResult | Terminated:
    config, args = one.config, one.settings.args
    stop = SaveAndStop(saves=one.saves)
    one.callbacks = [*_callbacks(one, console), stop]
    prepare(one)
    trainer = one.trainer
    trainer.remove_callback(PrinterCallback)
    if config.offload_states:
        trainer.add_callback(OffloadStates(one.plan, config.host_gib))
    if one.saves and args.should_save:
        content = {
            "config": config.absolute().to_json(),
            "sequences": one.settings.sequences,
            "engine": current_engine(),
        }
        checkpoints.write_run_file(one.output, {"lowtide": lowtide.__version__, **content})
    reports = args.should_log and one.side is None
    if reports:
        show_start(console, one)
    try:
        _train(one)
        if stop.stopped:
            name = "SIGTERM" if stop.stopped == 15 else "Ctrl-C"
            return Terminated(f"ended by {name} after step {one.step}. {how_to_resume(one.output)}", stop.stopped)
        evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry and entry["step"] == one.step]
        if trainer.eval_dataset is not None and (not evaluated or trainer.state.best_model_checkpoint):
            trainer.evaluate()
    finally:
        stop.close()
        if one.patched_trl is not None:  # of the process, in which a stock run may follow
            lowtide.unpatch_trl()
    saved = _save_model(one) if one.saves else None
    result = _measured(one, saved)
    if reports:
        show_result(console, result)
    return result


def _callbacks(one: RunState, console: Console) -> Iterator[Any]:
    progress = console if one.settings.args.disable_tqdm else None
    if one.side is not None:
        yield from one.side.callbacks
        yield Monitor(one.metrics, console=progress, label=one.side.label)
    else:
        yield Monitor(one.metrics, console=progress, file=one.output / checkpoints.LOG_FILE)
        yield Complete(one.settings.keep)


def _settings(one: RunState) -> Settings:
    """Return the trainer's arguments; a resumed run has as many sequences in a step as at its start."""
    make = partial(trainer_settings, one.config, one.output, save=one.saves, text=find_data(one.config.data).is_text)
    if one.checkpoint is None:
        return make()
    check_engine(one.checkpoint)
    check_states(one.checkpoint)
    sequences = checkpoints.read_run_file(one.output)["sequences"]
    settings = make()
    args = settings.args
    rows = args.per_device_train_batch_size * args.world_size
    if sequences % rows:
        expected = f"a divisor of the run's {sequences} sequences per step"
        got = f"{args.world_size} processes with {args.per_device_train_batch_size} each"
        hint = "Give another --per_device_train_batch_size, or start another number of processes."
        raise ArgumentValueError(message("--per_device_train_batch_size", expected, got, hint))
    batches = sequences // rows
    return settings if batches == args.gradient_accumulation_steps else make(accumulate=batches)


def _train(one: RunState) -> None:
    """Let the trainer train.

    Raises:
        ArgumentValueError: the checkpoint cannot be read, or the optimizer or its schedule cannot be made.
    """
    try:
        if one.checkpoint is None:
            one.trainer.train()
        else:
            load_experts(one.checkpoint, one.trainer.model)
            one.trainer.train(resume_from_checkpoint=str(one.checkpoint))
        best = one.trainer.state.best_model_checkpoint
        if best and one.settings.args.load_best_model_at_end and one.metrics.began:
            load_experts(Path(best), one.trainer.model)
    except Exception as error:
        if isinstance(error, LowtideError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        if one.checkpoint is not None and not one.metrics.began:
            got = f"{one.checkpoint}, which cannot be read ({why(error)})"
            hint = "If it is damaged, remove it, to resume from an older one."
            raise ArgumentValueError(message("--resume_from_checkpoint", "a complete checkpoint", got, hint)) from error
        if one.trainer.lr_scheduler is None and isinstance(error, ValueError | TypeError | ImportError):
            expected = "an optimizer and a schedule with these settings"
            raise ArgumentValueError(message("options", expected, why(error))) from error
        if isinstance(error, RuntimeError) and "DeepSpeedCPUAdam" in str(error):  # --parallel zero3-offload
            expected, hint = "DeepSpeed's Adam for CPUs, which it compiles", "Install a C++ compiler and ninja."
            raise ArgumentValueError(message("parallel", expected, why(error.__cause__ or error), hint)) from error
        if isinstance(error, NotImplementedError) and not one.metrics.losses:  # such as flex attention on a CPU
            raise ArgumentValueError(message("options", "what PyTorch has on this device", why(error))) from error
        raise


def _save_model(one: RunState) -> Path:
    """Write the model, push it if requested, and return where it is."""
    trainer, final = one.trainer, one.output / checkpoints.MODEL
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")

    def write(folder: Path) -> None:
        trainer.save_model(str(folder), _internal_call=True)  # which pushes nothing: that may fail
        trainer.accelerator.wait_for_everyone()

    write_folder(final, write, publish=one.settings.args.should_save)
    trainer.accelerator.wait_for_everyone()
    if one.settings.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=one.settings.args.hub_revision)
    return final


def _measured(one: RunState, saved: Path | None) -> TrainResult:
    metrics, history, patched, trl = one.metrics, one.trainer.state.log_history, one.patched, one.patched_trl
    held_out = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    best = one.trainer.state.best_model_checkpoint
    fused = materialised = None
    if patched is not None:
        fused = patched.calls_fused + (sum(trl.calls_lowtide.values()) if trl else 0)
        materialised = patched.calls_materialised + (sum(trl.calls_trl.values()) if trl else 0)
    return TrainResult(
        losses=metrics.losses,
        held_out_before=next((e["eval_loss"] for e in history if "eval_loss" in e and not e["step"]), None),
        held_out_after=held_out[-1] if held_out else None,
        tokens_per_second=metrics.tokens_per_second,
        step_seconds=metrics.median_step_seconds,
        steps_seconds=metrics.step_seconds,
        peak_resident_bytes=max(peak_resident_bytes(), metrics.highest_bytes),
        peak_cuda_bytes=cuda_peak_bytes(),
        warm_bytes=metrics.warm_bytes,
        peak_step_bytes=metrics.peak_bytes,
        calls_fused=fused,
        calls_materialised=materialised,
        seconds=time.perf_counter() - one.began,
        saved=str(saved) if saved else None,
        best=int(best.rpartition("-")[2]) if best else None,
        dtype=one.settings.product_dtype,
    )

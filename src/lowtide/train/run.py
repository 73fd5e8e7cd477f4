"""One training run, from its settings to the saved model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.trainer_callback import PrinterCallback

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import cuda_peak_bytes, peak_resident_bytes
from lowtide.train import checkpoints
from lowtide.train.activations import OffloadStates
from lowtide.train.advice import advise
from lowtide.train.checkpoints import Complete, write_folder
from lowtide.train.config import ACTIVATIONS, TrainConfig, fixed_settings
from lowtide.train.ending import RankLost, SaveAndStop, Terminated, is_lost_rank
from lowtide.train.files import find_data, why
from lowtide.train.model import pretrained_model, stored_dtype
from lowtide.train.monitor import Monitor
from lowtide.train.parallel import engine_of, in_group, launched_ranks, leave_group
from lowtide.train.prepare import Run, prepare
from lowtide.train.report import show_result, show_start
from lowtide.train.result import TrainResult
from lowtide.train.resuming import check_engine, load_experts, readable
from lowtide.train.settings import trainer_settings
from lowtide.train.shapes import model_folder

_RESUME = "resume_from_checkpoint"
_MAY_CHANGE = (  # options of the trainers that a resumed run may be given anew
    *("save_", "eval_", "logging_", "log_", "report_to", "disable_tqdm", "run_name", "hub_", "push_to_hub"),
    *("num_train_epochs", "per_device_train_batch_size", "dataloader_", "torch_empty_cache_steps"),
)


def run(
    config: TrainConfig,
    *,
    console: Console | None = None,
    save: bool = True,
    label: str = "train",
    tokens: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    reports: bool = True,
) -> TrainResult:
    """Do what `lowtide.train.train` says.

    Args:
        config: the run's settings.
        console: where to print progress and result.
        save: write checkpoints and the model.
        label: printed in front of the progress.
        tokens: the file of tokens of a run that shares its data.
        callbacks: further ones of the trainer, before lowtide's.
        reports: print what is trained and the result, not only the progress.
    """
    group_was_there = in_group()
    config, checkpoint = _resumed(config)
    with engine_of(config):
        runner = _Runner(config, checkpoint, console or Console(), save=save, label=label, reports=reports)
        result = runner.result(tokens, callbacks)
    if not group_was_there:
        leave_group()  # here, where nothing of the run is left that its threads could hold
    if isinstance(result, Terminated):
        raise result
    return result


class _Runner:
    """One run, and what an error in the middle of it can report."""

    def __init__(
        self,
        config: TrainConfig,
        checkpoint: Path | None,
        console: Console,
        *,
        save: bool,
        label: str,
        reports: bool,
    ) -> None:
        self.config, self.checkpoint, self.console, self.save, self.label = config, checkpoint, console, save, label
        self.reports = reports
        self.began = time.perf_counter()
        self.run: Run | None = None
        if checkpoint is not None:
            self.output = checkpoint.parent
        elif save:
            if config.output is None and launched_ranks() > 1:
                got, hint = "none: by the clock each would make its own", "Name it with --output."
                raise ArgumentValueError(message("output", "a folder that all ranks share", got, hint))
            self.output = checkpoints.new_output(config.output, time.strftime("%Y%m%d-%H%M%S"))
        else:
            self.output = Path(config.output or checkpoints.MODEL)

    def result(self, tokens: Path | None, callbacks: tuple[Any, ...]) -> TrainResult | Terminated:
        """Run, and return what was measured, or the signal that ended the run."""
        try:
            return self._result(tokens, callbacks)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(self._how_to_resume()) from interrupt
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            if is_lost_rank(error):
                raise RankLost(f"another process has ended ({why(error)}). {self._how_to_resume()}") from error
            if checkpoints.is_not_written(error) and self.save and (step := self._step()) is not None:
                raise checkpoints.save_error(self.output / f"checkpoint-{step}", error) from error
            raise

    def _result(self, tokens: Path | None, callbacks: tuple[Any, ...]) -> TrainResult | Terminated:
        config, began = self.config, None
        if self.checkpoint is not None:
            check_engine(self.checkpoint)
            began = checkpoints.read_run_file(self.output)
        text = find_data(config.data).is_text
        settings = trainer_settings(config, self.output, save=self.save, text=text)
        args = settings.args
        if began is not None:
            settings = self._same_sequences(settings, began["sequences"], text)
            args = settings.args
        self.run = one = Run(config, settings, self.output, checkpoint=self.checkpoint, tokens=tokens)
        stop = SaveAndStop(saves=self.save)
        one.callbacks = [*callbacks, *self._callbacks(one, args), stop]
        prepare(one)
        one.trainer.remove_callback(PrinterCallback)
        if config.offload_states:
            one.trainer.add_callback(OffloadStates(config, one.applied))
        if self.save and args.should_save:
            sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            content = {"config": config.absolute().to_json(), "sequences": sequences}
            checkpoints.write_run_file(self.output, {"lowtide": lowtide.__version__, **content})
        if args.should_log and self.reports:
            show_start(self.console, one)
        trainer = one.trainer
        try:
            self._train(one)
            if stop.stopped:
                name = "SIGTERM" if stop.stopped == 15 else "Ctrl-C"
                ended = f"ended by {name} after step {trainer.state.global_step}. {self._how_to_resume()}"
                return Terminated(ended, stop.stopped)
            history = trainer.state.log_history
            evaluated = [e for e in history if "eval_loss" in e and e["step"] == trainer.state.global_step]
            if trainer.eval_dataset is not None and (not evaluated or trainer.state.best_model_checkpoint):
                trainer.evaluate()
        finally:
            for callback in one.callbacks:
                if hasattr(callback, "close"):
                    callback.close()
            if one.patched_trl is not None:  # of the process, in which a stock run may follow
                lowtide.unpatch_trl()
        saved = self._save_model(one) if self.save else None
        result = self._measured(one, saved)
        if args.should_log and self.reports:
            show_result(self.console, result, config)
        return result

    def _callbacks(self, one: Run, args: Any) -> list[Any]:
        file = self.output / checkpoints.LOG_FILE if self.save else None
        console = self.console if args.disable_tqdm else None
        callbacks: list[Any] = [Monitor(one.metrics, console=console, label=self.label, file=file)]
        if self.save:
            callbacks.append(Complete(one.settings.keep))
        if self.config.early_stopping_patience:
            from transformers import EarlyStoppingCallback

            callbacks.append(EarlyStoppingCallback(self.config.early_stopping_patience))
        return callbacks

    def _same_sequences(self, settings: Any, sequences: int, text: bool) -> Any:
        """Return the settings of a resumed run with as many sequences in a step as at its start."""
        args = settings.args
        rows = args.per_device_train_batch_size * args.world_size
        if sequences % rows:
            expected = f"a divisor of the run's {sequences} sequences per step"
            got = f"{args.world_size} processes with {args.per_device_train_batch_size} each"
            hint = "Give another --per_device_train_batch_size, or start another number of processes."
            raise ArgumentValueError(message("--per_device_train_batch_size", expected, got, hint))
        batches = sequences // rows
        if batches == args.gradient_accumulation_steps:
            return settings
        return trainer_settings(self.config, self.output, save=self.save, text=text, accumulate=batches)

    def _train(self, one: Run) -> None:
        """Let the trainer train.

        Raises:
            ArgumentValueError: the checkpoint cannot be read, or the optimizer or its schedule cannot be made.
        """
        try:
            if self.checkpoint is None:
                one.trainer.train()
            else:
                with readable(self.checkpoint, one.trainer, self.output / checkpoints.STAGING) as folder:
                    one.trainer.train(resume_from_checkpoint=str(folder))
            best = one.trainer.state.best_model_checkpoint
            if best and one.settings.args.load_best_model_at_end and one.metrics.began:
                load_experts(Path(best), one.trainer.model)
        except Exception as error:
            if isinstance(error, LowtideError) or is_out_of_memory(error) or is_lost_rank(error):
                raise
            if self.checkpoint is not None and not one.metrics.began:
                got = f"{self.checkpoint}, which cannot be read ({why(error)})"
                hint = "If it is damaged, remove it, to resume from an older one."
                raise ArgumentValueError(message(f"--{_RESUME}", "a complete checkpoint", got, hint)) from error
            if one.trainer.lr_scheduler is None and isinstance(error, ValueError | TypeError | ImportError):
                expected = "an optimizer and a schedule with these settings"
                raise ArgumentValueError(message("options", expected, why(error))) from error
            if isinstance(error, NotImplementedError) and not one.metrics.losses:  # such as flex attention on a CPU
                raise ArgumentValueError(
                    message("options", "what PyTorch has on this device", why(error).rstrip("."))
                ) from error
            raise

    def _save_model(self, one: Run) -> Path:
        """Write the model, and the merged one where asked for; return where."""
        trainer, final = one.trainer, self.output / checkpoints.MODEL
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")

        def write(folder: Path) -> None:
            trainer.save_model(str(folder))
            trainer.accelerator.wait_for_everyone()

        write_folder(final, write, publish=one.settings.args.should_save)
        if self.config.lora_merge and one.settings.args.should_save:
            write_folder(self.output / checkpoints.MERGED, lambda folder: self._merge(final, folder))
        trainer.accelerator.wait_for_everyone()
        return final

    def _merge(self, adapter: Path, folder: Path) -> None:
        """Write the base with an adapter merged in, summed in float32, in the dtype that the base is stored in."""
        from peft import PeftModel

        base = model_folder(self.config.model)
        assert base is not None
        model = pretrained_model(base, dtype=torch.float32, alone=True)
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        if not merged.config.get_text_config().tie_word_embeddings:  # peft unties where an adapter trained one side
            # else the weight of the other side is not saved
            merged.all_tied_weights_keys, merged._keys_to_ignore_on_save = {}, None
        merged.to(stored_dtype(base)).save_pretrained(folder)
        assert self.run is not None
        self.run.trainer.processing_class.save_pretrained(folder)

    def _measured(self, one: Run, saved: Path | None) -> TrainResult:
        metrics, history, patched, trl = one.metrics, one.trainer.state.log_history, one.patched, one.patched_trl
        held_out = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        best = Path(one.trainer.state.best_model_checkpoint or "").name
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
            calls_fused=patched.calls_fused + sum((trl.calls_lowtide if trl else {}).values()) if patched else None,
            calls_materialised=patched.calls_materialised + sum((trl.calls_trl if trl else {}).values())
            if patched
            else None,
            seconds=time.perf_counter() - self.began,
            saved=str(saved) if saved else None,
            best=int(best.rpartition("-")[2]) if best else None,
            dtype=one.settings.product_dtype,
        )

    def _step(self) -> int | None:
        """Return the steps done; None before there was a trainer."""
        return None if self.run is None or self.run.trainer is None else int(self.run.trainer.state.global_step)

    def _out_of_memory(self, error: Exception) -> LowtideError:
        """Return the error with the planner's advice; what the step held is free by then."""
        error.__traceback__ = None  # its frames hold the step's tensors
        one, step = self.run, self._step()
        return advise(
            error,
            self.config,
            one.settings if one else None,
            batch=one.batch if one else None,
            model=one.model if one else None,
            applied=one.applied if one else None,
            step=None if step is None else step + 1,
            go_on=self._how_to_resume() if self.save else "",
        )

    def _how_to_resume(self) -> str:
        """Return what to do after a run that ended early."""
        if not self.save or not checkpoints.checkpoints(self.output):
            return "There is no checkpoint yet: start again."
        return f"Resume with: lowtide train --{_RESUME} true --output {self.output}"


def _resumed(config: TrainConfig) -> tuple[TrainConfig, Path | None]:
    """Return the settings and checkpoint of a run that is resumed: those it began with, and those given now.

    Raises:
        ArgumentValueError: there is no such run, or a setting that it must keep is another one now.
    """
    given = config.options.get(_RESUME)
    if given in (None, False, "", "false", "False"):
        return config, None
    checkpoint = checkpoints.checkpoint_to_resume(config.output, str(given))
    if config.output is not None and Path(config.output).expanduser().resolve() != checkpoint.parent.resolve():
        expected, hint = f"{checkpoint.parent}, the folder of the checkpoint", "Copy the folder to keep both."
        raise ArgumentValueError(message("output", expected, config.output, hint))
    before = TrainConfig.from_json(checkpoints.read_run_file(checkpoint.parent)["config"])
    defaults, now = TrainConfig(), config.absolute()
    changed = {
        name: getattr(now, name)
        for name in before.__dataclass_fields__
        if name not in ("options", "output") and getattr(now, name) != getattr(defaults, name)
    }
    hint = "A resumed run keeps its model, data order and schedule: leave it out, or begin a new run."
    for name in (*fixed_settings(), "lr"):
        if name in changed and changed[name] != (old := getattr(before, name)):
            raise ArgumentValueError(message(name, f"{_named(old)}, as the run began", repr(changed[name]), hint))
    for name, value in now.options.items():
        old = before.options.get(name)
        if name != _RESUME and str(value) != str(old) and not name.startswith(_MAY_CHANGE):
            raise ArgumentValueError(message(f"--{name}", f"{_named(old)}, as the run began", repr(value), hint))
    if any(name in changed for name in ACTIVATIONS):  # in place of the one that the run began with
        changed = {**dict.fromkeys(ACTIVATIONS), **changed}
    options = {**before.options, **{k: v for k, v in config.options.items() if k != _RESUME}}
    return replace(before, **changed, output=str(checkpoint.parent), options=options), checkpoint


def _named(value: object) -> str:
    return "the default" if value is None else repr(value)

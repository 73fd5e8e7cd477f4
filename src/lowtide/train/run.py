"""One training run, from its settings to the saved model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import cuda_peak_bytes, peak_resident_bytes
from lowtide.train import checkpoints
from lowtide.train.activations import states_away
from lowtide.train.advice import advise
from lowtide.train.checkpoints import why
from lowtide.train.config import TrainConfig
from lowtide.train.ending import RankLost, SaveAndStop, Terminated, is_lost_rank
from lowtide.train.logs import JsonLog, check_tensorboard, forget_after, tensorboard
from lowtide.train.lora import merge_adapter, stored_dtype
from lowtide.train.metrics import Recorder, StepMetrics
from lowtide.train.model import has_weights
from lowtide.train.offloading import OffloadStates
from lowtide.train.packing import PackedBlocks
from lowtide.train.parallel import engine_of, uses_deepspeed
from lowtide.train.positions import ranks_at, shares_of
from lowtide.train.prepare import ModelBox, Prepared, base_model, prepare
from lowtide.train.progress import ProgressDisplay
from lowtide.train.ranks import Shares, in_group, is_first_rank, launched_ranks, leave_group
from lowtide.train.report import show_result, show_start
from lowtide.train.result import TrainResult
from lowtide.train.stopping import EarlyStop, best_step, held_out_losses, is_over
from lowtide.train.streams import Position
from lowtide.train.tokenizer import load_tokenizer
from lowtide.train.trainer import Collate, LowtideTrainer, training_arguments


def run(config: TrainConfig, *, console: Console | None = None, save: bool = True, label: str = "train") -> TrainResult:
    """Do what `lowtide.train.train` says.

    Args:
        config: the run's settings.
        console: where to show progress and result.
        save: write checkpoints and the model.
        label: said in front of the progress.
    """
    group_was_there = in_group()
    with engine_of(config):
        result = _Run(config, console or Console(), save=save, label=label).result()
    if not group_was_there:
        leave_group()  # here, where nothing of the run is left that its threads could hold
    if isinstance(result, Terminated):
        raise result
    return result


class _Run:
    """One run, and what an error in the middle of it can tell."""

    def __init__(self, config: TrainConfig, console: Console, *, save: bool, label: str) -> None:
        self.config, self.console, self.save, self.label = config, console, save, label
        self.began = time.perf_counter()
        self.output, self.resume_from = Path(), None
        self.box = ModelBox()
        self.args: Any = None
        self.trainer: LowtideTrainer | None = None
        if config.tensorboard:
            check_tensorboard()
        if config.resume:
            self.output = checkpoints.run_to_resume(config.output)
            self.resume_from = checkpoints.checkpoints(self.output)[-1]
            if checkpoints.step_of(self.resume_from) >= config.max_steps:
                expected, hint = f"a run with steps left of {config.max_steps}", "Ask for more with --max-steps."
                raise ArgumentValueError(message("resume", expected, f"{self.output}, which is complete", hint))
        elif save:
            if config.output is None and launched_ranks() > 1:
                got, hint = "none: by the clock each would make its own", "Name it with --output."
                raise ArgumentValueError(message("output", "a folder that all ranks know", got, hint))
            self.output = checkpoints.new_output(config.output, time.strftime("%Y%m%d-%H%M%S"))

    def result(self) -> TrainResult | Terminated:
        """Run, and return what was measured, or that it was ended."""
        try:
            return self._result()
        except KeyboardInterrupt as interrupt:
            if self.save and self.trainer is not None:
                checkpoints.clear_staging(self.output)
            raise KeyboardInterrupt(self._how_to_go_on()) from interrupt
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            if is_lost_rank(error):
                raise RankLost(f"another process has ended ({why(error)}). {self._how_to_go_on()}") from error
            raise

    def _result(self) -> TrainResult | Terminated:
        config = self.config
        shares, starts = shares_of(config, self.resume_from)  # before a model is built that cannot go on
        self.args = args = training_arguments(
            config, self.output, save=self.save, resuming=config.resume, batches=shares.batches
        )
        if self.resume_from is not None:
            checkpoints.check_states(self.resume_from, ranks_at(self.resume_from))
        ready = prepare(config, args, self.resume_from, self.box, self._say if args.should_log else None)
        if self.save and args.should_save and self.resume_from is None:
            _open_run(self.output, ready, None)
        if args.should_log:
            show_start(self.console, ready, args, shares.streams, self.resume_from)
        metrics = StepMetrics(config.seq_len * shares.streams * config.grad_accum)
        stop = SaveAndStop(saves=self.save)
        callbacks = [*self._callbacks(metrics, ready), stop]
        try:
            self.trainer = trainer = make_trainer(ready, args, shares, starts, callbacks)
            self._train(metrics)
            if stop.stopped:
                return Terminated(f"ended by SIGTERM after step {trainer.state.global_step}. {self._how_to_go_on()}")
            if trainer.state.global_step not in held_out_losses(trainer.state.log_history):
                trainer.evaluate()
        finally:
            for callback in callbacks:
                if hasattr(callback, "close"):
                    callback.close()
        best = best_step(trainer.state.log_history) if config.early_stop else None
        saved = self._save_model(best) if self.save else None
        losses = held_out_losses(trainer.state.log_history)
        result = TrainResult(
            losses=metrics.losses,
            held_out_before=next((e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e), None),
            held_out_after=losses[trainer.state.global_step if best is None else best],
            tokens_per_second=metrics.tokens_per_second,
            step_seconds=metrics.median_step_seconds,
            peak_resident_bytes=max(peak_resident_bytes(), metrics.highest_bytes),
            peak_cuda_bytes=cuda_peak_bytes(),
            warm_bytes=metrics.warm_bytes,
            peak_step_bytes=metrics.peak_bytes,
            calls_fused=ready.patched.calls_fused if ready.patched else None,
            calls_materialised=ready.patched.calls_materialised if ready.patched else None,
            seconds=time.perf_counter() - self.began,
            saved=str(saved) if saved else None,
            best=best,
            conversations=trainer.conversations() if ready.corpus.chat else None,
        )
        if args.should_log:
            show_result(self.console, result, config)
        return result

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _callbacks(self, metrics: StepMetrics, ready: Prepared) -> list[Any]:
        """Return what measures, shows, logs and ends the run, and what offloads the optimizer's states."""
        config = self.config
        callbacks: list[Any] = [Recorder(metrics)]
        if self.save and self.args.should_save and self.resume_from is not None:
            callbacks.append(_GoesOn(self.output, ready, self.resume_from))
        if away := states_away(config, ready.chosen):
            callbacks.append(OffloadStates(away))
        if config.progress:
            callbacks.append(ProgressDisplay(self.console, metrics, self.label))
        if self.save and self.args.should_log:
            callbacks.append(JsonLog(self.output / checkpoints.LOG_FILE, metrics))
            if config.tensorboard:
                resumed_at = None if self.resume_from is None else checkpoints.step_of(self.resume_from)
                callbacks.append(tensorboard(self.output / checkpoints.BOARD, resumed_at))
        if config.early_stop:
            callbacks.append(EarlyStop(config.early_stop, saves=self.save))
        return callbacks

    def _train(self, metrics: StepMetrics) -> None:
        """Let Trainer train.

        Raises:
            ArgumentValueError: the checkpoint cannot be read, or no first step ended with the ``trainer_args`` given.
        """
        assert self.trainer is not None
        resume = str(self.resume_from) if self.resume_from else None
        try:
            self.trainer.train(resume_from_checkpoint=resume)
        except Exception as error:
            if isinstance(error, LowtideError) or is_out_of_memory(error) or is_lost_rank(error):
                raise
            if self.resume_from is not None and uses_deepspeed() and not metrics.began:  # which reads it by itself
                got = f"{self.resume_from}, from which DeepSpeed does not go on ({why(error)})"
                hint = "If it is damaged, remove it, to take an older one."
                raise ArgumentValueError(message("resume", "a whole checkpoint", got, hint)) from error
            if self.config.trainer_args and not metrics.step_seconds:
                expected = "arguments that transformers.Trainer can train a step with"
                got = f"{' '.join(self.config.trainer_args)} ({why(error)})"
                hint = "Leave them out to see whether they are the cause."
                raise ArgumentValueError(message("trainer_args", expected, got, hint)) from error
            raise

    def _save_model(self, best: int | None) -> Path:
        """Write the model, the best one's with early stopping, and the merged one where asked for; return where."""
        trainer, config = self.trainer, self.config
        assert trainer is not None
        of_best = None if best is None else self.output / f"checkpoint-{best}"
        if of_best is None or best == trainer.state.global_step or not of_best.is_dir():
            saved = trainer.save_whole_model()
        else:
            saved = self.output / checkpoints.MODEL
            if self.args.should_save:
                checkpoints.model_from_checkpoint(of_best)
            trainer.accelerator.wait_for_everyone()
        if config.lora_merge:
            if self.args.should_save:
                merge(config, saved)
            trainer.accelerator.wait_for_everyone()
        return saved

    def _out_of_memory(self, error: Exception) -> LowtideError:
        """Return the error with the planner's advice; what the step held is free by then."""
        step = None
        if self.trainer is not None:
            step = self.trainer.state.global_step + 1
            if self.save:
                checkpoints.clear_staging(self.output)
        error.__traceback__ = None  # its frames hold the step's tensors
        return advise(
            error,
            self.config,
            self.args,
            model=self.box.model,
            chosen=self.box.chosen,
            packing=self.box.packing,
            step=step,
            go_on=self._how_to_go_on() if self.save else "",
        )

    def _how_to_go_on(self) -> str:
        """Return what to do after a run that ended before its time."""
        if not self.save or not checkpoints.checkpoints(self.output):
            return "There is no checkpoint yet: start again."
        return f"Go on with: lowtide train --resume --output {self.output}"


def make_trainer(
    ready: Prepared, args: Any, shares: Shares, starts: list[Position], callbacks: list[Any]
) -> LowtideTrainer:
    """Return the trainer, this rank's streams where they are to begin."""
    config = ready.config

    def order(stream: int) -> Any:
        return lambda epoch: ready.split.share(stream, shares.streams, epoch)

    streams = [ready.layout.stream(order(number), position=at) for number, at in enumerate(starts, shares.first)]
    return LowtideTrainer(
        blocks=PackedBlocks(streams),
        shares=shares,
        keep_best=config.early_stop > 0,
        model=ready.model,
        args=args,
        eval_dataset=ready.held_out,
        processing_class=ready.tokenizer,
        data_collator=Collate(bounds=ready.bounds),  # Trainer's choice for a tokenizer would pad
        callbacks=callbacks,
    )


def merge(config: TrainConfig, adapter: Path) -> Path:
    """Write the run's model with an adapter merged in, in the stock format, whole or not at all, and return where.

    Raises:
        SaveError: it could not be written.
    """
    output = adapter.parent
    staged, final = output / checkpoints.STAGING / checkpoints.MERGED, output / checkpoints.MERGED
    tokenizer = load_tokenizer(adapter)
    base = base_model(config, tokenizer, whole=True).float()
    dtype = stored_dtype(config.model) if has_weights(config.model) else torch.float32
    try:
        checkpoints.clear_staging(output)
        merge_adapter(base, adapter, staged, dtype=dtype)
        tokenizer.save_pretrained(staged)
        checkpoints.publish(staged, final)
        checkpoints.clear_staging(output)
    except Exception as error:
        if not checkpoints.is_not_written(error):
            raise
        raise checkpoints.save_error(final, error) from error
    return final


def finish_complete_run(config: TrainConfig) -> Path | None:
    """Return the model of a resumed run that has no steps left, None where it has some.

    It is made from the last checkpoint, or the best one of a run that stops early: a run killed between that one and
    its model has an older model, or none.
    """
    output = checkpoints.run_to_resume(config.output)
    newest = checkpoints.checkpoints(output)[-1]
    history = checkpoints.log_history(newest) if config.early_stop else []
    if checkpoints.step_of(newest) < config.max_steps and not is_over(history, config.early_stop):
        return None
    if not is_first_rank():  # which makes it for all
        return newest
    best = best_step(history)
    of_best = output / f"checkpoint-{best}"
    model = checkpoints.model_from_checkpoint(of_best if best is not None and of_best.is_dir() else newest)
    if config.lora_merge:
        merge(config, model)
    return model


class _GoesOn(TrainerCallback):  # type: ignore[misc]
    """Writes a resumed run's file once its checkpoint has been read: what cannot go on leaves it as it was."""

    def __init__(self, output: Path, ready: Prepared, resume_from: Path) -> None:
        self._told = (output, ready, resume_from)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write it."""
        del args, state, control
        _open_run(*self._told)


def _open_run(output: Path, ready: Prepared, resume_from: Path | None) -> None:
    """Write the run's file, and clear what was left half written before."""
    config = ready.config.absolute()
    content = {"lowtide": lowtide.__version__, "config": config.to_json(), **ready.known.to_json()}
    if resume_from is not None:
        checkpoints.clear_staging(output)
        forget_after(output / checkpoints.LOG_FILE, checkpoints.step_of(resume_from))
    else:
        checkpoints.clear_logs(output)
    checkpoints.write_run_file(output, content)

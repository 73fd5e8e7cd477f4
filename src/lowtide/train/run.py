"""One training run: TRL's or transformers' trainer, lowtide's callbacks, and the errors that a user can correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_callback import PrinterCallback

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.advice import advise
from lowtide.train.arguments import Arguments
from lowtide.train.checkpoints import (
    COMPLETE,
    WholeCheckpoints,
    checkpoint_to_resume,
    is_not_written,
    locked,
    next_step,
    save_error,
)
from lowtide.train.distillation import Distillation
from lowtide.train.endings import FiniteLoss, SaveAndStop, Terminated, lost_rank
from lowtide.train.meter import RunResult, StepMeter
from lowtide.train.ranks import first_does, in_group, is_first_rank, leave_group

say = partial(print, flush=True)
_HUB = ("huggingface_hub", "httpx")  # modules of its client's errors, and of its connection's


def train(
    found: Arguments, *, show: Callable[[str], object] = say, saves: bool = True, callbacks: Sequence[Any] = ()
) -> RunResult:
    """Train as the options say, save the model, and return what was measured.

    Args:
        found: the options, of `lowtide.train.arguments.parse`.
        show: is given lines to print, of the first rank.
        saves: whether checkpoints and the model are written, and lines printed; not of a side of a comparison.
        callbacks: of the trainer, before lowtide's.

    Raises:
        ArgumentValueError: the data or the model cannot be used.
        SaveError: a checkpoint or the model could not be written; the last complete checkpoint is still there.
        Terminated: SIGTERM or Ctrl-C came; the step was finished and a checkpoint written.
        RankLost: another of the run's processes has ended or does not answer.
        OutOfMemory: a step, or the model, needs more memory than there is; the text says what would fit.
    """
    group_was_there = in_group()
    outcome = _run(found, show if saves and is_first_rank() else lambda _: None, saves, callbacks)
    if not group_was_there:
        leave_group()  # here, where nothing of the run is left that its threads could hold
    if isinstance(outcome, Terminated):
        raise outcome
    return outcome


def _run(
    found: Arguments, show: Callable[[str], object], saves: bool, callbacks: Sequence[Any]
) -> RunResult | Terminated:
    """Train, evaluate what is held out and save the model; return what was measured, or the signal that ended it."""
    args, run, output = found.training, found.run, Path(found.training.output_dir)
    patch = lowtide.PatchCallback(
        show=show,
        trl=args.loss_type != "nll" if found.fine_tunes else None,
        memory_budget=run.memory_budget,
        host_budget=run.host_budget,
    )
    meter, stop = StepMeter(), SaveAndStop(saves=saves)
    own = [*([patch] * run.patch), meter, FiniteLoss(), stop, *([WholeCheckpoints(found.resume)] * saves)]
    trainer: Any = None
    try:
        with ExitStack() as stack:
            checkpoint = None
            if saves:

                def begin() -> Path | None:
                    stack.enter_context(locked(output))
                    return checkpoint_to_resume(output, args.resume_from_checkpoint)

                checkpoint = first_does(begin)
            args.resume_from_checkpoint = checkpoint
            make = _fine_tuner if found.fine_tunes else _block_trainer
            distillation = Distillation(found) if run.teacher else None  # before a budget takes what is free
            trainer, lines = make(found, [*callbacks, *own])
            if distillation is not None:
                lines = [*lines, distillation.attach(trainer)]
            trainer.args.prediction_loss_only = True
            if not saves:
                trainer.remove_callback(PrinterCallback)
            for line in (*_start(found, trainer), *lines, *([f"resume   from {checkpoint}"] if checkpoint else [])):
                show(line)
            stack.callback(stop.on_train_end)
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            if stop.stopped:
                name = "SIGTERM" if stop.stopped == 15 else "Ctrl-C"
                text = f"ended by {name} after step {trainer.state.global_step}. {next_step(output, found.resume)}"
                return Terminated(text, stop.stopped)
            _finish(trainer, saves)
    except (Exception, CheckpointException, KeyboardInterrupt) as error:  # a CheckpointException is no Exception
        explained = _explained(error, found, trainer, saves)
        if explained is error:
            raise
        raise explained from error
    finally:
        if patch.trl_report is not None:  # of the process: a stock run may follow
            lowtide.unpatch_trl()
    result = meter.finish(trainer.state.log_history)
    if patch.report is not None:
        result.calls_fused, result.calls_materialised = patch.counts()
    for line in (*result.lines(), f"saved    {output}"):
        show(line)
    return result


def _fine_tuner(found: Arguments, callbacks: list[Any]) -> tuple[Any, list[str]]:
    """Return TRL's trainer, and lines about its data."""
    from trl import get_peft_config, get_quantization_config

    from lowtide.train.fine_tuning import FineTuner, load_rows

    args, model = found.training, found.model
    rows, held_out, lines = load_rows(found)
    args.eval_on_start = held_out is not None and not args.resume_from_checkpoint
    own = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    if args.world_size == 1 and args.device.type == "cuda":
        own["device_map"] = str(args.device)  # else TRL spreads the model over all GPUs
    args.model_init_kwargs = {**own, **(args.model_init_kwargs or {})}
    try:
        trainer = FineTuner(
            stock=not found.run.patch,
            model=str(Path(model.model_name_or_path).expanduser()),
            args=args,
            train_dataset=rows,
            eval_dataset=held_out,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            callbacks=callbacks,
        )
    except Exception as error:  # those of models and tokenizers have no common base
        if isinstance(error, LowtideError) or is_out_of_memory(error) or lost_rank(error, ""):
            raise
        expected = "a model, options and data that TRL's SFTTrainer accepts"
        why = " ".join(str(error).split())[:500]
        raise ArgumentValueError(message("options", expected, f"{type(error).__name__}: {why}")) from error
    return trainer, [*lines, *trainer.lines()]


def _block_trainer(found: Arguments, callbacks: list[Any]) -> tuple[Any, list[str]]:
    """Return transformers' trainer of random weights, and a line about its data."""
    from transformers import default_data_collator

    from lowtide.train.scratch import HELD_OUT, make_blocks, make_tokenizer, pieces, random_model
    from lowtide.train.shapes import model_config
    from lowtide.train.trainers import BaseTrainer

    args, model = found.training, found.model
    text = pieces(model.dataset_name, args.seed)
    config = model_config(model.model_name_or_path)
    tokenizer = make_tokenizer(model.tokenizer_name, text, config)
    most = args.max_steps * _sequences(args) if args.max_steps > 0 else None
    held = found.run.held_out or HELD_OUT
    train, held_out = make_blocks(text, tokenizer, args.max_length, held_out=held, most=most, seed=args.seed)
    args.eval_on_start = not args.resume_from_checkpoint
    args.train_sampling_strategy = "sequential"  # blocks are shuffled, and a longer run goes on as a shorter one ended
    trainer = BaseTrainer(
        model=random_model(found, config, tokenizer),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    return trainer, [f"tokens   {len(train) * args.max_length:,} in {len(train):,} sequences"]


def _sequences(args: Any) -> int:
    """Return the sequences of a step, of all ranks."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _start(found: Arguments, trainer: Any) -> list[str]:
    """Return lines about what is about to be trained."""
    args = trainer.args
    numbers = [  # a shard of ZeRO-3 has another name for them, and 4 bits are two in a byte
        (2 * p.nbytes if hasattr(p, "quant_state") else getattr(p, "ds_numel", p.numel()), p.requires_grad)
        for p in trainer.model.parameters()
    ]
    of_all, trained = sum(n for n, _ in numbers), sum(n for n, grad in numbers if grad)
    adapters = f", {trained / 1e6:,.2f} M of them trained" if trained < of_all else ""
    length = f"{args.max_steps:,} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    packed = ", layers in 4 bits" if getattr(found.model, "load_in_4bit", False) else ""
    engine = trainer.accelerator.distributed_type.value.replace("MULTI_GPU", "DDP").replace("MULTI_CPU", "DDP")
    return [
        f"model    {found.model.model_name_or_path}: {of_all / 1e6:,.1f} M parameters{adapters}",
        f"steps    {length} of {_sequences(args)} sequences of at most {args.max_length} tokens, "
        f"on {args.world_size} x {args.device.type}{f', {engine}' if args.world_size > 1 else ''}",
        f"dtypes   weights {found.model.dtype}{packed}, GEMMs {found.gemm_dtype}; "
        f"learning rate up to {args.learning_rate:g}",
    ]


def _finish(trainer: Any, saves: bool) -> None:
    """Evaluate what is held out, if the last step did not, and save the model as `trl sft` does."""
    state, args = trainer.state, trainer.args
    done = any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)
    if trainer.eval_dataset is not None and (not done or state.best_model_checkpoint):
        trainer.evaluate()
    if saves:
        if (plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(args.output_dir)


def _explained(error: BaseException, found: Arguments, trainer: Any, saves: bool) -> BaseException:
    """Return lowtide's error for one of the libraries, the error itself where there is none."""
    if isinstance(error, LowtideError):
        return error
    output = Path(found.training.output_dir)
    after = next_step(output, found.resume) if saves else ""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(after)
    if is_out_of_memory(error):
        error.__traceback__ = None  # its frames hold the step's tensors
        return advise(error, trainer, resume=after)
    if (lost := lost_rank(error, after)) is not None:
        return lost
    if found.training.push_to_hub and type(error).__module__.startswith(_HUB):
        expected, hint = "a Hub that takes the model", "Log in with `hf auth login`, or leave it out."
        return ArgumentValueError(message("--push_to_hub", expected, " ".join(str(error).split()), hint))
    if saves and trainer is not None and is_not_written(error):
        checkpoint = output / f"checkpoint-{trainer.state.global_step}"
        written = (checkpoint / COMPLETE).exists() or not checkpoint.exists()
        return save_error(output / "model.safetensors" if written else checkpoint, error, found.resume)
    return error

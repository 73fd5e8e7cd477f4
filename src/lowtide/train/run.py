"""One training run: TRL's or transformers' trainer, lowtide's callbacks, and the errors that a user can correct."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_callback import PrinterCallback

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.advice import advise
from lowtide.train.arguments import Arguments, check_early, parse
from lowtide.train.checkpoints import (
    WholeCheckpoints,
    checkpoint_to_resume,
    checkpoints,
    is_not_written,
    locked,
    save_error,
    save_model,
)
from lowtide.train.endings import FiniteLoss, SaveAndStop, Terminated, is_lost_rank, lost_rank
from lowtide.train.meter import RunResult, StepMeter
from lowtide.train.ranks import engine_line, first_does, in_group, is_first_rank, leave_group
from lowtide.train.shapes import model_config

_HUB = ("huggingface_hub", "httpx")  # modules of its client's errors, and of its connection's


class Run:
    """A run as far as it is made.

    Attributes:
        found: its options.
        output: its folder.
        callbacks: of its trainer.
        meter: what its steps measure.
        patch: the callback that patches the model; None for a stock one.
        stop: the callback that ends it at a signal.
        trainer: None before it is made.
        lines: about model and data, to print.
        saves: whether it writes checkpoints and the model.
    """

    def __init__(self, found: Arguments, *, label: str | None, callbacks: Sequence[Any], console: Console) -> None:
        self.found, self.console = found, console
        self.output = Path(found.training.output_dir)
        self.saves = label is None
        run = found.run
        self.patch = None
        if run.patch:
            self.patch = lowtide.PatchCallback(
                show=self._show if self.saves else None,
                trl=found.training.loss_type != "nll" if found.fine_tunes else None,
                memory_budget=run.memory_budget,
                host_budget=run.host_budget,
                length=found.model.max_length if not found.fine_tunes else None,
            )
        self.meter = StepMeter(say=None if self.saves else lambda text: console.print(f"{label}: {text}"))
        self.stop = SaveAndStop(saves=self.saves)
        own = [self.patch, self.meter, FiniteLoss(), self.stop, *([WholeCheckpoints(found.resume)] * self.saves)]
        self.callbacks = [*callbacks, *filter(None, own)]
        self.trainer: Any = None
        self.lines: list[str] = []

    def _show(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def how_to_resume(self) -> str:
        """Return what to do after it ended early."""
        return self.found.resume if checkpoints(self.output) else "There is no checkpoint yet: start again."

    def make_trainer(self) -> None:
        """Read the data and make the trainer.

        Raises:
            ArgumentValueError: the model or the data cannot be used.
        """
        if self.found.fine_tunes:
            self._make_fine_tuner()
        else:
            self._make_block_trainer()
        self.trainer.args.prediction_loss_only = True
        if not self.saves:
            self.trainer.remove_callback(PrinterCallback)

    def _make_fine_tuner(self) -> None:
        from trl import get_peft_config, get_quantization_config

        from lowtide.train.fine_tuning import FineTuner, load_rows

        found, args, model = self.found, self.found.training, self.found.model
        rows, held_out, lines = load_rows(found)
        args.eval_on_start = held_out is not None and not args.resume_from_checkpoint
        own = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
        args.model_init_kwargs = {**own, **(args.model_init_kwargs or {})}
        try:
            self.trainer = FineTuner(
                stock=not found.run.patch,
                model=str(Path(model.model_name_or_path).expanduser()),
                args=args,
                train_dataset=rows,
                eval_dataset=held_out,
                quantization_config=get_quantization_config(model),
                peft_config=get_peft_config(model),
                callbacks=self.callbacks,
            )
        except Exception as error:  # those of models and tokenizers have no common base
            if isinstance(error, LowtideError) or is_out_of_memory(error) or is_lost_rank(error):
                raise
            expected = "a model, options and data that TRL's SFTTrainer accepts"
            why = " ".join(str(error).split())[:500]
            raise ArgumentValueError(message("options", expected, f"{type(error).__name__}: {why}")) from error
        self.lines += [*lines, *self.trainer.lines()]

    def _make_block_trainer(self) -> None:
        from transformers import default_data_collator

        from lowtide.train.scratch import HELD_OUT, make_blocks, pieces, random_model, text_files
        from lowtide.train.trainers import BlockTrainer

        found, args = self.found, self.found.training
        text = pieces(text_files(found.model.dataset_name), args.seed)
        config = model_config(found.model.model_name_or_path)
        tokenizer = _tokenizer(found, text, config)
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        train, held_out = make_blocks(
            text,
            tokenizer,
            found.model.max_length,
            held_out=found.run.held_out or HELD_OUT,
            most=args.max_steps * sequences if args.max_steps > 0 else None,
            seed=args.seed,
        )
        self.lines.append(f"tokens   {len(train) * found.model.max_length:,} in {len(train):,} sequences")
        args.eval_on_start = not args.resume_from_checkpoint
        self.trainer = BlockTrainer(
            model=random_model(found, config, tokenizer),
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=default_data_collator,
            callbacks=self.callbacks,
        )

    def show_start(self) -> None:
        """Print what is about to be trained on what."""
        found, args, model = self.found, self.trainer.args, self.trainer.model
        numbers = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
        of_all, trained = sum(n for n, _ in numbers), sum(n for n, grad in numbers if grad)
        adapters = f", {trained / 1e6:,.2f} M of them trained" if trained < of_all else ""
        length = f"{args.max_steps:,} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        most = found.training.max_length if found.fine_tunes else found.model.max_length
        for line in (
            f"model    {found.model.model_name_or_path}: {of_all / 1e6:,.1f} M parameters{adapters}",
            *self.lines,
            f"steps    {length} of {sequences} sequences of at most {most} tokens, on {args.world_size} x "
            f"{args.device.type}",
            f"dtypes   weights {found.model.dtype}, GEMMs {_product_dtype(found)}; learning rate up to "
            f"{args.learning_rate:g}",
            engine_line(),
        ):
            if line is not None:
                self._show(line)

    def train(self, checkpoint: Path | None) -> None:
        """Train, evaluate what is held out, and save the model.

        Raises:
            Terminated: a signal came.
            SaveError: something could not be written.
        """
        trainer = self.trainer
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            self.stop.close()
        if self.stop.stopped:
            name = "SIGTERM" if self.stop.stopped == 15 else "Ctrl-C"
            after = f"ended by {name} after step {trainer.state.global_step}. {self.how_to_resume()}"
            raise Terminated(after, self.stop.stopped)
        history = trainer.state.log_history
        done = any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history)
        if trainer.eval_dataset is not None and (not done or trainer.state.best_model_checkpoint):
            trainer.evaluate()
        if self.saves:
            save_model(trainer, self.output, self.found.resume)
            if trainer.args.push_to_hub:
                trainer.push_to_hub(commit_message="Model save")

    def result(self) -> RunResult:
        """Return what was measured."""
        result = self.meter.finish(_product_dtype(self.found))
        if self.patch is not None and self.patch.report is not None:
            result.calls_fused, result.calls_materialised = self.patch.counts()
        return result

    def explained(self, error: BaseException) -> BaseException:
        """Return lowtide's error for one of the libraries, the error itself where there is none."""
        step = None if self.trainer is None else self.trainer.state.global_step
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt(self.how_to_resume())
        if isinstance(error, LowtideError):
            return error
        if is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold the step's tensors
            length = None if self.found.fine_tunes else self.found.model.max_length
            return advise(error, self.trainer, length=length, resume=self.how_to_resume() if self.saves else "")
        if is_lost_rank(error):
            return lost_rank(error, self.how_to_resume())
        if self.found.training.push_to_hub and type(error).__module__.startswith(_HUB):
            expected, hint = "a Hub that takes the model", "Log in with `hf auth login`, or leave it out."
            return ArgumentValueError(message("--push_to_hub", expected, " ".join(str(error).split()), hint))
        if self.saves and step is not None and is_not_written(error):
            return save_error(self.output / f"checkpoint-{step}", error, self.found.resume)
        return error


def train(
    words: Sequence[str], *, console: Console | None = None, label: str | None = None, callbacks: Sequence[Any] = ()
) -> RunResult:
    """Train as a command line says, save the model, and return what was measured.

    Args:
        words: the options, as ``lowtide train`` takes them.
        console: where lines are printed; standard output without it.
        label: of a side of a comparison, which saves nothing and prints its progress alone.
        callbacks: of the trainer, before lowtide's.

    Raises:
        ArgumentValueError: an option, the data or the model cannot be used.
        SaveError: a checkpoint or the model could not be written; the last complete checkpoint is still there.
        Terminated: SIGTERM or Ctrl-C came; the step was finished and a checkpoint written.
        RankLost: another of the run's processes has ended or does not answer.
        OutOfMemory: a step, or the model, needs more memory than there is; the text says what would fit.
    """
    found = parse(words, fine_tunes=check_early(words))
    group_was_there = in_group()
    outcome = _run(Run(found, label=label, callbacks=callbacks, console=console or Console()))
    if not group_was_there:
        leave_group()  # here, where nothing of the run is left that its threads could hold
    if isinstance(outcome, Terminated):
        raise outcome
    return outcome


def _run(one: Run) -> RunResult | Terminated:
    try:
        with ExitStack() as stack:
            checkpoint = None
            if one.saves:
                first_does(lambda: stack.enter_context(locked(one.output)))
                checkpoint = first_does(
                    lambda: checkpoint_to_resume(one.output, one.found.training.resume_from_checkpoint)
                )
            one.found.training.resume_from_checkpoint = checkpoint
            one.make_trainer()
            if one.saves and is_first_rank():
                one.show_start()
                if checkpoint is not None:
                    one.console.print(f"resume   from {checkpoint}", highlight=False, soft_wrap=True)
            one.train(checkpoint)
    except Terminated as ended:
        return ended
    except (Exception, CheckpointException, KeyboardInterrupt) as error:  # a CheckpointException is no Exception
        explained = one.explained(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        if one.patch is not None and one.patch.trl_report is not None:  # of the process: a stock run may follow
            lowtide.unpatch_trl()
    result = one.result()
    if one.saves and is_first_rank():
        for line in (*result.lines(), f"saved    {one.output}"):
            one.console.print(line, highlight=False, markup=False, soft_wrap=True)
    return result


def save_tokenizer(found: Arguments, folder: Path) -> str:
    """Write the tokenizer of a run from random weights into a folder, whose name this returns."""
    from lowtide.train.scratch import pieces, text_files

    text = pieces(text_files(found.model.dataset_name), found.training.seed)
    _tokenizer(found, text, model_config(found.model.model_name_or_path)).save_pretrained(folder)
    return str(folder)


def _tokenizer(found: Arguments, text: list[str], config: Any) -> Any:
    from lowtide.train.scratch import make_tokenizer

    return first_does(lambda: make_tokenizer(found.model.tokenizer_name, text, config))


def _product_dtype(found: Arguments) -> str:
    """Return the dtype that GEMMs run in."""
    args = found.training
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else str(found.model.dtype)

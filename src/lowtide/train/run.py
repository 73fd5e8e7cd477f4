"""One training run, from its settings to the saved model."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import default_data_collator

import lowtide
from lowtide.errors import ArgumentValueError, message
from lowtide.measure import cuda_peak_bytes, peak_resident_bytes
from lowtide.models import PatchReport
from lowtide.train import checkpoints
from lowtide.train.config import TrainConfig, fixed_settings
from lowtide.train.corpus import Corpus, open_corpus
from lowtide.train.metrics import Recorder, StepMetrics
from lowtide.train.model import build_model, check_model, check_vocabulary, has_weights, model_config
from lowtide.train.packing import PackedBlocks, Position, Split, Stream, held_out_blocks, split_corpus
from lowtide.train.progress import ProgressDisplay
from lowtide.train.report import show_result, show_start
from lowtide.train.tokenizer import load_tokenizer, tokenize_with, train_tokenizer
from lowtide.train.trainer import LowtideTrainer, training_arguments

_BYTES_PER_TOKEN = 6  # a generous guess, to hold out enough text for the blocks asked for


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run measured; bytes and seconds.

    Attributes:
        losses: training loss of each step, from the first, also of those before a resume.
        held_out_before: mean loss on text never trained on, before the first step.
        held_out_after: the same after the last step.
        tokens_per_second: of all ranks together, by the median step.
        step_seconds: the median step.
        peak_resident_bytes: of this process, over the whole run.
        peak_cuda_bytes: of this rank's tensors; 0 without CUDA.
        warm_bytes: memory in use between steps once the optimizer has its state; None in runs too short for it.
        peak_step_bytes: the highest while training after that, of the same memory.
        calls_fused: losses computed without logits; None where the model was not patched.
        calls_materialised: losses for which the logits were built.
        seconds: the whole run.
        saved: the folder of the model; None where nothing is saved.
    """

    losses: dict[int, float]
    held_out_before: float | None
    held_out_after: float | None
    tokens_per_second: float
    step_seconds: float
    peak_resident_bytes: int
    peak_cuda_bytes: int
    warm_bytes: int | None
    peak_step_bytes: int
    calls_fused: int | None
    calls_materialised: int | None
    seconds: float
    saved: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON knows it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything a run needs, checked before anything is written."""

    config: TrainConfig
    corpus: Corpus
    split: Split
    tokenizer: Any
    model: Any
    patched: PatchReport | None
    held_out: torch.Tensor


def run(config: TrainConfig, *, console: Console | None = None, save: bool = True, label: str = "train") -> TrainResult:
    """Do what `lowtide.train.train` says.

    Args:
        config: the run's settings.
        console: where to show progress and result.
        save: write checkpoints and the model.
        label: said in front of the progress.
    """
    began = time.perf_counter()
    console = console or Console()
    resume_from = None
    output = Path()
    if config.resume:
        output = checkpoints.run_to_resume(config.output)
        resume_from = checkpoints.checkpoints(output)[-1]
        if checkpoints.step_of(resume_from) >= config.max_steps:
            expected, hint = f"a run with steps left of {config.max_steps}", "Ask for more with --max-steps."
            raise ArgumentValueError(message("resume", expected, f"{output}, which is complete", hint))
    elif save:
        output = checkpoints.new_output(config.output, time.strftime("%Y%m%d-%H%M%S"))
    args = training_arguments(config, output, save=save, resuming=config.resume)
    ready = prepare(config, args, resume_from)
    if save and args.should_save:
        _open_run(output, ready, resume_from)
    if args.should_log:
        show_start(console, ready, args, resume_from)
    metrics = StepMetrics(config.seq_len * config.batch_size * config.grad_accum * args.world_size)
    trainer = make_trainer(ready, args, metrics, resume_from, ProgressDisplay(console, metrics, label))
    try:
        held_out_after = _train(trainer, resume_from)
    except KeyboardInterrupt as interrupt:
        if save:
            checkpoints.clear_staging(output)
        raise KeyboardInterrupt(_how_to_go_on(output, save)) from interrupt
    saved = trainer.save_whole_model() if save else None
    result = TrainResult(
        losses=metrics.losses,
        held_out_before=next((e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e), None),
        held_out_after=held_out_after,
        tokens_per_second=metrics.tokens_per_second,
        step_seconds=metrics.median_step_seconds,
        peak_resident_bytes=max(peak_resident_bytes(), metrics.highest_bytes),
        peak_cuda_bytes=cuda_peak_bytes(),
        warm_bytes=metrics.warm_bytes,
        peak_step_bytes=metrics.peak_bytes,
        calls_fused=ready.patched.calls_fused if ready.patched else None,
        calls_materialised=ready.patched.calls_materialised if ready.patched else None,
        seconds=time.perf_counter() - began,
        saved=str(saved) if saved else None,
    )
    if args.should_log:
        show_result(console, result)
    return result


def prepare(config: TrainConfig, args: Any, resume_from: Path | None) -> Prepared:
    """Find the data, make tokenizer and model, patch it, and take the held-out blocks; nothing is written.

    Raises:
        ArgumentValueError: any of them cannot be used.
    """
    streams = config.batch_size * args.world_size
    corpus = open_corpus(config.data, text_field=config.text_field, streams=streams, seq_len=config.seq_len)
    shape = model_config(config.model, vocab_size=config.vocab_size)
    split = split_corpus(
        corpus, seed=config.seed, held_out_bytes=config.eval_blocks * config.seq_len * _BYTES_PER_TOKEN
    )
    tokenizer = _tokenizer(config, corpus, split, resume_from)
    check_vocabulary(shape, len(tokenizer))
    blocks = held_out_blocks(
        corpus,
        split,
        tokenize_with(tokenizer),
        eos=tokenizer.eos_token_id,
        seq_len=config.seq_len,
        limit=config.eval_blocks,
    )
    if not has_weights(config.model):  # a fresh model's special tokens are the tokenizer's
        shape.bos_token_id, shape.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        shape.eos_token_id = tokenizer.eos_token_id
    model = build_model(config.model, shape, seed=config.seed)
    check_model(model, seq_len=config.seq_len)
    patched = None
    if config.patch:
        patched = lowtide.patch(model, options=lowtide.HeadOptions(workspace_mib=config.workspace_mib))
    return Prepared(
        config=config,
        corpus=corpus,
        split=split,
        tokenizer=tokenizer,
        model=model,
        patched=patched,
        held_out=blocks,
    )


def make_trainer(
    ready: Prepared, args: Any, metrics: StepMetrics, resume_from: Path | None, display: ProgressDisplay
) -> LowtideTrainer:
    """Return the trainer, its data at the start or at the checkpoint's position."""
    config = ready.config
    streams = config.batch_size * args.world_size
    first = config.batch_size * args.process_index
    tokenize = tokenize_with(ready.tokenizer)

    def pack(start: list[Position] | None) -> PackedBlocks:
        start = [Position()] * config.batch_size if start is None else start

        def stream(row: int) -> Stream:
            return Stream(
                ready.corpus,
                lambda epoch: ready.split.share(first + row, streams, epoch),
                tokenize,
                eos=ready.tokenizer.eos_token_id,
                seq_len=config.seq_len,
                position=start[row],
            )

        return PackedBlocks([stream(row) for row in range(config.batch_size)])

    return LowtideTrainer(
        pack=pack,
        resume_from=resume_from,
        model=ready.model,
        args=args,
        eval_dataset=[{"input_ids": block, "labels": block} for block in ready.held_out],
        processing_class=ready.tokenizer,
        data_collator=default_data_collator,  # Trainer's choice for a tokenizer would pad
        callbacks=[Recorder(metrics), *([display] if config.progress else [])],
    )


def finish_complete_run(config: TrainConfig) -> Path | None:
    """Return the model of a resumed run that has no steps left, None where it has some.

    It is made from the last checkpoint: a run killed between that one and its model has an older model, or none.
    """
    output = checkpoints.run_to_resume(config.output)
    newest = checkpoints.checkpoints(output)[-1]
    if checkpoints.step_of(newest) < config.max_steps:
        return None
    return checkpoints.model_from_checkpoint(newest)


def _train(trainer: LowtideTrainer, resume_from: Path | None) -> float | None:
    """Train and return the held-out loss afterwards."""
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        after: float | None = trainer.evaluate().get("eval_loss")
        return after
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressDisplay):
                callback.close()


def _how_to_go_on(output: Path, save: bool) -> str:
    """Return what to do after an interrupt."""
    if not save or not checkpoints.checkpoints(output):
        return "There is no checkpoint yet: start again."
    return f"Go on with: lowtide train --resume --output {output}"


def _tokenizer(config: TrainConfig, corpus: Corpus, split: Split, resume_from: Path | None) -> Any:
    """Return the tokenizer: the checkpoint's, the one named, the model's own, or one trained here."""
    if resume_from is not None:
        return load_tokenizer(resume_from)
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    if has_weights(config.model):
        return load_tokenizer(config.model)
    pieces = split.share(0, 1, 0)
    trained = [train_tokenizer(corpus, pieces, vocab_size=config.vocab_size, seq_len=config.seq_len)]
    return broadcast_object_list(trained)[0]  # every rank the first one's


def _open_run(output: Path, ready: Prepared, resume_from: Path | None) -> None:
    """Write the run's file, or on resume check that the data is still the same and clear what was left half written."""
    content = {"lowtide": lowtide.__version__, "config": ready.config.to_json(), "data": ready.corpus.fingerprint()}
    if resume_from is not None:
        if checkpoints.read_run_file(output)["data"] != content["data"]:
            hint = "Restore the files as they were, or begin a new run."
            raise ArgumentValueError(message("data", "the files the run began with", "other names or sizes", hint))
        checkpoints.clear_staging(output)
    checkpoints.write_run_file(output, content)


def resumed_config(given: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run to go on with: those it began with, and over them the ones given now.

    Args:
        given: settings named by the user now, ``resume`` and ``output`` among them.

    Raises:
        ArgumentValueError: there is no such run, or a setting that fixes its model or data order is another one now.
    """
    output = checkpoints.run_to_resume(given.get("output"))
    before = checkpoints.read_run_file(output)["config"]
    now = TrainConfig.from_json({**before, **given, "output": str(output)}).to_json()
    for name in fixed_settings():
        if name in given and now[name] != before.get(name):
            hint = "A run keeps what fixes its model and data order: leave the option out, or begin a new run."
            raise ArgumentValueError(message(name, f"{before.get(name)!r}, as the run began", repr(now[name]), hint))
    return TrainConfig.from_json(now)

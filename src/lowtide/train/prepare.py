"""Everything a run needs, made and checked before the first step: data, tokenizer, model, trainer, patch and policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.units import mib
from lowtide.train.activations import check_offload, plan_and_apply
from lowtide.train.checkpoints import TOKENS, is_not_written, save_error
from lowtide.train.config import TrainConfig
from lowtide.train.files import Sources, find_data, why
from lowtide.train.model import check_model, check_vocabulary, count, model_config, pretrained_model, random_model
from lowtide.train.parallel import built_whole, first_does
from lowtide.train.run_state import SEQ_LEN, RunState
from lowtide.train.settings import Settings
from lowtide.train.shapes import pretrained_name
from lowtide.train.tokenizer import as_loaded, check_template, load_tokenizer, set_chat_template, train_tokenizer
from lowtide.train.tokens import Text, write_tokens

_SAMPLE = 1000  # rows
_MOST_HELD_OUT = 10  # a tenth of the rows


def prepare(run: RunState) -> None:
    """Read the data, make tokenizer, model and trainer, and patch the model.

    Raises:
        ArgumentValueError: any of them cannot be used.
    """
    config = run.config
    check_offload(config)
    sources = find_data(config.data)
    source = "Python's standard library" if not config.data else ", ".join(config.data)
    skipped = f", {sources.skipped} files that are not text skipped" if sources.skipped else ""
    run.lines.append(f"data     {source}: {mib(sources.bytes):,.1f} MiB{skipped}")
    make = _fine_tuner if config.fine_tunes else _pre_trainer
    make(run, sources)
    run.model = run.trainer.model  # with its adapters
    plan_and_apply(run)
    run.lines += _notes(run)


def share_data(config: TrainConfig, settings: Settings, folder: Path) -> TrainConfig:
    """Write what the sides of a comparison share in a folder, from random weights; return their config."""
    config = replace(config, output=str(folder))
    if config.fine_tunes:
        return config
    text = _text(config, settings, find_data(config.data))
    tokenizer = _own_tokenizer(config, text, model_config(config.model, vocab_size=config.vocab_size))
    tokenizer.save_pretrained(folder)
    _write_tokens(folder / TOKENS, text, tokenizer, config, settings)
    return replace(config, tokenizer=str(folder))


def _pre_trainer(run: RunState, sources: Sources) -> None:
    """Make the trainer of random weights: neither TRL nor datasets is imported."""
    from transformers import default_data_collator

    from lowtide.train.tokens import Blocks
    from lowtide.train.trainers import PreTrainer

    config, settings, args = run.config, run.settings, run.settings.args
    run.seq_len = config.seq_len or SEQ_LEN
    shape = model_config(config.model, vocab_size=config.vocab_size)  # a wrong name ends the run before the tokenizer
    file = run.output / TOKENS

    def tokenized() -> Any:
        text = _text(config, settings, sources)
        tokenizer = load_tokenizer(run.checkpoint) if run.checkpoint else _own_tokenizer(config, text, shape)
        check_vocabulary(shape, len(tokenizer))
        if run.side is None:  # the sides of a comparison find the file that they share
            _write_tokens(file, text, tokenizer, config, settings, begun=run.checkpoint is not None)
        return tokenizer

    tokenizer = first_does(tokenized)
    shape.bos_token_id, shape.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    shape.pad_token_id = None if pad == tokenizer.eos_token_id else pad  # some models' embeddings do not train its row
    blocks, held_out = Blocks(file, "train"), Blocks(file, "held_out")
    run.lines.append(f"tokens   {len(blocks) * run.seq_len:,} in {len(blocks):,} sequences, {len(held_out)} held out")
    dtype = getattr(torch, settings.model.dtype)
    with built_whole(args):
        run.model = random_model(shape, seed=args.seed, dtype=dtype, attention=settings.model.attn_implementation)
    run.model.config.pad_token_id = pad
    first_does(lambda: check_model(run.model, seq_len=run.seq_len))  # another may have no weights
    _patch(run)
    args.eval_on_start = run.checkpoint is None
    run.trainer = PreTrainer(
        metrics=run.metrics,
        model=run.model,
        args=args,
        train_dataset=blocks,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=run.callbacks,
    )


def _fine_tuner(run: RunState, sources: Sources) -> None:
    """Make the trainer of a pretrained model."""
    from transformers import set_seed
    from trl import get_peft_config, get_quantization_config

    from lowtide.train.fine_tuning import FineTuner

    config, settings, args = run.config, run.settings, run.settings.args
    name = pretrained_name(config.model)
    assert name is not None
    tokenizer = load_tokenizer(config.tokenizer or name, trust_remote_code=args.trust_remote_code, end=args.eos_token)
    if args.chat_template_path is not None:
        set_chat_template(tokenizer, args.chat_template_path)
    parts = _rows(run, sources, tokenizer)
    kwargs = dict(args.model_init_kwargs or {})
    if settings.model.attn_implementation is not None:
        kwargs["attn_implementation"] = settings.model.attn_implementation
    if (quantization := get_quantization_config(settings.model)) is not None:
        kwargs["quantization_config"] = quantization
    if (dtype := settings.model.dtype) not in ("auto", None):
        dtype = getattr(torch, dtype)
    run.model = pretrained_model(name, dtype=dtype, trust_remote_code=args.trust_remote_code, **kwargs)
    check_vocabulary(run.model.config, len(tokenizer))
    _patch(run)  # before TRL installs its own head, which calls the forward that it finds
    args.model_init_kwargs = None  # done
    set_seed(args.seed)  # of the adapters: reading and patching a model may draw random numbers
    args.eval_on_start = run.checkpoint is None and parts["test"] is not None
    try:
        run.trainer = FineTuner(
            stock=not config.patch,
            metrics=run.metrics,
            model=run.model,
            args=args,
            train_dataset=parts["train"],
            eval_dataset=parts["test"],
            processing_class=tokenizer,
            peft_config=get_peft_config(settings.model),
            callbacks=run.callbacks,
        )
    except (ValueError, TypeError, RuntimeError, ImportError, KeyError) as error:
        if isinstance(error, LowtideError) or is_out_of_memory(error):
            raise
        expected = "settings and data that TRL's SFTTrainer accepts"
        raise ArgumentValueError(message("options", expected, why(error))) from error
    if type(run.trainer.model.get_output_embeddings()).__name__ == "TrainableTokensWrapper":  # neither trl nor peft can
        got = f"{args.chat_template_path}, whose tokens the tied embeddings lack"
        hint = "Give its template as a .jinja file, or train without --use_peft."
        raise ArgumentValueError(message("--chat_template_path", "no new tokens beside adapters", got, hint))
    _check_truncation(run, parts)
    rows = run.trainer.train_dataset
    run.padded = len({len(ids) for ids in rows[: min(_SAMPLE, len(rows))]["input_ids"]}) > 1
    run.lines += _learned(rows, tokenizer)


def _rows(run: RunState, sources: Sources, tokenizer: Any) -> Mapping[str, Any]:
    """Return the rows to train on, and under "test" those held out."""
    from lowtide.train.rows import describe, load_rows

    config, args = run.config, run.settings.args
    with args.main_process_first(local=False):
        rows, notes = load_rows(
            sources,
            columns=config.named_columns,
            text_field=args.dataset_text_field,
            check=lambda row: check_template(tokenizer, row),
            check_key=str(tokenizer.chat_template),
        )
    args.dataset_text_field = "text"  # whatever the column's name was in the files
    run.seq_len = args.max_length or max(map(len, rows[0].values()))
    skipped = f", {notes.skipped:,} with nothing to train on skipped" if notes.skipped else ""
    run.lines.append(f"rows     {describe(rows)}{skipped}")
    if notes.roles:
        named = ", ".join(f"{role!r} in {count:,}" for role, count in notes.roles.most_common(5))
        run.lines.append(f"roles    not system, user, assistant or tool: {named} of the conversations")
    held_out = min(config.held_out, len(rows) // _MOST_HELD_OUT)
    return rows.train_test_split(test_size=held_out, seed=args.seed) if held_out else {"train": rows, "test": None}


def _check_truncation(run: RunState, parts: Mapping[str, Any]) -> None:
    """Raise where TRL has dropped all rows of a part: what they are trained on is behind the most tokens."""
    for name, left in (("train", run.trainer.train_dataset), ("test", run.trainer.eval_dataset)):
        if left is not None and len(left) == 0:
            expected = f"rows with something to train on in their first {run.seq_len} tokens"
            got = f"none in the {len(parts[name])} {'training' if name == 'train' else 'held-out'} rows"
            hint = "Give a larger --seq-len" + (" or more --held-out rows" if name == "test" else "") + "."
            raise ArgumentValueError(message("data", expected, got, hint))
    if not run.settings.args.packing and (dropped := len(parts["train"]) - len(run.trainer.train_dataset)) > 0:
        run.lines.append(f"dropped  {dropped:,} rows with nothing to train on in their first {run.seq_len} tokens")


def _patch(run: RunState) -> None:
    if run.config.patch:
        run.patched = lowtide.patch(run.model)
        if getattr(run.settings.args, "loss_type", "nll") != "nll":  # which TRL's own head computes
            run.patched_trl = lowtide.patch_trl()


def _text(config: TrainConfig, settings: Settings, sources: Sources) -> Text:
    """Return the text that random weights are trained on."""
    columns = config.named_columns
    if others := sorted(columns.keys() - {"text"}):
        hint = "Name a pretrained model with --model to train on others."
        raise ArgumentValueError(message("columns", "text=COLUMN, from random weights", others[0], hint))
    field = columns.get("text", str(settings.model.dataset_text_field))
    return Text(sources, field, config.seq_len or SEQ_LEN, settings.args.seed)


def _own_tokenizer(config: TrainConfig, text: Text, shape: Any) -> Any:
    """Return the tokenizer of a run from random weights: the one named, or one trained on the data."""
    name, size = config.tokenizer, config.vocab_size
    return as_loaded(load_tokenizer(name) if name else train_tokenizer(text, vocab_size=size), shape)


def _write_tokens(
    file: Path, text: Text, tokenizer: Any, config: TrainConfig, settings: Settings, *, begun: bool = False
) -> None:
    """Tokenise as much of the text as the run's steps take."""
    steps = settings.args.max_steps
    blocks = steps * settings.sequences if steps > 0 else None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(file, text, tokenizer, held_out=config.held_out, blocks=blocks, begun=begun)
    except OSError as error:
        if not is_not_written(error):
            raise
        raise save_error(file, error) from error


def _learned(dataset: Any, tokenizer: Any) -> Iterator[str]:
    """Yield what of the first row is trained on: the mistake to see before a long run."""
    labels = next(iter(dataset)).get("labels", ())
    if trained := [token for token in labels if token != -100]:
        last = tokenizer.decode(trained[-1:])
        yield f"trained  {len(trained):,} of the {len(labels):,} tokens of the first sequence, the last {last!r}"


def _notes(run: RunState) -> Iterator[str]:
    """Yield what a user should see about the model before a long run."""
    positions = getattr(run.model.config.get_text_config(), "max_position_embeddings", None) or run.seq_len
    if positions < run.seq_len:
        yield f"length   the config is for {positions:,} positions: the model has not been trained on those after them"
    if run.config.offload_states and not run.config.memory_budget:
        yield "states   the optimizer states are in host memory from forward on, and come back in backward"
    trained = count(p for p in run.model.parameters() if p.requires_grad)
    if trained < count(run.model.parameters()):
        yield f"adapters {trained / 1e6:,.2f} M parameters are trained"
    elif run.settings.model.dtype == "bfloat16":
        yield (
            "weights  bfloat16, and so gradients and optimizer states: updates of less than 1/512 of a weight are "
            "rounded away, which hurts small learning rates and long runs. --dtype float32 avoids it"
        )

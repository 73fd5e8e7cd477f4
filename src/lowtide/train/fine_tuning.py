"""Fine-tuning's data, by `datasets` and TRL, checked row by row; and `trl.SFTTrainer` with the patched model's loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from transformers import Trainer
from trl import SFTTrainer, get_dataset

from lowtide.errors import ArgumentValueError, message
from lowtide.train.arguments import Arguments
from lowtide.train.trainers import BaseTrainer

_LINES = ".jsonl"
_FORMATS = "rows with text, messages, or prompt and completion"
_NO_CONTENT = {"role", "name", "tool_call_id", "content"}  # keys of a message that say nothing by themselves


class MalformedRow(ValueError):
    """A row that cannot be trained on; the text says what it has."""


def load_rows(found: Arguments) -> tuple[Any, Any | None, list[str]]:
    """Return the rows to train on, those held out, and lines about them.

    A file is read by `datasets`' reader for its suffix, a .txt file as one document; a folder is one that
    `save_to_disk` wrote or that `load_dataset` reads; other names are the Hub's. Rows with nothing to train on (an
    empty text or completion, no turn of the assistant) are left out and counted: TRL would train on the end-of-text
    token alone.

    Raises:
        ArgumentValueError: the data cannot be read, or a row cannot be trained on: with its file and line.
    """
    script, args, run = found.script, found.training, found.run
    if not script.dataset_name and not found.mixture.datasets:
        hint = "Give a file of text, .jsonl, .json, .parquet or .csv, a folder, or a dataset of the Hub."
        raise ArgumentValueError(message("--dataset_name", "data to fine-tune on", "none", hint))
    with args.main_process_first(local=False):
        splits = get_dataset(found.mixture) if found.mixture.datasets else _load(script)
    if script.dataset_train_split not in splits:
        expected = f"one of the data's splits {', '.join(splits)}"
        raise ArgumentValueError(message("--dataset_train_split", expected, script.dataset_train_split))
    where = args.dataset_text_field, script.dataset_name or ""
    rows, lines = _checked(splits[script.dataset_train_split], *where)
    test = None
    if run.held_out:
        if not isinstance(rows, Dataset) or run.held_out >= len(rows):
            got = f"{run.held_out} of {len(rows)}" if isinstance(rows, Dataset) else "a stream"
            raise ArgumentValueError(message("--held-out", "fewer rows than there are", got))
        parts = rows.train_test_split(test_size=run.held_out, seed=args.seed)
        rows, test = parts["train"], parts["test"]
        lines[-1] += f", {len(test):,} of them held out"
    elif args.eval_strategy != "no":
        if script.dataset_test_split not in splits:
            hint = f"Give --dataset_test_split ({', '.join(splits)}), or --held-out N to hold out N of the rows."
            expected = "a split to evaluate on, as --eval_strategy says"
            raise ArgumentValueError(message("--dataset_test_split", expected, script.dataset_test_split, hint))
        test, _ = _checked(splits[script.dataset_test_split], *where)
    return rows, test, lines


def _load(script: Any) -> Mapping[str, Any]:
    """Return the splits of ``--dataset_name``."""
    path = Path(script.dataset_name).expanduser()
    more = {"name": script.dataset_config, "streaming": script.dataset_streaming}
    try:
        if path.is_file():
            if path.suffix == ".txt":
                more["sample_by"] = "document"
            return load_dataset(str(path.absolute().parent), data_files=path.name, **more)  # type: ignore[no-any-return]
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = load_from_disk(str(path))
            return saved if isinstance(saved, dict) else {"train": saved}
        return load_dataset(str(path) if path.is_dir() else script.dataset_name, **more)  # type: ignore[no-any-return]
    except (DatasetGenerationError, OSError, ValueError, RuntimeError, StopIteration) as error:
        if path.is_file() and path.suffix == _LINES:
            _check_lines(path)
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        got = f"{script.dataset_name} ({' '.join(str(cause).split())[:300] or 'it is empty'})"
        hint = "" if path.exists() else "HF_HUB_OFFLINE=0 in the environment lets datasets download it."
        raise ArgumentValueError(message("--dataset_name", "data that datasets can read", got, hint)) from error


def _check_lines(path: Path) -> None:
    """Raise at the first line of a .jsonl file that is no JSON object."""
    for number, line in _numbered(path):
        try:
            row: Any = json.loads(line)
            got = "another JSON value"
        except ValueError as error:
            row, got = None, f"no valid JSON ({error})"
        if not isinstance(row, dict):
            got = f"{got} in line {number:,} of {path}"
            raise ArgumentValueError(message("--dataset_name", "one JSON object in each line", got, "Fix the line."))


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _checked(rows: Any, text_field: str, name: str) -> tuple[Any, list[str]]:
    """Return the rows that have something to train on, and a line about them; of a stream, which is not read, none."""
    if not isinstance(rows, Dataset):
        return rows, []
    used = []
    for index, row in enumerate(rows):
        try:
            used += [index] * row_is_full(row, text_field)
        except MalformedRow as error:
            got = f"{_place(name, index)}: {error}"
            raise ArgumentValueError(message("--dataset_name", _FORMATS, got, "Fix or remove the row.")) from error
    if not used:
        hint = "Texts and completions are empty, or conversations have no turn of the assistant."
        raise ArgumentValueError(message("--dataset_name", "rows with something to train on", f"none in {name}", hint))
    left_out = len(rows) - len(used)
    with_nothing = f", {left_out:,} with nothing to train on left out" if left_out else ""
    line = f"rows     {len(used):,} with {', '.join(rows.column_names)}{with_nothing}"
    return (rows.select(used) if left_out else rows), [line]


def _place(name: str, index: int) -> str:
    """Return the file and line of a row, or its number in the data."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == _LINES:
        return f"line {next(islice(_numbered(path), index, None))[0]:,} of {path}"
    return f"row {index + 1:,} of {name}"


def row_is_full(row: Mapping[str, Any], text_field: str = "text") -> bool:
    """Return whether a row has something to train on.

    Raises:
        MalformedRow: it has none of TRL's formats; the text says what it has.
    """
    if row.get("input_ids") is not None:
        return len(row["input_ids"]) > 0
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            return _has_answer(row[key])
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list):
            _has_answer(row["prompt"])
            return _has_answer(row["completion"])
        for key in ("prompt", "completion"):
            if not isinstance(row[key], str):
                raise MalformedRow(f"{key} that is no text but {_short(row[key])}")
        return bool(row["completion"])
    if isinstance(row.get(text_field), str):
        return bool(row[text_field])
    raise MalformedRow(f"the columns {', '.join(row)} (texts in another column: --dataset_text_field)")


def _has_answer(messages: Any) -> bool:
    """Return whether the assistant has a turn in a conversation, by TRL's keys or ShareGPT's."""
    if not isinstance(messages, list) or not messages:
        raise MalformedRow(f"no list of messages but {_short(messages)}")
    answers = False
    for turn in messages:
        role = turn.get("role") or turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(role, str):
            raise MalformedRow(f"a message without a role, {_short(turn)}")
        content = turn.get("content") if turn.get("role") else turn.get("value")
        if content is None and not any(value for key, value in turn.items() if key not in _NO_CONTENT):
            raise MalformedRow(f"a message without content, {_short(turn)}")
        if not isinstance(content, str | list | None):
            raise MalformedRow(f"a message whose content is neither text nor a list, {_short(turn)}")
        answers |= role in ("assistant", "gpt", "model", "bot")
    return answers


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


class FineTuner(BaseTrainer, SFTTrainer):  # type: ignore[misc]
    """An `SFTTrainer` that calls ``model(**inputs)``, so that `lowtide.patch` computes the loss.

    TRL installs a head of its own on every model. It runs the backbone, takes the head's weight and builds a few rows
    of logits at a time; under FSDP2 it gathers that weight with ``full_tensor()``. Here it is not called: transformers'
    own `Trainer.compute_loss` is, which also smooths labels in one forward where TRL takes two.

    Not logged, in contrast to TRL: entropy and token accuracy, which are computed by that head. ``stock`` keeps TRL's
    loss; the other arguments are SFTTrainer's.

    Attributes:
        cut: of the rows of each dataset ("train", "eval"), how many are longer than ``max_length``, how many lose all
            that is trained on by that, and how many there are.
    """

    def __init__(self, *, stock: bool = False, **kwargs: Any) -> None:
        self._stock = stock
        self.cut: dict[str, tuple[int, int, int]] = {}
        super().__init__(**kwargs)
        for module in self.model.modules():  # TRL changes the config alone, which many models have read by then
            if hasattr(module, "router_aux_loss_coef"):
                module.router_aux_loss_coef = self.router_aux_loss_coef

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting: Any, name: str
    ) -> Any:
        """Tokenise, count what will be cut off, then cut and pack."""
        most = args.max_length
        args.max_length = None
        try:
            whole = super()._prepare_dataset(dataset, processing_class, args, False, formatting, name)
        finally:
            args.max_length = most
        if most is not None and isinstance(whole, Dataset) and (not packing or args.packing_strategy == "bfd"):
            long = [labels for labels in whole["labels"] if len(labels) > most]
            lost = sum(all(label == -100 for label in labels[:most]) for labels in long)
            self.cut[name] = len(long), lost, len(whole)
            if lost == len(whole):
                expected = f"rows with something to train on in their first {most} tokens"
                hint = "Give a larger --max_length."
                raise ArgumentValueError(message("--max_length", expected, f"none of {lost} {name} rows", hint))
        return super()._prepare_dataset(whole, processing_class, args, packing, formatting, name)

    def lines(self) -> Iterator[str]:
        """Yield what of the rows is trained on, as lines to print: the mistakes to see before a long run."""
        for name, (long, lost, rows) in self.cut.items():
            if long:
                gone = f", {lost:,} of them lose all that is trained on and are left out" if lost else ""
                yield f"cut      {long:,} of {rows:,} {name} rows at --max_length {self.args.max_length}{gone}"
        labels = next(iter(self.train_dataset)).get("labels", ())
        if trained := [token for token in labels if token != -100]:
            last = self.processing_class.decode(trained[-1:])
            yield f"trained  {len(trained):,} of the {len(labels):,} tokens of the first sequence, the last {last!r}"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, by the model itself; TRL's where its ``loss_type`` is another than "nll"."""
        if self._stock or self.args.loss_type != "nll":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        if self.aux_loss_enabled and num_items_in_batch is not None and self.label_smoother is None:
            # the model adds its load-balancing loss once per batch, and Trainer scales it like a sum over tokens
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            batches = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss * (1 / batches - processes)
        return (loss, outputs) if return_outputs else loss

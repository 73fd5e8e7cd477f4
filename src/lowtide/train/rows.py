"""Rows to fine-tune on, in the columns that TRL's SFTTrainer takes, each checked before training starts.

A row's format is found by its columns, the first of these that it has:

| columns | becomes |
|---|---|
| ``text`` (``--dataset_text_field``) | ``text`` |
| ``messages``: a list of role and content | ``messages`` |
| ``conversations`` (ShareGPT): a list of from and value, or of role and content; ``system`` | ``messages`` |
| ``prompt`` and ``completion``: two texts, or two lists of messages | the same |
| ``instruction``, ``output`` (Alpaca); ``input`` | ``prompt``: both, an empty line after each; ``completion`` |

``tools`` (a list, or JSON text of one) and ``chat_template_kwargs`` of a conversation are passed on. A text file is one
row, in parts of 1 MiB cut at line ends. Rows without anything to train on (an empty text or completion, no turn of the
assistant) are skipped and counted: TRL would train on the end-of-text token alone, or stop.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.files import Source, Sources, load_json, read_lines, read_text, unreadable, why

Row = dict[str, Any]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
_FORMATS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_BESIDE = ("tools", "chat_template_kwargs", "system", "input")  # read where a format has them
COLUMNS = sum(_FORMATS, ("text",)) + _BESIDE  # what a column of a row may hold
_KNOWN = "a text, messages, conversations, prompt and completion, or instruction and output"
_NOUNS = {"text": "texts", "messages": "conversations", "prompt": "prompts with completions"}
_TEXT_BYTES = 2**20  # of one row


@dataclass
class Notes:
    """What was counted in rows that were read.

    Attributes:
        skipped: rows without anything to train on.
        roles: for each role that is not one of `_ROLES`, the number of conversations with it.
    """

    skipped: int = 0
    roles: Counter[str] = field(default_factory=Counter)


class Malformed(ValueError):
    """A row that cannot be trained on; the text says what it has."""


def load_rows(
    sources: Sources,
    *,
    columns: Mapping[str, str],
    text_field: str,
    check: Callable[[Row], object] | None = None,
    check_key: str = "",
) -> tuple[Any, Notes]:
    """Return all rows as one `datasets.Dataset`, converted and checked, and the notes on them.

    The rows are stored in the cache of `datasets`, under a digest of the arguments and of the files' names, sizes and
    times of change: the next call with the same ones reads nothing. A call that fails stores nothing.

    The dataset is of one of four kinds: ``text``; ``messages``; ``prompt`` and ``completion`` as texts, or as lists of
    messages. Conversations have the columns ``tools`` (JSON text or None) and ``chat_template_kwargs`` too.

    Args:
        sources: the files.
        columns: the files' columns by the name of what they hold, such as ``{"prompt": "question", "completion":
            "answer"}``; of the others `_BESIDE` alone are read. Empty: the format is found by the columns.
        text_field: the column of texts.
        check: called with each converted row; its error is raised with the row's place.
        check_key: what the outcome of ``check`` depends on, such as the chat template.

    Raises:
        ArgumentValueError: a file cannot be read, a row cannot be trained on, rows are of several kinds, or none has
            anything to train on.
    """
    import datasets

    code = Path(__file__).read_bytes()  # rows that an older version converted are converted again
    hub = [_builder(source).cache_dir for source in sources.files if source.kind == "hub"]
    key = sources.fingerprint(sorted(columns.items()), text_field, check_key, code, datasets.__version__, hub)[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "lowtide" / key
    notes, notes_file = Notes(), cache / "notes.json"

    def converted() -> Iterator[tuple[Row, str]]:
        name = columns.get("text", text_field)
        for row, place in (found for source in sources.files for found in _read(source, name)):
            try:
                one = _convert(_renamed(row, columns), "text" if columns else text_field, notes)
                if one is not None and check is not None:
                    check(one)
            except Exception as error:  # of any check, such as a template's
                raise _bad_row(error, place) from error
            if one is not None:
                yield one, place
            notes.skipped += one is None

    every = converted()
    first, first_place = next(every, (None, ""))
    if first is None:
        names = ", ".join(str(source.path) for source in sources.files[:3])
        hint = "Texts and completions are empty, or conversations have no turn of the role assistant."
        raise ArgumentValueError(message("data", "rows with something to train on", f"none in {names}", hint))
    kinds = _kinds(first)

    def stored() -> Iterator[Row]:
        for row, place in chain([(first, first_place)], every):
            if _kinds(row) != kinds:
                expected = "rows of one kind in a run (texts, conversations, or prompts with completions)"
                got = f"{_noun(first)} in {first_place} and {_noun(row)} in {place}"
                raise ArgumentValueError(message("data", expected, got, "Train on them in separate runs."))
            yield {name: _as_json(value) if kinds[name] != "text" else value for name, value in row.items()}
        cache.mkdir(parents=True, exist_ok=True)
        notes_file.write_text(json.dumps(vars(notes)))  # before the rows are renamed into place

    types = {"text": datasets.Value("string"), "json": datasets.Json(), "list": datasets.List(datasets.Json())}
    try:
        dataset = datasets.Dataset.from_generator(
            stored,
            features=datasets.Features({name: types[kind] for name, kind in kinds.items()}),
            cache_dir=str(cache),
            fingerprint=key,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise unreadable(cache, cause) if isinstance(cause, OSError) else cause from cause.__cause__
    known_notes = json.loads(notes_file.read_text())
    return dataset, Notes(known_notes["skipped"], Counter(known_notes["roles"]))


def describe(dataset: Any) -> str:
    """Return how many rows of which kind a dataset of `load_rows` has, such as "812 conversations"."""
    return f"{len(dataset):,} {_noun(dataset.column_names)}"


def _noun(columns: Iterable[str]) -> str:
    noun = next(noun for name, noun in _NOUNS.items() if name in columns)
    return f"conversational {noun}" if {"prompt", "tools"} <= {*columns} else noun


def _kinds(row: Row) -> dict[str, str]:
    """Return what each column holds: a "text", "json", or a "list" of JSON objects."""
    kinds = {name: "list" if isinstance(value, list) else "text" for name, value in row.items()}
    return kinds | ({"chat_template_kwargs": "json"} if "chat_template_kwargs" in row else {})


def _as_json(value: Any) -> Any:
    """Return JSON text for datasets' Json: of an object, `datasets` itself would write ten digits of a number."""
    return [_as_json(one) for one in value] if isinstance(value, list) else json.dumps(value, default=str)


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row's columns under the names that the user gave them; the row itself where there are none."""
    if not columns:
        return row
    if absent := [name for name in columns.values() if name not in row]:
        raise Malformed(f"no column {absent[0]!r}, but {', '.join(map(str, row))}")
    beside = {name: row[name] for name in _BESIDE if name in row}
    return beside | {name: row[column] for name, column in columns.items()}


def _convert(row: Row, text_field: str, notes: Notes) -> Row | None:
    """Return a row in TRL's columns; None: there is nothing to train on.

    Raises:
        Malformed: it has none of the formats.
    """
    found = [names for names in ((text_field,), *_FORMATS) if all(name in row for name in names)]
    full = [names for names in found if all(row[name] is not None for name in names)]
    match next(iter(full or found), None):
        case [name] if name == text_field:
            text = _text(row, name)
            return {"text": text} if text else None
        case ["messages" | "conversations" as name]:
            system = _text(row, "system") if name == "conversations" else ""
            opening = [{"role": "system", "content": system}] if system else []
            return _conversation({"messages": [*opening, *_messages(row, name)]}, row, notes)
        case ["prompt", "completion"] if isinstance(row["prompt"], list):
            return _conversation({name: _messages(row, name) for name in ("prompt", "completion")}, row, notes)
        case ["prompt", "completion"]:
            prompt, completion = _text(row, "prompt"), _text(row, "completion")
        case ["instruction", "output"]:
            parts = [_text(row, "instruction"), _text(row, "input")]
            prompt, completion = "".join(f"{part}\n\n" for part in parts if part), _text(row, "output")
        case _:
            columns = ", ".join(map(str, row)) or "none"
            raise Malformed(f"the columns {columns} (for other names: --columns prompt=question completion=answer)")
    return {"prompt": prompt, "completion": completion} if completion else None


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise Malformed(f"{name} that is no text but {_short(value)}")
    return value or ""


def _messages(row: Row, name: str) -> list[Row]:
    """Return messages with a role each, from lists of role and content or of from and value."""
    given = _parsed(row[name], name)
    if not isinstance(given, list) or not given:
        raise Malformed(f"{name} that is no list of messages but {_short(given)}")
    return [_message(one, name) for one in given]


def _message(one: Any, name: str) -> Row:
    """Return one message; keys that are null are left out: Parquet has in each message those of all."""
    if isinstance(one, Mapping) and "from" in one and one.get("role") is None:
        if one["from"] not in _SHAREGPT_ROLES:
            raise Malformed(f"a turn from {one['from']!r}, which is none of {', '.join(_SHAREGPT_ROLES)}")
        if not isinstance(one.get("value"), str):
            raise Malformed(f"{name} with {_short(one)}, which has no text as its value")
        return {"role": _SHAREGPT_ROLES[one["from"]], "content": one["value"]}
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
        raise Malformed(f"{name} with {_short(one)}, which has no role")
    if not isinstance(one.get("content"), str | list | None):
        raise Malformed(f"{name} with content that is neither text, a list nor null: {_short(one['content'])}")
    if all(one[key] is None for key in one.keys() - {"role", "name", "tool_call_id"}):  # templates would print "None"
        raise Malformed(f"{name} with a message that has neither content nor tool_calls: {_short(one)}")
    return {key: value for key, value in one.items() if value is not None or key == "content"}


def _conversation(lists: dict[str, list[Row]], row: Row, notes: Notes) -> Row | None:
    """Return a conversation with its tools and the template's variables; None where the assistant has no turn."""
    roles = [{one["role"] for one in messages} for messages in lists.values()]
    notes.roles.update(set().union(*roles) - _ROLES)
    tools, options = (
        _parsed(row.get("tools"), "tools"),
        _parsed(row.get("chat_template_kwargs"), "chat_template_kwargs"),
    )
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise Malformed(f"tools that are no list of JSON schemas but {_short(tools)}")
    if not isinstance(options or {}, Mapping):
        raise Malformed(f"chat_template_kwargs that are no object but {_short(options)}")
    if "assistant" not in roles[-1]:
        return None
    return {**lists, "tools": json.dumps(tools, default=str) if tools else None, "chat_template_kwargs": options or {}}


def _parsed(value: Any, name: str) -> Any:
    """Return a value, or the one that it is the JSON text of: CSV has no other lists, and Parquet often none."""
    try:
        return load_json(value.encode()) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{name} that is no JSON: {_short(value)}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _bad_row(error: Exception, place: str) -> ArgumentValueError:
    if isinstance(error, Malformed):
        return ArgumentValueError(message("data", f"rows with {_KNOWN}", f"{place}: {error}", "Fix or remove the row."))
    return ArgumentValueError(f"data: {place}: {why(error)}")


def _read(source: Source, text_name: str) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a source and the place of each; those of a text file have one column of the given name.

    Raises:
        ArgumentValueError: it cannot be read.
    """
    path = source.path
    if source.kind == "text":
        for begin in range(0, source.size, _TEXT_BYTES):
            yield {text_name: read_text(path, begin, begin + _TEXT_BYTES)}, f"byte {begin} of {path}"
    elif source.kind == "jsonl":
        yield from read_lines(path)
    else:
        try:
            rows = _read_csv(path) if source.kind == "csv" else _table(source)
            yield from ((row, f"row {number:,} of {path}") for number, row in enumerate(rows, start=1))
        except OSError as error:
            raise unreadable(path, error) from error
        except (ValueError, RuntimeError, csv.Error) as error:  # which those of pyarrow and datasets are
            hint = "With one row per line its suffix is .jsonl." if source.kind == "json" else ""
            got = f"{path} ({why(error)})"
            raise ArgumentValueError(message("data", "a file or dataset of rows", got, hint)) from error


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield rows of texts; `datasets` would make the answer 007 a number."""
    csv.field_size_limit(2**31 - 1)  # 128 KiB by default
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num:,} has another number of fields than the first")
            yield row


def _builder(source: Source) -> Any:
    """Return what loads a dataset of the Hub.

    Raises:
        ArgumentValueError: `datasets` does not find it.
    """
    import datasets

    try:
        return datasets.load_dataset_builder(str(source.path), source.config)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "HF_HUB_OFFLINE=0 in the environment lets datasets download it."
        expected, got = "a dataset of the Hub that is in the local cache", f"{source.path} ({why(error)})"
        raise ArgumentValueError(message("data", expected, got, hint)) from error


def _table(source: Source) -> Iterable[Row]:
    """Return the rows of a list of JSON, of Parquet, or of a dataset's split "train", or its only one."""
    if source.kind == "json":
        rows = load_json(source.path.read_bytes())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is not one list of objects")
        return rows
    if source.kind == "parquet":
        from pyarrow.parquet import ParquetFile

        given = (row for batch in ParquetFile(source.path).iter_batches(1024) for row in batch.to_pylist())
    else:
        import datasets

        if source.kind == "saved":
            given = datasets.load_from_disk(str(source.path))
        else:
            given = datasets.load_dataset(str(source.path), source.config)
        if isinstance(given, dict):
            if "train" not in given and len(given) > 1:
                raise ValueError(f"it has no split train, but {', '.join(given)}")
            given = given.get("train") or next(iter(given.values()))
    return ({name: _without_nulls(value) for name, value in row.items()} for row in given)


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the keys that are null: its structs have every key that any row has."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return value

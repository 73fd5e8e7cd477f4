"""Rows to fine-tune on, in the columns that TRL's SFTTrainer takes, each checked before training starts.

A row's format is found by its columns, the first of these that it has:

| format | columns | becomes |
|---|---|---|
| text | ``text`` (``--text-field``) | ``text`` |
| messages | ``messages``: a list of role and content | ``messages`` |
| ShareGPT | ``conversations``: a list of from and value, or of role and content; ``system`` | ``messages`` |
| completion | ``prompt`` and ``completion``: two texts, or two lists of messages | the same |
| Alpaca | ``instruction`` and ``output``; ``input`` | ``prompt``, ``completion`` |

Alpaca's prompt is the instruction, then the input if there is one, then nothing, each followed by an empty line.
``tools`` (a list, or JSON text of one) and ``chat_template_kwargs`` of a conversation are passed on. A text file is one
row, in parts of 1 MiB cut at line ends. Rows without anything to train on (an empty text or completion, no turn of the
assistant) are skipped and counted: TRL would train on the end-of-text token alone, or stop.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, did_you_mean, message
from lowtide.train.files import Place, Source, Sources, load_json, read_lines, read_text, unreadable

Row = dict[str, Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_BYTES = 2**20  # of one row
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
_FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
_BESIDE = ("tools", "chat_template_kwargs", "system", "input")  # read where a format has them
_KNOWN = "messages, conversations, prompt and completion, or instruction and output"
_NOUNS = {"text": "texts", "messages": "conversations", "prompt": "prompts with completions"}


@dataclass
class Notes:
    """What there is to say of rows that were read.

    Attributes:
        skipped: rows without anything to train on.
        roles: for each role that is not one of `ROLES`, the number of conversations with it.
    """

    skipped: int = 0
    roles: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _RowPlace:
    """The place of a row in a file that has no lines of its own, counted from 1."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"row {self.number:,} of {self.path}"


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
    """Return all rows as one `datasets.Dataset`, converted and checked, and what there is to say of them.

    The rows are stored in the cache of `datasets`, under a digest of the arguments and of the files' names, sizes and
    times of change: the next call with the same ones reads nothing. A call that fails stores nothing.

    Args:
        sources: the files.
        columns: names of the files' columns by the name of what they hold, such as ``{"prompt": "question",
            "completion": "answer"}``; other columns are then ignored, except ``tools``, ``chat_template_kwargs``,
            ``system`` and ``input``. Empty: the format is found by the columns.
        text_field: the column of texts.
        check: called with each converted row; its error is raised with the row's place.
        check_key: what the outcome of ``check`` depends on, such as the chat template: rows are checked again where it
            changed.

    Returns:
        The dataset, of one of four kinds: ``text``; ``messages``; ``prompt`` and ``completion`` as texts, or as lists
        of messages. Conversations have the columns ``tools`` (JSON text or None) and ``chat_template_kwargs`` too.

    Raises:
        ArgumentValueError: a file cannot be read, a row cannot be trained on, rows are of several kinds, or none has
            anything to train on.
    """
    import datasets

    _check_columns(columns)
    code = Path(__file__).read_bytes()  # rows that an older version converted are converted again
    key = sources.fingerprint(sorted(columns.items()), text_field, check_key, code, datasets.__version__)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "lowtide" / key[:32]
    notes_file = cache / "notes.json"
    notes = Notes()

    def normalised(notes: Notes) -> Iterator[tuple[Row, object]]:
        for source in sources.files:
            for row, place in _read(source):
                try:
                    given = row if source.kind == "text" else _renamed(row, columns)
                    converted = _convert(given, "text" if columns or source.kind == "text" else text_field, notes)
                    if converted is not None:
                        _check_characters(converted)
                        if check is not None:
                            check(converted)
                except Exception as error:
                    raise _bad_row(error, place, row) from error
                if converted is not None:
                    yield converted, place
                else:
                    notes.skipped += 1

    first = next(normalised(Notes()), None)
    if first is None:
        raise _nothing(sources)
    features, first_place = _features(first[0]), first[1]

    def stored() -> Iterator[Row]:
        for row, place in normalised(notes):
            if _features(row) != features:
                expected = "rows of one kind in a run (texts, conversations, or prompts with completions)"
                got = f"{_noun(first[0])} in {first_place} and {_noun(row)} in {place}"
                raise ArgumentValueError(message("data", expected, got, "Train on them in separate runs."))
            yield row
        notes_file.parent.mkdir(parents=True, exist_ok=True)
        notes_file.write_text(json.dumps(vars(notes)))  # before the rows are renamed into place

    types = {"text": datasets.Value("string"), "json": datasets.Json(), "list": datasets.List(datasets.Json())}
    try:
        dataset = datasets.Dataset.from_generator(
            stored,
            features=datasets.Features({name: types[kind] for name, kind in features.items()}),
            cache_dir=str(cache),
            fingerprint=key[:32],
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise unreadable(cache, cause) from cause
        raise cause from cause.__cause__
    known = json.loads(notes_file.read_text())
    return dataset, Notes(known["skipped"], Counter(known["roles"]))


def describe(dataset: Any) -> str:
    """Return how many rows of which kind a dataset of `load_rows` has, such as "812 conversations"."""
    return f"{len(dataset):,} {_noun(dataset.column_names)}"


def _noun(columns: Any) -> str:
    return next(noun for name, noun in _NOUNS.items() if name in columns)


def _features(row: Row) -> dict[str, str]:
    """Return the kind of each column: "text", "json", or a "list" of JSON objects."""
    kinds = {name: "list" if isinstance(value, list) else "text" for name, value in row.items()}
    return kinds | ({"chat_template_kwargs": "json"} if "chat_template_kwargs" in row else {})


def _check_columns(columns: Mapping[str, str]) -> None:
    known = sorted({name for names in _FORMATS.values() for name in names} | {"text", *_BESIDE})
    for name in columns:
        if name not in known:
            raise ArgumentValueError(
                message("columns", f"names among {', '.join(known)}", name, did_you_mean(name, known))
            )


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row's columns under the names that the user gave them; the row itself where there are none."""
    if not columns:
        return row
    if absent := [name for name in columns.values() if name not in row]:
        raise Malformed(f"no column {absent[0]!r}, but {', '.join(map(str, row))}")
    beside = {name: row[name] for name in _BESIDE if name in row}
    return beside | {name: row[column] for name, column in columns.items()}


def _convert(row: Mapping[str, Any], text_field: str, notes: Notes) -> Row | None:
    """Return a row in TRL's columns; None: there is nothing to train on.

    Raises:
        Malformed: it has none of the formats.
    """
    names = {"text": (text_field,), **_FORMATS}
    found = [name for name, needed in names.items() if all(column in row for column in needed)]
    full = [name for name in found if all(row[column] is not None for column in names[name])]
    match next(iter(full or found), None):
        case "text":
            text = _text(row, text_field)
            return {"text": text} if text else None
        case "messages":
            return _conversation({"messages": _messages(row, "messages")}, row, notes)
        case "conversations":
            return _conversation({"messages": _sharegpt(row)}, row, notes)
        case "completion":
            if isinstance(row["prompt"], list):
                both = {name: _messages(row, name) for name in ("prompt", "completion")}
                return _conversation(both, row, notes)
            prompt, completion = _text(row, "prompt"), _text(row, "completion")
        case "alpaca":
            parts = [_text(row, "instruction"), _text(row, "input")]
            prompt, completion = "".join(f"{part}\n\n" for part in parts if part), _text(row, "output")
        case _:
            raise Malformed(f"the columns {', '.join(map(str, row)) or '(none)'}")
    return {"prompt": prompt, "completion": completion} if completion else None


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise Malformed(f"{name} that is no text but {_short(value)}")
    return value or ""


def _messages(row: Mapping[str, Any], name: str) -> list[Row]:
    """Return messages with a role each; keys that are null (Parquet has those of all messages) are left out."""
    given = row[name]
    if isinstance(given, str):  # a list as JSON text, as CSV has it
        try:
            given = load_json(given.encode(errors="surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"{name} that is no list of messages but {_short(given)}") from error
    if not isinstance(given, list) or not given:
        raise Malformed(f"{name} that is no list of messages but {_short(given)}")
    for one in given:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise Malformed(f"{name} with {_short(one)}, which has no role")
        if not isinstance(one.get("content"), str | list | None):
            raise Malformed(f"{name} with content that is neither text, a list nor null: {_short(one['content'])}")
    return [{key: value for key, value in one.items() if value is not None or key == "content"} for one in given]


def _sharegpt(row: Mapping[str, Any]) -> list[Row]:
    given = row["conversations"]
    if isinstance(given, list) and given and all(isinstance(turn, Mapping) and turn.get("role") for turn in given):
        messages = _messages(row, "conversations")
    else:
        messages = [_turn(turn) for turn in given] if isinstance(given, list) else []
        if not messages:
            raise Malformed(f"conversations that is no list of turns but {_short(given)}")
    system = _text(row, "system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _turn(turn: Any) -> Row:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise Malformed(f"conversations with {_short(turn)}, which has no text as its value")
    speaker = turn.get("from")
    if speaker not in _SHAREGPT_ROLES:
        raise Malformed(f"a turn from {speaker!r}, which is none of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]}


def _conversation(lists: dict[str, list[Row]], row: Mapping[str, Any], notes: Notes) -> Row | None:
    """Return a conversation with its tools and the template's variables; None where the assistant has no turn."""
    roles = {one["role"] for messages in lists.values() for one in messages}
    notes.roles.update(roles - ROLES)
    tools, options = row.get("tools"), row.get("chat_template_kwargs") or {}
    try:
        tools = load_json(tools.encode()) if isinstance(tools, str) and tools else tools
    except (ValueError, RecursionError) as error:
        raise Malformed(f"tools that are no JSON: {_short(tools)}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise Malformed(f"tools that are no list of JSON schemas but {_short(tools)}")
    if not isinstance(options, Mapping):
        raise Malformed(f"chat_template_kwargs that are no object but {_short(options)}")
    if "assistant" not in {one["role"] for one in list(lists.values())[-1]}:
        return None
    return {**lists, "tools": json.dumps(tools) if tools else None, "chat_template_kwargs": dict(options)}


def _check_characters(row: Row) -> None:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"half of a character (surrogate {error.object[error.start]!a})") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _bad_row(error: Exception, place: object, row: Mapping[str, Any]) -> ArgumentValueError:
    if not isinstance(error, Malformed):
        why = " ".join(str(error).split())[:300] or type(error).__name__
        return ArgumentValueError(f"data: {place}: {why}")
    expected = f"rows with text, {_KNOWN}"
    columns = ", ".join(map(str, row))
    hint = f"Fix the row, or name its columns ({columns}): --columns prompt=question completion=answer"
    return ArgumentValueError(message("data", expected, f"{error} in {place}", hint))


def _nothing(sources: Sources) -> ArgumentValueError:
    names = ", ".join(str(source.path) for source in sources.files[:3])
    hint = "Texts and completions are empty, or conversations have no turn of the role assistant."
    return ArgumentValueError(message("data", "rows with something to train on", f"none in {names}", hint))


def _read(source: Source) -> Iterator[tuple[Mapping[str, Any], object]]:
    """Yield the rows of a source and the place of each.

    Raises:
        ArgumentValueError: it cannot be read.
    """
    path = source.path
    if source.kind == "text":
        for begin in range(0, source.size, _TEXT_BYTES):
            yield {"text": read_text(path, begin, begin + _TEXT_BYTES)}, Place(path, begin)
    elif source.kind == "jsonl":
        yield from ((row, place) for place, row in read_lines(path))
    else:
        rows = {"json": _read_json, "csv": _read_csv}.get(source.kind, _read_arrow)(source)
        try:
            for number, row in enumerate(rows, start=1):
                yield row, _RowPlace(path, number)
        except ArgumentValueError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
        except (ValueError, RecursionError, csv.Error) as error:  # pyarrow's and datasets' errors are ValueErrors
            why = " ".join(str(error).split())[:300]
            got = f"{path}, which cannot be read ({why})"
            raise ArgumentValueError(message("data", f"rows as {source.kind}", got)) from error


def _read_json(source: Source) -> Iterator[Mapping[str, Any]]:
    rows = load_json(source.path.read_bytes())
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is not one list of objects")
    yield from rows


def _read_csv(source: Source) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 128 KiB by default
    with source.path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t" if source.path.suffix.lower() == ".tsv" else ",", strict=True):
            if None in row or None in row.values():
                raise ValueError("a row has another number of fields than the first line")
            yield row


def _read_arrow(source: Source) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of Parquet, or of a dataset saved or downloaded: of its split "train", or of its only one."""
    import datasets

    if source.kind == "parquet":
        given = datasets.load_dataset("parquet", data_files=str(source.path), streaming=True)
    elif source.kind == "saved":
        given = datasets.load_from_disk(str(source.path))
    else:
        given = datasets.load_dataset(str(source.path), source.config, streaming=True)
    if isinstance(given, dict):
        if "train" not in given and len(given) > 1:
            raise ValueError(f"it has no split train, but {', '.join(given)}")
        given = given.get("train") or next(iter(given.values()))
    for row in given:
        yield {name: _without_nulls(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the keys that are null: its structs have every key that any row has."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return value

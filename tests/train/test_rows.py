"""Rows to fine-tune on: every format becomes TRL's columns, a bad row is one error, and nothing half done is reused."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.train.files import Source, Sources, find_data
from lowtide.train.rows import Notes, load_rows

datasets = pytest.importorskip("datasets")
Row = dict[str, Any]
USER, ASSISTANT = {"role": "user", "content": "how high"}, {"role": "assistant", "content": "low"}
CHAT = [USER, ASSISTANT]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": None, "y": 0.1234567890123}}}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": 1}}}]
KEPT = {"tools": None, "chat_template_kwargs": {}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `datasets` stores what it read, for this test alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    return tmp_path / "cache"


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(*paths: str, columns: dict[str, str] | None = None, **options: Any) -> tuple[list[Row], Notes]:
    dataset, notes = load_rows(find_data(paths), columns=columns or {}, **{"text_field": "text", **options})
    return list(dataset), notes


def error_of(*paths: str, **options: Any) -> str:
    with pytest.raises(ArgumentValueError) as raised:
        load(*paths, **options)
    return str(raised.value)


FORMATS: dict[str, tuple[Row, Row]] = {
    "text": ({"text": "a\nb", "other": 1}, {"text": "a\nb"}),
    "text before messages": ({"text": "a", "messages": CHAT}, {"text": "a"}),
    "null text beside messages": ({"text": None, "messages": CHAT}, {"messages": CHAT, **KEPT}),
    "messages": ({"messages": CHAT, "prompt": "x", "id": 7}, {"messages": CHAT, **KEPT}),
    "a list as text": ({"messages": json.dumps(CHAT)}, {"messages": CHAT, **KEPT}),
    "further keys": (
        {
            "messages": [USER, CALL, {**ASSISTANT, "name": None, "x": 1}],
            "tools": TOOLS,
            "chat_template_kwargs": {"a": [1]},
        },
        {
            "messages": [USER, CALL, {**ASSISTANT, "x": 1}],
            "tools": json.dumps(TOOLS),
            "chat_template_kwargs": {"a": [1]},
        },
    ),
    "no tools": ({"messages": CHAT, "tools": [], "chat_template_kwargs": None}, {"messages": CHAT, **KEPT}),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "how high"}, {"from": "gpt", "value": "low"}], "system": "s"},
        {"messages": [{"role": "system", "content": "s"}, *CHAT], **KEPT},
    ),
    "sharegpt's tools": (
        {
            "conversations": [
                {"from": f, "value": "v"} for f in ("system", "user", "function_call", "observation", "chatgpt")
            ]
        },
        {
            "messages": [{"role": r, "content": "v"} for r in ("system", "user", "assistant", "tool", "assistant")],
            **KEPT,
        },
    ),
    "completion": ({"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "2 + 2 = ", "completion": "4"}),
    "messages in prompt": (
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT], **KEPT},
    ),
    "alpaca": ({"instruction": "add", "input": "2 2", "output": "4"}, {"prompt": "add\n\n2 2\n\n", "completion": "4"}),
    "alpaca, no input": ({"instruction": "add", "input": "", "output": "4"}, {"prompt": "add\n\n", "completion": "4"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_becomes_the_columns_of_trl(name: str, tmp_path: Path) -> None:
    given, expected = FORMATS[name]
    assert load(jsonl(tmp_path / "a.jsonl", given)) == ([expected], Notes())


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ({"text": "body"}, {"text": "no", "body": "yes"}, {"text": "yes"}),
        ({"messages": "chat"}, {"text": "no", "chat": CHAT}, {"messages": CHAT, **KEPT}),
        ({"prompt": "q", "completion": "a"}, {"q": "x", "a": "y", "text": "z"}, {"prompt": "x", "completion": "y"}),
        (
            {"instruction": "q", "output": "a"},
            {"q": "x", "a": "y", "input": "z"},
            {"prompt": "x\n\nz\n\n", "completion": "y"},
        ),
        (
            {"conversations": "c"},
            {"c": CHAT, "system": "s", "tools": TOOLS},
            {"messages": [{"role": "system", "content": "s"}, *CHAT], **KEPT, "tools": json.dumps(TOOLS)},
        ),
    ],
)
def test_columns_that_the_user_names_win(columns: dict[str, str], row: Row, expected: Row, tmp_path: Path) -> None:
    assert load(jsonl(tmp_path / "a.jsonl", row), columns=columns, text_field="q")[0] == [expected]


@pytest.mark.parametrize("source", ["json", "csv", "tsv", "parquet", "saved", "splits"])
def test_rows_of_every_kind_of_file(source: str, tmp_path: Path) -> None:
    rows: list[Row] = [{"prompt": f'é{i},\n"{i}"', "completion": f"00{i}"} for i in range(5)]
    path = tmp_path / f"a.{source}"
    given = datasets.Dataset.from_list(rows)
    if source == "json":
        path.write_text(json.dumps(rows))
    elif source in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if source == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif source == "parquet":
        given.to_parquet(path)
    elif source == "saved":
        given.save_to_disk(path)
    else:
        datasets.DatasetDict(test=given.select([0]), train=given).save_to_disk(path)
    assert load(str(path))[0] == rows


def test_a_dataset_of_the_hub_is_loaded_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder stands for the repository: `datasets` takes one by the same call."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    lines = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("one", "two")]
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(lines) + "---\n")
    for name in ("one", "two"):
        jsonl(folder / f"{name}.jsonl", {"text": name})
    sources = find_data(["org/name:two", "org/name", "org/other"]).files
    monkeypatch.chdir(tmp_path)

    def texts(source: Source) -> list[Row]:
        return list(load_rows(Sources((source,)), columns={}, text_field="text")[0])

    assert texts(sources[0]) == [{"text": "two"}]
    for source, why in zip(sources[1:], (r"\['one', 'two'\]", "HF_HUB_OFFLINE=0"), strict=True):
        with pytest.raises(ArgumentValueError, match=why):
            texts(source)


def test_keys_that_parquet_adds_are_left_out(tmp_path: Path) -> None:
    """Its structs have every key that any row has, and a template would print them."""
    rows = [{"messages": CHAT}, {"messages": [USER, {**CALL, "tool_calls": [{"a": {"x": 1}}, {"a": {"y": "z"}}]}]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    expected = [[dict(one) for one in row["messages"]] for row in rows]
    assert [row["messages"] for row in load(str(tmp_path / "a.parquet"))[0]] == expected


def test_a_text_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    text = "".join(f"line {i} é\n" for i in range(120_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    rows, _ = load(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), columns={"text": "body"})
    assert len(rows) == 3
    assert "".join(row["text"] for row in rows[:2]) == text
    assert rows[0]["text"].endswith("é\n")
    assert rows[2] == {"text": "short"}


def test_rows_without_anything_to_train_on_are_skipped_and_counted(tmp_path: Path) -> None:
    empty: list[Row] = [
        {"messages": [USER]},
        {"messages": [{**ASSISTANT, "role": "model"}, {**USER, "role": "narrator"}]},
    ]
    named = {**USER, "role": "narrator"}
    path = jsonl(tmp_path / "a.jsonl", *empty, {"messages": [named, named, ASSISTANT]}, *empty)
    rows, notes = load(path)
    assert [row["messages"] for row in rows] == [[named, named, ASSISTANT]]
    assert notes == Notes(4, Counter(model=2, narrator=3))
    assert load(path)[1] == notes, "those of rows that are cached already"
    for name, row in {
        "text": {"text": ""},
        "null": {"text": None},
        "completion": {"prompt": "x", "completion": ""},
    }.items():
        full = dict.fromkeys(row, "x")
        assert load(jsonl(tmp_path / f"{name}.jsonl", row, full, row)) == ([full], Notes(2))
    found = error_of(jsonl(tmp_path / "none.jsonl", *empty))
    assert f"none in {tmp_path}/none.jsonl. Texts and completions are empty, or conversations have no turn" in found


BAD: dict[str, tuple[Any, str]] = {
    "unknown columns": ({"q": 1, "a": 2}, "the columns q, a (for other names: --columns prompt=question"),
    "no object": ([1], "another JSON value"),
    "a number": ({"text": 7}, "text that is no text but 7"),
    "messages": ({"messages": "low"}, "messages that is no JSON: 'low'"),
    "no messages": ({"messages": []}, "messages that is no list of messages but []"),
    "nothing said": (
        {"messages": [USER, {**ASSISTANT, "content": None}]},
        "messages with a message that has neither content nor tool_calls",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "messages with {'content': 'x'}, which has no role"),
    "no message": ({"messages": ["x" * 99]}, f"messages with '{'x' * 56}..., which has no role"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "content that is neither text, a list nor null: 3"),
    "speaker": ({"conversations": [{"from": "me", "value": "x"}]}, "a turn from 'me', which is none of human, user"),
    "no value": ({"conversations": [{"from": "human"}]}, "which has no text as its value"),
    "system": ({"conversations": CHAT, "system": 1}, "system that is no text but 1"),
    "half a prompt": ({"prompt": [USER], "completion": "x"}, "completion that is no JSON: 'x'"),
    "tools": ({"messages": CHAT, "tools": "f"}, "tools that is no JSON: 'f'"),
    "tools, no list": ({"messages": CHAT, "tools": {"a": 1}}, "tools that are no list of JSON schemas but {'a': 1}"),
    "half a character": ({"text": "\ud83d"}, "surrogates not allowed"),
}


def test_keys_that_differ_between_rows_stay_as_they_were(tmp_path: Path) -> None:
    """The first row has the least: Arrow would not hold the others."""
    values: list[Any] = [True, -(2**53), 1 / 8, 'é漢🌊\n"', [], [{"a": []}], {"b": {"c": None}}]
    rows: list[Row] = [{"messages": [ASSISTANT]}]
    rows += [{"messages": [{**USER, f"x{i}": one}, ASSISTANT]} for i, one in enumerate(values)]
    rows += [{"messages": CHAT, "chat_template_kwargs": {"a": one}} for one in values]
    found, _ = load(jsonl(tmp_path / "a.jsonl", *rows))
    assert [row["messages"] for row in found] == [row["messages"] for row in rows]
    assert [row["chat_template_kwargs"] for row in found] == [row.get("chat_template_kwargs", {}) for row in rows]


@pytest.mark.parametrize("at", [0, 30])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_error_with_its_line(name: str, at: int, tmp_path: Path) -> None:
    row, why = BAD[name]
    good: Row = {"text": "x"} if name in ("a number", "half a character") else {"messages": CHAT}
    path = jsonl(tmp_path / "a.jsonl", *[good] * at, row, good)
    found = error_of(path)
    assert why in found
    assert f"line {at + 1} of {path}" in found


def test_a_failed_call_leaves_nothing_that_the_next_takes_for_whole(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[{"text": str(i)} for i in range(3000)])

    def check(row: Row) -> None:
        if row["text"] in refused:
            raise TypeError("not\nthis one")

    refused = {"2999"}
    for _ in range(2):
        assert f"line 3,000 of {path}: not this one" in error_of(path, check=check)
    refused.clear()
    assert len(load(path, check=check)[0]) == 3000
    refused.add("1")
    assert len(load(path, check=check)[0]) == 3000, "checked already"
    assert "not this one" in error_of(path, check=check, check_key="another template")


def test_files_that_were_written_to_are_read_again(tmp_path: Path) -> None:
    path = Path(jsonl(tmp_path / "a.jsonl", {"text": "one", "b": "1"}))
    assert load(str(path))[0] == [{"text": "one"}]
    stat = path.stat()
    jsonl(path, {"text": "two", "b": "2"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load(str(path))[0] == [{"text": "two"}], "the same size, another time"
    assert load(str(path), columns={"text": "b"})[0] == [{"text": "2"}]
    assert load(str(path), text_field="b")[0] == [{"text": "2"}]


@pytest.mark.parametrize(
    ("first", "second", "nouns"),
    [
        ({"text": "x"}, {"messages": CHAT}, ("texts", "conversations")),
        ({"messages": CHAT}, {"prompt": "x", "completion": "y"}, ("conversations", "prompts with completions")),
        (
            {"prompt": "x", "completion": "y"},
            {"prompt": [USER], "completion": [ASSISTANT]},
            ("prompts with completions", "conversational prompts with completions"),
        ),
    ],
)
def test_rows_of_two_kinds_are_an_error_that_names_both(
    first: Row, second: Row, nouns: tuple[str, str], tmp_path: Path
) -> None:
    paths = [jsonl(tmp_path / f"{i}.jsonl", row) for i, row in enumerate((first, second))]
    places = [f"{noun} in line 1 of {path}" for noun, path in zip(nouns, paths, strict=True)]
    assert f"got {places[0]} and {places[1]}. Train on them in separate runs." in error_of(*paths)


def test_what_the_arguments_and_files_can_have_wrong(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"q": "x"})
    assert "no column 'r', but q." in error_of(path, columns={"text": "r"})
    assert "the columns prompt (for other names: " in error_of(path, columns={"prompt": "q"})
    torn = {
        "a.json": ('{"data": []}', "it is not one list of objects"),
        "b.json": ("[", "Expecting value"),
        "a.csv": ("text\na\nb,c\n", "line 3 has another number of fields"),
        "b.csv": ("text,b\na\n", "line 2 has another number of fields"),
        "c.csv": ('text\n"a\n', "unexpected end of data"),
        "a.parquet": ("PAR1 and no more", "Parquet magic bytes not found"),
    }
    for name, (text, why) in torn.items():
        (tmp_path / name).write_text(text)
        found = error_of(str(tmp_path / name))
        assert f"{tmp_path / name} (" in found
        assert why in found
    (tmp_path / "d.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(load(str(tmp_path / "d.csv"))[0][0]["text"]) == 200_000
    datasets.Dataset.from_list([{"q": 1}]).to_parquet(tmp_path / "b.parquet")
    assert f"row 1 of {tmp_path}/b.parquet: the columns q" in error_of(str(tmp_path / "b.parquet"))
    datasets.DatasetDict({name: datasets.Dataset.from_list([{"text": name}]) for name in "ab"}).save_to_disk(
        tmp_path / "ab"
    )
    assert "it has no split train, but a, b" in error_of(str(tmp_path / "ab"))

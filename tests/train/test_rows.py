"""What is trained on: rows that cannot be, rows with nothing in them, what is cut off, what is held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promises import promise
from train.conftest import Files, write_rows

pytest.importorskip("trl")
from lowtide.errors import ArgumentValueError
from lowtide.train.arguments import Arguments, RunArguments, parse
from lowtide.train.fine_tuning import FineTuner, MalformedRow, load_rows, row_is_full

pytestmark = promise("errors")

ASKED = {"role": "user", "content": "in?"}
ANSWER = {"role": "assistant", "content": "out"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
TEXT = {"text": "the tide"}

FULL: list[tuple[dict[str, Any], bool]] = [
    (TEXT, True),
    ({"text": ""}, False),
    ({"messages": [ASKED, ANSWER]}, True),
    ({"messages": [ASKED]}, False),
    ({"messages": [ASKED, CALL]}, True),
    ({"conversations": [{"from": "human", "value": "in?"}, {"from": "gpt", "value": "out"}]}, True),
    ({"prompt": "in", "completion": "out"}, True),
    ({"prompt": "", "completion": "out"}, True),
    ({"prompt": "in", "completion": ""}, False),
    ({"prompt": [ASKED], "completion": [ANSWER]}, True),
    ({"input_ids": [1, 2]}, True),
]

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user"}, ANSWER]}, "a message without content, {'role': 'user'}"),
    ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "a message without content"),
    ({"messages": [{"content": "out"}]}, "a message without a role"),
    ({"messages": ["out"]}, "a message without a role, 'out'"),
    ({"messages": [{"role": "user", "content": 3}]}, "neither text nor a list"),
    ({"messages": "in? out"}, "no list of messages but 'in? out'"),
    ({"messages": []}, "no list of messages"),
    ({"prompt": "in", "completion": 4}, "completion that is no text but 4"),
    ({"instruction": "in", "output": "out"}, "the columns instruction, output"),
    ({"text": None}, "the columns text"),
]


@pytest.mark.parametrize(("row", "full"), FULL, ids=lambda value: json.dumps(value)[:60])
def test_a_row_that_can_be_trained_on(row: dict[str, Any], full: bool) -> None:
    assert row_is_full(row) == full


@pytest.mark.parametrize(("row", "says"), MALFORMED, ids=lambda value: json.dumps(value)[:60])
def test_a_row_that_cannot(row: dict[str, Any], says: str) -> None:
    with pytest.raises(MalformedRow) as raised:
        row_is_full(row)
    assert says in str(raised.value)


def found(files: Files, data: Path | str, **more: object) -> Arguments:
    return parse(files.tune(**{"output_dir": "x", "dataset_name": data, "held_out": 1, **more}))


BAD_FILES = {  # lines of a file, and what the error says of it
    "rows.jsonl": ('{"text": "a"}\n\n{"text": "b"}\n{"txt": 1}\n', ["line 4 of", "the columns text, txt"]),
    "cut.jsonl": ('{"text": "a"}\n{"text": \n', ["no valid JSON", "line 2 of", "Fix the line."]),
    "list.jsonl": ('{"text": "a"}\n[1, 2]\n', ["another JSON value in line 2 of"]),
    "rows.csv": ("prompt,completion\nin,out\nin,\n,\n", ["row 2 of", "completion that is no text but None"]),
    "empty.jsonl": ('{"text": ""}\n{"text": ""}\n', ["none in", "with something to train on"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_row_is_named_with_its_file_and_line(name: str, files: Files, tmp_path: Path) -> None:
    text, says = BAD_FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentValueError) as raised:
        load_rows(found(files, tmp_path / name))
    assert all(part in str(raised.value) for part in [*says, "--dataset_name"]), raised.value


def test_rows_with_nothing_are_left_out_and_counted(files: Files, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [TEXT, {"text": ""}, {"text": "came in"}, {"text": ""}, TEXT])
    rows, held_out, lines = load_rows(found(files, data))
    assert (len(rows), len(held_out or ())) == (2, 1)
    assert lines == ["rows     3 with text, 2 with nothing to train on left out, 1 of them held out"]


def test_as_many_rows_are_held_out_as_was_asked(files: Files) -> None:
    rows, held_out, lines = load_rows(found(files, files.chats, held_out=20))
    assert (len(rows), len(held_out or ())) == (60, 20)
    assert lines == ["rows     80 with messages, 20 of them held out"]
    texts = [json.dumps(row["messages"]) for part in (rows, held_out) for row in part or ()]
    lines = files.chats.read_text().splitlines()
    assert sorted(texts) == sorted(json.dumps(json.loads(line)["messages"]) for line in lines)
    with pytest.raises(ArgumentValueError, match="--held-out: expected fewer rows than there are, got 80 of 80"):
        load_rows(found(files, files.chats, held_out=80))


def test_text_files_folders_and_saved_datasets_are_data(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("the tide\ncame in\n")
    given = parse([*files.tune(dataset_name="one.txt")[:-2], "--output_dir=x"])
    assert list(load_rows(given)[0]["text"]) == ["the tide\ncame in\n"]
    Dataset.from_list([TEXT] * 3).save_to_disk(str(tmp_path / "saved"))
    assert len(load_rows(found(files, tmp_path / "saved"))[0]) == 2
    write_rows(tmp_path / "folder.jsonl", [TEXT] * 4)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ArgumentValueError, match=r"empty.jsonl \(it is empty\)"):
        load_rows(found(files, tmp_path / "empty.jsonl"))
    with pytest.raises(ArgumentValueError, match="HF_HUB_OFFLINE=0"):
        load_rows(found(files, "nobody/nothing"))
    with pytest.raises(ArgumentValueError, match="--dataset_train_split: expected one of the data's splits train"):
        load_rows(found(files, tmp_path / "folder.jsonl", dataset_train_split="tain"))
    wanted = [*files.tune(dataset_name=files.chats)[:-2], "--output_dir=x", "--eval_strategy=steps", "--eval_steps=2"]
    with pytest.raises(ArgumentValueError, match=r"--dataset_test_split.*--held-out N"):
        load_rows(parse(wanted))


def tuner(files: Files, data: Path, **more: object) -> FineTuner:
    given = found(files, data, **more)
    rows, held_out, _ = load_rows(given)
    model = str(given.model.model_name_or_path)
    return FineTuner(model=model, args=given.training, train_dataset=rows, eval_dataset=held_out)


def test_what_is_cut_off_is_counted_and_what_is_trained_on_is_shown(files: Files, tmp_path: Path) -> None:
    """Of a long prompt the whole completion is lost."""
    sizes = (20, 30, 55, 61, 64, 90)  # one token a byte, and the end of text
    data = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "x" * size, "completion": "y" * 5} for size in sizes])
    given = replace(found(files, data, max_length=64), run=RunArguments())
    rows, _, _ = load_rows(given)
    trainer = FineTuner(model=str(files.pretrained), args=given.training, train_dataset=rows)
    assert trainer.cut == {"train": (3, 2, 6)}
    assert [len(row["input_ids"]) for row in trainer.train_dataset] == [26, 36, 61, 64]
    cut, trained = trainer.lines()
    assert cut.startswith("cut      3 of 6 train rows at --max_length 64, 2 of them lose all")
    assert trained == "trained  6 of the 26 tokens of the first sequence, the last '<|endoftext|>'"
    given.training.max_length = 8
    with pytest.raises(ArgumentValueError, match=r"none of 6 train rows\. Give a larger --max_length"):
        FineTuner(model=str(files.pretrained), args=given.training, train_dataset=rows)


def test_packed_rows_lose_nothing_that_is_not_counted(files: Files) -> None:
    trainer = tuner(files, files.pairs, packing=True, packing_strategy="wrapped", max_length=40)
    assert trainer.cut == {}
    assert {len(row["input_ids"]) for row in trainer.train_dataset} <= {40, *range(40)}
    assert tuner(files, files.pairs, packing=True, max_length=40).cut["train"][0] > 0


def test_the_streams_of_trl_are_not_checked(files: Files) -> None:
    given = found(files, files.chats, held_out=1)
    given.run.held_out = None
    given.script.dataset_streaming = True
    rows, held_out, lines = load_rows(given)
    assert (held_out, lines) == (None, [])
    assert next(iter(rows))["messages"]
    given.run.held_out = 3
    with pytest.raises(ArgumentValueError, match="got a stream"):
        load_rows(given)


def test_no_data_is_an_error_that_names_the_option(files: Files) -> None:
    given = found(files, files.chats)
    script = SimpleNamespace(dataset_name=None)
    with pytest.raises(ArgumentValueError, match="--dataset_name: expected data to fine-tune on, got none"):
        load_rows(replace(given, script=script))


def test_a_bad_row_of_a_run_is_one_line(files: Files, refused: Callable[..., str], tmp_path: Path) -> None:
    """Through the command, before the model is loaded."""
    bad = write_rows(tmp_path / "bad.jsonl", [{"messages": [ASKED, ANSWER]}] * 3 + [{"messages": [{"role": "user"}]}])
    line = refused(*files.tune(dataset_name=bad, output_dir=tmp_path / "run"))
    assert "line 4 of" in line
    assert "a message without content" in line
    assert not list((tmp_path / "run").glob("*"))

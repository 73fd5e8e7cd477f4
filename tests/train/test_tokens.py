"""Tokens of text: nothing lost, nothing twice, an order of sizes and seed alone, and a longer run begins alike."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from chat_data import byte_tokenizer
from lowtide.errors import ArgumentValueError
from lowtide.train.files import find_data
from lowtide.train.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from lowtide.train.tokens import IGNORED, Blocks, Pieces, Text, read_header, write_tokens

SEQ_LEN = 16


def framed(before: str = "", after: str = "") -> Any:
    """A tokenizer of bytes that puts special tokens around a text, as Llama's and BERT's do."""
    tokenizer = byte_tokenizer(None)
    special = [token for token in (before, after) if token]
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in special]
        template = " ".join(one for one in (before, "$A", after) if one)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=pairs
        )
    return tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `datasets` stores rows, for this test alone."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer() -> Any:
    return framed()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts and .jsonl of random lengths, most of them shorter than a piece and some far longer."""
    folder, rng = tmp_path / "data", random.Random()
    folder.mkdir()
    for i in range(8):
        lines = [f"file {i} line {j} é {rng.random()}\n" for j in range(rng.choice([3, 20, 300]))]
        (folder / f"{i}.txt").write_text("".join(lines))
    rows = [{"text": f"row {j} 漢 " + "x" * rng.randint(0, 200)} for j in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": ""}]))
    return folder


def text_in(path: Path, field: str = "text", seq_len: int = SEQ_LEN, seed: int = 1) -> Text:
    return Text(find_data([str(path)]), field, seq_len, seed)


def write(file: Path, folder: Path, tokenizer: Any, **options: Any) -> dict[str, Any]:
    options = {"held_out": 4, "blocks": None} | options
    of_text = {name: options.pop(name) for name in ("field", "seq_len", "seed") if name in options}
    write_tokens(file, text_in(folder, **of_text), tokenizer, **options)
    header = read_header(file)
    assert header is not None
    return header


def ids_of(file: Path, part: Any) -> list[list[int]]:
    blocks = Blocks(file, part)
    return [blocks[i]["input_ids"].tolist() for i in range(len(blocks))]


def text_of(tokenizer: Any, file: Path, part: Any) -> str:
    return tokenizer.decode([*itertools.chain.from_iterable(ids_of(file, part))])


def expected_tokens(folder: Path, tokenizer: Any, seed: int = 1) -> list[list[int]]:
    """The tokens of each piece, one text after the other, by the tokenizer's plainest call."""
    pieces = Pieces(text_in(folder, seed=seed))
    ids = [
        [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for i in pieces.order for text in pieces.documents(i)
    ]
    return [one[:-1] if one[-2:-1] == one[-1:] else one for one in ids]


def error_of(*args: Any, **options: Any) -> str:
    with pytest.raises(ArgumentValueError) as raised:
        write(*args, **options)
    return str(raised.value)


def test_pieces_are_all_of_the_text_once(data: Path) -> None:
    pieces = Pieces(text_in(data))
    assert sorted(pieces.order) == list(range(len(pieces.order)))
    assert pieces.order != sorted(pieces.order)
    found = [text for piece in range(len(pieces.order)) for text in pieces.documents(piece)]
    rows = [json.loads(line)["text"] for line in (data / "rows.jsonl").read_text().splitlines()]
    texts = [(data / f"{i}.txt").read_text() for i in range(8)]
    assert found[-200:] == rows[:200]
    assert "".join(found[:-200]) == "".join(texts)
    assert len(found) > 208, "a long file is several documents"


@pytest.mark.parametrize(("before", "after"), [("", ""), ("<s>", ""), ("<s>", "</s>"), ("", "<|endoftext|>")])
def test_blocks_are_the_documents_with_their_frames_and_one_end(
    data: Path, before: str, after: str, tmp_path: Path
) -> None:
    tokenizer = framed(before, after)
    header = write(tmp_path / "tokens", data, tokenizer)
    expected = list(itertools.chain.from_iterable(expected_tokens(data, tokenizer)))
    held, trained = ids_of(tmp_path / "tokens", "held_out"), ids_of(tmp_path / "tokens", "train")
    assert list(itertools.chain.from_iterable(held)) == expected[: 4 * SEQ_LEN]
    train = list(itertools.chain.from_iterable(trained))
    assert any(train == expected[at : at + len(train)] for at in range(len(expected) - len(train) + 1))
    assert header == {**header, "held_out": 4, "train": len(trained), "whole": True, "itemsize": 2}
    assert len(train) > 0.8 * len(expected)


@pytest.mark.parametrize(("before", "after"), [("", ""), ("<s>", ""), ("<s>", "<|endoftext|>")])
def test_special_tokens_that_are_written_out_are_not_doubled(before: str, after: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    texts = ["the tide", f"{before}came in", "and<|endoftext|>", f"{before}out<|endoftext|>", "<|endoftext|>", "é"]
    (tmp_path / "a" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 200))
    tokenizer = framed(before, after)
    write(tmp_path / "tokens", tmp_path / "a", tokenizer)
    found = text_of(tokenizer, tmp_path / "tokens", "train").split("<|endoftext|>")[1:-1]
    assert {*found} == {f"{before}{text}" for text in ("the tide", "came in", "and", "out", "", "é")}


@pytest.mark.parametrize("seed", [0, 7])
def test_a_file_with_more_blocks_begins_with_the_same_ones(
    data: Path, tokenizer: Any, seed: int, tmp_path: Path
) -> None:
    files = {count: tmp_path / str(count) for count in (1, 5, 60, None)}
    counts = [write(file, data, tokenizer, blocks=count, seed=seed)["train"] for count, file in files.items()]
    assert counts[:3] == [1, 5, 60]
    whole = ids_of(files[None], "train")
    for count, file in files.items():
        assert ids_of(file, "train") == whole[:count]
        assert ids_of(file, "held_out") == ids_of(files[None], "held_out")
    assert read_header(files[60])["whole"] is False  # type: ignore[index]


def test_the_order_follows_sizes_and_seed_alone(data: Path, tokenizer: Any, tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    write(first, data, tokenizer)
    write(other, data, tokenizer, seed=2)
    assert ids_of(first, "train") != ids_of(other, "train")
    for path in sorted(data.iterdir()):
        os.utime(path, ns=(1, 1))
    data.rename(data.with_name("moved"))
    write(other, data.with_name("moved"), tokenizer)
    assert first.read_bytes() == other.read_bytes()


def test_held_out_text_is_at_most_a_tenth_and_never_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lines = [f"{i:05} {'x' * (i % 7)}" for i in range(3000)]
    (tmp_path / "a" / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    header = write(tmp_path / "tokens", tmp_path / "a", tokenizer, held_out=10**6)
    held, trained = (text_of(tokenizer, tmp_path / "tokens", part) for part in ("held_out", "train"))
    seen = [{*text.split(END_OF_TEXT)[1:-1]} for text in (held, trained)]
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) > 2990
    assert 0.05 < header["held_out"] / (header["held_out"] + header["train"]) <= 0.11


def test_one_document_of_most_of_the_bytes_is_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    texts = ["tide " * 4_000, *["short " * 20] * 100]
    for at in (0, 50, 100):
        rows = [json.dumps({"text": text}) + "\n" for text in (*texts[1 : at + 1], texts[0], *texts[at + 1 :])]
        (tmp_path / "a" / "a.jsonl").write_text("".join(rows))
        for seed in range(2):
            write(tmp_path / "tokens", tmp_path / "a", tokenizer, seed=seed)
            assert "tide" not in text_of(tokenizer, tmp_path / "tokens", "held_out")
            assert "tide" in text_of(tokenizer, tmp_path / "tokens", "train")


def test_a_file_is_written_again_only_where_it_is_another(data: Path, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens"

    def rewritten(of: Any = tokenizer, **options: Any) -> bool:
        before = file.stat().st_ino if file.exists() else None
        write(file, data, of, **options)
        return file.stat().st_ino != before

    for options, expected in [
        ({"blocks": 5}, True),
        ({"blocks": 3}, False),
        ({"blocks": 6}, True),
        ({"blocks": None}, True),
        ({"blocks": 6}, False),
        ({"seed": 2}, True),
        ({"held_out": 2}, True),
        ({"seq_len": 8}, True),
        ({"of": framed("<s>")}, True),
        ({"of": framed("<s>")}, False),
    ]:
        assert rewritten(**options) == expected, options
    os.utime(data / "0.txt")
    assert rewritten(framed("<s>")), "a file was written to"
    file.write_bytes(file.read_bytes()[:-1])
    assert read_header(file) is None, "it was cut"
    assert rewritten(framed("<s>"))


def test_a_run_that_is_killed_leaves_no_file_that_is_not_whole(
    data: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out" / "tokens"
    file.parent.mkdir()
    write(file, data, tokenizer, blocks=2)
    replace, calls = Path.replace, iter(range(9))

    def stops(self: Path, target: Path) -> Path:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        write(file, data, tokenizer, blocks=3)
    assert read_header(file) is None, "the new blocks with the old counts"
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(ArgumentValueError, match=r"file: expected a whole file of tokens, got .*tokens"):
        Blocks(file, "train")


def test_blocks_are_labelled_and_shuffled_by_epoch(data: Path, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "tokens", data, tokenizer)
    blocks = Blocks(tmp_path / "tokens", "train")
    first = blocks[0]
    assert {name: (value.dtype, value.shape) for name, value in first.items()} == dict.fromkeys(
        ("input_ids", "labels"), (torch.int64, (SEQ_LEN,))
    )
    assert first["labels"].tolist() == [IGNORED, *first["input_ids"].tolist()[1:]]
    for bad in (-1, len(blocks)):
        with pytest.raises(IndexError):
            blocks[bad]
    orders = []
    for epoch in (0, 1, 2, 1):
        blocks.set_epoch(epoch)
        orders.append([tuple(blocks[i]["input_ids"].tolist()) for i in range(len(blocks))])
    assert orders[0] == [tuple(one) for one in ids_of(tmp_path / "tokens", "train")]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    assert orders[1] == orders[3]


def test_a_large_vocabulary_takes_four_bytes(data: Path, tmp_path: Path) -> None:
    tokenizer = framed()
    tokenizer.add_tokens([f"<{i}>" for i in range(66_000)])
    (data / "last.txt").write_text("<65999>" * 2000)
    assert write(tmp_path / "tokens", data, tokenizer)["itemsize"] == 4
    assert max(map(max, ids_of(tmp_path / "tokens", "train"))) == len(tokenizer) - 1 >= 2**16


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_tables_are_read_in_ranges_of_rows(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a").mkdir()
    rows = [{"body": f"row {i}"} for i in range(777)]
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / "a" / f"a.{kind}"
    {
        "json": lambda: path.write_text(json.dumps(rows)),
        "csv": lambda: table.to_csv(path),
        "parquet": lambda: table.to_parquet(path),
    }[kind]()
    (tmp_path / "a" / "b.txt").write_text("text")
    pieces = Pieces(text_in(tmp_path / "a", "body"))
    assert len(pieces.order) > 20
    found = [text for piece in range(len(pieces.order)) for text in pieces.documents(piece)]
    assert found == ["text", *(row["body"] for row in rows)]
    assert write(tmp_path / "tokens", tmp_path / "a", tokenizer, field="body")["train"] > 300
    assert f"row 1 of {path}: no column 'text', but body" in error_of(tmp_path / "x", tmp_path / "a", tokenizer)


def test_text_that_is_too_short_or_has_no_such_field(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "a.txt"
    path.write_text("word\n" * 20)
    expected = "held-out text of 16 tokens or more, got less. Give more text with --data, or lower --seq-len."
    assert expected in error_of(tmp_path / "x", tmp_path / "a", tokenizer)
    path.write_text("word\n" * 2)
    assert "training text of 16 tokens or more" in error_of(tmp_path / "x", tmp_path / "a", tokenizer, held_out=0)
    assert not list(tmp_path.glob("x*"))
    path.write_text("word\n" * 3)
    header = write(tmp_path / "x", tmp_path / "a", tokenizer, held_out=0)
    assert (header["held_out"], header["train"]) == (0, 1)
    path = path.rename(path.with_suffix(".jsonl"))
    for row, got in [
        ({"body": "x"}, "line 2 of {}: no column 'text', but body"),
        ({"text": 1}, "line 2 of {}: text that is no text but 1"),
    ]:
        path.write_text('{"text": "x"}\n' + json.dumps(row) + "\n")
        found = error_of(tmp_path / "x", tmp_path / "a", tokenizer)
        assert got.format(path) in found


def test_a_tokenizer_is_trained_on_text_that_is_not_held_out(data: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(text_in(data), vocab_size=300)
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.model_max_length) == (300, END_OF_TEXT, SEQ_LEN)
    assert tokenizer.decode(tokenizer("é漢🌊 file")["input_ids"]) == "é漢🌊 file"
    assert len(tokenizer("file 1 line")["input_ids"]) < 11
    assert train_tokenizer(text_in(data), vocab_size=300).get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").get_vocab() == tokenizer.get_vocab()

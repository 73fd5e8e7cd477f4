"""Pieces: together they are the text, each byte once, whatever the cuts hit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from lowtide.train.corpus import Corpus, open_corpus

from lowtide.errors import ArgumentValueError


def corpus_of(*files: Path, piece_bytes: int) -> Corpus:
    return Corpus(tuple(files), tuple(f.stat().st_size for f in files), piece_bytes, "text", 0)


def whole(corpus: Corpus) -> list[str]:
    return [document for piece in range(len(corpus)) for document in corpus.documents(piece)]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_text_are_the_text(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "ab\n" if seed % 2 else "aé漢🌊\n" if seed % 4 else "é漢🌊"  # the last has no line to cut at
    text = "".join(rng.choices(alphabet, k=rng.randint(1, 5000)))
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    size = path.stat().st_size
    corpus = corpus_of(path, piece_bytes=rng.randint(max(8, size // 50), size + 10))
    assert "".join(whole(corpus)) == text
    if "\n" in alphabet:
        assert all(d.endswith("\n") for d in whole(corpus)[:-1])


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1000, 10**6])
def test_every_line_of_jsonl_is_one_document_once(tmp_path: Path, piece_bytes: int) -> None:
    rng = random.Random(piece_bytes)
    texts = ["é\n" * rng.randint(1, 30) + str(i) for i in range(60)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=bool(i % 2)) for i, t in enumerate(texts)) + "\n\n")
    assert whole(corpus_of(path, piece_bytes=piece_bytes)) == texts


def test_several_files_keep_their_order(tmp_path: Path) -> None:
    files = []
    for i in range(5):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(f"file {i}\n" * (i + 1))
    corpus = corpus_of(*files, piece_bytes=16)
    assert "".join(whole(corpus)) == "".join(f.read_text() for f in files)
    assert sum(corpus.bytes_of(piece) for piece in range(len(corpus))) == corpus.bytes


def test_the_standard_library_is_found_in_the_same_order_each_time() -> None:
    first, second = (open_corpus((), text_field="text", streams=8, seq_len=256) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert first.bytes > 2**20
    assert not [f for f in first.files if "site-packages" in f.parts or "test" in f.parts]


def test_what_is_not_text_in_a_folder_is_left_out_and_counted(text: Path) -> None:
    (text / "picture.png").write_bytes(bytes(range(256)))
    (text / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (text / ".hidden.txt").write_text("hidden")
    corpus = open_corpus([str(text)], text_field="text", streams=2, seq_len=256)
    assert (corpus.skipped, len(corpus.files)) == (2, 4)


def test_a_file_with_two_names_is_read_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is held out under one name is trained on under the other."""
    monkeypatch.chdir(text)
    (text.parent / "link.txt").symlink_to(text / "1.txt")
    given = ["2.txt", str(text), str(text / "2.txt"), "../text/0.txt", "../link.txt"]
    corpus = open_corpus(given, text_field="text", streams=2, seq_len=256)
    assert corpus.files == (Path("2.txt"), *(text / f"{i}.txt" for i in (0, 1, 3)))


def test_a_line_without_the_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(ArgumentValueError, match=r"line 2 \(byte 14\) of .*a\.jsonl"):
        whole(corpus_of(path, piece_bytes=100))


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    corpus = corpus_of(path, piece_bytes=100)
    path.unlink()
    with pytest.raises(ArgumentValueError, match=r"a\.txt.*No such file"):
        whole(corpus)

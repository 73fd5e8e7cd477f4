"""Text for random weights: which files, in which order, what is held out, and a tokenizer that is loaded as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from lowtide.errors import ArgumentValueError
from lowtide.train import scratch
from lowtide.train.scratch import make_blocks, make_tokenizer, pieces
from promises import promise
from train.conftest import Files

pytestmark = promise("trainers")


def test_the_standard_librarys_text_is_there_without_a_name() -> None:
    text = "".join(pieces(None, 0))
    assert "class ArgumentParser(" in text
    assert "class TestCase(" in text
    assert "class TestArgumentParserCopiable(" not in text  # of its tests


def test_text_is_cut_into_pieces_whose_order_the_seed_determines(tmp_path: Path) -> None:
    lines = [f"line {i} of a text\n" for i in range(3000)]
    (tmp_path / "a.txt").write_text("".join(lines[:1000]))
    (tmp_path / "b.md").write_text("".join(lines[1000:]))
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    found = pieces(str(tmp_path), 1)
    assert sorted("".join(found).splitlines(keepends=True)) == sorted(lines)
    assert all(piece.endswith("\n") for piece in found)
    assert found == pieces(str(tmp_path), 1) != pieces(str(tmp_path), 2)
    (tmp_path / "d.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ArgumentValueError, match=r"UTF-8 text, got .*d.txt"):
        pieces(str(tmp_path), 1)
    (tmp_path / "rows.jsonl").write_text('{"text": "no JSON is to be learnt"}')
    for name in ("c.bin", "rows.jsonl"):
        with pytest.raises(ArgumentValueError, match="none in"):
            pieces(str(tmp_path / name), 1)


def test_held_out_blocks_come_first_and_fewer_are_the_beginning_of_all(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_MIXED", 8 * 32)
    text, tokenizer = pieces(str(files.text), 0), AutoTokenizer.from_pretrained(files.pretrained)

    def made(most: int | None, seed: int = 1, held_out: int = 5) -> tuple[list[list[int]], ...]:
        both = make_blocks(text, tokenizer, 32, held_out=held_out, most=most, seed=seed)
        assert all(torch.equal(block["input_ids"], block["labels"]) for blocks in both for block in blocks)
        return tuple([block["input_ids"].tolist() for block in blocks] for blocks in both)

    (every, held), (few, same), (other, _) = made(None), made(13), made(None, 2)
    assert (few, same, len(held)) == (every[:13], held, 5)
    whole = [token for piece in text for token in [*tokenizer(piece)["input_ids"], tokenizer.eos_token_id]]
    blocks = [whole[at : at + 32] for at in range(0, len(whole) // 32 * 32, 32)]
    assert held == blocks[:5]
    assert every[:8] != blocks[5:13] != other[:8] != every[:8]
    assert sorted(every[:8]) == sorted(blocks[5:13])
    assert sorted(every) == sorted(other) == sorted(blocks[5:])
    with pytest.raises(ArgumentValueError, match=r"text of more than 5000 sequences of 32 tokens.*Give more text"):
        made(None, held_out=5000)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_a_trained_tokenizer_is_the_one_that_a_saved_run_is_loaded_with(
    config: type, files: Files, tmp_path: Path
) -> None:
    """For some types transformers takes a class of its own, with other splits, whatever class the files name."""
    text = pieces(str(files.text), 0)
    shape = config(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    tokenizer = make_tokenizer(None, text, shape)
    assert len(tokenizer) <= 300
    tokenizer.save_pretrained(tmp_path)
    shape.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    sentence = "The tide came in, and 12 gulls\n\tcounted waves."
    assert loaded(sentence)["input_ids"] == tokenizer(sentence)["input_ids"]
    assert loaded.decode(loaded(sentence)["input_ids"]) == sentence


def test_a_tokenizer_that_does_not_fit_is_refused(files: Files, tmp_path: Path) -> None:
    shape = LlamaConfig(vocab_size=200)
    with pytest.raises(ArgumentValueError, match=r"--model_name_or_path: expected a vocabulary of at least"):
        make_tokenizer(str(files.pretrained), [], shape)
    with pytest.raises(ArgumentValueError, match="--tokenizer_name: expected a folder with a tokenizer"):
        make_tokenizer(str(tmp_path), [], shape)

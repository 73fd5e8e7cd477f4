"""A tiny model in a folder with a tokenizer of words, as the recipes take one, and data in the columns they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from pages.blocks import tiny_model

WORDS = (
    "the", "tide", "came", "in", "and", "went", "out", "over", "sand", "while", "gulls", "counted", "waves", "slowly",
    "under", "a", "low", "grey", "sky",
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a page does stays in a folder of its own, and in this test."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    lowtide.unpatch_trl()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model with its tokenizer, in the Hugging Face format."""
    pytest.importorskip("transformers")
    from chat_data import word_tokenizer

    place = tmp_path_factory.mktemp("model")
    word_tokenizer(WORDS).save_pretrained(place)
    torch.manual_seed(0)
    tiny_model(layers=2).save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight lines of .jsonl, of different lengths, with the columns that any of the recipes reads."""
    place = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = []
    for i in range(8):
        words = WORDS[i:] + WORDS[:i]
        lines.append(
            {
                "text": " ".join(words[: 7 + i]), "prompt": " ".join(words[:3]),
                "completion": " " + " ".join(words[3:9]),
                "chosen": " " + " ".join(words[3 : 5 + i % 3]), "rejected": " " + " ".join(words[9:12]),
            }
        )  # fmt: skip
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place

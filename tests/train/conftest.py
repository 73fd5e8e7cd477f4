"""A tiny run: seconds on one core, and every part of it is the real one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chat_data import CHATML, byte_tokenizer
from lowtide.cli import main

WORDS = ("the", "tide", "came", "in", "and", "went", "out", "over", "sand", "while", "gulls", "counted", "waves")

SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much where another process wants the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the children
        yield
    torch.set_num_threads(before)


def write_text(path: Path, size: int, seed: int = 0) -> Path:
    """Write lines of words, about so many bytes."""
    rng = random.Random(seed)
    lines, written = [], 0
    while written < size:
        lines.append(" ".join(rng.choices(WORDS, k=rng.randint(1, 14))))
        written += len(lines[-1]) + 1
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_arguments(folder: Path) -> list[str]:
    """Write a model's shape and some text into a folder and return the arguments of a tiny run on them."""
    (folder / "text").mkdir()
    for i in range(4):
        write_text(folder / "text" / f"{i}.txt", 12_000, seed=i)
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    size = {"vocab-size": 400, "seq-len": 32, "batch-size": 2, "eval-blocks": 4, "max-steps": 6, "save-every": 3}
    options = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    return ["train", "--model", str(folder / "tiny.json"), "--data", str(folder / "text"), *options]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The arguments of a tiny run, its output folder left out."""
    return tiny_arguments(tmp_path)


@pytest.fixture(scope="session")
def chat_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of a tiny run on conversations, with a tokenizer that has a chat template; no output folder."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tiny.json").write_text(json.dumps({**SHAPE, "tie_word_embeddings": False}))
    byte_tokenizer(CHATML).save_pretrained(folder / "tokenizer")
    rng = random.Random(0)
    lines = []
    for _ in range(300):
        turns = [("user", "assistant")[i % 2] for i in range(2 * rng.randint(1, 3))]
        said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in turns]
        lines.append({"messages": [{"role": r, "content": c} for r, c in zip(turns, said, strict=True)]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = {"seq-len": 96, "batch-size": 2, "eval-blocks": 3, "max-steps": 6, "save-every": 2, "keep": 5}
    options = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    where = ["--data", str(folder / "chat.jsonl"), "--tokenizer", str(folder / "tokenizer")]
    return ["train", "--model", str(folder / "tiny.json"), *where, *options]


@pytest.fixture
def text(tmp_path: Path, tiny: list[str]) -> Path:
    """The folder with the text of the tiny run."""
    return tmp_path / "text"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run of twice the steps that ended undisturbed, checkpoints and all."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*tiny_arguments(folder), "--max-steps", "12", "--output", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def lowtide(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return its status and what it wrote to standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run

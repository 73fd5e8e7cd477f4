"""Tiny runs: seconds on one core, and every part of them is the real one."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_data import byte_tokenizer
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
# which of the assistant's tokens are trained on, as TRL reads it
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much where another process wants the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the children
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows that a run reads are stored in a cache, here in one of these tests alone; no name is looked up online."""
    cache = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(cache))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        if "datasets" in sys.modules:  # it has read them
            import datasets

            patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
            datasets.disable_progress_bars()
        yield


def save_model(folder: Path, *, template: str | None = TEMPLATE, **shape: object) -> Path:
    """Write a tiny pretrained model with a tokenizer of one token a byte and a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SHAPE, **shape}))
    for parameter in model.parameters():  # a fresh model's attention hardly looks anywhere
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Files:
    """What tiny runs read: a pretrained model, a shape, and data."""

    pretrained: Path
    shape: Path
    text: Path
    chats: Path
    pairs: Path

    def scratch(self, **more: object) -> list[str]:
        """Return the words of a tiny run from random weights, its folder left out."""
        where = {"model_name_or_path": self.shape, "dataset_name": self.text, "max_length": 32}
        return words(**{**where, "held_out": 4, "max_steps": 6, "per_device_train_batch_size": 2, **more})

    def tune(self, data: str = "chats", **more: object) -> list[str]:
        """Return the words of a tiny fine-tuning, its folder left out."""
        where = {"model_name_or_path": self.pretrained, "dataset_name": getattr(self, data), "max_length": 96}
        size = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "held_out": 3}
        return words(**{**where, **size, **more})


def words(**options: object) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)

    def some(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    (folder / "shape.json").write_text(json.dumps(SHAPE))
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text("\n".join(some(14) for _ in range(400)))
    turns = [[("user", "assistant")[i % 2] for i in range(2 * rng.randint(1, 3))] for _ in range(80)]
    chats = [{"messages": [{"role": role, "content": some(4)} for role in roles]} for roles in turns]
    pairs = [{"prompt": some(4), "completion": f" {some(8)}"} for _ in range(80)]
    return Files(
        pretrained=save_model(folder / "pretrained"),
        shape=folder / "shape.json",
        text=folder / "text",
        chats=write_rows(folder / "chats.jsonl", chats),
        pairs=write_rows(folder / "pairs.jsonl", pairs),
    )


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs a command that is refused, in one line, which this returns."""

    def run(*arguments: object) -> str:
        assert main(["train", *map(str, arguments)]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowtide train: ")]
        assert len(lines) == 1, lines
        return lines[0]

    return run


def history(output: Path, step: int) -> list[dict[str, Any]]:
    """Return what a run's checkpoint has logged."""
    logged = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    assert isinstance(logged, list)
    return logged


def losses(output: Path, step: int) -> dict[int, float]:
    """Return the training loss of each step of a run."""
    return {line["step"]: line["loss"] for line in history(output, step) if "loss" in line}


def assert_same_weights(a: Path, b: Path) -> None:
    """Assert that two saved models are the same to the bit."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

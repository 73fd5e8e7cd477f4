"""Tiny runs: seconds on one core, and every part of them is the real one."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
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


def write_text(path: Path, size: int, seed: int = 0) -> Path:
    """Write lines of words, about so many bytes."""
    rng = random.Random(seed)
    lines, written = [], 0
    while written < size:
        lines.append(" ".join(rng.choices(WORDS, k=rng.randint(1, 14))))
        written += len(lines[-1]) + 1
    path.write_text("\n".join(lines) + "\n")
    return path


def options(**values: object) -> list[str]:
    """Return options as words of a command line; those that are None are left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", *map(str, _values(value)))]


def _values(value: object) -> tuple[object, ...]:
    if value is True:
        return ()
    return value if isinstance(value, tuple) else (value,)


def tiny_arguments(folder: Path) -> list[str]:
    """Write a model's shape and some text into a folder and return the arguments of a tiny run from random weights."""
    (folder / "text").mkdir()
    for i in range(4):
        write_text(folder / "text" / f"{i}.txt", 12_000, seed=i)
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    size = {"vocab-size": 400, "seq-len": 32, "held-out": 4, "max-steps": 6}
    of_trainer = {"per_device_train_batch_size": 2, "save_steps": 3}
    where = {"model": folder / "tiny.json", "data": folder / "text"}
    return ["train", *options(**where, **size, **of_trainer)]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The arguments of a tiny run from random weights, its output folder left out."""
    return tiny_arguments(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run of twice the steps that ended undisturbed, checkpoints and all."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*tiny_arguments(folder), "--max-steps", "12", "--output", str(folder / "run")]) == 0
    return folder / "run"


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


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    return save_model(tmp_path_factory.mktemp("pretrained") / "model")


def write_rows(path: Path, rows: list[Mapping[str, object]]) -> Path:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files to fine-tune on: conversations, prompts with completions, and text."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)

    def words(most: int = 4) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    chats, pairs = [], []
    for _ in range(80):
        turns = [("user", "assistant")[i % 2] for i in range(2 * rng.randint(1, 3))]
        chats.append({"messages": [{"role": role, "content": words()} for role in turns]})
        pairs.append({"prompt": words(), "completion": f" {words(8)}"})
    return {
        "messages": write_rows(folder / "chats.jsonl", chats),
        "pairs": write_rows(folder / "pairs.jsonl", pairs),
        "rows": write_rows(folder / "rows.jsonl", [{"text": words(12)} for _ in range(80)]),
        "text": write_text(folder / "text.txt", 12_000),
    }


@pytest.fixture
def tune(pretrained: Path, data: dict[str, Path]) -> Callable[..., list[str]]:
    """Return the arguments of a tiny fine-tuning on a kind of data, its output folder left out."""

    def arguments(kind: str = "messages", **more: object) -> list[str]:
        size = {"seq-len": 96, "held-out": 3, "max-steps": 6}
        of_trainer = {"per_device_train_batch_size": 2, "save_steps": 2, "save_total_limit": 5, "learning_rate": 1e-3}
        return ["train", *options(**{"model": pretrained, "data": data[kind], **size, **of_trainer, **more})]

    return arguments


class Run:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return its status and what it wrote to standard output and error."""
        self._capsys.readouterr()
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *self._capsys.readouterr()

    def done(self, *arguments: object) -> str:
        """Return the output of a command that ends well, without a word on standard error."""
        status, out, err = self(*arguments)
        assert (status, err) == (0, ""), err
        return out

    def refused(self, *arguments: object) -> str:
        """Return the one line with which a command ends that cannot be run."""
        status, _, err = self(*arguments)
        assert (status, err.count("\n"), err[:15], err[-1]) == (2, 1, "lowtide train: ", "\n"), err
        return err


@pytest.fixture
def lowtide(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command."""
    return Run(capsys)


def log(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log."""
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def losses(output: Path) -> dict[int, float]:
    """Return the training loss of each step of a run."""
    return {line["step"]: line["loss"] for line in log(output) if "loss" in line}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved model, or of saved adapters."""
    from safetensors.torch import load_file

    (file,) = (folder / name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).exists())
    return load_file(file)


def assert_same_weights(a: Path, b: Path) -> None:
    """Assert that two saved models are the same to the bit."""
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

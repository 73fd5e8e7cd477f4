"""TRL, put back as it was after each test; a tiny model, a tokenizer of words, and runs of TRL's trainers on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide

trl = pytest.importorskip("trl", reason="TRL comes with the trl extra")

WORDS = (
    "the", "tide", "came", "in", "and", "went", "out", "over", "sand", "while", "gulls", "counted", "waves", "slowly",
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test patches, the next one finds TRL as it came."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products gain nothing from a second one
    yield
    lowtide.unpatch_trl()
    torch.set_num_threads(threads)


def build_model(seed: int = 0, *, family: str = "Llama", vocab_size: int = 23, **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
            "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **settings,
        }
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for distributions that are not uniform
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.get_output_embeddings().weight.mul_(4)
    return model


def words(generator: torch.Generator, low: int, high: int) -> str:
    count = int(torch.randint(low, high, (), generator=generator))
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator))


def rows(kind: str, count: int = 12) -> Any:
    """A dataset of sentences of different lengths, in the columns that a trainer wants."""
    from datasets import Dataset

    g = torch.Generator().manual_seed(3)
    columns: dict[str, list[Any]] = {"prompt": [words(g, 2, 5) for _ in range(count)]}
    if kind == "DPO":
        columns |= {name: [" " + words(g, 2, 7) for _ in range(count)] for name in ("chosen", "rejected")}
    if kind in ("SFT", "KTO"):
        columns["completion"] = [" " + words(g, 2, 7) for _ in range(count)]
    if kind == "KTO":
        columns["label"] = [i % 3 != 0 for i in range(count)]
    return Dataset.from_dict(columns)


def reward(completions: list[str], **_: Any) -> list[float]:
    """How often an answer speaks of the tide; a little for every letter."""
    return [text.count("tide") + 0.01 * len(text) for text in completions]


_GENERATES = {"max_completion_length": 6, "num_generations": 3, "temperature": 0.8}
_SETTINGS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 24},
    "DPO": {"max_length": 24},
    "KTO": {"max_length": 24},
    "GRPO": {**_GENERATES, "beta": 0.1, "num_iterations": 2},
    "RLOO": {**_GENERATES, "beta": 0.1},
    "Distillation": {"max_completion_length": 6, "temperature": 0.8},
}


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """A random model: its family, its settings; the same weights at each call."""
    return build_model


def trl_trainer(folder: Path, kind: str, model: Any, *callbacks: Any, peft_config: Any = None, **settings: Any) -> Any:
    """Return one of TRL's trainers by its name, on the CPU, logging every step."""
    from chat_data import word_tokenizer

    own: dict[str, Any] = {} if peft_config is None else {"peft_config": peft_config}
    model.save_pretrained(folder / "start")  # from where a trainer loads its reference
    model.config._name_or_path = str(folder / "start")
    if kind in ("GRPO", "RLOO"):
        own["reward_funcs"] = reward
    if kind == "Distillation":
        own["teacher_model"] = build_model(9, vocab_size=model.config.vocab_size, hidden_size=24)
    arguments = getattr(trl, f"{kind}Config")(
        **{
            "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 3, "learning_rate": 0.01,
            "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "seed": 0,
            "dataloader_pin_memory": False, **_SETTINGS[kind], **settings,
        }
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=rows(kind), processing_class=word_tokenizer(WORDS),
        callbacks=list(callbacks), **own,
    )  # fmt: skip


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """`trl_trainer` in a folder of the test's own."""
    return functools.partial(trl_trainer, tmp_path)

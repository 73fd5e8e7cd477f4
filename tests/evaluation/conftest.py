"""A tiny pretrained model, texts, and tasks of lm-evaluation-harness that need no network."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from train.conftest import WORDS, no_cache_of_the_user, one_thread, save_model

__all__ = ["no_cache_of_the_user", "one_thread"]

_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
"""
_TASKS = {
    "tide_choice": ("multiple_choice", "label", 'doc_to_choice: "{{choices}}"\nmetric_list:\n  - metric: acc\n'
                    "  - metric: acc_norm"),
    "tide_letter": ("multiple_choice", "label", 'doc_to_choice: ["A", "B", "C"]\nmetric_list:\n  - metric: acc'),
    "tide_text": ("loglikelihood_rolling", '"{{text}}"', "metric_list:\n  - metric: word_perplexity\n"
                  "  - metric: byte_perplexity\n  - metric: bits_per_byte"),
    "tide_words": ("generate_until", '"{{text}}"', 'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 5\n'
                   "  do_sample: false\nmetric_list:\n  - metric: exact_match"),
}  # fmt: skip


def sentence(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(2, most)))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("evaluated") / "model")


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The YAML files of tasks: choices of several tokens, of one token, a text's perplexity, and generation."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
    rows = [
        {
            "question": f"{sentence(rng, 6)}:",
            "choices": [f" {sentence(rng, 4)}" for _ in range(3)],
            "label": rng.randrange(3),
            "text": sentence(rng, 30),
        }
        for _ in range(9)
    ]
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    for name, (kind, target, more) in _TASKS.items():
        text = _TASK.format(name=name, file=file, kind=kind, target=target, more=more)
        if kind == "loglikelihood_rolling":
            text = text.replace('"{{question}}"', '""')
        (folder / f"{name}.yaml").write_text(text)
    return {name: folder / f"{name}.yaml" for name in _TASKS}

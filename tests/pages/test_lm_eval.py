"""The recipe for lm-evaluation-harness: its scores are those of the stock model, and no logits are built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pages.blocks import all_blocks
from pages.conftest import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHOICE = """\
task: tide_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """\
task: tide_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.mark.parametrize("task", [CHOICE, TEXT])
def test_the_recipe_scores_as_stock_and_builds_no_logits(task: str, folder: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    rows = [
        {
            "question": " ".join(WORDS[i : i + 5]),
            "choices": [f" {WORDS[(i + k) % 19]} {WORDS[i]}" for k in range(3)],
            "label": i % 3,
            "text": " ".join(WORDS[i:]),
        }
        for i in range(9)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    file = tmp_path / "task.yaml"
    file.write_text(task.replace("FILE", str(tmp_path / "rows.json")))
    (block,) = [b for b in all_blocks("python") if b.page == "docs/recipes/lm-eval.md" and b.needs]
    names: dict[str, Any] = {}
    code = block.code.replace("path/to/model", str(folder)).replace("hellaswag", str(file))
    code = code.replace("batch_size=32", 'batch_size=32, device="cpu"')  # the harness's default is a GPU
    exec(code, names)
    stock = lm_eval.simple_evaluate(HFLM(pretrained=str(folder), device="cpu"), tasks=[str(file)])
    for got, expected in zip(*(list(found["results"].values()) for found in (names["results"], stock)), strict=True):
        for metric, value in expected.items():
            assert got[metric] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    assert names["report"].calls_fused > 0
    assert names["report"].calls_materialised == 0

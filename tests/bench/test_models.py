"""The sweep over model types: one process a type, results that can be gone on with, a page for the documents."""

import json
import multiprocessing
import os
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide.bench.models import MODELS, _in_child, markdown, summary
from lowtide.bench.models_case import CRASHED, DIFFERENT, FUSED, NOT_BUILT, TIMED_OUT
from lowtide.bench.tiny import VOCAB, tiny_values
from lowtide.bench.train_config import ModelsBenchConfig
from lowtide.cli import main

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def test_a_run_and_going_on_with_it(tmp_path):
    said, table = [], tmp_path / "table.md"
    settings = {"kind": ("causal",), "workers": 1, "table": str(table), "output": str(tmp_path)}
    (row,) = MODELS.run(ModelsBenchConfig(only=("gpt2",), **settings), said.append).rows
    assert (row["kind"], row["type"], row["status"]) == ("causal", "gpt2", FUSED)
    (file,) = tmp_path.glob("*-models-cpu.json")
    told = json.loads(file.read_text())
    assert told["rows"] == [row]
    assert told["command"].startswith("lowtide bench models --kind causal --only gpt2")
    assert told["machine"]["transformers"]
    assert "| gpt2 | fused |" in table.read_text()
    # What was compared stays; what was not is tried again.
    told["rows"].append({"kind": "causal", "type": "xglm", "status": TIMED_OUT, "why": ""})
    file.write_text(json.dumps(told))
    rows = MODELS.run(ModelsBenchConfig(only=("gpt2", "xglm"), resume=str(file), **settings), said.append).rows
    assert "2 types, 1 to check\n" in said
    assert [row["status"] for row in rows] == [FUSED, FUSED]
    assert json.loads(file.read_text())["rows"] == rows


@pytest.mark.parametrize(
    ("instead", "of", "status", "why"),
    [
        (os._exit, lambda _: (3,), CRASHED, "ended with status 3"),
        (connection.wait, lambda sender: ([sender], 60), TIMED_OUT, "no answer within 1 s"),
    ],
    ids=["crash", "hang"],
)
def test_a_child_that_does_not_answer_is_a_row(instead, of, status, why):
    spawn = multiprocessing.get_context("spawn")

    def process(target, args, daemon):
        return spawn.Process(target=instead, args=of(args[0]), daemon=daemon)

    context = SimpleNamespace(Pipe=spawn.Pipe, Process=process)
    told = _in_child(context, "causal", "gpt2", ModelsBenchConfig(timeout=1))
    assert told["status"] == status
    assert why in told["why"]


def test_the_command_fails_where_one_is_different(monkeypatch, capsys, tmp_path):
    from lowtide.bench import models

    def check_of(status):
        monkeypatch.setattr(models, "_in_child", lambda *_: {"status": status, "why": "so"})
        return main(["bench", "models", "--only", "gpt2", "--output", str(tmp_path)])

    assert check_of(DIFFERENT) == 1
    assert check_of(NOT_BUILT) == 0


def test_the_page_of_the_documents_is_that_of_the_committed_result():
    (file,) = (ROOT / "benchmarks" / "results").glob("*-models-cpu.json")
    assert (ROOT / "docs" / "supported-models.md").read_text() == markdown(json.loads(file.read_text()), file.name)


def test_the_page_counts_and_names_what_is_different():
    rows = [
        {"kind": "causal", "type": "gpt2", "status": FUSED, "why": "", "parts": {"mlp": 0, "norm": 5, "rope": 2}},
        {"kind": "causal", "type": "llama", "status": DIFFERENT, "why": "a | b"},
        {"kind": "seq2seq", "type": "t5", "status": NOT_BUILT, "why": "no"},
    ]  # fmt: skip
    told = {"rows": rows, "command": "lowtide bench models", "machine": {"transformers": "5", "torch": "2"}}
    page = markdown(told, "file.json")
    assert "Of the 3 model types in transformers 5, 1 train without logits, 0 fall back" in page
    assert "and 1 cannot be built or run in this test" in " ".join(page.split())
    assert "| | fused | not built | different | types |" in page
    assert "| Causal language models | 1 | 0 | 1 | 2 |" in page
    assert "| gpt2 | fused |  | 5 | 2 |" in page
    assert "| llama | **different**: a \\| b |  |  |  |" in page
    assert summary(rows) == "causal     1 fused, 1 different\nseq2seq    1 not built\n"


def test_a_config_is_shrunk_by_what_its_settings_are_called():
    values = {
        "vocab_size": 200000, "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "num_experts": 64,
        "num_experts_per_tok": 8, "attention_dropout": 0.1, "rms_norm_eps": 1e-6, "image_token_id": 150000,
        "eos_token_id": [5, 6], "id2label": {0: "a"}, "sliding_window": None, "tie_word_embeddings": True,
        "layer_types": ["local", "local", "local", "full", "local", "local"],
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 24, "num_heads": 16, "hidden_size": 1024, "patch_size": 14},
    }  # fmt: skip
    assert tiny_values(values) == {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "image_token_id": VOCAB - 1,
        "eos_token_id": [2], "id2label": {0: "a"}, "sliding_window": None, "tie_word_embeddings": True,
        "layer_types": ["local", "full"],
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14},
    }  # fmt: skip

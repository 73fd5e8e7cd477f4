"""Random weights: transformers' Trainer on blocks of tokens, without TRL or datasets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.train.quiet import stay_offline
from train.conftest import Run, log, losses, options

# Runs the command, and then lists which of the libraries it has imported.
IMPORTED = """
import json, os, sys
from lowtide.cli import main
status = main(sys.argv[1:])
names = ("trl", "datasets", "transformers", "deepspeed", "wandb", "tensorboard")
variables = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
found = {"imported": [n for n in names if sys.modules.get(n)], **{v: os.environ.get(v) for v in variables}}
print("FOUND " + json.dumps(found))
sys.exit(status)
"""


def in_a_process(arguments: list[str], **env: str) -> tuple[dict[str, Any], list[str]]:
    """What a run in an interpreter of its own has imported, and every line that it printed."""
    command = [sys.executable, "-c", IMPORTED, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    assert ended.returncode == 0, ended.stderr
    *lines, found = ended.stdout.splitlines()
    return json.loads(found.removeprefix("FOUND ")), [*lines, *ended.stderr.splitlines()]


OWN_LINES = re.compile(
    r"(loading|model|data|steps|dtypes|tokens|rows|trained|adapters|train: step|training loss|held-out loss|speed|"
    r"peak memory|losses|time|saved)\b.*|"
)


def test_the_defaults_import_neither_trl_nor_datasets(tiny: list[str], tmp_path: Path) -> None:
    found, lines = in_a_process([*tiny, "--output", str(tmp_path / "out")])
    assert found["imported"] == ["transformers"]
    assert (found["HF_HUB_OFFLINE"], found["HF_HUB_DISABLE_TELEMETRY"]) == ("1", "1")
    assert lines[0] == "loading torch and transformers ..."
    assert not [line for line in lines if not OWN_LINES.fullmatch(line)]


def test_fine_tuning_prints_no_line_of_another_library(tune: Any, tmp_path: Path) -> None:
    """Its imports, bars, warnings and logs; and what the user configured of the Hub is left alone."""
    arguments = [*tune(assistant_only_loss=True, use_peft=True), "--output", str(tmp_path / "out")]
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    found, lines = in_a_process(arguments, HF_HUB_OFFLINE="0", **cache)
    assert {"trl", "datasets"} <= set(found["imported"])
    assert "deepspeed" not in found["imported"]
    assert (found["HF_HUB_OFFLINE"], found["HF_DATASETS_OFFLINE"]) == ("0", "1")
    assert lines[0] == "loading torch, transformers, datasets and TRL ..."
    assert not [line for line in lines if not OWN_LINES.fullmatch(line)]


@pytest.mark.parametrize("pushes", [True, False])
def test_a_run_that_pushes_its_model_is_online(pushes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    stay_offline(pushes=pushes)
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert os.environ.get("HF_HUB_OFFLINE") == os.environ.get("HF_DATASETS_OFFLINE") == (None if pushes else "1")


def test_it_is_transformers_trainer_on_the_same_blocks(tiny: list[str], lowtide: Run, tmp_path: Path) -> None:
    """Nothing of lowtide's but the file of tokens and the initial weights."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    from lowtide.train.model import model_config, random_model
    from lowtide.train.tokenizer import load_tokenizer
    from lowtide.train.tokens import Blocks

    output = tmp_path / "out"
    more = ["--gradient_accumulation_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3"]
    out = lowtide.done(*tiny, *more, "--output", output)
    assert re.search(r"losses +\d+ without logits, 0 with\s", out)
    tokenizer = load_tokenizer(output / "model")
    shape = model_config(str(tmp_path / "tiny.json"), vocab_size=400)
    model = random_model(shape, seed=42)
    args = TrainingArguments(
        str(tmp_path / "plain"),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        adam_beta2=0.95,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    blocks, held_out = (Blocks(output / "tokens.bin", part) for part in ("train", "held_out"))
    assert (len(blocks), len(held_out)) == (24, 4)
    assert len(tokenizer) <= 400
    plain = Trainer(model, args, default_data_collator, blocks, held_out)
    before = plain.evaluate()["eval_loss"]
    plain.train()
    stock = {entry["step"]: entry["loss"] for entry in plain.state.log_history if "loss" in entry}
    assert losses(output) == pytest.approx(stock, rel=2e-6)
    evaluated = [line["eval_loss"] for line in log(output) if "eval_loss" in line]
    assert len(evaluated) == 3
    assert evaluated[0] == pytest.approx(before, rel=1e-6)
    assert evaluated[-1] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_the_log_has_a_line_for_each_step_and_evaluation(finished: Path) -> None:
    lines = log(finished)
    assert [line["step"] for line in lines] == [0, *range(1, 13), 12]
    assert {"time", "loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes"} <= lines[1].keys()
    assert "eval_loss" in lines[0].keys() & lines[-1].keys()
    state = json.loads((finished / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    assert {e["step"]: e["loss"] for e in state if "loss" in e} == losses(finished)


def test_a_saved_model_and_its_tokenizer_are_fine_tuned_next(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    text = finished.parent / "text"
    size = options(**{"seq-len": 32, "max-steps": 1, "per_device_train_batch_size": 2, "held-out": 4})
    status, out, err = lowtide(
        "train", "--model", finished / "model", "--data", text, *size, "--output", tmp_path / "o"
    )
    assert (status, err) == (0, "")
    assert "of up to 32 tokens" in out
    assert losses(tmp_path / "o")[1] < 6.1, "it begins from trained weights"
    ours, theirs = (folder / "model" / "tokenizer.json" for folder in (tmp_path / "o", finished))
    assert ours.read_text() == theirs.read_text()

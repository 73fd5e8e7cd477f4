"""Command lines that once ended in a stack trace, in a silently wrong result or in a message that misled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chat_data import byte_tokenizer
from train.conftest import Run, assert_same_weights, log, losses, save_model, write_rows
from train.test_fine_tuning import Tune

pytest.importorskip("trl")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU takes them")
@pytest.mark.parametrize("name", ["activation_offloading", "fp16"])
def test_options_of_gpus_are_refused_on_a_cpu(name: str, tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    err = lowtide.refused(*tune(**{name: True}), "--output", tmp_path / "run")
    assert err == f"lowtide train: --{name}: expected a GPU, got a CPU. Leave it out on a CPU.\n"


@pytest.mark.parametrize("fine_tunes", [True, False])
def test_a_run_that_did_its_steps_does_no_further_one_on_resume(
    fine_tunes: bool, tune: Tune, tiny: list[str], lowtide: Run, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    arguments = tune(eval_strategy="epoch", save_strategy="epoch") if fine_tunes else tiny
    lowtide.done(*arguments, "--output", output)
    before, saved = log(output), (output / "checkpoint-6" / "complete").stat().st_mtime_ns
    (output / "model").rename(tmp_path / "model")
    out = lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)
    assert "no further step" in out
    assert log(output)[: len(before)] == before
    assert len(log(output)) == len(before) + (not fine_tunes), "evaluated again, which its checkpoint does not have"
    assert (output / "checkpoint-6" / "complete").stat().st_mtime_ns == saved
    assert_same_weights(output / "model", tmp_path / "model")


def test_another_output_than_the_checkpoints_is_refused(finished: Path, lowtide: Run, tmp_path: Path) -> None:
    checkpoint = finished / "checkpoint-12"
    err = lowtide.refused("train", "--resume_from_checkpoint", checkpoint, "--output", tmp_path / "other")
    assert "the folder of the checkpoint" in err


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_a_folders_template_brings_its_tokens(tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", template=None)
    template = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    source = byte_tokenizer(template)
    source.add_tokens([f"<|{i}|>" for i in range(300)] + ["<|end|>"])
    source.eos_token = "<|end|>"
    source.save_pretrained(tmp_path / "source")
    arguments = tune(model=model, chat_template_path=tmp_path / "source")
    for output, more in (("patched", ()), ("stock", ("--no-patch",))):
        out = lowtide.done(*arguments, *more, "--output", tmp_path / output)
        assert "the last '<|end|>'" in out
    assert losses(tmp_path / "patched") == pytest.approx(losses(tmp_path / "stock"), rel=2e-6)
    err = lowtide.refused(*arguments, "--use_peft", "--output", tmp_path / "adapters")
    assert "expected no new tokens beside adapters" in err


def test_rows_that_truncation_leaves_nothing_of_are_reported(tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (200 if i % 2 else 3), "completion": "c"} for i in range(20)]
    half = write_rows(tmp_path / "half.jsonl", rows)
    out = lowtide(*tune(data=half, **{"held-out": 1, "seed": 3}), "--output", tmp_path / "half")[1]
    assert "rows with nothing to train on in their first 96 tokens" in out
    long = write_rows(tmp_path / "long.jsonl", rows[1::2])
    err = lowtide.refused(*tune(data=long), "--output", tmp_path / "long")
    assert "96 tokens, got none in the 9 training rows. Give a larger --seq-len.\n" in err
    err = lowtide.refused(*tune(data=half, **{"held-out": 1, "seed": 1}), "--output", tmp_path / "held-out")
    assert "none in the 1 held-out rows. Give a larger --seq-len or more --held-out" in err


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("compare: true", "compare. Give it on the command line."),
        ("env: {A: b}", "env. Set the environment's variables"),
        ("report_to: []\nlora_target_modules: []\ncolumns: {text: body}\nnum_train_epochs: 1", ""),
    ],
)
def test_config_files_as_trl_has_them(text: str, got: str, tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    data = write_rows(tmp_path / "rows.jsonl", [{"body": "some words"}] * 20)
    status, _, err = lowtide(*tune(data=data), "--config", tmp_path / "run.yaml", "--output", tmp_path / "run")
    assert status == (2 if got else 0)
    assert got in err


def test_random_weights_are_trained_on_the_column_that_is_named(
    tiny: list[str], lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"body": "some words and more of them " * 9}] * 40)
    arguments = [*tiny, "--data", data, "--max-steps", "2"]
    lowtide.done(*arguments, "--columns", "text=body", "--output", tmp_path / "a")
    for more, expected in (
        (["--columns", "prompt=body"], "columns: expected text=COLUMN, from random weights, got prompt."),
        (["--dtype", "auto"], "(choose from 'float32', 'bfloat16', 'float16')"),
        ([], "no column 'text', but body"),
    ):
        assert expected in lowtide.refused(*arguments, *more, "--output", tmp_path / "b")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowtide.train.prepare.write_tokens", full)
    err = lowtide.refused(*arguments, "--columns", "text=body", "--output", tmp_path / "c")
    assert "tokens.bin (No space left on device). Make room" in err

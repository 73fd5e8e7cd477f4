"""The command as a shell sees it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lowtide
from lowtide.cli import main
from lowtide.train import TrainConfig
from lowtide.train.shapes import SHAPES

SCRIPT = Path(sys.executable).parent / "lowtide"
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def command(*arguments: object) -> list[str]:
    """The installed script, with warnings as errors."""
    return [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny products gain nothing from more
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text("the tide came in and went out\n" * 2000)
    small = ["--vocab-size", 300, "--seq-len", 32, "--batch-size", 2, "--eval-blocks", 2]
    return ["train", "--model", tmp_path / "tiny.json", "--data", tmp_path / "text.txt", *small]


def test_help_has_every_setting_its_default_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(TrainConfig):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in out if field.default is True else f"--{flag}" in out
        if field.default not in (None, (), True, False):
            default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
            assert f"(default: {default})" in out
    assert "lowtide train --resume --output my-run" in out
    assert all(name in out for name in SHAPES)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


def test_no_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from lowtide.cli import main
try:
    main(["train", "--help"])
except SystemExit:
    pass
print({"transformers", "tokenizers", "accelerate", "triton", "rich"} & set(sys.modules), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "set()\n"


def test_the_script_trains_without_a_warning(tmp_path: Path, tiny: list[object]) -> None:
    run = command(*tiny, "--max-steps", 3, "--output", tmp_path / "out")
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "held-out loss" in ended.stdout
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_interrupt_says_how_to_go_on(tmp_path: Path, tiny: list[object]) -> None:
    output = tmp_path / "out"
    run = command(*tiny, "--max-steps", 100_000, "--save-every", 5, "--output", output)
    here = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, as do theirs
    try:
        child = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, here)
    try:
        while child.poll() is None and not (output / "checkpoint-5").exists():
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert err.strip().count("\n") == 0, err
    assert f"lowtide train --resume --output {output}" in err
